"""Shards: the rows of a replay split by slots over actors, in this process, in local processes or on Ray."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.actors.backend import RunnerError
from penstock.actors.make import make_backend
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.errors import ConfigError, LearnerError
from penstock.core.memmap import FetchedArray, chunks, releaser
from penstock.core.tree import tree_leaves, tree_structure, tree_unflatten
from penstock.processes.serialization import require_same_versions, ship
from penstock.replay.columns import Array, Plan, Rows
from penstock.replay.room import gigabytes
from penstock.replay.settings import ReplaySettings
from penstock.replay.shard import PACKAGES, ReplayShard
from penstock.replay.storage import require_arrays
from penstock.replay.view import View

if TYPE_CHECKING:
    from penstock.replay.store import StoragePlan

START_TIMEOUT_S = 300.0
"""Seconds within which a shard must come up; later ones have `shard_deadline_s`."""


class Shards:
    """A `Store` with its rows in `shards` actors, each for consecutive slots.

    The learner draws, by an index over all slots, and keeps an index of the rows: which are valid, and the data for
    priorities of fresh rows. The shard that holds a sample makes it. So samples and checkpoints equal those of a local
    replay bit for bit, for any number of shards.

    At most one call is in flight, from any thread. A lost shard is not replaced, as its rows are gone.

    Raises:
        ConfigError: more shards than slots, no room for the rows, something that cannot be sent, or other versions on
            a node.
        LearnerError: a shard did not come up.
    """

    def __init__(self, plan: StoragePlan, view: View, slots: int, settings: ReplaySettings) -> None:
        shards, self._deadline_s = settings.shards, settings.shard_deadline_s
        if shards > slots:
            raise ConfigError(
                f"replay.shards={shards} with {slots} slots, and a shard keeps those of one at least; use "
                f"replay.shards <= {slots}, or a sampler with more slots"
            )
        self.storage = plan._replace(folder=None, episodes=False).made(slots, index_only=True)
        self._form, self._view = _Form(plan, view), view
        self._bounds = [i * slots // shards for i in range(shards + 1)]
        self._zeros = plan._replace(info={}, folder=None, rows=self._form.rows).made(1).zeros
        self._writes: dict[int, Any] = {}
        self._backend = make_backend(settings.shard_backend, shards, num_cpus=0.0, words=("replay.shards", "CPUs"))
        self._finalizer = weakref.finalize(self, self._backend.close)
        self._where = [""] * shards
        self._lost = ""
        """The message about a shard that was lost, and all others with it."""
        try:
            self._actors = [self._start(i, plan._replace(info={}), view) for i in range(shards)]
            self._plan, size = self._described(slots, in_memory=plan.folder is None)
        except BaseException:
            self.close()
            raise
        self.bytes = self.storage.bytes + size

    def write(self, batch: SampleBatch, terminated: Array | None) -> int:
        """Like `Storage.write`: sends every shard its columns. The next call raises their errors."""
        self.storage.require_room(batch)
        self._settle()
        gap = self.storage.gap(batch, self._goes_on(batch))
        moved = self.storage.write(batch, terminated, gap)
        lean = replace(batch, info={})
        for i, at in enumerate(self._slots):
            ends = None if terminated is None else terminated[:, at]
            self._writes[i] = self._call(i, "write", lean[:, at], ends, gap)
        return moved

    def read(self, t: Rows, b: Rows, noise: Array) -> TrainBatch:
        """Like `View.read`; each shard makes the samples of its slots."""
        self._settle()
        places = {i: np.flatnonzero((b >= at.start) & (b < at.stop)) for i, at in enumerate(self._slots)}
        asked = {i: at for i, at in places.items() if len(at) or not len(b)}
        found = self._results(
            {
                i: self._call(i, "read", t[at], b[at] - self._bounds[i], noise[at], self._zeros)
                for i, at in asked.items()
            }
        )
        return self._form.joined(len(b), [(asked[i], leaves) for i, leaves in found.items()])

    def set_discount(self, discount: float) -> None:
        """Like `View.set_discount`, in every shard."""
        self._settle()
        self._results({i: self._call(i, "set_discount", discount) for i in range(len(self._actors))})
        self._view.set_discount(discount)

    def state_dict(self) -> dict[str, Any]:
        """Like `Storage.state_dict`, for all slots in one."""
        self._settle()
        return {**self.storage.state_dict(), "zeros": list(self._zeros)}

    def written(self) -> Iterator[tuple[str, Any]]:
        """Like `Storage.written`, for all slots in one: the index's arrays, and others as `FetchedArray`."""
        own = dict(self.storage.written())
        for name, (shape, dtype) in self._plan.items():
            rows = min(self.storage.head + 1, shape[0])
            fetch = partial(self.gathered, name)
            yield name, own[name] if name in own else FetchedArray(fetch, (rows, *shape[1:]), dtype)
        yield from ((name, x) for name, x in own.items() if name not in self._plan)

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Like `Storage.load`; sends every shard its columns."""
        self._settle()
        require_arrays(self._plan, state["head"], arrays)
        self.storage.load({**state, "zeros": []}, arrays)
        for name in self._plan:
            x = arrays[name]
            forget = releaser(x)
            for rows in chunks(x) if x.nbytes else ():
                self._results(
                    {i: self._call(i, "set_rows", name, rows.start, x[rows, at]) for i, at in enumerate(self._slots)}
                )
                forget()
        self._results({i: self._call(i, "load_state", dict(state)) for i in range(len(self._actors))})
        self._zeros = list(state["zeros"])

    def gathered(self, name: str, start: int, stop: int) -> Array:
        """[n, B, ...] rows of an array by their places in the ring, from all shards."""
        self._settle()
        calls = {i: self._call(i, "rows", name, start, stop) for i in range(len(self._actors))}
        return np.concatenate(list(self._results(calls).values()), 1)

    def close(self) -> None:
        """Ends the shards. A second call does nothing."""
        self._finalizer()

    def __deepcopy__(self, memo: Any) -> Shards:
        raise ConfigError(
            "a replay in shards cannot be copied; with run.learner_threads='auto', which times a copy, give a number"
        )

    @property
    def _slots(self) -> list[slice]:
        return [slice(low, high) for low, high in zip(self._bounds, self._bounds[1:])]

    def _goes_on(self, batch: SampleBatch) -> bool:
        """Like `Storage.goes_on`, for all slots."""
        if not self.storage.head:
            return False
        row = replace(batch[:1], info={}, state=None)
        calls = {i: self._call(i, "goes_on", row[:, at], self._zeros) for i, at in enumerate(self._slots)}
        return all(self._results(calls).values())

    def _settle(self) -> None:
        """Waits for the last write, and learns from it what frames come before episodes."""
        writes, self._writes = self._writes, {}
        for told in self._results(writes).values():
            for k, zeros in enumerate(told):
                if None not in (zeros, self._zeros[k]) and zeros != self._zeros[k]:
                    raise ConfigError(
                        "some stacks of frames begin with zeros, others with repeated frames, so they cannot be kept "
                        "frame by frame; use replay.deduplicate_frames=False"
                    )
                self._zeros[k] = self._zeros[k] if zeros is None else zeros

    def _start(self, i: int, plan: StoragePlan, view: View) -> Any:
        payload = ship(
            (plan, view, self._bounds[i + 1] - self._bounds[i]),
            "the replay's view cannot be sent to a shard",
            "give replay.reward_fn as 'module:function', or use replay.shards=0",
        )
        return self._backend.start(ReplayShard, (payload,), f"replay shard {i}")

    def _described(self, slots: int, in_memory: bool) -> tuple[Plan, int]:
        """Shapes and dtypes of all slots' arrays by name, and their bytes."""
        found = self._results({i: self._call(i, "describe") for i in range(len(self._actors))}, START_TIMEOUT_S)
        hosts: dict[str, list[Any]] = {}
        for i, made in found.items():
            require_same_versions(f"replay shard {i}", made["host"], made["versions"], PACKAGES)
            self._where[i] = f", {made['host']}, pid {made['pid']}"
            hosts.setdefault(made["host"], []).append(made)
        for host, made in hosts.items():
            needed, free = sum(x["bytes"] for x in made), min(x["free"] for x in made)
            if in_memory and needed > free:
                raise ConfigError(
                    f"{len(made)} replay shards on {host} need {gigabytes(needed)}; free is {gigabytes(free)} of "
                    "memory: use a smaller replay.capacity, more nodes, replay.dir or replay.deduplicate_frames"
                )
        arrays = found[0]["arrays"]
        plan = {name: ((shape[0], slots, *shape[2:]), np.dtype(dtype)) for name, (shape, dtype) in arrays.items()}
        return plan, sum(made["bytes"] for made in found.values())

    def _call(self, i: int, method: str, *args: Any) -> Any:
        if self._lost:
            raise LearnerError(self._lost)
        return self._backend.call(self._actors[i], method, *args)

    def _results(self, calls: Mapping[int, Any], timeout_s: float | None = None) -> dict[int, Any]:
        """The results of calls by shard, all within a deadline. Raises ConfigError or LearnerError, which names one."""
        until = time.monotonic() + (self._deadline_s if timeout_s is None else timeout_s)
        return {i: self._result(i, call, max(until - time.monotonic(), 0.0)) for i, call in calls.items()}

    def _result(self, i: int, call: Any, timeout_s: float) -> Any:
        try:
            return self._backend.result(call, timeout_s)
        except RunnerError as error:
            if self._lost:
                raise LearnerError(self._lost) from error
            place = f"replay shard {i} (slots {self._bounds[i]} to {self._bounds[i + 1] - 1}{self._where[i]})"
            here = self._backend.look(self._actors[i]).stacks if error.kind == "timeout" else ""
            trace = f"\n{error.trace}" if error.trace else f"\nIt was here:\n{here}" if here else ""
            if error.kind != "exception":
                slow = "; if it is only slow, use a longer replay.shard_deadline_s" if error.kind == "timeout" else ""
                self._lost = (
                    f"{place} is lost, and its rows with it: {error}{slow}; resume the run from its last checkpoint "
                    f"(penstock resume RUN){trace}"
                )
                self.close()  # the other shards are useless now, and the replay may stay referenced for long
                raise LearnerError(self._lost) from error
            if error.error_type == "ConfigError" or " raised ConfigError: " in str(error):
                raise ConfigError(f"{place}: {error}") from error
            raise LearnerError(f"{place}: {error}{trace}") from error


