"""Conformance of records: every row of `SeedEcho` environments is computed anew and compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.noise import env_seed
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.pools.settings import Reset
from penstock.envs.toy.plumbing import SeedEcho


class Finished(NamedTuple):
    """An episode that `RecordCheck` saw end."""

    slot: int
    seed: int
    rewards: list[float]
    """Rewards of the steps that are in the record."""
    length: int
    """Steps since the reset, which are more if some were taken before the first batch."""
    terminated: bool


class RecordCheck:
    """Follows B slots of `SeedEcho` through batches; `add` raises AssertionError at the first wrong row.

    Args:
        seed, slot, reset, decorrelated: see `check_pool`.
        acted: the batches come from a sampler, which nulls the actions of rows that are not valid.
        faults: workers may die: from some row to the end of the batch a slot is then not valid and stands still, and it
            goes on with a later episode.
    """

    def __init__(
        self,
        B: int,
        *,
        seed: int | None,
        slot: int = 0,
        reset: Reset = "next_step",
        decorrelated: bool = False,
        acted: bool = False,
        faults: bool = False,
    ) -> None:
        self._seed, self._slot, self._batch_end = seed, slot, reset == "batch_end"
        self._decorrelated, self._acted, self._faults = decorrelated, acted, faults
        self.cuts = 0
        """Slots that a fault ended within a batch."""
        self._last: SampleBatch | None = None
        self._ended = [False] * B
        self._episode = [0] * B
        self._rewards: list[list[float]] = [[] for _ in range(B)]
        self._seen: set[int] = set()
        self._batches = 0
        self.env_steps = 0
        """Valid rows so far."""

    def add(self, batch: SampleBatch) -> list[Finished]:
        """Checks the next batch; returns the episodes that ended in it, by row, then by slot."""
        T, B = batch.spec
        seeds, steps = SeedEcho.place_of(batch.obs)
        nested = isinstance(batch.obs, dict)
        for x, y in zip(tree_leaves(batch.obs), tree_leaves(SeedEcho.obs_of(seeds, steps, nested))):
            same(x, y, f"batch {self._batches}", "an observation that no environment gave")
        if self._last is None:
            self._check_opening(batch, seeds, steps)
        else:
            for name in ("obs", "first", "prev_action", "prev_reward"):
                for x, y in zip(tree_leaves(getattr(batch, name)), tree_leaves(getattr(self._last, name))):
                    same(x[0], y[-1], f"batch {self._batches}", f"row 0 of {name} is not row T of the batch before")
        rewards = SeedEcho.reward_of(seeds[:-1], steps[:-1], batch.action).astype(np.float32)
        finished: list[Finished] = []
        for t in range(T):
            for b in range(B):
                place = f"batch {self._batches}, row {t}, slot {b}"
                if batch.valid[t, b]:
                    finished += self._check_step(batch, t, b, seeds, steps, rewards, place)
                else:
                    self._check_invalid(batch, t, b, seeds, steps, place)
        self._last = batch[T - 1 :].copy()
        self._batches += 1
        return finished

    def _check_opening(self, batch: SampleBatch, seeds: Any, steps: Any) -> None:
        for b, first in enumerate(batch.first[0]):
            place = f"batch 0, row 0, slot {b}"
            seed, step = int(seeds[0, b]), int(steps[0, b])
            if first:
                expect(step == 0, place, f"`first` at step {step} of an episode")
                expect(batch.prev_reward[0, b] == 0, place, "`first` with a previous reward")
                _check_null(batch, 0, b, place)
            else:
                expect(self._decorrelated, place, "the first batch does not begin with a reset")
                before = tree_map(lambda x, b=b: x[0, b], batch.prev_action)
                reward = np.float32(SeedEcho.reward_of(seed, step - 1, before))
                expect(batch.prev_reward[0, b] == reward, place, "the previous reward does not answer prev_action")
            self._ended[b] = step == SeedEcho.length_of(seed)
            if self._seed is not None:
                known = [
                    env_seed(self._seed, self._slot + b, e)
                    for e in range(100 if self._decorrelated or self._faults else 1)
                ]
                expect(seed in known, place, f"seed {seed}; expected {known[0]}, of this slot's first episode")
                self._episode[b] = known.index(seed)
            self._seen.add(seed)

    def _check_step(
        self, batch: SampleBatch, t: int, b: int, seeds: Any, steps: Any, rewards: Any, place: str
    ) -> list[Finished]:
        seed, step = int(seeds[t, b]), int(steps[t, b])
        expect(not self._ended[b], place, "a valid row after an end; expected a reset")
        expect(not batch.first[t + 1, b], place, "`first` after a valid row")
        expect(
            (seeds[t + 1, b], steps[t + 1, b]) == (seed, step + 1),
            place,
            f"step {step} of seed {seed} is followed by step {steps[t + 1, b]} of seed {seeds[t + 1, b]}",
        )
        expect(
            batch.reward[t, b] == rewards[t, b],
            place,
            f"reward {batch.reward[t, b]}; expected {rewards[t, b]}, which answers this row's action",
        )
        last = step + 1 == SeedEcho.length_of(seed)
        ends = tuple(bool(last and end) for end in SeedEcho.end_of(seed))
        got = bool(batch.terminated[t, b]), bool(batch.truncated[t, b])
        expect(got == ends, place, f"(terminated, truncated) = {got}; expected {ends}")
        self._check_columns(
            batch, t, b, {"echo": step if step % 2 == 0 else np.nan, "is_success": seed % 2 if last else np.nan}, place
        )
        self._ended[b] = bool(last)
        self._rewards[b].append(float(batch.reward[t, b]))
        self.env_steps += 1
        if not last:
            return []
        done = Finished(b, seed, self._rewards[b], step + 1, ends[0])
        self._rewards[b] = []
        return [done]

    def _check_invalid(self, batch: SampleBatch, t: int, b: int, seeds: Any, steps: Any, place: str) -> None:
        anew = t == 0 and bool(batch.first[1, b])  # its worker died before row 0
        if self._faults and (anew or self._is_cut(batch, t, b)):
            self.cuts += not self._ended[b]
            self._ended[b], self._rewards[b] = True, []
        expect(self._ended[b], place, "not valid, but the episode goes on")
        ends = bool(batch.terminated[t, b]), bool(batch.truncated[t, b])
        expect(ends == (False, False), place, f"not valid, but (terminated, truncated) = {ends}")
        expect(batch.reward[t, b] == 0, place, f"not valid, but the reward is {batch.reward[t, b]}")
        self._check_columns(batch, t, b, {"echo": np.nan, "is_success": np.nan}, place)
        if self._acted:
            _check_null(batch, t + 1, b, place)
        if (self._batch_end and t > 0) or (self._faults and not batch.first[t + 1, b]):
            expect(not batch.first[t + 1, b], place, "a reset inside a batch of reset='batch_end'")
            for x in tree_leaves(batch.obs):
                same(x[t + 1, b], x[t, b], place, "an idle slot does not repeat its observation")
            return
        seed, step = int(seeds[t + 1, b]), int(steps[t + 1, b])
        expect(bool(batch.first[t + 1, b]), place, "the row after an end is no reset row: `first` is not set after it")
        expect(step == 0, place, f"a reset to step {step}")
        self._episode[b] += 1
        if self._seed is None:
            expect(seed not in self._seen, place, f"a reset to seed {seed} once more")
        else:
            while self._faults and seed != env_seed(self._seed, self._slot + b, self._episode[b]):
                self._episode[b] += 1  # one that a dead worker had begun
                expect(self._episode[b] < 10_000, place, f"seed {seed} is none of this slot's next episodes")
            expected = env_seed(self._seed, self._slot + b, self._episode[b])
            expect(seed == expected, place, f"seed {seed}; expected {expected} for episode {self._episode[b]}")
        self._seen.add(seed)
        self._ended[b] = False

    @staticmethod
    def _is_cut(batch: SampleBatch, t: int, b: int) -> bool:
        still = all((x[t:, b] == x[t, b]).all() for x in tree_leaves(batch.obs))
        return still and not batch.valid[t:, b].any() and not batch.first[t + 1 :, b].any()

    @staticmethod
    def _check_columns(batch: SampleBatch, t: int, b: int, expected: dict[str, float], place: str) -> None:
        columns = batch.info.get("env", {})
        for key in columns.keys() & expected.keys():
            same(columns[key][t, b], np.float32(expected[key]), place, f"info['env'][{key!r}]")


def _check_null(batch: SampleBatch, t: int, b: int, place: str) -> None:
    """`prev_action[t]` must be null. The nulls of `SeedEcho`: 0, or the smallest choice."""
    nulls = {"arm": np.zeros(2, np.float32), "pick": (np.int64(5), np.array([1, -2])), "bits": np.zeros(2, np.int8)}
    null = nulls if isinstance(batch.prev_action, dict) else np.int64(0)
    for x, y in zip(tree_leaves(batch.prev_action), tree_leaves(null)):
        same(x[t, b], y, place, "the action that led to a reset is not null")


def same(got: Any, expected: Any, place: str, what: str) -> None:
    """Raises AssertionError at the first element that differs; NaN equals NaN."""
    got, expected = np.asarray(got), np.asarray(expected)
    if np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"):
        return
    at = tuple(np.argwhere((got != expected) & ((got == got) | (expected == expected)))[0].tolist())
    raise AssertionError(f"{place}: {what}: got {got[at]}{f' at {list(at)}' if at else ''}, expected {expected[at]}")


def expect(holds: bool, place: str, what: str) -> None:
    """Raises AssertionError unless it holds; unlike `assert`, under `python -O` as well."""
    if not holds:
        raise AssertionError(f"{place}: {what}")
