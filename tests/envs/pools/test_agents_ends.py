"""The end of an agent's episode: what it reports without a turn, rewards after it, and masks that nobody needs."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import penstock as ps
from penstock.core.errors import EnvContractError, EnvWorkerError
from penstock.envs.pools.settings import PoolSettings
from penstock.envs.pools.simultaneous import SimultaneousPool
from penstock.envs.toy.agents import ParallelToy, TurnToy
from penstock.envs.toy.base import box, vector

ONE = ps.Policies({"x": ps.PPO(minibatch=16, epochs=1)})


def played(env: Any, batches: int, T: int = 16, B: int = 2, **config: Any) -> tuple[Any, list[Any], dict[str, float]]:
    """Batches and episodes of the environment under PPO, trained on each; and the sampler's metrics."""
    sampler = ps.SerialSampler(T=T, B=B).build(ONE.seat(ps.EnvConfig(env, **config)), seed=0)
    policies = ONE.build(sampler.specs)
    sampler.initialize(policies.agents)
    found: list[Any] = []
    for itr in range(batches):
        batch, episodes = sampler.obtain_samples(itr)
        ps.train_one_step(policies, batch)
        found.append(episodes)
    metrics = sampler.metrics()
    own = sampler.evaluate_agent(0, 8)
    sampler.shutdown()
    return own, found, metrics


class Judge(TurnToy):
    """Two of three agents move; agent_0 wins at once or agent_1 answers, and the info of all says who was right."""

    def __init__(self) -> None:
        super().__init__(3, box(-1, 99), 2)

    def begin(self) -> None:
        for agent in self.possible_agents:
            self.enter(agent)
        self.select("agent_0")

    def observe(self, agent: str) -> Any:
        return vector(self.t)

    def play(self, agent: str, action: Any) -> None:
        if self.t == 2 or self.rng.random() < 0.5:
            for other in self.agents:
                self.rewards[other] = 1.0 if other == agent else -1.0
                self.infos[other] = {"is_success": other == agent}
                self.end(other)
        else:
            self.select("agent_1")


def test_an_agent_that_ends_without_a_turn_reports_its_info() -> None:
    """Its return counts, so what it reports does too: else only wins would be reported by who moves last."""
    own, found, _ = played(Judge, 12)
    for episodes in (own, *(x for x in found if len(x))):
        success = episodes.parts.columns["is_success"]
        assert np.array_equal(success, episodes.parts.return_ > 0)
        assert episodes.reported()["success_rate"] == pytest.approx(1 / 3)


class Slow(TurnToy):
    """Two of three agents move, without end; infos hold a number that grows."""

    def __init__(self) -> None:
        super().__init__(3, box(-1, 999), 2)

    begin, observe = Judge.begin, Judge.observe

    def play(self, agent: str, action: Any) -> None:
        for other in self.agents:
            self.infos[other] = {"score": float(self.t)}
        self.select(self.agents[self.t % 2])


def test_an_episode_that_an_evaluation_cuts_reports_the_info_of_everybody() -> None:
    sampler = ps.SerialSampler(T=4, B=1).build(ONE.seat(ps.EnvConfig(Slow, info_keys=("score",))), seed=0)
    sampler.initialize(ONE.build(sampler.specs).agents)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        episodes = sampler.evaluate_agent(0, 2, max_steps=5)
    assert episodes.parts is not None and episodes.parts.columns["score"].tolist() == [[5.0, 5.0, 5.0]] * 2
    sampler.shutdown()


class ShortLife(ParallelToy):
    """agent_1 ends in the first step, with its score; a run's random first steps may hold that step."""

    def __init__(self) -> None:
        super().__init__(2, box(-1, 99), 2)

    def observe(self, agent: str) -> Any:
        return vector(self.t)

    def act(self, actions: Any) -> Any:
        ends = {agent: agent == "agent_1" or self.t == 12 for agent in actions}
        now = [agent for agent in actions if not ends[agent]]
        return dict.fromkeys(actions, 1.0), ends, dict.fromkeys(actions, False), now

    def step(self, actions: Any) -> Any:
        *found, infos = super().step(actions)
        return (*found, {agent: {"score": 7.0} for agent in infos})


def test_random_first_steps_report_what_their_agents_do() -> None:
    settings = ps.SerialSampler(T=16, B=4, max_decorrelation_steps=8)
    sampler = settings.build(ONE.seat(ps.EnvConfig(ShortLife, info_keys=("score",))), seed=0)
    sampler.initialize(ONE.build(sampler.specs).agents)
    _, episodes = sampler.obtain_samples(0)
    assert episodes.parts is not None and len(episodes) >= 4
    assert (episodes.parts.return_[:, 1] == 1.0).all() and (episodes.parts.columns["score"] == 7.0).all()
    sampler.shutdown()


class Archers(ParallelToy):
    """agent_0 is gone after step 2; in step 40 its arrow hits."""

    def __init__(self, whom: str = "agent_0") -> None:
        super().__init__(2, box(-1, 99), 2)
        self._whom = whom

    observe = ShortLife.observe

    def act(self, actions: Any) -> Any:
        rewards = {**dict.fromkeys(self.possible_agents, 0.0), **({self._whom: 7.0} if self.t == 40 else {})}
        ends = {agent: agent == "agent_0" and self.t == 2 for agent in actions}
        cuts = dict.fromkeys(actions, self.t == 50)
        return rewards, ends, cuts, [agent for agent in actions if not (ends[agent] or cuts[agent])]


