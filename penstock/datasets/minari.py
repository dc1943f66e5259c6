"""Datasets in Minari's HDF5 layout, read and written with h5py alone: no Minari, no JAX.

    DIR/data/metadata.json      total_episodes, total_steps, data_format "hdf5", spaces and env_spec as JSON text, ...
    DIR/data/main_data.hdf5     a group episode_0, episode_1, ... for each, with the datasets observations [L+1, ...],
                                actions, rewards, terminations, truncations [L, ...] and the group infos ([L+1] each);
                                a Dict space is a group by key, a Tuple space one by _index_0, _index_1, ...

The layout is that of Minari 0.5.4 (its `HDF5Storage` and `serialize_space`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from penstock.core.errors import CheckpointError, ConfigError, MissingExtraError, PenstockError
from penstock.core.files import open_stored, read_stored
from penstock.core.machine import free_memory
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import Tree, tree_leaves
from penstock.datasets.episode import (
    ENV,
    Episode,
    EpisodeSource,
    check_episode,
    clipped,
    obs_outside,
    say_outside,
)
from penstock.datasets.minari_spaces import space_to_plain, stored_spec
from penstock.envs.contract import Checks
from penstock.envs.wrappers import bytes_of

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
        drop: keys of the observation to leave out, as far as it has them. text: bytes that texts are shown as.

    Raises:
        MissingExtraError: h5py is not installed. ConfigError: half-written, damaged, or not of this layout.
    """

    def __init__(self, directory: str | Path, drop: Sequence[str] = (), text: int = 0) -> None:
        self.path = _data(Path(directory))
        self.name = str(self.path)
        h5py = import_h5py()
        metadata = _read_metadata(self.path)
        self._metadata = metadata
        self._fingerprint: str | None = None
        self.spec = stored_spec(metadata, str(self.path / _METADATA), drop, text)
        main = str(self.path / _MAIN)
        with _undamaged(main):
            with open_stored(self.path / _MAIN, self.path):
                self._file: Any = h5py.File(self.path / _MAIN, "r")
            names = [f"episode_{i}" for i in range(len(self._file))]
            _require_own(self._file, main)
            absent = [name for name in names if name not in self._file or "rewards" not in self._file[name]]
        if absent or not names or len(names) != metadata["total_episodes"]:
            raise ConfigError(
                f"{main} holds {len(names)} episodes{f', {absent[0]} not whole' if absent else ''}; "
                f"{_METADATA} says {metadata['total_episodes']}: it is half-written, record it anew"
            )
        shapes = [_node(self._file[name], "rewards", f"{main}: {name}").shape for name in names]
        for name, shape in zip(names, shapes):
            if len(shape) != 1:
                raise ConfigError(
                    f"{main}: {name}: rewards has the shape {list(shape)}; expected [L], one for each step"
                )
        self.lengths = np.array([shape[0] for shape in shapes], np.int64)
        with _undamaged(f"{main}: {names[0]}: infos"):
            infos = _infos(self._file[names[0]])
            self.info: Mapping[str, tuple[str, tuple[int, ...]]] = {
                f"{ENV}{key}": ("float32", ()) for key, x in infos.items() if _is_number(x)
            }

    @property
    def fingerprint(self) -> str:
        """Hash of the whole content, read once: after `verify` from the page cache, in a second for every GB."""
        if self._fingerprint is None:
            with _undamaged(str(self.path / _MAIN)), open_stored(self.path / _MAIN, self.path) as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            self._fingerprint = hashlib.sha256(f"{content} {self._metadata}".encode()).hexdigest()
        return self._fingerprint

    def episode(self, i: int) -> Episode:
        where = f"{self.path / _MAIN}: episode_{i}"
        with _undamaged(where):
            group, L = self._file[f"episode_{i}"], int(self.lengths[i])
        ends = {name: _flags(group, name, L, where) for name in ("terminations", "truncations")}
        early = np.flatnonzero((ends["terminations"] | ends["truncations"])[:-1])
        if len(early):
            raise ConfigError(f"{where} ends at step {early[0]} of {L} and goes on; split it there into two episodes")
        terminated = bool(ends["terminations"][-1:].any())
        with _undamaged(f"{where}: rewards"):
            reward = np.asarray(_read(group["rewards"]), np.float32)
        with _undamaged(f"{where}: infos"):
            infos = _infos(group)
            info = {key: _info_rows(infos, key.removeprefix(ENV), L) for key in self.info}
        found = Episode(
            _tree(group, "observations", self.spec.obs, where),
            _tree(group, "actions", self.spec.action, where),
            reward,
            terminated,
            bool(ends["truncations"][-1:].any()) or not terminated,  # a recording that stops without an end was cut
            info,
        )
        check_episode(found, self.spec, where)
        return found

    def verify(self, checks: Checks = "sampled") -> None:
        _ = self.fingerprint  # of the file that is read here, should another take its name during a run
        for i in range(len(self.lengths)):
            found = self.episode(i)
            if checks in ("sampled", "always") and (outside := obs_outside(tree_leaves(found.obs), self.spec)):
                say_outside(f"{self.path / _MAIN}: episode_{i}, row {outside[0]}: {outside[1]}", checks)
                checks = "off"

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


