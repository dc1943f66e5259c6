"""What a replay must hold and show, by plain loops over the batches that were appended; and random batches to append.

Every observation that an environment gives differs from all others (`v` counts them), so no row can pass for another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.replay.replay import Replay

STACK = 3
V = LeafSpec("box", (1,), "float64")
IMAGE = LeafSpec("box", (STACK, 2, 2), "uint8", 0.0, 255.0)
GOAL = LeafSpec("box", (2,), "float32")
ACTION = (LeafSpec("discrete", (), "int64", sizes=(9,), start=3), LeafSpec("box", (2,), "float32"))
SPEC = EnvSpec({"v": V, "image": IMAGE, "achieved_goal": GOAL, "desired_goal": GOAL}, ACTION)
INFO = {"q": np.zeros((), np.float32), "deep": {"x": np.zeros(2, np.float64)}}
STATE = {"h": np.zeros(2, np.float32), "c": np.zeros(1, np.float64)}


@dataclass
class Slot:
    """One environment: what it shows, and the chances of what may happen to it."""

    rng: np.random.Generator
    number: int
    zeros: bool
    shown: int = 0
    obs: dict[str, np.ndarray] = field(default_factory=dict)
    first: bool = False
    ended: bool = True
    lost: bool = False
    """A fault: the slot idles to the end of the batch."""
    action: Any = None
    reward: float = 0.0

    def show(self, opens: bool) -> None:
        """A new observation."""
        self.shown += 1
        frame = self.rng.integers(0, 256, IMAGE.shape[1:], np.uint8)
        if opens:
            self.goal = self.rng.integers(0, 9, 2).astype(np.float32)
            old = np.zeros_like(frame) if self.zeros else frame
            image = np.stack([old] * (STACK - 1) + [frame])
        else:
            image = np.concatenate([self.obs["image"][1:], frame[None]])
        v = self.number * 10_000 + self.shown + 1 / 3
        achieved = np.array([self.shown, self.number], np.float32)
        self.obs = {"v": np.array([v]), "image": image, "achieved_goal": achieved, "desired_goal": self.goal}
        self.first = opens

    def step(self, may_reset: bool, absent: bool) -> tuple[bool, bool, bool]:
        """(valid, terminated, truncated) of the next row; the slot then holds row t + 1."""
        self.action, self.reward = (np.int64(3), np.zeros(2, np.float32)), 0.0
        if self.lost or absent or (self.ended and not may_reset):
            self.first = False
            return False, False, False
        if self.ended:
            self.show(opens=True)
            self.ended = False
            return False, False, False
        if self.rng.random() < 0.03:
            self.lost = self.ended = True
            self.first = False
            return False, False, False
        self.action = np.int64(self.rng.integers(3, 12)), self.rng.normal(size=2).astype(np.float32)
        self.reward = float(np.float32(self.rng.normal()))
        self.show(opens=False)
        terminated, truncated = self.rng.random() < 0.08, self.rng.random() < 0.08
        self.ended = terminated or truncated
        return True, terminated, truncated


def random_batches(
    seed: int,
    T: int | tuple[int, ...],
    B: int,
    count: int,
    reset: str = "next_step",
    gaps: float = 0.0,
    zeros: bool = False,
    absences: bool = False,
) -> Iterator[tuple[SampleBatch, bool]]:
    """Batches that obey the record's rules, and whether each begins where the one before ended. Several T take turns."""
    lengths = itertools.cycle((T,) if isinstance(T, int) else T)
    rng = np.random.default_rng(seed)
    slots = [Slot(np.random.default_rng([seed, b]), b, zeros) for b in range(B)]
    null = np.int64(3), np.zeros(2, np.float32)
    for slot in slots:
        slot.show(opens=True)
        slot.ended, slot.action = False, null
    goes_on = True
    while count:
        steps = next(lengths)
        batch = allocate_batch(SPEC, BatchSpec(steps, B), INFO, STATE)
        for b, slot in enumerate(slots):
            _put(batch, 0, b, slot)
        for t in range(steps):
            for b, slot in enumerate(slots):
                absent = absences and (b == 0 and rng.random() < 0.2)
                valid, terminated, truncated = slot.step(reset == "next_step" or t == 0, absent)
                batch.valid[t, b], batch.terminated[t, b], batch.truncated[t, b] = valid, terminated, truncated
                _put(batch, t + 1, b, slot)
        for slot in slots:
            slot.lost = False
        for x in tree_leaves((batch.info, batch.state)):
            x[...] = rng.normal(size=x.shape)
        if rng.random() < gaps:
            goes_on = False
            continue
        yield batch, goes_on
        goes_on = True
        count -= 1


def _put(batch: SampleBatch, t: int, b: int, slot: Slot) -> None:
    tree_map(lambda x, y: x.__setitem__((t, b), y), batch.obs, dict(slot.obs))
    tree_map(lambda x, y: x.__setitem__((t, b), y), batch.prev_action, slot.action)
    batch.prev_reward[t, b], batch.first[t, b] = slot.reward, slot.first


