"""The suites find what they are there to find: each sampler below breaks one promise."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import SampleBatch
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.pools.serial import SerialPool
from penstock.samplers import collector
from penstock.samplers.episodes import Episodes
from penstock.samplers.live import LiveSampler
from penstock.testing.samplers import Build, check_resume, check_sampler

T, B = 6, 3


class Broken(LiveSampler):
    """A sampler that breaks nothing yet."""

    def __init__(self, config: EnvConfig, seed: int) -> None:
        super().__init__(BatchSpec(T, B), SerialPool(config, seed, slice(0, B)), config, seed, 0.99, 1000)


class ForgetsItsMemory(Broken):
    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        own: Any = self._training
        own.states = [tree_map(lambda x: x * 0, state) for state in own.states]
        return super().obtain_samples(itr)


class KeepsMemoryOverResets(Broken):
    def initialize(self, agent: Any) -> Any:
        act = agent.act

        def blind(inputs: Any, state: Any, noise: Any) -> Any:
            action, info, _ = act(inputs, state, noise)
            returns = state["return"] + inputs.prev_reward
            held = {"age": state["age"], "return": returns}
            return action, info | {"held": held}, {"age": state["age"] + 1, "return": returns}

        agent.act = blind
        return super().initialize(agent)


class CountsItsCalls(Broken):
    calls = -1

    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        self.calls += 1
        batch, episodes = super().obtain_samples(self.calls)
        batch.version[...] = itr
        return batch, episodes


class LagsInVersion(Broken):
    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        batch, episodes = super().obtain_samples(itr)
        batch.version[...] = itr - 1
        return batch, episodes


class SharesNoise(Broken):
    def initialize(self, agent: Any) -> Any:
        act = agent.act
        agent.act = lambda inputs, state, noise: act(inputs, state, noise[:1].expand_as(noise))
        return super().initialize(agent)


class ShowsTheRowBefore(Broken):
    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        batch, episodes = super().obtain_samples(itr)
        shown = batch.info["shown"]["obs"]
        shown[1:] = shown[:-1].copy()
        return batch, episodes


class ActsOnInvalidRows(Broken):
    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        batch, episodes = super().obtain_samples(itr)
        batch.action[~batch.valid] = 1
        return batch, episodes


class LosesAnEpisode(Broken):
    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        batch, episodes = super().obtain_samples(itr)
        return batch, episodes.last(max(len(episodes) - 1, 0))


class LosesTheStartOfEpisodes(Broken):
    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        own: Any = self._tracker
        own._stats.return_[:] = 0.0
        return super().obtain_samples(itr)


class CountsInvalidSteps(Broken):
    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        batch, episodes = super().obtain_samples(itr)
        return batch, replace(episodes, length=episodes.length + 1)


class EvaluatesInItsTrainingEnvironments(Broken):
    def evaluate_agent(self, itr: int, episodes: int = 20, deterministic: bool = True) -> Episodes:
        self.pool.host.envs[0].reset(seed=0)  # pyright: ignore
        return super().evaluate_agent(itr, episodes, deterministic)


class EvaluatesWithItsTrainingMemory(Broken):
    def evaluate_agent(self, itr: int, episodes: int = 20, deterministic: bool = True) -> Episodes:
        own: Any = self._training
        own.states = [tree_map(lambda x: x * 0, state) for state in own.states]
        return super().evaluate_agent(itr, episodes, deterministic)


class EvaluatesTooMany(Broken):
    def evaluate_agent(self, itr: int, episodes: int = 20, deterministic: bool = True) -> Episodes:
        return super().evaluate_agent(itr, episodes + 1, deterministic)


class EvaluatesFirstComeFirstServed(Broken):
    def evaluate_agent(self, itr: int, episodes: int = 20, deterministic: bool = True) -> Episodes:
        return super().evaluate_agent(itr, 64, deterministic).at(slice(0, episodes))


class EvaluatesTheSameEpisodes(Broken):
    def evaluate_agent(self, itr: int, episodes: int = 20, deterministic: bool = True) -> Episodes:
        return super().evaluate_agent(0, episodes, deterministic)


class EvaluatesOtherEpisodesEachTime(Broken):
    calls = 0

    def evaluate_agent(self, itr: int, episodes: int = 20, deterministic: bool = True) -> Episodes:
        self.calls += 1
        return super().evaluate_agent(self.calls, episodes, deterministic)


class AlwaysDeterministic(Broken):
    def evaluate_agent(self, itr: int, episodes: int = 20, deterministic: bool = True) -> Episodes:
        return super().evaluate_agent(itr, episodes)


class IgnoresItsSeed(Broken):
    def __init__(self, config: EnvConfig, seed: int) -> None:
        super().__init__(config, 3)


class HasASecretSeed(Broken):
    def __init__(self, config: EnvConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._seed = int(np.random.default_rng().integers(1 << 30)) + 10


class GivesBatchedExamples(Broken):
    def initialize(self, agent: Any) -> Any:
        examples = super().initialize(agent)
        return examples | {"obs": examples["obs"][None]}


class LeavesPoison(Broken):
    """Leaves a leaf of the last batch in place."""

    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        before: Any = self.last_batch
        held = before.info["shown"]["reward"].copy()
        batch, episodes = super().obtain_samples(itr)
        batch.info["shown"]["reward"][2] = held[2]
        return batch, episodes


PROMISES: dict[type[LiveSampler], str] = {
    ForgetsItsMemory: "the state before row 0 is not that after row T",
    KeepsMemoryOverResets: "recurrent age [3 3 3]; expected [3 0 3]",
    CountsItsCalls: "the noise is not that of (seed, itr, slot)",
    LagsInVersion: "version is",
    SharesNoise: "the noise is not that of (seed, itr, slot)",
    ShowsTheRowBefore: "the agent was shown another obs",
    ActsOnInvalidRows: "the action that led to a reset is not null",
    LosesAnEpisode: "episodes; ",
    LosesTheStartOfEpisodes: "return_ is",
    CountsInvalidSteps: "(slot, length, terminated) =",
    EvaluatesInItsTrainingEnvironments: "evaluation disturbed training",
    EvaluatesWithItsTrainingMemory: "evaluation disturbed training",
    EvaluatesTooMany: "evaluation of 1 episodes: gave 2",
    EvaluatesFirstComeFirstServed: "expected equal shares",
    EvaluatesTheSameEpisodes: "every evaluation has the same episodes",
    EvaluatesOtherEpisodesEachTime: "the same itr gave other episodes",
    AlwaysDeterministic: "deterministic=False acted the same",
    IgnoresItsSeed: "another seed gave the same batch",
    HasASecretSeed: "the noise is not that of (seed, itr, slot)",
    GivesBatchedExamples: "examples['obs'] are",
    LeavesPoison: "the agent was shown another reward",
}


def test_the_unbroken_sampler_passes():
    check_sampler(Broken)
    check_resume(Broken)


@pytest.mark.parametrize("sampler", PROMISES, ids=lambda x: x.__name__)
def test_each_broken_promise_is_named(sampler: Build):
    with pytest.raises(AssertionError) as caught:
        check_sampler(sampler)
    assert PROMISES[sampler] in str(caught.value)  # pyright: ignore


def test_a_loop_that_nulls_actions_after_the_agent_saw_them_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collector.GroupViews, "null_ignored", lambda self, t: None)

    class NullsLate(Broken):
        def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
            batch, episodes = super().obtain_samples(itr)
            batch.action[~batch.valid] = 0
            return batch, episodes

    with pytest.raises(AssertionError, match="the agent was shown another action"):
        check_sampler(NullsLate)


def test_a_loop_that_lets_actions_of_invalid_rows_stand_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collector.GroupViews, "null_ignored", lambda self, t: None)
    with pytest.raises(AssertionError, match="the action that led to a reset is not null"):
        check_sampler(Broken)


class Resumes(Broken):
    """Loads all but one thing."""

    without = ""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        blank = super().state_dict()
        super().load_state_dict(state | ({self.without: blank[self.without]} if state["collected"] else {}))


@pytest.mark.parametrize(
    ("without", "text"),
    [("row", "were cut"), ("agent_states", "other bits"), ("stats", "other bits"), ("journal", "were cut")],
)
def test_a_resume_that_lacks_something_is_found(without: str, text: str):
    Resumes.without = without
    with pytest.raises(AssertionError, match=text):
        check_resume(Resumes)