@contextlib.contextmanager
def _undamaged(where: str) -> Generator[None]:
    """Turns every error that a damaged file causes in the block into a ConfigError that says where."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # HDF5's own are of many types
        raise ConfigError(
            f"{where} is missing, half-written or damaged, or of another layout ({type(error).__name__}: "
            f"{str(error) or 'no more is known'}); copy it again, or record it anew"
        ) from error


def _node(group: Any, name: str, where: str) -> Any:
    """An HDF5 dataset. Raises ConfigError that names it, where it is none."""
    with _undamaged(f"{where}: {name}"):
        found = group[name]
        if not hasattr(found, "dtype") or not hasattr(found, "shape") or found.shape is None:
            raise TypeError(f"it is a {type(found).__name__}; expected an array")
        return found


def _flags(group: Any, name: str, L: int, where: str) -> npt.NDArray[np.bool_]:
    """[L] bool, for each step whether it ended the episode. Raises ConfigError."""
    node = _node(group, name, where)
    if node.shape != (L,) or node.dtype.kind not in "biu":
        raise ConfigError(
            f"{where}: {name} is {node.dtype}{list(node.shape)}; expected bool[{L}], one for each of the rewards"
        )
    with _undamaged(f"{where}: {name}"):
        return np.asarray(_read(node)).astype(bool)


def _tree(group: Any, name: str, spec: Tree, where: str) -> Tree:
    if isinstance(spec, (dict, tuple)):
        with _undamaged(f"{where}: {name}"):
            below = group[name]
        named = spec.items() if isinstance(spec, dict) else ((f"_index_{i}", leaf) for i, leaf in enumerate(spec))
        leaves = {key: _tree(below, key, leaf, f"{where}: {name}") for key, leaf in named}
        return leaves if isinstance(spec, dict) else tuple(leaves.values())
    node = _node(group, name, where)
    with _undamaged(f"{where}: {name}"):
        return _leaf(node, spec, where)


def _leaf(node: Any, spec: LeafSpec, where: str) -> npt.NDArray[Any]:
    x = np.asarray(_read(node))
    if x.ndim == 1 and x.dtype.kind in "SO" and len(spec.shape) == 1:
        return np.stack([bytes_of(bytes(text), spec.shape[0], f"{where}, row {t}: ") for t, text in enumerate(x)])
    if spec.dtype == "uint8" and len(spec.shape) in (2, 3) and x.shape[1:] != spec.shape:  # each row is a JPEG file
        if not all(bytes(row[:3]) == _JPEG for row in x):
            raise ValueError("a row is no JPEG file")  # other formats have readers that start programs
        read = _jpeg_reader()
        x = np.stack([read(io.BytesIO(bytes(row)), format="jpeg") for row in x])
    # Not cast where that would lose something, so that the check that follows names it.
    return x.astype(spec.dtype) if np.can_cast(x.dtype, spec.dtype, "same_kind") else x


def _jpeg_reader() -> Any:
    try:
        return importlib.import_module("matplotlib.image").imread
    except ImportError as error:
        raise MissingExtraError("matplotlib, which reads JPEG,", "plot") from error


def _read(x: Any) -> npt.NDArray[Any]:
    """The content of an HDF5 dataset that lies in the file itself and fits into memory. Raises ValueError."""
    if x.external or x.is_virtual:
        raise ValueError(f"{x.name} keeps its data in another file")
    if x.nbytes > (free := free_memory()):
        raise ValueError(f"{x.name} has {x.nbytes:,} bytes; free are {free:,}")
    return x[()]


def _require_own(group: Any, where: str) -> None:
    """Raises ConfigError if something in an HDF5 file is a link into another file."""

    def first(name: bytes, info: Any) -> str | None:  # a return value ends the visit; an exception must not
        return name.decode(errors="replace") if info.type == _EXTERNAL_LINK else None

    if (name := group.id.links.visit(first, info=True)) is not None:
        raise ConfigError(f"{where}: {name} is a link into another file; copy the data")


def _infos(group: Any) -> Mapping[str, Any]:
    """The infos of an episode, by key. Raises TypeError if they are not an HDF5 group."""
    found = group.get("infos", {})
    if not isinstance(found, Mapping):
        raise TypeError(f"it is a {type(found).__name__}; expected a group of arrays")
    return cast(Mapping[str, Any], found)


def _info_rows(infos: Any, key: str, L: int) -> npt.NDArray[np.float32]:
    """[L] float32, one number for each step; `infos` begin with that of the reset. NaN where the episode has none."""
    if key not in infos or not _is_number(infos[key]) or len(infos[key]) not in (L, L + 1):
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