class Oracle:
    """All rows that were ever appended, by slot and by the number that the storage gave them."""

    def __init__(self, replay: Replay, history: int = 0) -> None:
        self.replay, self.history = replay, history
        self.rows: dict[tuple[int, int], tuple[SampleBatch, int]] = {}
        """(slot, number) -> batch and row in it."""
        self.starts: dict[int, SampleBatch] = {}
        self.apart: set[int] = set()

    @property
    def written(self) -> int:
        """Rows that the storage has numbered so far."""
        return 0 if self.replay.storage is None else self.replay.storage.head

    def append(self, batch: SampleBatch, goes_on: bool, terminated: np.ndarray | None = None) -> None:
        """Appends to the replay, whose memory then is not the batch's, and to the oracle."""
        own, before = batch.copy(), self.written
        self.replay.append(batch, terminated)
        if terminated is not None:
            own.terminated[:] = terminated
        for x in tree_leaves((batch, terminated)):
            x[...] = 0
        self.note(own, before, goes_on)

    def note(self, own: SampleBatch, before: int, goes_on: bool) -> None:
        """Takes down a batch that was appended when `before` rows were written."""
        self.head = self.written
        T, B = own.valid.shape
        start = self.head - T
        assert goes_on == (start == before) or before == 0
        self.starts[start] = own
        if start != before:
            self.apart.add(start)
        for b in range(B):
            for i in range(T):
                self.rows[b, start + i] = own, i

    def valid(self, b: int, t: int) -> bool:
        """Row t of slot b was a step of the environment."""
        found = self.rows.get((b, t))
        return found is not None and bool(found[0].valid[found[1], b])

    def inputs(self, b: int, t: int) -> list[np.ndarray]:
        """Leaves of what the agent saw at a row."""
        batch, i = self.rows[b, t]
        return [x[i, b] for x in tree_leaves(batch.inputs)]

    def following(self, b: int, t: int) -> list[np.ndarray]:
        """Leaves of what it saw after a row."""
        batch, i = self.rows[b, t]
        return [x[i + 1, b] for x in tree_leaves(batch.inputs)]

    def column(self, name: str, b: int, t: int) -> Any:
        """`action`, `reward`, ... of a row, as its leaves."""
        batch, i = self.rows[b, t]
        return [x[i, b] for x in tree_leaves(getattr(batch, name))]

    def flag(self, name: str, b: int, t: int) -> bool:
        """`terminated` or `truncated`."""
        return bool(self.column(name, b, t)[0])

    def go_on(self, b: int, t: int) -> bool:
        """Row t + 1 is the valid successor of the valid row t."""
        over = self.flag("terminated", b, t) or self.flag("truncated", b, t)
        return not over and t + 1 < self.head and self.valid(b, t + 1)

    def last(self, b: int, t: int) -> int:
        """The last row that follows from a valid row t."""
        while self.go_on(b, t):
            t += 1
        return t

    @property
    def oldest(self) -> int:
        """The first row that the ring still holds with its frames."""
        storage = self.replay.storage
        assert storage is not None
        gone = self.head - (storage.rows - 1)
        return gone + self.history if gone > 0 else 0

    def transition(self, b: int, t: int, n: int, discount: float, clip: bool) -> tuple[float, float, list[np.ndarray]]:
        """Return, discount of the next value, and leaves of the next inputs."""
        total = 0.0
        for i in range(n):
            reward = float(self.column("reward", b, t + i)[0])
            total += discount**i * (np.sign(reward) if clip else reward)
            if self.flag("terminated", b, t + i):
                return total, 0.0, self.following(b, t + i)
            if i == n - 1 or not self.go_on(b, t + i):
                return total, discount ** (i + 1), self.following(b, t + i)
        raise AssertionError

    def transitions(self, span: int) -> set[tuple[int, int]]:
        """(slot, row) that may be drawn."""
        return {(b, t) for b, t in self.rows if self.oldest <= t <= self.head - span and self.valid(b, t)}

    def in_sequence(self, b: int, start: int, t: int) -> bool:
        """Row t is valid and reached from `start` without a gap in the record."""
        return self.valid(b, t) and not any(start < x <= t for x in self.apart)

    def sequences(self, every: int, burn_in: int, train: int, n: int, stateful: bool = True) -> set[tuple[int, int]]:
        """(slot, first row) that may be drawn."""
        span, slots = burn_in + train + n, {b for b, _ in self.rows}
        starts = [
            t for t in range(0, self.head - span + 1, every) if t >= self.oldest and (t in self.starts or not stateful)
        ]
        return {(b, t) for b in slots for t in starts
                if any(self.in_sequence(b, t, t + burn_in + i) for i in range(train))}  # fmt: skip


def assert_same(seen: Any, expected: list[Any]) -> None:
    """The leaves of `seen` are the stacked `expected` leaves of each sample, in float32 where they were float64."""
    leaves = tree_leaves(seen)
    assert len(leaves) == len(expected[0])
    for x, *rows in zip(leaves, *expected):
        y = np.stack(rows)
        y = y.astype(np.float32) if y.dtype == np.float64 else y
        assert x.dtype == y.dtype and np.array_equal(x, y)
