"""Store: the Protocol between a replay and the place of its rows, here or in shards that are actors of their own."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_paths
from penstock.replay.columns import Array, DeviceMemory, Rows
from penstock.replay.hindsight import GOALS
from penstock.replay.index import Index
from penstock.replay.settings import ReplaySettings
from penstock.replay.storage import Storage, frame_history
from penstock.replay.view import View

if TYPE_CHECKING:
    from penstock.replay.replay import Replay


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
    exact: frozenset[str]
    memory: DeviceMemory | None = None

    def made(self, slots: int, index_only: bool = False) -> Storage:
        """A storage for this many slots."""
        env, rows, frames, info, state, state_every, folder, episodes, exact, memory = self
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
            index_only=index_only,
            exact=exact,
            memory=memory,
        )


class Store(Protocol):
    """Keeps the rows of a replay, and makes samples of them."""

    storage: Storage
    """Storage of the learner: all data, or all but observations and states if the rows are in shards."""
    bytes: int
    """Bytes of all arrays once every row is written."""

    def write(self, batch: SampleBatch, terminated: Array | None) -> int:
        """Like `Storage.write`."""
        ...

    def read(self, t: Rows, b: Rows, noise: Array) -> TrainBatch:
        """Like `View.read`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Like `Storage.state_dict`."""
        ...

    def written(self) -> Iterator[tuple[str, Array]]:
        """Like `Storage.written`; for rows held elsewhere, reading a slice of an array fetches it."""
        ...

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Like `Storage.load`."""
        ...

    def set_discount(self, discount: float) -> None:
        """Like `View.set_discount`, wherever a view is."""
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
        self.set_discount = view.set_discount

    def close(self) -> None:
        """Does nothing: memory goes with the last reference to it."""


def make_store(settings: ReplaySettings, plan: StoragePlan, view: View, slots: int) -> Store:
    """The store that the settings ask for.

    Raises:
        ConfigError: there is no room for the rows, or no place for the shards.
    """
    if not settings.shards:
        return LocalStore(plan.made(slots), view)
    from penstock.replay.shards import Shards  # with all that starts actors, a third of what replay takes to import

    return Shards(plan, view, slots, settings)


def planned(
    settings: ReplaySettings,
    spec: EnvSpec,
    view: View,
    T: int,
    slots: int,
    info: Mapping[str, Any],
    state: Tree,
    exact: bool = False,
    least: int = 0,
    memory: DeviceMemory | None = None,
) -> StoragePlan:
    """The storage that the settings ask for, for batches [T, B] of this many slots in total, and samples of the view.

    Args:
        least: rows of each slot that must fit, even beyond the capacity.
        exact: float64 observations stay so; in hindsight goals do anyway, as rewards are made of them.

    Raises:
        ConfigError: it is too short for a batch or a sample, or states are not recorded where sequences begin.
    """
    stride, history = view.stride, frame_history(spec, settings.deduplicate_frames)
    needed = T + view.span + stride + history + 2
    rows = max(math.ceil(settings.capacity / slots), least) + 1
    rows = math.ceil(rows / stride) * stride
    if rows < needed:
        raise ConfigError(
            f"replay.capacity={settings.capacity} leaves {rows} rows for each of {slots} slots, and batches of "
            f"T={T} with samples of {view.span + 1} rows need {needed}; use replay.capacity >= {(needed - 1) * slots}"
        )
    if state is not None and stride % T:
        raise ConfigError(
            f"recurrent states are recorded where a batch begins, every sampler.T={T} rows, and sequences begin "
            f"every {stride}: use a sampler.T that divides {stride}, or set state_interval to a multiple of {T}"
        )
    return StoragePlan(
        spec,
        rows,
        frames=settings.deduplicate_frames,
        info=info,
        state=state,
        state_every=stride,
        folder=None if settings.dir is None else Path(settings.dir),
        episodes=view.episodes,
        exact=frozenset(tree_paths(spec.obs) if exact else GOALS if settings.hindsight else ()),
        memory=memory,
    )


def chosen_info(info: Tree, paths: tuple[str, ...]) -> dict[str, Any]:
    """The leaves with these paths. Raises ConfigError if one is not recorded."""
    known = dict(zip(tree_paths(info), tree_leaves(info)))
    missing = [path for path in paths if path not in known]
    if missing:
        raise ConfigError(
            f"the replay keeps info {missing}, which the algorithm's own agent records as it acts, and these batches "
            f"have {sorted(known)}; expected a sampler that steps the environment, without replay.dataset, and an "
            "agent whose `act` returns it"
        )
    return {path: known[path] for path in paths}


def require_alike(
    state: Mapping[str, Any], arrays: Mapping[str, Array], prepared: list[int], index_kind: str, index: Index
) -> None:
    """Raises CheckpointError unless the state of a replay is of one with these rows and slots, and of this index."""
    if prepared != list(state["prepared"]):
        (rows, slots), (own_rows, own_slots) = state["prepared"], prepared
        raise CheckpointError(
            f"the checkpoint's replay has {rows - 1} rows of {slots} slots; this one has {own_rows - 1} of "
            f"{own_slots}: resume with the replay.capacity and sampler.B of the run"
        )
    if index_kind != state["index_kind"]:
        raise CheckpointError(
            f"the checkpoint's replay has replay.index={state['index_kind']!r}; this one has "
            f"{index_kind!r}: resume with the replay settings of the run"
        )
    for name, x in index.arrays().items():
        stored = arrays.get(f"index.{name}")
        if stored is None or (stored.shape, stored.dtype) != (x.shape, x.dtype):
            seen = "nothing" if stored is None else f"{stored.dtype}{list(stored.shape)}"
            raise CheckpointError(
                f"the checkpoint's replay has {seen} as index.{name}; this one keeps {x.dtype}{list(x.shape)}: "
                "resume with the replay settings of the run"
            )


def copied(replay: Replay) -> Replay:
    """A replay of its own with the same rows, in memory; its arrays have views of one another, so it is made anew.

    Raises:
        ConfigError: the rows lie in shards or with other learners, or do not fit into memory a second time.
    """
    settings = replay.settings
    if settings.shards or replay.partition is not None:
        where = "in shards" if settings.shards else "of several learners"
        raise ConfigError(
            f"a replay {where} cannot be copied; with run.learner_threads='auto', which times a copy, give a number"
        )
    made = type(replay)(
        replay.spec,
        replace(settings, dir=None),
        copy.deepcopy(replay.view),
        info=replay.info,
        priority_fn=replay.priority_fn,
        state=replay.state,
        exact=replay.exact,
    )
    made.least, made.dataset, made.fingerprint = replay.least, replay.dataset, replay.fingerprint
    made.device_memory = replay.device_memory
    if replay.prepared is not None:
        made.prepare(*replay.prepared)
        made.load_state_dict(copy.deepcopy(replay.state_dict()), replay.arrays())
    return made
