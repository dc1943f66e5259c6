"""The storage: the last rows of the record, in a ring of [rows, slots] arrays, in memory or in files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from penstock.core.batch import Inputs, SampleBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.mapped import copy_rows
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_paths, tree_structure, tree_unflatten
from penstock.replay.columns import Array, FrameColumn, RingColumn, Rows


class Storage:
    """A ring over time of all slots. Row `head` holds the newest observation, and no action yet.

    Rows are numbered from the first that was ever written, so a row keeps its number while it is kept. As in the
    record, `prev_action[t + 1]` is the action of row t, and so for rewards; nothing is stored twice.

    Args:
        rows: length of the ring, one more than it keeps. slots: B.
        frames: keep stacks of images frame by frame.
        info: examples of the leaves of `info` to keep, without leading dimensions, by their path in the tree.
        state: example of the recurrent state, kept where a batch begins at a multiple of `state_every` rows.
        folder: where to keep the arrays as files; None for memory.

    Raises:
        ConfigError: it takes more bytes than there are.
    """

    def __init__(
        self, env: EnvSpec, rows: int, slots: int, *, frames: bool = False, info: Mapping[str, Any] | None = None, state: Tree = None,
        state_every: int = 1, folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.slots, self.state_every, self._folder = rows, slots, state_every, folder
        self.head = 0
        """Number of the row that is written next; its observation is known already."""
        self.arrays: dict[str, Array] = {}
        """Everything that is kept, by name: [rows, slots, ...], and states [rows // state_every, slots, ...]."""
        self._structures = {name: tree_structure(tree) for name, tree in (("obs", env.obs), ("action", env.action))}
        self._obs = [
            self._column(f"obs{path}", leaf.shape, leaf.dtype, frames and leaf.is_image and leaf.shape[0] > 1)
            for path, leaf in zip(tree_paths(env.obs), tree_leaves(env.obs))
        ]
        self._action = [
            self._column(f"prev_action{path}", leaf.shape, leaf.dtype)
            for path, leaf in zip(tree_paths(env.action), tree_leaves(env.action))
        ]
        self._reward = self._column("prev_reward", (), np.float32)
        self._first, self._terminated, self._truncated, self._valid = (
            self._column(name, (), np.bool_) for name in ("first", "terminated", "truncated", "valid")
        )
        self._info = {path: self._column(f"info{path}", np.shape(x), np.asarray(x).dtype) for path, x in (info or {}).items()}
        self._state_structure = tree_structure(state)
        units = rows // state_every
        self._states = [self._allocate(f"state{path}", (units, slots, *np.shape(x)), np.asarray(x).dtype)
                        for path, x in zip(tree_paths(state), tree_leaves(state))]  # fmt: skip
        self._state_rows = np.full(units, -1, np.int64)
        self.history = max((column.history for column in self._obs), default=0)
        """Rows before a row that reading its observation needs."""
        self._check_room()

    @property
    def bytes(self) -> int:
        """What the arrays take once every row is written."""
        return sum(x.nbytes for x in self.arrays.values())

    @property
    def tail(self) -> int:
        """Number of the oldest row that is kept."""
        return max(0, self.head - (self.rows - 1))

    def write(self, batch: SampleBatch, terminated: Array | None = None) -> int:
        """Adds the T rows of a batch of numpy arrays; gives the number of rows that the head moved.

        More than T if the batch does not begin where the one before ended: invalid rows then keep them apart, one, or
        as many as bring it to a row whose state is kept.

        Args:
            terminated: [T, B], where targets shall see other ends than the environment's; None for its own.
        """
        T, B = batch.valid.shape
        if B != self.slots or T + 2 > self.rows:
            raise ConfigError(f"a batch of T={T}, B={B} for a replay of {self.slots} slots and {self.rows - 1} rows a slot; B must "
                              f"stay the same, and T smaller than the rows: use replay.capacity >= {(T + 2) * B}")  # fmt: skip
        moved = T
        first = batch.first
        if self.head and not self._goes_on(batch):
            gap = self.state_every - self.head % self.state_every if self._states else 1
            for column in (self._terminated, self._truncated, self._valid):
                column.write(self.head, np.zeros((gap, B), bool))
            self.head += gap
            moved += gap
            first = batch.first.copy()
            first[0] = True
        start, follows = self.head, batch.valid
        for column, x in zip(self._obs, tree_leaves(batch.obs)):
            column.write(start, x, first, follows)
        for column, x in zip(self._action, tree_leaves(batch.prev_action)):
            column.write(start, x)
        self._reward.write(start, batch.prev_reward)
        self._first.write(start, first)
        self._terminated.write(start, batch.terminated if terminated is None else terminated)
        self._truncated.write(start, batch.truncated)
        self._valid.write(start, batch.valid)
        known = dict(zip(tree_paths(batch.info), tree_leaves(batch.info))) if self._info else {}
        for path, column in self._info.items():
            column.write(start, known[path])
        if self._states and start % self.state_every == 0:
            unit = start // self.state_every % len(self._state_rows)
            for array, x in zip(self._states, tree_leaves(batch.state)):
                array[unit] = x
            self._state_rows[unit] = start
        self.head += T
        return moved

    def inputs(self, t: Rows, b: Rows, fed: frozenset[str] = frozenset(("prev_action", "prev_reward", "first"))) -> Inputs:
        """[*N, ...] what the agent sees at rows t of slots b; parts that are not in `fed` are None."""
        return Inputs(
            self.obs(t, b),
            tree_unflatten(self._structures["action"], [x.read(t, b) for x in self._action]) if "prev_action" in fed else None,
            self._reward.read(t, b) if "prev_reward" in fed else None,
            self._first.read(t, b) if "first" in fed else None,
        )  # fmt: skip

    def obs(self, t: Rows, b: Rows) -> Tree:
        """[*N, *O]."""
        return tree_unflatten(self._structures["obs"], [x.read(t, b) for x in self._obs])

    def action(self, t: Rows, b: Rows) -> Tree:
        """[*N, *A] chosen at rows t."""
        return tree_unflatten(self._structures["action"], [x.read(t + 1, b) for x in self._action])

    def reward(self, t: Rows, b: Rows) -> Array:
        """[*N] float32 that came after rows t."""
        return self._reward.read(t + 1, b)

    def first(self, t: Rows, b: Rows) -> Array:
        """[*N] bool."""
        return self._first.read(t, b)

    def terminated(self, t: Rows, b: Rows) -> Array:
        """[*N] bool."""
        return self._terminated.read(t, b)

    def truncated(self, t: Rows, b: Rows) -> Array:
        """[*N] bool."""
        return self._truncated.read(t, b)

    def valid(self, t: Rows, b: Rows) -> Array:
        """[*N] bool."""
        return self._valid.read(t, b)

    def info(self, path: str, t: Rows, b: Rows) -> Array:
        """[*N, ...] of a kept info leaf, by its path in the tree: "['q']"."""
        return self._info[path].read(t, b)

    def has_state(self, t: Rows) -> Array:
        """[*N] bool: the recurrent state before rows t is kept."""
        return self._state_rows[t // self.state_every % len(self._state_rows)] == t

    def state(self, t: Rows, b: Rows) -> Tree:
        """[*N, ...] the recurrent state before rows t."""
        unit = t // self.state_every % len(self._state_rows)
        return tree_unflatten(self._state_structure, [x[unit, b] for x in self._states])

    def state_dict(self) -> dict[str, Any]:
        """What is not in `arrays`."""
        zeros = [column.zeros for column in self._obs if isinstance(column, FrameColumn)]
        return {"head": self.head, "state_rows": self._state_rows.copy(), "zeros": zeros}

    def written(self) -> Iterator[tuple[str, Array]]:
        """Name and the part of each array that holds something, a view."""
        for name, x in self.arrays.items():
            yield name, x[: min(self.head + 1, len(x))]

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """The inverse of `state_dict` and `written`. Raises CheckpointError if the shapes differ."""
        for name, x in self.arrays.items():
            kept = min(state["head"] + 1, len(x))
            stored = arrays.get(name)
            if stored is None or stored.dtype != x.dtype or stored.shape != (kept, *x.shape[1:]):
                seen = "nothing" if stored is None else f"{stored.dtype}{list(stored.shape)}"
                raise CheckpointError(f"the checkpoint's replay has {seen} as {name}; this one keeps {x.dtype}{list(x.shape)}: resume "
                                      "with the replay settings and sampler.B of the run")  # fmt: skip
        for name, x in self.arrays.items():
            copy_rows(x[: len(arrays[name])], arrays[name])
        self.head = int(state["head"])
        self._state_rows[:] = state["state_rows"]
        for column, zeros in zip((c for c in self._obs if isinstance(c, FrameColumn)), state["zeros"]):
            column.zeros = zeros

    def _goes_on(self, batch: SampleBatch) -> bool:
        """Row 0 of the batch is the row that the head holds."""
        t, b = np.full(self.slots, self.head), np.arange(self.slots)
        held = [*tree_leaves(self.obs(t, b)), self._first.read(t, b)] if self.head >= self.tail + self.history else []
        new = [*tree_leaves(batch.obs), batch.first]
        return all(np.array_equal(x, y[0].astype(x.dtype), equal_nan=x.dtype.kind == "f") for x, y in zip(held, new))

    def _column(self, name: str, shape: tuple[int, ...], dtype: Any, frames: bool = False) -> Any:
        kind = FrameColumn if frames else RingColumn
        return kind(name, self.rows, self.slots, tuple(shape), dtype, self._allocate)

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Zeroed memory that takes none until it is written; a file of its own if there is a folder."""
        try:
            if self._folder is None:
                x = np.zeros(shape, dtype)
            else:
                self._folder.mkdir(parents=True, exist_ok=True)
                x = np.memmap(self._folder / file_name(name), dtype, "w+", shape=shape)
        except (MemoryError, OSError) as error:
            raise ConfigError(f"replay of {self.rows} rows x {self.slots} slots: {name} {dtype}{list(shape)} does not fit: {error}; use a "
                              "smaller replay.capacity") from error  # fmt: skip
        self.arrays[name] = x
        return x

    def _check_room(self) -> None:
        if self._folder is None:
            free, what = psutil.virtual_memory().available, "memory"
        else:
            free, what = psutil.disk_usage(os.fspath(self._folder)).free, f"space in {self._folder}"
        if self.bytes > free:
            needed, per_row = self.bytes, self.bytes / (self.rows * self.slots)
            self.arrays.clear()
            raise ConfigError(
                f"replay of {self.rows * self.slots:,} rows x {per_row:,.0f} B needs {needed / 1e9:.2f} GB; free is {free / 1e9:.2f} GB of "
                f"{what}; use replay.capacity <= {int(free * 0.9 / per_row)}, replay.dir or replay.deduplicate_frames"
            )


def file_name(name: str) -> str:
    """A file's name for an array's name."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name) + ".bin"
