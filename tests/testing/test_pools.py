"""The suite finds what it is there to find: each pool below breaks one rule."""

import sys
from collections.abc import Callable, Iterator, Sequence
from subprocess import run
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import SampleBatch, allocate_batch, poison
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.pools.pool import Group
from penstock.envs.pools.serial import SerialPool
from penstock.envs.pools.settings import PoolSettings
from penstock.envs.toy import SeedEcho
from penstock.testing.pools import check_pool, echo_config

B = 3


class Broken(SerialPool):
    """A pool that breaks nothing yet; `_out` is the bound batch, `sent` the row of the last step."""

    sent = 0

    def __init__(self) -> None:
        super().__init__(echo_config(), 1, slice(0, B))

    @property
    def out(self) -> SampleBatch:
        assert self._out is not None
        return self._out

    def send(self, group: int, row: int) -> None:
        super().send(group, row)
        self.sent = row
        self.spoil(row)

    def spoil(self, t: int) -> None:
        """Called after row t was written."""

    def end(self, t: int) -> Any:
        return self.out.terminated[t] | self.out.truncated[t]


class Untouched(Broken):
    """Keeps every promise."""


class NoCarry(Broken):
    def bind(self, outs: Sequence[SampleBatch]) -> None:
        super().bind(outs)
        out = outs[0]
        if self.sent:
            out.prev_reward[0] = 0.0


class CarriesFromTheWrongRow(Broken):
    def bind(self, outs: Sequence[SampleBatch]) -> None:
        before = None if self._out is None else self._out.obs[-2].copy()
        super().bind(outs)
        if before is not None:
            outs[0].obs[0] = before


class CarriesAnotherSlot(Broken):
    def bind(self, outs: Sequence[SampleBatch]) -> None:
        super().bind(outs)
        out = outs[0]
        if self.sent:
            out.obs[0] = out.obs[0, ::-1]


class ForgetsFirst(Broken):
    def bind(self, outs: Sequence[SampleBatch]) -> None:
        super().bind(outs)
        outs[0].first[0] &= self.sent == 0


class NoOpening(Broken):
    def bind(self, outs: Sequence[SampleBatch]) -> None:
        super().bind(outs)
        outs[0].first[0] = False


class StartsWithAPreviousReward(Broken):
    def bind(self, outs: Sequence[SampleBatch]) -> None:
        super().bind(outs)
        outs[0].prev_reward[0] += self.sent == 0


class LosesTheLastObservation(Broken):
    """Same-step reset: the observation after an end is the next episode's first."""

    def spoil(self, t: int) -> None:
        for b in np.nonzero(self.end(t))[0]:
            self.out.obs[t + 1, b] = SeedEcho.obs_of(7, 0, False)


class SwapsSlots(Broken):
    def spoil(self, t: int) -> None:
        self.out.obs[t + 1] = self.out.obs[t + 1, ::-1]


class OneStepLate(Broken):
    def spoil(self, t: int) -> None:
        self.out.reward[t] = self.out.prev_reward[t]


class ClipsRewards(Broken):
    def spoil(self, t: int) -> None:
        self.out.reward[t].clip(-1, 1, out=self.out.reward[t])


class ResetIsValid(Broken):
    def spoil(self, t: int) -> None:
        self.out.valid[t] = True


class ResetHasReward(Broken):
    def spoil(self, t: int) -> None:
        self.out.reward[t][~self.out.valid[t]] = 1.0


class ResetEnds(Broken):
    def spoil(self, t: int) -> None:
        self.out.truncated[t] |= ~self.out.valid[t]


class ResetIsNotFirst(Broken):
    def spoil(self, t: int) -> None:
        self.out.first[t + 1] = False


class EndIsFirst(Broken):
    def spoil(self, t: int) -> None:
        self.out.first[t + 1] |= self.end(t)


class TruncationIsTermination(Broken):
    def spoil(self, t: int) -> None:
        self.out.terminated[t] |= self.out.truncated[t]


class TerminationHidesTruncation(Broken):
    def spoil(self, t: int) -> None:
        self.out.truncated[t] &= ~self.out.terminated[t]


class MissesTruncation(Broken):
    def spoil(self, t: int) -> None:
        self.out.truncated[t] = False


class DropsARow(Broken):
    def spoil(self, t: int) -> None:
        if t == 3:
            self.out.valid[t] = False


