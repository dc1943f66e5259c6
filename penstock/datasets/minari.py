"""Datasets in Minari's HDF5 layout, read and written with h5py alone: no Minari, no JAX.

    DIR/data/metadata.json      total_episodes, total_steps, data_format "hdf5", spaces and env_spec as JSON text, ...
    DIR/data/main_data.hdf5     a group episode_0, episode_1, ... for each, with the datasets observations [L+1, ...],
                                actions, rewards, terminations, truncations [L, ...] and the group infos ([L+1] each);
                                a Dict space is a group by key, a Tuple space one by _index_0, _index_1, ...

The layout is that of Minari 0.5.4 (its `HDF5Storage` and `serialize_space`).
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import CheckpointError, ConfigError, MissingExtraError
from penstock.core.files import open_stored, read_stored
from penstock.core.machine import free_memory
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree
from penstock.datasets.episode import ENV, Episode, EpisodeSource, check_episode, clipped
from penstock.datasets.minari_spaces import space_to_plain, stored_spec

_MAIN, _METADATA = "main_data.hdf5", "metadata.json"
_VERSION = "0.5.4"
_JPEG = b"\xff\xd8\xff"
_EXTERNAL_LINK = 64
"""HDF5's H5L_TYPE_EXTERNAL."""


def is_minari(directory: Path) -> bool:
    """True if a directory or its folder `data` holds a dataset in this layout, or half of one."""
    return any((_data(directory) / name).is_file() for name in (_MAIN, _METADATA))


