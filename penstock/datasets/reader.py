"""Datasets in penstock's own format: an index, and shards of arrays, which are mapped and not loaded.

DIR/dataset.json            format, whether it is complete, spaces, env, columns, shards with size and sha256
DIR/000000/length.npy       [E] int64 steps of each episode of the shard; terminated.npy and truncated.npy [E] bool
DIR/000000/obs-0.npy        [sum of L+1, *O] first leaf of the observation, episode after episode; obs-1.npy, ...
DIR/000000/action-0.npy     [sum of L, *A]; reward.npy [sum of L] float32; info-0.npy, ... named by `info` of the index
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.files import has_controls, open_stored, read_stored, require_inside
from penstock.core.memmap import map_npy
from penstock.core.spec import MASK_KEY, EnvSpec
from penstock.core.tree import tree_leaves, tree_structure, tree_unflatten, tree_without
from penstock.datasets.episode import (
    Episode,
    EpisodeSource,
    check_choices,
    illegal_choice,
    obs_outside,
    say_outside,
)
from penstock.datasets.minari import MinariEpisodes, is_minari
from penstock.envs.contract import Checks

FORMAT = 1
INDEX = "dataset.json"
STAGING = "episodes"
"""Subfolder of a Minari dataset that holds the episodes until all are recorded: an HDF5 file cut short is lost."""
_KEYS = {"complete", "env", "spec", "info", "shards", "made_by"}
_SHARD, _COLUMN = re.compile(r"\d{6}"), re.compile(r"[a-z]+(-\d+)?\.npy")
"""Names of a shard's folder and of its files."""
_LARGEST_ROW = 1 << 28
"""Most numbers of one step of an info column."""
_OPEN_SHARDS = 16
"""Shards mapped at a time: each of their files takes a descriptor, of which a process may have 1,024."""


def open_dataset(directory: str | Path, drop: Sequence[str] = (), text: int = 0) -> EpisodeSource:
    """A dataset in penstock's or Minari's format.

    Args:
        drop, text: of the environment that it is for, as in `EnvConfig`: its observations are shown alike.

    Raises:
        ConfigError: there is none, or it is half-written or damaged; the message says which.
    """
    path = Path(directory)
    if has_controls(path):
        raise ConfigError(f"dataset {str(path)!r} has control characters in its name; rename that folder")
    if (path / INDEX).is_file():
        return Dataset(path, drop)
    if is_minari(path):
        return MinariEpisodes(path, drop, text)
    if not path.is_dir():
        raise ConfigError(
            f"no dataset at {path} (from {Path.cwd()}); expected a folder that `penstock record RUN --dataset "
            "DIR` or Minari wrote"
        )
    if (path / STAGING / INDEX).is_file():
        raise ConfigError(
            f"{path} is half-written: its recorder ended before the HDF5 file was made; go on with "
            "`penstock record RUN --dataset DIR --format minari --append`, or keep just what is there with "
            "--append --episodes 0"
        )
    names = sorted(p.name for p in path.iterdir())
    raise ConfigError(
        f"{path} is no dataset: it holds {', '.join(names[:8]) or 'nothing'}; expected {INDEX} (penstock) or "
        "data/main_data.hdf5 and data/metadata.json (Minari)"
    )