class RecordsResetInfo(Broken):
    def spoil(self, t: int) -> None:
        self.out.info["env"]["echo"][t][~self.out.valid[t]] = -1.0


class KeepsInfoOfTheBatchBefore(Broken):
    def bind(self, outs: Sequence[SampleBatch]) -> None:
        super().bind(outs)
        outs[0].info["env"]["echo"][...] = 0.0


class ReseedsByInstance(Broken):
    period = 1000

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        super().restart(seed, episodes)
        seeds: Any = [[100 * b + k % self.period for k in range(1000)] for b in range(B)]
        self.host._seeds = seeds  # pyright: ignore[reportPrivateUsage]


class RepeatsItsSeeds(ReseedsByInstance):
    period = 4


class SkipsAnEpisode(Broken):
    def send(self, group: int, row: int) -> None:
        for b, over in enumerate(self.host.over):
            self.host.episode[b] += over and self.host.episode[b] == 2
        super().send(group, row)


class WritesActions(Broken):
    def spoil(self, t: int) -> None:
        self.out.action[t] = 0


class WritesVersion(Broken):
    def bind(self, outs: Sequence[SampleBatch]) -> None:
        super().bind(outs)
        outs[0].version[...] = 0


class ActsOnTheRowBefore(Broken):
    def send(self, group: int, row: int) -> None:
        chosen = self.out.action[row].copy()
        self.out.action[row] = self.out.prev_action[row] if row else 0
        super().send(group, row)
        self.out.action[row] = chosen


class GivesEnvironmentsItsOwnMemory(Broken):
    def __init__(self) -> None:
        SerialPool.__init__(self, echo_config(nested=True), 1, slice(0, B))
        self.to_env = lambda row: [tree_map(lambda x, b=b: x[b].clip(-9, 9) if x.ndim == 1 else x[b], row)
                                     for b in range(B)]  # fmt: skip


class DoesNotClip(Broken):
    def __init__(self) -> None:
        SerialPool.__init__(self, echo_config(nested=True), 1, slice(0, B))
        self.to_env = lambda row: [tree_map(lambda x, b=b: x[b].copy(), row) for b in range(B)]


class AnswersLate(Broken):
    """Gives a row back before it is written."""

    late: Callable[[], None] | None = None

    def send(self, group: int, row: int) -> None:
        if self.late is not None:
            self.late()
        super().send(group, row)
        then = self.out.reward[row].copy()
        self.out.reward[row] = 0.25
        self.late = lambda: self.out.reward.__setitem__(row, then)
        if row == len(self.out.valid) - 1:
            self.late()


class ReadsAReleasedBuffer(Broken):
    held: SampleBatch | None = None

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        self.held = self._out
        super().bind(outs)

    def spoil(self, t: int) -> None:
        if self.held is not None and t == 0:
            self.out.reward[0] = self.held.reward[0] if self.held is not self.out else self.out.reward[0]


class LeavesPoison(Broken):
    def spoil(self, t: int) -> None:
        if t == 2:
            self.out.obs[t + 1, 1] = np.nan


