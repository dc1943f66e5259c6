"""Store: the Protocol between a replay and the place of its rows, here or in shards that are actors of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.config import import_object
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_paths
from penstock.replay.columns import Array, Rows
from penstock.replay.settings import ReplaySettings
from penstock.replay.storage import Storage
from penstock.replay.view import View

_SHARDS = "penstock.distributed.replay_shards:Shards"
"""Of a layer above, found by name: it imports what starts actors."""


class StoragePlan(NamedTuple):
    """All that a `Storage` is made of but its slots; members as its arguments."""

    env: EnvSpec
    rows: int
    frames: bool
    info: Mapping[str, Any]
    state: Tree
    state_every: int
    folder: Path | None
    episodes: bool

    def made(self, slots: int, ledger: bool = False) -> Storage:
        """A storage for so many slots."""
        env, rows, frames, info, state, state_every, folder, episodes = self
        return Storage(
            env,
            rows,
            slots,
            frames=frames,
            info=info,
            state=state,
            state_every=state_every,
            folder=folder,
            episodes=episodes,
            ledger=ledger,
        )


class Store(Protocol):
    """Keeps the rows of a replay, and makes samples of them."""

    storage: Storage
    """What the learner itself keeps: everything, or of rows in shards all but observations and states."""
    bytes: int
    """Bytes of all arrays once every row is written."""

    def write(self, batch: SampleBatch, terminated: Array | None) -> int:
        """As `Storage.write`."""
        ...

    def read(self, t: Rows, b: Rows, noise: Array) -> TrainBatch:
        """As `View.read`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """As `Storage.state_dict`."""
        ...

    def written(self) -> Iterator[tuple[str, Array]]:
        """As `Storage.written`; of rows elsewhere each slice of an array is fetched when it is asked for."""
        ...

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """As `Storage.load`."""
        ...

    def close(self) -> None:
        """Lets go of rows elsewhere; nothing can be read or written any more."""
        ...


class LocalStore:
    """All rows in this process."""

    def __init__(self, storage: Storage, view: View) -> None:
        self.storage, self.bytes = storage, storage.bytes
        self.written, self.state_dict, self.load = storage.written, storage.state_dict, storage.load
        # The view and the storage themselves, with nothing between them and the replay.
        self.write, self.read = storage.write, functools.partial(view.read, storage)

    def close(self) -> None:
        """Does nothing: memory goes with the last reference to it."""


def make_store(settings: ReplaySettings, plan: StoragePlan, view: View, slots: int) -> Store:
    """The store that the settings ask for.

    Raises:
        ConfigError: there is no room for the rows, or no place for the shards.
    """
    if not settings.shards:
        return LocalStore(plan.made(slots), view)
    return import_object(_SHARDS)(plan, view, slots, settings)


def chosen_info(info: Tree, paths: tuple[str, ...]) -> dict[str, Any]:
    """The leaves with these paths. Raises ConfigError if one is not recorded."""
    known = dict(zip(tree_paths(info), tree_leaves(info)))
    missing = [path for path in paths if path not in known]
    if missing:
        raise ConfigError(
            f"the replay is to keep info {missing}, and batches record {sorted(known)}; does the agent give it?"
        )
    return {path: known[path] for path in paths}