class _Form:
    """The tree of a view's samples, and the axis of each of its leaves along which samples lie.

    Both are seen in two and three samples of a storage that holds nothing yet.
    """

    def __init__(self, plan: StoragePlan, view: View) -> None:
        every = plan.state_every
        self.rows = every * (2 + (view.span + 1) // every)
        blank = plan._replace(rows=self.rows, info={}, folder=None).made(1)
        first = np.zeros(3, np.int64)
        two, three = (view.read(blank, first[:n], first[:n], np.zeros((n, view.noise))) for n in (2, 3))
        self._structure = tree_structure(two)
        shapes = [(np.shape(x), np.shape(y)) for x, y in zip(tree_leaves(two), tree_leaves(three))]
        self._axes = [next(k for k, (m, n) in enumerate(zip(*pair)) if m != n) for pair in shapes]

    def joined(self, n: int, parts: list[tuple[Rows, list[Array]]]) -> TrainBatch:
        """N samples in memory of their own, out of leaves by the samples' places."""
        leaves: list[Array] = []
        for k, axis in enumerate(self._axes):
            shape = list(parts[0][1][k].shape)
            shape[axis] = n
            whole = np.empty(shape, parts[0][1][k].dtype)
            for at, found in parts:
                whole[(slice(None),) * axis + (at,)] = found[k]
            leaves.append(whole)
        return tree_unflatten(self._structure, leaves)