class SkipsAGroup(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.groups = (Group(0, slice(0, 1)), Group(0, slice(2, 3)))


class Restarts(Broken):
    """Breaks off every episode after three steps."""

    def spoil(self, t: int) -> None:
        for b in range(B):
            self.host.over[b] |= SeedEcho.place_of(self.out.obs[t + 1, b])[1] == 3


def broken() -> Iterator[tuple[type[Broken], str]]:
    yield NoCarry, "row 0 of prev_reward is not row T of the batch before"
    yield CarriesFromTheWrongRow, "an observation that no environment gave: got nan at [0, 0, 0]"
    yield CarriesAnotherSlot, "row 0 of obs is not row T"
    yield ForgetsFirst, "row 0 of first is not row T"
    yield NoOpening, "the first batch does not begin with a reset"
    yield StartsWithAPreviousReward, "`first` with a previous reward"
    yield LosesTheLastObservation, "is followed by step 0 of seed 7"
    yield SwapsSlots, "is followed by"
    yield OneStepLate, "which answers this row's action"
    yield ClipsRewards, "which answers this row's action"
    yield ResetIsValid, "a valid row after an end"
    yield ResetHasReward, "not valid, but the reward is 1.0"
    yield ResetEnds, "not valid, but (terminated, truncated) = (False, True)"
    yield ResetIsNotFirst, "is no reset row"
    yield EndIsFirst, "`first` after a valid row"
    yield TruncationIsTermination, "(terminated, truncated) = (True, True); expected (False, True)"
    yield TerminationHidesTruncation, "(terminated, truncated) = (True, False); expected (True, True)"
    yield MissesTruncation, "expected (False, True)"
    yield DropsARow, "not valid, but the episode goes on"
    yield RecordsResetInfo, "info['env']['echo']: got -1.0, expected nan"
    yield KeepsInfoOfTheBatchBefore, "info['env']['echo']: got 0.0, expected nan"
    yield ReseedsByInstance, "of this slot's first episode"
    yield SkipsAnEpisode, "for episode 3"
    yield WritesActions, "actions: the pool wrote the loop's memory"
    yield WritesVersion, "the pool wrote the loop's memory"
    yield ActsOnTheRowBefore, "which answers this row's action"
    yield AnswersLate, "written after recv gave the group"
    yield ReadsAReleasedBuffer, "the reward is nan"
    yield LeavesPoison, "an observation that no environment gave"
    yield SkipsAGroup, "are not consecutive, or not all slots"


def test_the_unbroken_pool_passes():
    check_pool(Untouched, seed=1)
    check_pool(Untouched)


@pytest.mark.parametrize(("pool", "text"), [*broken()], ids=lambda x: x.__name__ if isinstance(x, type) else "")
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_each_broken_rule_is_named(pool: type[Broken], text: str):
    with pytest.raises(AssertionError) as caught:
        check_pool(pool, seed=1)
    assert text in str(caught.value)


def test_where_seeds_are_free_each_still_comes_once():
    check_pool(ReseedsByInstance)
    with pytest.raises(AssertionError, match="once more"):
        check_pool(RepeatsItsSeeds, batches=12)


@pytest.mark.parametrize("pool", [Restarts, DoesNotClip, GivesEnvironmentsItsOwnMemory])
def test_what_only_the_environment_sees_is_found(pool: type[Broken]):
    with pytest.raises(Exception, match=r"a valid row after an end|not valid, but|is not in|was overwritten"):
        check_pool(pool, seed=1)


def test_an_idle_slot_must_repeat_its_observation_and_wait_for_the_batch_to_end():
    class Idle(SerialPool):
        wander = early = False

        def __init__(self) -> None:
            super().__init__(echo_config(), 1, slice(0, B), PoolSettings(reset="batch_end"))

        def send(self, group: int, row: int) -> None:
            if self.early and row == 4:
                self.host.idle = [False] * B
            super().send(group, row)
            out = self._out
            assert out is not None
            idle = ~out.valid[row] & ~out.first[row + 1]
            if self.wander:
                out.obs[row + 1][idle] = SeedEcho.obs_of(9, 1, False)

    check_pool(Idle, seed=1, reset="batch_end")
    with pytest.raises(AssertionError, match="is no reset row"):
        check_pool(Idle, seed=1)
    Idle.wander = True
    with pytest.raises(AssertionError, match="an idle slot does not repeat its observation"):
        check_pool(Idle, seed=1, reset="batch_end")
    Idle.wander, Idle.early = False, True
    with pytest.raises(AssertionError, match="a reset inside a batch"):
        check_pool(Idle, seed=1, reset="batch_end")
    with pytest.raises(AssertionError, match="a reset inside a batch"):
        check_pool(Untouched, seed=1, reset="batch_end")


def test_warm_up_steps_are_found_where_none_are_allowed():
    def make() -> SerialPool:
        return SerialPool(echo_config(), 1, slice(0, B), PoolSettings(max_decorrelation_steps=3))

    check_pool(make, seed=1, decorrelated=True)
    with pytest.raises(AssertionError, match="the first batch does not begin with a reset"):
        check_pool(make, seed=1)


def test_poison_reaches_every_leaf():
    pool = SerialPool(echo_config(nested=True), 1, slice(0, B))
    batch = allocate_batch(pool.spec, BatchSpec(2, B), {"logp": np.float32(0)}, {"h": np.zeros(2)}, ("echo",))
    poison(batch)
    for x in tree_leaves(batch):
        assert x.size
        assert (np.isnan(x) if x.dtype.kind == "f" else x if x.dtype.kind == "b" else x < -40).all()


def test_the_suite_loads_no_torch():
    code = "import sys, penstock.testing.pools; assert 'torch' not in sys.modules"
    run([sys.executable, "-c", code], check=True, timeout=60)