class TurnArchers(TurnToy):
    """The same in turns, three agents of whom agent_2 is gone."""

    def __init__(self, whom: str = "agent_2") -> None:
        super().__init__(3, box(-1, 99), 2)
        self._whom = whom

    begin, observe = Judge.begin, Judge.observe

    def play(self, agent: str, action: Any) -> None:
        if self.t == 3:
            self.end("agent_2")
        going = [x for x in self.agents if not self.terminations[x]]
        self.select(going[self.t % len(going)])
        if self.t >= 50:
            for other in going:
                self.end(other, truncated=True)

    def step(self, action: Any) -> None:
        super().step(action)
        if self.t == 40 and self._whom not in self.agents:
            self.rewards[self._whom] = 7.0


@pytest.mark.parametrize("env", [Archers, TurnArchers])
def test_a_reward_after_an_agents_end_is_counted_and_warned_of_once(env: Any) -> None:
    assert ps.check_env(env).reproducible
    with pytest.warns(UserWarning, match="reaches nobody") as caught:
        _, found, metrics = played(env, 30)
    assert sum("reaches nobody" in str(x.message) and "evaluation" not in str(x.message) for x in caught) == 1
    whole = sum(len(episodes) for episodes in found)
    assert whole >= 4 and whole <= metrics["env/lost_rewards"] <= whole + 2
    assert not any(episodes.return_.any() for episodes in found)


@pytest.mark.parametrize("env", [Archers, TurnArchers])
def test_a_reward_after_an_agents_end_is_an_error_where_all_is_checked(env: Any) -> None:
    with pytest.raises(EnvContractError, match=r"slot [01] of .*agent 'agent_[02]': rewards it with 7\.0"):
        played(env, 30, checks="always")


def test_a_reward_for_somebody_unknown_is_an_error() -> None:
    with pytest.raises(EnvContractError, match=r"agent 'goblin': rewards it with 7\.0"):
        played(lambda: Archers("goblin"), 6)


def masked(cls: Any, kind: str) -> Any:
    """An environment whose infos hold masks, but `none` or `zero` ones of agents that are over."""

    def mask(over: bool) -> dict[str, Any]:
        full = {"action_mask": np.array([1, 0, 1], np.int8)}
        return full if not over else {} if kind == "none" else {"action_mask": np.zeros(3, np.int8)}

    class Masked(cls):
        def __init__(self) -> None:
            super().__init__()
            self._moves = spaces.Discrete(3)

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            found = super().reset(seed, options)
            if found is None:
                self.infos = {agent: mask(False) for agent in self.agents}
                return None
            return found[0], {agent: mask(False) for agent in found[0]}

        def step(self, action: Any) -> Any:
            found = super().step(action)
            if found is None:
                self.infos = {a: mask(self.terminations[a] or self.truncations[a]) for a in self.agents}
                return None
            obs, rewards, ends, cuts, _ = found
            return obs, rewards, ends, cuts, {agent: mask(ends[agent] or cuts[agent]) for agent in obs}

    return Masked


@pytest.mark.parametrize("kind", ["none", "zero"])
@pytest.mark.parametrize("cls", [Archers, TurnArchers, Judge])
@pytest.mark.filterwarnings("ignore:.*reaches nobody")
def test_who_is_over_needs_no_mask(cls: Any, kind: str) -> None:
    _, found, _ = played(masked(cls, kind), 20)
    assert sum(map(len, found)) > 3


@pytest.mark.parametrize("cls", [Archers, TurnArchers])
def test_who_is_there_needs_one(cls: Any) -> None:
    class Forgets(masked(cls, "none")):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            found = super().step(action)
            if self.t == 30:
                self.infos = {agent: {} for agent in self.agents}
                return found and (*found[:4], self.infos)
            return found

    with pytest.raises(EnvWorkerError, match=r"slot 0 of .* step 29, seed \d+, agent 'agent_\d': no info\['action_m"):
        played(Forgets, 6)


def test_settings_of_a_pool_count_lost_rewards_by_slot() -> None:
    """The episode table that workers share with their parent has a word for it."""
    config = ONE.seat(Archers)
    pool = SimultaneousPool(config, 0, slice(0, 2), PoolSettings())
    assert pool.metrics() == {}
    pool.host.episode_table[1, 4] = 3
    assert pool.metrics() == {"env/lost_rewards": 3.0}
    pool.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*reaches nobody")
@pytest.mark.parametrize("env", [Archers, TurnArchers])
def test_lost_rewards_are_counted_alike_wherever_environments_step(env: Any) -> None:
    found: list[float] = []
    for settings in (
        ps.SerialSampler(T=16, B=4),
        ps.CpuSampler(T=16, B=4, workers=2),
        ps.RunnerSampler(runners=2, inner=ps.SerialSampler(T=16, B=2), backend="in-process"),
        ps.RunnerSampler(runners=2, inner=ps.SerialSampler(T=16, B=2), backend="in-process", depth=1),
    ):
        live = settings.build(ONE.seat(env), seed=0)
        live.initialize(ONE.build(live.specs).agents)
        for itr in range(20):
            live.obtain_samples(itr)
        found.append(live.metrics()["env/lost_rewards"])
        live.shutdown()
    assert found[0] > 3 and len(set(found[:3])) == 1 and found[3] >= found[0]
