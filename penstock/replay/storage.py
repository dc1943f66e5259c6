"""The storage: the last rows of the record, in a ring of [rows, slots] arrays, in memory, in files or on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.batch import Inputs, SampleBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.memmap import copy_rows
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_paths, tree_structure, tree_unflatten
from penstock.replay.columns import (
    Array,
    Column,
    DeviceColumn,
    DeviceMemory,
    FrameColumn,
    Plan,
    RingColumn,
    Rows,
    Trajectories,
    on_host,
    ring_slices,
    stored_dtype,
)
from penstock.replay.endings import Endings, without_resets
from penstock.replay.room import planned_bytes, reserve

_LARGE_BYTES = 1 << 20


class Storage:
    """A ring over time of all slots. Row `head` holds the newest observation, and no action yet.

    Rows are numbered from the first that was ever written, so a row keeps its number while it is kept. Where it lies
    says `places`, once for all that is read there. As in the record, `prev_action` at row t + 1 is the action of row t,
    and so for rewards; nothing is stored twice. The arrays are made here, all of them; memory is taken as they are
    first written, the space of files at once.

    Args:
        rows: length of the ring, one more than it keeps. slots: B.
        frames: keep stacks of images frame by frame.
        info: examples of the leaves of `info` to keep, without leading dimensions, by their path in the tree.
        state: example of the recurrent state, kept where a batch begins at a multiple of `state_every` rows.
        folder: where to keep the arrays as files; None for memory.
        episodes: keep the arrays that `last` needs.
        index_only: keep no observations and states, as they lie elsewhere.
        exact: paths of the leaves of observations that stay float64.
        memory: where observations and actions lie, as tensors, in which they are read too; None for arrays of the host.

    Raises:
        ConfigError: it takes more bytes than there are, or no observation is a stack of frames.
    """

    def __init__(
        self,
        env: EnvSpec,
        rows: int,
        slots: int,
        *,
        frames: bool = False,
        info: Mapping[str, Any] | None = None,
        state: Tree = None,
        state_every: int = 1,
        folder: Path | None = None,
        episodes: bool = False,
        index_only: bool = False,
        exact: frozenset[str] = frozenset(),
        memory: DeviceMemory | None = None,
    ) -> None:
        self.rows, self.slots, self.state_every = rows, slots, state_every
        self.head = 0
        """Number of the row that is written next; its observation is known already."""
        self._structures = {name: tree_structure(tree) for name, tree in (("obs", env.obs), ("action", env.action))}

        self._memory = memory

        def column(name: str, shape: tuple[int, ...], dtype: Any) -> RingColumn:
            return RingColumn(name, rows, slots, tuple(shape), dtype)

        kind = RingColumn if memory is None else DeviceColumn
        self._obs: dict[str, Column] = {
            path: FrameColumn(f"obs{path}", rows, slots, leaf.shape, leaf.dtype)
            if frames and is_stack(leaf)
            else kind(f"obs{path}", rows, slots, leaf.shape, leaf.dtype, path in exact)
            for path, leaf in zip(tree_paths(env.obs), tree_leaves(env.obs))
            if not index_only
        }
        self.history = frame_history(env, frames)
        """Rows before a row that reading its observation may need."""
        self._action: list[Column] = [
            kind(f"prev_action{path}", rows, slots, leaf.shape, leaf.dtype)
            for path, leaf in zip(tree_paths(env.action), tree_leaves(env.action))
        ]
        self._reward = column("prev_reward", (), np.float32)
        self._first, self._terminated, self._truncated, self._valid = (
            column(name, (), np.bool_) for name in ("first", "terminated", "truncated", "valid")
        )
        self._inputs: list[Column] = [*self._obs.values(), *self._action, self._reward, self._first]
        self._info = {path: column(f"info{path}", np.shape(x), np.asarray(x).dtype) for path, x in (info or {}).items()}
        self._trajectories = Trajectories(rows, slots) if episodes else None
        self._state_structure, self._has_states = tree_structure(state), bool(tree_leaves(state))
        units = rows // state_every
        states: Plan = {
            f"state{path}": ((units, slots, *np.shape(x)), stored_dtype(np.asarray(x).dtype))
            for path, x in zip(tree_paths(state), tree_leaves(state))
            if not index_only
        }
        parts: list[Any] = [
            *self._inputs,
            self._terminated,
            self._truncated,
            self._valid,
            *self._info.values(),
            *([self._trajectories] if self._trajectories else []),
        ]
        plan = {name: array for part in parts for name, array in part.plan.items()} | states
        self.bytes = planned_bytes(plan)
        """Bytes of the arrays once every row is written."""
        self._plan = plan
        there = [name for x in (*self._obs.values(), *self._action) for name in x.plan] if memory is not None else []
        self.arrays: dict[str, Any] = reserve(plan, folder, rows * slots, (2 + state_every) * slots, memory, there)
        """Everything that is kept, by name: [rows, slots, ...], and states [rows // state_every, slots, ...]."""
        for part in parts:
            part.bind(self.arrays)
        self._states = [self.arrays[name] for name in states]
        self._state_rows = np.full(units, -1, np.int64)
        self._apart, self._gaps = np.zeros(rows, bool), False
        self._seen = {
            path: (leaf.shape, leaf.dtype if path in exact else stored_dtype(leaf.dtype))
            for path, leaf in zip(tree_paths(env.obs), tree_leaves(env.obs))
        }
        self.endings: Endings | None = None
        """Last observations of episodes, if environments reset in the step of an end; None without."""

    @property
    def tail(self) -> int:
        """Number of the oldest row that is kept."""
        return max(0, self.head - (self.rows - 1))

    @property
    def oldest(self) -> int:
        """Number of the oldest row with a readable observation."""
        return self.tail + self.history if self.tail else 0

    @property
    def zeros(self) -> list[bool | None]:
        """For each observation kept frame by frame: True if frames before an episode are zeros; None: not known yet."""
        return [column.zeros for column in self._obs.values() if isinstance(column, FrameColumn)]

    @zeros.setter
    def zeros(self, known: Sequence[bool | None]) -> None:
        for column, zeros in zip((c for c in self._obs.values() if isinstance(c, FrameColumn)), known):
            column.zeros = zeros

    def write(self, batch: SampleBatch, terminated: Array | None = None, gap: int | None = None) -> int:
        """Adds the T rows of a batch of numpy arrays; returns the number of rows that the head moved.

        That is more than T if the batch does not begin where the one before ended: rows that are not valid then keep
        them apart, as many as stacks of frames and the spacing of states need.

        Args:
            terminated: [T, B] ends that targets see; None for the environment's own.
            gap: number of those rows, where it was decided over more slots than these; None to decide it here.
        """
        self.require_room(batch)
        leaves = self._leaves(batch)
        if gap is None:
            gap = self.gap(batch, self._goes_on(leaves, batch.valid))
        ends = batch.terminated if terminated is None else terminated
        self._write_flags(gap, batch, ends)
        start = self.head + gap
        T = len(batch.valid)
        if batch.final is not None and self.endings is None:
            self.endings = Endings(self.rows, self.slots, self._seen, self._memory)
        if self.endings is not None:
            resets = batch.resets if batch.final is not None else np.zeros_like(batch.valid)
            self.endings.write(self.head, start, resets, batch.final, start + T - (self.rows - 1))
        if gap:
            self._skip(gap, leaves)
        for column, x in zip(self._inputs, leaves):
            column.write(start, x, batch.first, batch.valid)
        if self._info:
            known = dict(zip(tree_paths(batch.info), tree_leaves(batch.info)))
            for path, column in self._info.items():
                column.write(start, known[path])
        if self._has_states and start % self.state_every == 0:
            unit = start // self.state_every % len(self._state_rows)
            for array, x in zip(self._states, tree_leaves(batch.state)):
                array[unit] = x
            self._state_rows[unit] = start
        self.head = start + T
        return gap + T

    def require_room(self, batch: SampleBatch) -> None:
        """Raises ConfigError if batches of this shape do not fit."""
        T, B = batch.valid.shape
        longest = T + 1 + self.history + self.state_every
        if self.slots != B or longest >= self.rows:
            raise ConfigError(
                f"a batch of T={T}, B={B} for a replay of {self.slots} slots and {self.rows - 1} rows a slot; B must "
                f"stay the same, and T smaller than the rows: use replay.capacity >= {(longest + 1) * B}"
            )

    def goes_on(self, batch: SampleBatch) -> bool:
        """True if row 0 of a batch is the row that the head holds."""
        return self._goes_on(self._leaves(batch), batch.valid)

    def gap(self, batch: SampleBatch, goes_on: bool) -> int:
        """Rows to leave free before a batch."""
        if goes_on:
            return 0
        # The frames before an episode's first are known; before any other row they need rows of their own.
        gap = (self.head > 0) + (0 if batch.first[0].all() else self.history)
        return gap + -(self.head + gap) % self.state_every

    def places(self, t: Rows, b: Rows) -> Rows:
        """[*N] where rows t of slots b lie, as the methods below take it."""
        return t % self.rows * self.slots + b if self.slots > 1 else t % self.rows

    def inputs(self, at: Rows, fed: frozenset[str] = frozenset(("prev_action", "prev_reward", "first"))) -> Inputs:
        """[*N, ...] inputs of the agent; parts that are not in `fed` are None."""
        return Inputs(
            self.obs(at),
            self.prev_action(at) if "prev_action" in fed else None,
            self.prev_reward(at) if "prev_reward" in fed else None,
            self.first(at) if "first" in fed else None,
        )

    def successors(self, t: Rows, b: Rows, at: Rows, fed: frozenset[str]) -> Inputs:
        """[*N, ...] inputs after rows t of slots b, of which rows t + 1 lie at `at`."""
        inputs = self.inputs(at, fed)
        if self.endings is None:
            return inputs
        for path, x in zip(self._obs, tree_leaves(inputs.obs)):
            self.endings.put(path, x, t, b)
        return without_resets(inputs, self.endings.ended(t, b))

    def obs(self, at: Rows) -> Tree:
        """[*N, *O]."""
        at = self._sent(at)
        return tree_unflatten(self._structures["obs"], [x.read(at) for x in self._obs.values()])

    def seen_after(self, path: str, t: Rows, b: Rows) -> Array:
        """[*N, ...] of one leaf of the observation after rows t, by its path in the tree: "['achieved_goal']"."""
        found = self._obs[path].read(self.places(t + 1, b))
        return found if self.endings is None else self.endings.put(path, found, t, b)

    def prev_action(self, at: Rows) -> Tree:
        """[*N, *A] chosen at the rows before."""
        at = self._sent(at)
        return tree_unflatten(self._structures["action"], [x.read(at) for x in self._action])

    def prev_reward(self, at: Rows) -> Array:
        """[*N] float32 that came after the rows before."""
        return self._reward.read(at)

    def first(self, at: Rows) -> Array:
        """[*N] bool."""
        return self._first.read(at)

    def terminated(self, at: Rows) -> Array:
        """[*N] bool."""
        return self._terminated.read(at)

    def truncated(self, at: Rows) -> Array:
        """[*N] bool."""
        return self._truncated.read(at)

    def valid(self, at: Rows) -> Array:
        """[*N] bool."""
        return self._valid.read(at)

    def valid_rows(self, t: Rows) -> Array:
        """[n, B] bool of rows t [n] of all slots."""
        return self._valid.data.take(t % self.rows, 0)

    def info(self, path: str, t: Rows, b: Rows) -> Array:
        """[*N, ...] of a kept info leaf at rows t of slots b, by its path in the tree: "['q']"."""
        return self._info[path].read(self.places(t, b))

    def has_state(self, t: Rows) -> Array:
        """[*N] bool: True where a sequence can begin, as the recurrent state before rows t is kept or there is none."""
        if not self._has_states:
            return np.ones(t.shape, bool)
        return self._state_rows[t // self.state_every % len(self._state_rows)] == t

    def state(self, t: Rows, b: Rows) -> Tree:
        """[*N, ...] the recurrent state before rows t."""
        unit = t // self.state_every % len(self._state_rows)
        return tree_unflatten(self._state_structure, [x[unit, b] for x in self._states])

    def apart(self, t: Rows) -> Array:
        """[*N] bool: True where a batch began that continued none, so nothing before rows t leads there."""
        return self._apart[t % self.rows]

    def last(self, t: Rows, b: Rows) -> Rows:
        """[*N] the last row of the episodes of valid rows t, as far as they are kept: rows t to it are successors."""
        assert self._trajectories is not None
        return self._trajectories.last(t, b)

    def state_dict(self) -> dict[str, Any]:
        """All of the state but `arrays`."""
        return {
            "head": self.head,
            "state_rows": self._state_rows.copy(),
            "apart": self._apart.copy(),
            "zeros": self.zeros,
            **({} if self.endings is None else {"endings": self.endings.state_dict()}),
        }

    def written(self) -> Iterator[tuple[str, Array]]:
        """Each array's name and written part, which shares its memory; on a device reading a slice fetches it."""
        for name, x in self.arrays.items():
            yield name, on_host(x[: min(self.head + 1, len(x))], self._plan[name][1])
        if self.endings is not None:
            yield from self.endings.written(min(self.head + 1, self.rows))

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Inverse of `state_dict` and `written`. Raises CheckpointError if the shapes differ."""
        require_arrays(self._plan, state["head"], arrays)
        for name, x in self.arrays.items():
            sent = (lambda rows: rows) if isinstance(x, np.ndarray) else self._sent
            copy_rows(x[: len(arrays[name])], arrays[name], sent)
        self.load_state(state)
        self.endings = Endings(self.rows, self.slots, self._seen, self._memory) if "endings" in state else None
        if self.endings is not None:
            self.endings.load(state["endings"], arrays)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the arrays are written already."""
        self.head = int(state["head"])
        self._state_rows[:], self._apart[:] = state["state_rows"], state["apart"]
        self._gaps = bool(self._apart.any())
        self.zeros = state["zeros"]

    def _goes_on(self, leaves: list[Array], valid: Array) -> bool:
        head = self.head
        return head > 0 and all(column.goes_on(head, x[0], valid[0]) for column, x in zip(self._inputs, leaves))

    def _leaves(self, batch: SampleBatch) -> list[Array]:
        """Values to write into `_inputs`, in their order."""
        obs = tree_leaves(batch.obs) if self._obs else []
        return [*map(self._sent, (*obs, *tree_leaves(batch.prev_action))), batch.prev_reward, batch.first]

    def _sent(self, x: Any) -> Any:
        """An array as a tensor where observations and actions lie, unless they lie on the host."""
        return x if self._memory is None else self._memory.send(x)

    def _write_flags(self, gap: int, batch: SampleBatch, ends: Array) -> None:
        flags = [ends, batch.truncated, batch.valid]
        if gap:
            none = np.zeros((gap, self.slots), bool)
            flags = [np.concatenate([none, x]) for x in flags]
        kept = self._terminated, self._truncated, self._valid
        for column, x in zip(kept, flags):
            column.write(self.head, x)
        if self._trajectories is not None:
            before = self.places(np.full(self.slots, self.head - 1), np.arange(self.slots))
            ended, cut, valid = (column.read(before) for column in kept)
            going_on = valid & ~(ended | cut) if self.head else np.zeros(self.slots, bool)
            self._trajectories.write(self.head, flags[2], flags[0] | flags[1], going_on)
        if gap or self._gaps:
            for at, _ in ring_slices(self.head, len(flags[0]) + 1, self.rows):
                self._apart[at] = False
            self._apart[(self.head + gap) % self.rows] = gap > 0
            self._gaps = True

    def _skip(self, gap: int, leaves: list[Array]) -> None:
        """Fills the rows between with the batch's first, so that they hold legal values though none of them is used.

        Row `head` stays: it is the successor of the last row before.
        """
        start, between = self.head + gap, gap - (self.head > 0)
        for column, x in zip(self._inputs, leaves):
            if between:
                column.skip(start, between, x[0])
        for column in self._info.values():
            column.skip(start, gap, np.zeros(column.data.shape[1:], column.data.dtype))


def require_arrays(kept: Plan, head: int, arrays: Mapping[str, Array]) -> None:
    """Raises CheckpointError unless a checkpoint has the written part of every array that is kept.

    float32 may stand for observations that are float64 now: those of runs before they were kept so.
    """
    for name, (shape, dtype) in kept.items():
        stored = arrays.get(name)
        fits = stored is not None and (stored.dtype == dtype or (stored.dtype, dtype) == (np.float32, np.float64))
        if stored is None or not fits or stored.shape != (min(head + 1, shape[0]), *shape[1:]):
            seen = "nothing" if stored is None else f"{stored.dtype}{list(stored.shape)}"
            raise CheckpointError(
                f"the checkpoint's replay has {seen} as {name}; this one keeps {dtype}{list(shape)}: resume "
                "with the replay settings and sampler.B of the run"
            )


def is_stack(leaf: Any) -> bool:
    """True if the observation can be kept frame by frame: uint8 [S, H, W], or [S, ...] of colours, with S > 1."""
    colours = leaf.kind == "box" and leaf.dtype == "uint8" and len(leaf.shape) == 4
    return (leaf.is_image or colours) and leaf.shape[0] > 1


def frame_history(env: EnvSpec, frames: bool) -> int:
    """Number of earlier rows with frames of a row's observation, if stacks are kept frame by frame."""
    stacks = [leaf.shape[0] for leaf in tree_leaves(env.obs) if is_stack(leaf)] if frames else [1]
    if not stacks:
        raise ConfigError(
            "replay.deduplicate_frames=True, and no observation is a stack of uint8 images [C, H, W]; use False"
        )
    return max(stacks) - 1


def is_large(rows: int, obs: Tree) -> bool:
    """True if this many observations of a spec are large enough to read them in a thread."""
    return (
        rows * sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in tree_leaves(obs)) >= _LARGE_BYTES
    )