class Dataset:
    """A complete dataset in penstock's format; an `EpisodeSource`.

    Args:
        drop: keys of the observation to leave out, as far as it has them.

    Raises:
        ConfigError: half-written, of another format version, or a file is missing or has another size.
    """

    def __init__(self, directory: str | Path, drop: Sequence[str] = ()) -> None:
        self.path = Path(directory)
        self.name = str(self.path)
        self.index = read_index(self.path)
        if not self.index["complete"]:
            shards = self.index["shards"]
            count = sum(shard["episodes"] for shard in shards)
            kept = (
                f"Its {count:,} whole episodes in {len(shards)} shards are not lost: go on with `penstock record RUN "
                "--dataset DIR --append`, or keep just these with --append --episodes 0"
                if count
                else "It holds no whole episode yet: go on with `penstock record RUN --dataset DIR --append`"
            )
            raise ConfigError(f"dataset {self.path} is half-written: its recorder ended before it was complete. {kept}")
        self.env = str(self.index["env"])
        stored, info = stored_columns(self.index)
        self._stored = stored
        numbers = tree_unflatten(tree_structure(stored.obs), list(range(len(tree_leaves(stored.obs)))))
        self._shown: list[int] = tree_leaves(tree_without(numbers, drop))
        """Numbers of the leaves of the stored observation that are not dropped."""
        self.spec = EnvSpec(tree_without(stored.obs, drop), stored.action)
        self.info: Mapping[str, tuple[str, tuple[int, ...]]] = info
        self._shards: list[dict[str, Any]] = self.index["shards"]
        self._verified = False
        self._open: OrderedDict[int, dict[str, npt.NDArray[Any]]] = OrderedDict()
        for shard in self._shards:
            for file, entry in shard["files"].items():
                _check_size(self.path / shard["dir"] / file, entry["size"], self.path)
        lengths = [self._array(shard, "length") for shard in self._shards]
        for shard, length in zip(self._shards, lengths):
            steps = shard["steps"]
            if not ((length >= 1) & (length <= steps)).all() or length.sum(dtype=np.float64) != steps:
                raise ConfigError(
                    f"{self.path / shard['dir']} holds episodes of {length.sum():,} steps, the shortest of "
                    f"{length.min(initial=steps)}; its index says {steps:,}: copy the dataset again"
                )
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
        self._ends = np.cumsum([len(x) for x in lengths])
        self._starts = [np.cumsum(x) - x for x in lengths]
        if not len(self.lengths):
            raise ConfigError(
                f"dataset {self.path} holds no episode; record some: penstock record RUN --dataset DIR --append"
            )

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self._shards, sort_keys=True).encode()).hexdigest()

    def episode(self, i: int) -> Episode:
        number = int(np.searchsorted(self._ends, i, side="right"))
        shard = self._mapped(number)
        at = i - int(self._ends[number] - len(self._starts[number]))
        start, L = int(self._starts[number][at]), int(self.lengths[i])

        def leaves(name: str, numbers: Iterable[int], first: int, rows: int) -> list[npt.NDArray[Any]]:
            return [np.array(shard[f"{name}-{k}"][first : first + rows]) for k in numbers]

        obs = leaves("obs", self._shown, start + at, L + 1)
        action = leaves("action", range(len(tree_leaves(self.spec.action))), start, L)
        info = leaves("info", range(len(self.info)), start, L)
        found = Episode(
            tree_unflatten(tree_structure(self.spec.obs), obs),
            tree_unflatten(tree_structure(self.spec.action), action),
            np.array(shard["reward"][start : start + L]),
            bool(shard["terminated"][at]),
            bool(shard["truncated"][at]),
            dict(zip(self.info, info)),
        )
        if not self._verified:
            check_choices(found, self.spec, f"dataset {self.path}, episode {i}")
        return found

    def verify(self, checks: Checks = "sampled") -> None:
        for number, shard in enumerate(self._shards):
            for file, entry in shard["files"].items():
                path = self.path / shard["dir"] / file
                try:
                    with open_stored(path, self.path) as stream:
                        found = hashlib.file_digest(stream, "sha256").hexdigest()
                except OSError as error:
                    raise ConfigError(f"{path} cannot be read ({error.strerror}); copy the dataset again") from error
                if found != entry["sha256"]:
                    raise ConfigError(
                        f"{path} is damaged: sha256 {found[:12]}..., expected {entry['sha256'][:12]}...; copy "
                        "the dataset again, or record it anew"
                    )
            if self._look(number, checks):
                checks = "off"
        self._verified = True

    def _look(self, number: int, checks: Checks) -> bool:
        """Raises for a choice of a shard that is none; True if it warned of an observation outside its space."""
        shard, starts = self._mapped(number), self._starts[number]
        obs_starts = starts + np.arange(len(starts))
        mask = None
        if isinstance(self.spec.obs, dict) and MASK_KEY in self.spec.obs:
            leaf = tree_unflatten(tree_structure(self.spec.obs), self._shown)[MASK_KEY]
            mask = np.delete(shard[f"obs-{leaf}"], obs_starts[1:] - 1, axis=0)[:-1]
        action = [shard[f"action-{k}"] for k in range(len(tree_leaves(self.spec.action)))]
        if found := illegal_choice(action, mask, self.spec):
            raise ConfigError(f"{self._place(number, starts, found[0])}: {found[1]}")
        looks = checks in ("sampled", "always")
        found = obs_outside([shard[f"obs-{k}"] for k in self._shown], self.spec) if looks else None
        if found is not None:
            say_outside(f"{self._place(number, obs_starts, found[0])}: {found[1]}", checks)
        return found is not None

    def _place(self, number: int, starts: npt.NDArray[np.int64], row: int) -> str:
        """Dataset, episode and row in it of a row of a shard whose episodes start at these rows."""
        i = int(np.searchsorted(starts, row, side="right")) - 1
        return f"dataset {self.path}, episode {int(self._ends[number]) - len(starts) + i}, row {row - int(starts[i])}"

    def close(self) -> None:
        self._open.clear()

    def _form(self, shard: dict[str, Any], name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and shape that a column of a shard must have."""
        E, rows = shard["episodes"], shard["steps"]
        plain = {"length": (np.int64, (E,)), "terminated": (np.bool_, (E,)), "truncated": (np.bool_, (E,))}
        kind, _, k = name.partition("-")
        if kind == "info":
            dtype, shape = list(self.info.values())[int(k)]
            return np.dtype(dtype), (rows, *shape)
        if kind in ("obs", "action"):
            leaf = tree_leaves(getattr(self._stored, kind))[int(k)]
            return np.dtype(leaf.dtype), (rows + E * (kind == "obs"), *leaf.shape)
        dtype, shape = {**plain, "reward": (np.float32, (rows,))}[name]
        return np.dtype(dtype), shape

    def _mapped(self, number: int) -> dict[str, npt.NDArray[Any]]:
        if number in self._open:
            self._open.move_to_end(number)
        else:
            shard = self._shards[number]
            names = [Path(file).stem for file in shard["files"]]
            self._open[number] = {name: self._array(shard, name) for name in names}
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        return self._open[number]

    def _array(self, shard: dict[str, Any], name: str) -> npt.NDArray[Any]:
        path = self.path / shard["dir"] / f"{name}.npy"
        try:
            with open_stored(path, self.path) as file:
                found = map_npy(file)
            expected = self._form(shard, name)
            if (found.dtype, found.shape) != expected:
                raise ValueError(f"{found.dtype}{list(found.shape)}, expected {expected[0]}{list(expected[1])}")
            return found
        except (OSError, ValueError, LookupError) as error:
            raise ConfigError(f"{path} is damaged ({error}); copy the dataset again, or record it anew") from error


def read_index(directory: Path) -> dict[str, Any]:
    """The content of a directory's dataset.json. Raises ConfigError if it cannot be read, was changed since it was
    written, is of another version, or names files outside of the directory.
    """
    path = directory / INDEX
    try:
        index: dict[str, Any] = json.loads(read_stored(path, directory))
        version, keys = index["format"], _KEYS - index.keys()
        if version == FORMAT and not keys:
            stored = index.pop("sha256", None)  # versions before 0.2 wrote none
            if index.keys() - _KEYS - {"format", "columns"} or stored not in (None, _digest(index)):
                raise ValueError("its content and its own sha256 differ")
            _require_sound(index)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}); copy the dataset again") from error
    if version != FORMAT or keys:
        raise ConfigError(
            f"{path} is of format {version}{f' without {sorted(keys)}' if keys else ''}; this version of "
            f"penstock reads format {FORMAT}"
        )
    return index


def index_bytes(index: Mapping[str, Any]) -> bytes:
    """The text of dataset.json, which holds a sha256 of its content."""
    return (json.dumps({**index, "sha256": _digest(index)}, indent=1) + "\n").encode()


def stored_columns(index: Mapping[str, Any]) -> tuple[EnvSpec, dict[str, tuple[str, tuple[int, ...]]]]:
    """The spec in an index, and dtype and shape of one row of each info column."""
    info: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key, (text, given) in index["info"].items():
        dtype, shape = np.dtype(text), tuple(map(int, given))
        if dtype.kind not in "biuf" or min(shape, default=0) < 0 or math.prod(shape) > _LARGEST_ROW:
            raise ValueError(f"info {key!r} is {text}{given} for a step; expected at most {_LARGEST_ROW:,} numbers")
        info[str(key)] = dtype.name, shape
    return EnvSpec.from_plain(index["spec"]), info


def _digest(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _require_sound(index: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError or LookupError if an index holds data that a writer never writes."""
    spec, info = stored_columns(index)
    counts = {"obs": len(tree_leaves(spec.obs)), "action": len(tree_leaves(spec.action)), "info": len(info)}
    columns = {"length.npy", "terminated.npy", "truncated.npy", "reward.npy"}
    columns |= {f"{name}-{k}.npy" for name, count in counts.items() for k in range(count)}
    for shard in index["shards"]:
        if not _SHARD.fullmatch(shard["dir"]) or not all(map(_COLUMN.fullmatch, shard["files"])):
            raise ValueError(f"{shard['dir']!r} with {list(shard['files'])[:3]} is no shard of it")
        if missing := sorted(columns - shard["files"].keys()):
            raise ValueError(f"{shard['dir']} has no {missing[0]}")
        if not all(isinstance(entry["sha256"], str) for entry in shard["files"].values()):
            raise ValueError(f"{shard['dir']} lacks a sha256")
        counts = [shard["episodes"], shard["steps"], *(entry["size"] for entry in shard["files"].values())]
        if not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError(f"{shard['dir']} has counts that are none: {counts[:2]}")


def _check_size(path: Path, size: int, folder: Path) -> None:
    try:
        require_inside(path, folder)
        found = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); copy the dataset again, whole") from error
    if found != size:
        raise ConfigError(f"{path} has {found:,} bytes; expected {size:,}: the copy was cut short, copy it again")
