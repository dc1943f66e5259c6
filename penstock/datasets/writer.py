"""Datasets written shard by shard, so that no whole shard is lost whenever the writer dies."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core import files
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import EnvSpec
from penstock.core.tree import tree_leaves, tree_paths
from penstock.datasets.episode import Episode, check_episode, check_spec
from penstock.datasets.reader import FORMAT, INDEX, STAGING, index_bytes, read_index


class DatasetWriter:
    """Appends whole episodes to a directory; `close` makes it complete. As a context manager it closes at the end.

    Episodes are kept until `shard_bytes` are together, then written as a shard under a temporary name, forced to disk,
    renamed, and only then named in the index, which is replaced as a whole. So a reader, and a writer that appends,
    find whole shards of whole episodes whenever the process died. An error in the `with` block leaves the dataset
    marked as half-written.

    Args:
        append: adds to the dataset in the directory, complete or not; if False, the directory must be empty.
        made_by: plain data on the origin of the episodes, kept in the index.

    Raises:
        ConfigError: the directory is not empty, or its dataset has other spaces. CheckpointError: the disk refuses.
    """

    def __init__(
        self,
        directory: str | Path,
        spec: EnvSpec,
        *,
        env: str = "",
        append: bool = False,
        made_by: Mapping[str, Any] | None = None,
        shard_bytes: int = 64 << 20,
    ) -> None:
        self.path, self.spec = Path(directory), spec
        self._limit, self._bytes = shard_bytes, 0
        self._kept: list[Episode] = []
        self._stored: bytes | None = None
        if (self.path / INDEX).is_file() and append:
            self._index: dict[str, Any] = read_index(self.path)
            self._stored = (self.path / INDEX).read_bytes()
            check_spec(EnvSpec.from_plain(self._index["spec"]), spec, f"dataset {self.path}", env or "the environment")
        else:
            check_vacant(self.path)
            columns = {f"obs-{k}": f"obs{path}" for k, path in enumerate(tree_paths(spec.obs))}
            columns |= {f"action-{k}": f"action{path}" for k, path in enumerate(tree_paths(spec.action))}
            self._index = {
                "format": FORMAT,
                "complete": False,
                "env": env,
                "spec": spec.to_plain(),
                "columns": columns,
                "info": {},
                "made_by": [],
                "shards": [],
            }
        self._made_by = [] if made_by is None else [dict(made_by)]
        if self._stored is None:
            self._guarded(lambda: self._write_begun([]))

    @property
    def episodes(self) -> int:
        """Whole episodes so far, those of an earlier writer included."""
        return sum(shard["episodes"] for shard in self._index["shards"]) + len(self._kept)

    @property
    def steps(self) -> int:
        """Steps of these episodes."""
        return sum(shard["steps"] for shard in self._index["shards"]) + sum(len(episode) for episode in self._kept)

    def append(self, episode: Episode) -> None:
        """Adds an episode; writes a shard if there is enough for one. Raises ConfigError if it breaks the spec."""
        where = f"episode {self.episodes}"
        check_episode(episode, self.spec, where)
        info = {key: [str(x.dtype), list(x.shape[1:])] for key, x in sorted(episode.info.items())}
        if not self._index["shards"] and not self._kept:
            self._index["info"] = info
        if info != self._index["info"]:
            raise ConfigError(
                f"{where} has the info columns {info}; those of dataset {self.path} are {self._index['info']}"
            )
        self._kept.append(episode)
        self._bytes += sum(x.nbytes for x in tree_leaves((episode.obs, episode.action, episode.reward)))
        if self._bytes >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Writes the episodes in memory as a shard. Raises CheckpointError if the disk refuses; then they are kept."""
        if self._kept:
            self._guarded(self._write_shard)

    def close(self) -> None:
        """Writes the rest and marks the dataset as complete."""
        self.flush()
        if not self._index["complete"]:
            self._guarded(lambda: self._write_index({**self._index, "complete": True}))

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.flush()

    def _guarded(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            safe = sum(shard["episodes"] for shard in self._index["shards"])
            raise CheckpointError(
                f"cannot write dataset {self.path}: {error.strerror or error}; {safe:,} episodes in it are "
                "safe: make room and go on with --append"
            ) from error

    def _write_shard(self) -> None:
        taken = [p.name for p in self.path.iterdir() if p.is_dir()]
        name = next(n for n in (f"{k:06d}" for k in range(len(self._index["shards"]), 1_000_000)) if n not in taken)
        temporary = self.path / f".{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)  # of a writer that died
        temporary.mkdir()
        entries = {
            f"{column}.npy": files.write_new(temporary / f"{column}.npy", _npy(x))
            for column, x in self._columns().items()
        }
        files.fsync_dir(temporary)
        temporary.rename(self.path / name)
        files.fsync_dir(self.path)
        steps = sum(len(episode) for episode in self._kept)
        self._write_begun([{"dir": name, "episodes": len(self._kept), "steps": steps, "files": entries}])
        self._kept, self._bytes = [], 0

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        kept = self._kept
        columns = {
            "length": np.array([len(episode) for episode in kept], np.int64),
            "terminated": np.array([episode.terminated for episode in kept], bool),
            "truncated": np.array([episode.truncated for episode in kept], bool),
            "reward": np.concatenate([episode.reward for episode in kept]),
        }
        parts = {
            "obs": [tree_leaves(episode.obs) for episode in kept],
            "action": [tree_leaves(episode.action) for episode in kept],
            "info": [[episode.info[key] for key in self._index["info"]] for episode in kept],
        }
        for name, rows in parts.items():
            columns |= {f"{name}-{k}": np.concatenate(leaves) for k, leaves in enumerate(zip(*rows))}
        return columns

    def _write_begun(self, shards: list[dict[str, Any]]) -> None:
        """Adds shards, and this writer, to the index and marks it as half-written; until now it may be complete."""
        made_by = [*self._index["made_by"], *self._made_by]
        added = {"complete": False, "made_by": made_by, "shards": [*self._index["shards"], *shards]}
        self._write_index({**self._index, **added})
        self._made_by = []

    def _write_index(self, index: dict[str, Any]) -> None:
        """Replaces the index on the disk, then here."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / INDEX
        if self._stored is not None and path.read_bytes() != self._stored:
            raise ConfigError(f"{path} was changed by another writer; let one process at a time write a dataset")
        data = index_bytes(index)
        files.write_atomic(path, data)
        self._stored, self._index = data, index


def check_vacant(path: Path) -> None:
    """Raises ConfigError unless a directory is missing or empty, with a name in UTF-8; nothing is ever overwritten."""
    files.require_name(path, "dataset")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise ConfigError(f"{path} is a file, which was not touched; a dataset is a folder: choose another name")
    if (path / STAGING / INDEX).is_file():
        raise ConfigError(
            f"{path} holds a half-written Minari dataset, which was not touched; go on with it by --format "
            "minari --append, or choose another directory"
        )
    if not (path / INDEX).is_file():
        raise ConfigError(f"{path} is not empty; nothing in it was touched: choose another directory for the dataset")
    index = read_index(path)
    what = "a dataset" if index["complete"] else "a half-written dataset"
    count = sum(shard["episodes"] for shard in index["shards"])
    raise ConfigError(
        f"{path} holds {what} of {count:,} episodes, which was not touched; add to it with --append "
        "(append=True), or choose another directory"
    )


def _npy(x: npt.NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, x, allow_pickle=False)
    return stream.getvalue()