class MinariEpisodes:
    """A dataset in Minari's HDF5 layout; an `EpisodeSource`.

    Numeric `infos` of one number a step become `env/...` columns. Observations stored as JPEG are decoded, and differ a
    little from those of the environment.

    Args:
        directory: that of the dataset, or its folder `data`.

    Raises:
        MissingExtraError: h5py is not installed. ConfigError: half-written, damaged, or not of this layout.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = _data(Path(directory))
        self.name = str(self.path)
        h5py = import_h5py()
        metadata = _read_metadata(self.path)
        self._metadata = metadata
        self._fingerprint: str | None = None
        self.spec = stored_spec(metadata, str(self.path / _METADATA))
        try:
            with open_stored(self.path / _MAIN, self.path):
                self._file: Any = h5py.File(self.path / _MAIN, "r")
        except OSError as error:
            raise ConfigError(
                f"{self.path / _MAIN} is missing, half-written or damaged ({error}); copy it again, or record it anew"
            ) from error
        names = [f"episode_{i}" for i in range(len(self._file))]
        _require_own(self._file, str(self.path / _MAIN))
        absent = [name for name in names if name not in self._file or "rewards" not in self._file[name]]
        if absent or not names or len(names) != metadata["total_episodes"]:
            raise ConfigError(
                f"{self.path / _MAIN} holds {len(names)} episodes{f', {absent[0]} not whole' if absent else ''}; "
                f"{_METADATA} says {metadata['total_episodes']}: it is half-written, record it anew"
            )
        self.lengths = np.array([self._file[name]["rewards"].shape[0] for name in names], np.int64)
        infos = self._file[names[0]].get("infos", {})
        self.info: Mapping[str, tuple[str, tuple[int, ...]]] = {
            f"{ENV}{key}": ("float32", ()) for key, x in infos.items() if _is_number(x)
        }

    @property
    def fingerprint(self) -> str:
        """Hash of the whole content, read once: after `verify` from the page cache, in a second for every GB."""
        if self._fingerprint is None:
            with (self.path / _MAIN).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            self._fingerprint = hashlib.sha256(f"{content} {self._metadata}".encode()).hexdigest()
        return self._fingerprint

    def episode(self, i: int) -> Episode:
        where = f"{self.path / _MAIN}: episode_{i}"
        try:
            group, L = self._file[f"episode_{i}"], int(self.lengths[i])
            ends = {name: np.asarray(_read(group[name])).astype(bool) for name in ("terminations", "truncations")}
            early = np.flatnonzero((ends["terminations"] | ends["truncations"])[:-1])
            if len(early):
                raise ConfigError(
                    f"{where} ends at step {early[0]} of {L} and goes on; split it there into two episodes"
                )
            infos = group.get("infos", {})
            terminated = bool(ends["terminations"][-1])
            found = Episode(
                _tree(group["observations"], self.spec.obs),
                _tree(group["actions"], self.spec.action),
                np.asarray(_read(group["rewards"]), np.float32),
                terminated,
                bool(ends["truncations"][-1]) or not terminated,  # a recording that stops without an end was cut there
                {key: _info_rows(infos, key.removeprefix(ENV), L) for key in self.info},
            )
        except (OSError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{where} is damaged or of another layout ({type(error).__name__}: {error})") from error
        check_episode(found, self.spec, where)
        return found

    def verify(self) -> None:
        _ = self.fingerprint  # of the file that is read here, should another take its name during a run
        for i in range(len(self.lengths)):
            self.episode(i)

    def close(self) -> None:
        self._file.close()


def write_minari(
    source: EpisodeSource, directory: str | Path, *, env: str = "", env_spec: str | None = None, algorithm: str = ""
) -> Path:
    """Writes the episodes of another dataset in Minari's layout, actions clipped to their bounds; returns the folder.

    The files get their names only once they are whole, the metadata last.

    Args:
        directory: see `minari_id`.
        env: name of the environment. env_spec: `env.spec.to_json()`, from which Minari can make it again.

    Raises:
        MissingExtraError: h5py is not installed. ConfigError: a dataset is there. CheckpointError: the disk refuses.
    """
    h5py, path = import_h5py(), Path(directory)
    data = path / "data"
    if is_minari(path):
        raise ConfigError(f"{path} holds a Minari dataset, which was not touched; choose another directory")
    name = minari_id(path)
    metadata: dict[str, Any] = {
        "total_episodes": len(source.lengths),
        "total_steps": int(source.lengths.sum()),
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": json.dumps(space_to_plain(source.spec.obs)),
        "action_space": json.dumps(space_to_plain(source.spec.action)),
        "dataset_id": name,
        "minari_version": _VERSION,
        "env_name": env,
        "algorithm_name": algorithm,
    }
    metadata |= {"env_spec": env_spec} if env_spec is not None else {}
    temporary = data / f".{_MAIN}.tmp"
    try:
        data.mkdir(parents=True, exist_ok=True)
        with h5py.File(temporary, "w") as file:
            for i in range(len(source.lengths)):
                _write_episode(file.create_group(f"episode_{i}"), i, source.episode(i), source.spec)
        os.replace(temporary, data / _MAIN)
        metadata["dataset_size"] = round((data / _MAIN).stat().st_size / 1e6, 1)
        (data / f".{_METADATA}.tmp").write_text(json.dumps(metadata))
        os.replace(data / f".{_METADATA}.tmp", data / _METADATA)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write Minari dataset {path}: {error.strerror or error}; {source.name} is untouched"
        ) from error
    return data


def minari_id(directory: Path) -> str:
    """Minari's name for a directory: its path in Minari's folder, else its last part, with a version.

    Raises:
        ConfigError: it is in Minari's folder without a version, where Minari would find none of its datasets any more.
    """
    path = directory.resolve()
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets").resolve()
    inside = path != root and path.is_relative_to(root)
    name = "/".join(re.sub(r"[^-\w]", "_", part) for part in (path.relative_to(root).parts if inside else [path.name]))
    if re.search(r"-v\d+$", name):
        return name
    if inside:
        raise ConfigError(f"{directory} is in Minari's folder {root}, where names need a version; use {directory}-v0")
    return f"{name}-v0"


def _write_episode(group: Any, i: int, episode: Episode, spec: EnvSpec) -> None:
    L = len(episode)
    group.attrs["id"], group.attrs["total_steps"] = i, L
    _write_tree(group, "observations", episode.obs)
    _write_tree(group, "actions", clipped(episode.action, spec.action))
    group.create_dataset("rewards", data=episode.reward)
    for name, flag in (("terminations", episode.terminated), ("truncations", episode.truncated)):
        group.create_dataset(name, data=np.append(np.zeros(L - 1, bool), flag))
    columns = {key.removeprefix(ENV): x for key, x in episode.info.items() if key.startswith(ENV)}
    for key, x in columns.items():
        group.require_group("infos").create_dataset(key, data=np.append(np.float32(np.nan), x))


def _write_tree(group: Any, name: str, tree: Tree) -> None:
    if isinstance(tree, (dict, tuple)):
        items = tree.items() if isinstance(tree, dict) else ((f"_index_{i}", x) for i, x in enumerate(tree))
        below = group.create_group(name)
        for key, x in items:
            _write_tree(below, key, x)
    else:
        group.create_dataset(name, data=tree)


def _tree(node: Any, spec: Tree) -> Tree:
    if isinstance(spec, dict):
        return {key: _tree(node[key], leaf) for key, leaf in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_tree(node[f"_index_{i}"], leaf) for i, leaf in enumerate(spec))
    x = _read(node)
    if spec.dtype == "uint8" and len(spec.shape) in (2, 3) and x.shape[1:] != spec.shape:  # each row is a JPEG file
        if not all(bytes(row[:3]) == _JPEG for row in x):
            raise ValueError("a row is no JPEG file")  # other formats have readers that start programs
        read = importlib.import_module("matplotlib.image").imread
        x = np.stack([read(io.BytesIO(bytes(row)), format="jpeg") for row in x])
    # Not cast where that would lose something, so that the check that follows names it.
    return x.astype(spec.dtype) if np.can_cast(x.dtype, spec.dtype, "same_kind") else x


def _read(x: Any) -> npt.NDArray[Any]:
    """The content of an HDF5 dataset that lies in the file itself and fits into memory. Raises ValueError."""
    if x.external or x.is_virtual:
        raise ValueError(f"{x.name} keeps its data in another file")
    if x.nbytes > (free := free_memory()):
        raise ValueError(f"{x.name} has {x.nbytes:,} bytes; free are {free:,}")
    return x[()]


def _require_own(group: Any, where: str) -> None:
    """Raises ConfigError if something in an HDF5 file is a link into another file."""

    def first(name: bytes, info: Any) -> str | None:  # what it returns ends the visit; an exception must not
        return name.decode(errors="replace") if info.type == _EXTERNAL_LINK else None

    if (name := group.id.links.visit(first, info=True)) is not None:
        raise ConfigError(f"{where}: {name} is a link into another file; copy the data")


def _info_rows(infos: Any, key: str, L: int) -> npt.NDArray[np.float32]:
    """[L] float32, one number for each step; `infos` begin with that of the reset. NaN where the episode has none."""
    if key not in infos or len(infos[key]) not in (L, L + 1):
        return np.full(L, np.nan, np.float32)
    return np.asarray(_read(infos[key]), np.float32)[-L:]


def _is_number(x: Any) -> bool:
    return len(getattr(x, "shape", ())) == 1 and x.dtype.kind in "biuf"


def _data(directory: Path) -> Path:
    return directory / "data" if (directory / "data").is_dir() else directory


def _read_metadata(data: Path) -> dict[str, Any]:
    path = data / _METADATA
    try:
        metadata: dict[str, Any] = json.loads(read_stored(path, data))
        metadata["total_episodes"] = int(metadata["total_episodes"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is missing, half-written or damaged ({type(error).__name__}: {error}); copy the dataset "
            "again, or load and save it with Minari 0.5, which writes this file"
        ) from error
    if (kind := metadata.get("data_format", "hdf5")) != "hdf5":
        raise ConfigError(f"{path}: data_format is {kind!r}; expected 'hdf5': convert it with Minari")
    return metadata


def import_h5py() -> Any:
    """The module h5py. Raises MissingExtraError, which names the extra to install."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise MissingExtraError("h5py", "offline") from error
