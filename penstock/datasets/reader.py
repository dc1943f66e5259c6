"""Datasets in penstock's own format: an index, and shards of arrays, which are mapped and not loaded.

DIR/dataset.json            format, whether it is complete, spaces, env, columns, shards with size and sha256
DIR/000000/length.npy       [E] int64 steps of each episode of the shard; terminated.npy and truncated.npy [E] bool
DIR/000000/obs-0.npy        [sum of L+1, *O] first leaf of the observation, episode after episode; obs-1.npy, ...
DIR/000000/action-0.npy     [sum of L, *A]; reward.npy [sum of L] float32; info-0.npy, ... named by `info` of the index
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec
from penstock.core.tree import tree_leaves, tree_structure, tree_unflatten
from penstock.datasets.episode import Episode, EpisodeSource
from penstock.datasets.minari import MinariEpisodes, is_minari

FORMAT = 1
INDEX = "dataset.json"
STAGING = "episodes"
"""Subfolder of a Minari dataset that holds the episodes until all are recorded: an HDF5 file cut short is lost."""
_OPEN_SHARDS = 16
"""Shards mapped at a time: each of their files takes a descriptor, of which a process may have 1,024."""


def open_dataset(directory: str | Path) -> EpisodeSource:
    """A dataset in penstock's or Minari's format.

    Raises:
        ConfigError: there is none, or it is half-written or damaged; the message says which.
    """
    path = Path(directory)
    if (path / INDEX).is_file():
        return Dataset(path)
    if is_minari(path):
        return MinariEpisodes(path)
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

    Raises:
        ConfigError: half-written, of another format version, or a file is missing or has another size.
    """

    def __init__(self, directory: str | Path) -> None:
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
        self.spec = EnvSpec.from_plain(self.index["spec"])
        self.info: Mapping[str, tuple[str, tuple[int, ...]]] = {
            key: (dtype, tuple(shape)) for key, (dtype, shape) in self.index["info"].items()
        }
        self._shards: list[dict[str, Any]] = self.index["shards"]
        self._open: OrderedDict[int, dict[str, npt.NDArray[Any]]] = OrderedDict()
        for shard in self._shards:
            for file, entry in shard["files"].items():
                _check_size(self.path / shard["dir"] / file, entry["size"])
        lengths = [self._array(shard, "length") for shard in self._shards]
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

        def leaves(name: str, count: int, first: int, rows: int) -> list[npt.NDArray[Any]]:
            return [np.array(shard[f"{name}-{k}"][first : first + rows]) for k in range(count)]

        obs = leaves("obs", len(tree_leaves(self.spec.obs)), start + at, L + 1)
        action = leaves("action", len(tree_leaves(self.spec.action)), start, L)
        info = leaves("info", len(self.info), start, L)
        return Episode(
            tree_unflatten(tree_structure(self.spec.obs), obs),
            tree_unflatten(tree_structure(self.spec.action), action),
            np.array(shard["reward"][start : start + L]),
            bool(shard["terminated"][at]),
            bool(shard["truncated"][at]),
            dict(zip(self.info, info)),
        )

    def verify(self) -> None:
        for shard in self._shards:
            for file, entry in shard["files"].items():
                path = self.path / shard["dir"] / file
                with path.open("rb") as stream:
                    found = hashlib.file_digest(stream, "sha256").hexdigest()
                if found != entry["sha256"]:
                    raise ConfigError(
                        f"{path} is damaged: sha256 {found[:12]}..., expected {entry['sha256'][:12]}...; copy "
                        "the dataset again, or record it anew"
                    )

    def close(self) -> None:
        self._open.clear()

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
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged ({error}); copy the dataset again, or record it anew") from error


def read_index(directory: Path) -> dict[str, Any]:
    """The content of a directory's dataset.json. Raises ConfigError if it cannot be read or is of another version."""
    path = directory / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text())
        version, keys = index["format"], {"complete", "env", "spec", "info", "shards", "made_by"} - index.keys()
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}); copy the dataset again") from error
    if version != FORMAT or keys:
        raise ConfigError(
            f"{path} is of format {version}{f' without {sorted(keys)}' if keys else ''}; this version of "
            f"penstock reads format {FORMAT}"
        )
    return index


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); copy the dataset again, whole") from error
    if found != size:
        raise ConfigError(f"{path} has {found:,} bytes; expected {size:,}: the copy was cut short, copy it again")
