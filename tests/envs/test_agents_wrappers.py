"""Environments of many agents as they are shown: agents that are numbers, and observations without some keys."""

from __future__ import annotations

import enum
import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import penstock as ps
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.tree import tree_leaves
from penstock.envs.toy import EchoAgents, EchoTurns
from penstock.envs.toy.agents import ParallelToy, TurnToy
from penstock.envs.wrappers import WeightedReward
from tests.envs.pools.plain_loop import seated


class Kind(enum.Enum):
    RED, BLUE = 1, 2


def renamed(cls: Any, names: list[Any]) -> Any:
    """The toy with other names: it keeps its own inside, and the caller never sees them."""

    class Renamed:
        metadata: Any = {}  # noqa: RUF012

        def __init__(self, **kwargs: Any) -> None:
            self.toy = cls(len(names), **kwargs)
            self.possible_agents = list(names)
            self.to = dict(zip(self.toy.possible_agents, names))
            self.fro = {name: own for own, name in self.to.items()}
            if cls is EchoTurns:
                self.last, self.step = self.toy.last, self.toy.step  # type: ignore[method-assign]

        def _dict(self, x: Any) -> Any:
            return {self.to[own]: value for own, value in x.items()}

        def observation_space(self, agent: Any) -> Any:
            return self.toy.observation_space(self.fro[agent])

        def action_space(self, agent: Any) -> Any:
            return self.toy.action_space(self.fro[agent])

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            found = self.toy.reset(seed=seed)
            return found and tuple(map(self._dict, found))

        def step(self, actions: Any) -> Any:  # type: ignore[no-redef]
            return tuple(map(self._dict, self.toy.step({self.fro[agent]: x for agent, x in actions.items()})))

        def observe(self, agent: Any) -> Any:
            return self.toy.observe(self.fro[agent])

        def close(self) -> None:
            """Nothing to end."""

        @property
        def agents(self) -> Any:
            return [self.to[own] for own in self.toy.agents]

        @property
        def agent_selection(self) -> Any:
            return self.to[self.toy.agent_selection]

        def __getattr__(self, name: str) -> Any:
            if name in ("rewards", "terminations", "truncations", "infos", "_cumulative_rewards"):
                return self._dict(getattr(self.toy, name))
            raise AttributeError(name)

    return Renamed


def rows(env: Any, mapping: Any = None, batches: int = 2) -> list[bytes]:
    """Bits of some batches of the environment under PPO, evaluated once."""
    algo = ps.Policies({"a": ps.PPO(), "b": ps.PPO()}, mapping) if mapping else ps.Policies({"a": ps.PPO()})
    sampler = ps.SerialSampler(T=8, B=2).build(algo.seat(env), seed=3)
    policies = algo.build(sampler.specs, seed=3)
    sampler.initialize(policies.agents)
    out: list[bytes] = []
    for itr in range(batches):
        batch, episodes = sampler.obtain_samples(itr)
        for part in batch.values():
            out += [np.nan_to_num(x).tobytes() for x in tree_leaves((part.obs, part.action, part.reward, part.valid))]
        out.append(episodes.return_.tobytes())
        ps.train_one_step(policies, batch)
    out.append(sampler.evaluate_agent(0, 4, max_steps=7).return_.tobytes())
    sampler.shutdown()
    return out


@pytest.mark.parametrize("names", [[0, 1, 2], [np.int64(7), (0, 1), Kind.RED]], ids=str)
@pytest.mark.parametrize("cls", [EchoAgents, EchoTurns])
def test_agents_that_are_no_text_go_by_their_str(cls: Any, names: list[Any]) -> None:
    env = renamed(cls, names)
    report = ps.check_env(env)
    assert report.agents is not None and report.reproducible
    assert list(report.agents.specs) == [str(name) for name in names]
    assert rows(env) == rows(cls)
    mapping = {str(name): "ab"[k % 2] for k, name in enumerate(names)}
    plain = {f"agent_{k}": "ab"[k % 2] for k in range(3)}
    assert rows(env, mapping) == rows(cls, plain)


def test_names_that_are_one_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"possible_agents is .*distinct names"):
        ps.check_env(renamed(EchoAgents, [1, "1", 2]))


class DictAgents(ParallelToy):
    """Agents that see a Dict, one of them with a text."""

    def __init__(self, agents: int = 2) -> None:
        super().__init__(agents, spaces.Box(-1, 99, (2,), np.float32), 2)

    def observation_space(self, agent: str) -> Any:
        parts: dict[str, Any] = {"view": self._seen, "clock": spaces.Box(0, 99, (1,), np.float32)}
        return spaces.Dict({**parts, **({"mission": spaces.Text(20)} if agent == "agent_0" else {})})

    def observe(self, agent: str) -> Any:
        seen: dict[str, Any] = {"view": np.full(2, self.t, np.float32), "clock": np.full(1, self.t, np.float32)}
        return {**seen, **({"mission": "go there"} if agent == "agent_0" else {})}

    def act(self, actions: Any) -> Any:
        over = self.t >= 5
        flags = dict.fromkeys(actions, over)
        return dict.fromkeys(actions, 1.0), flags, dict.fromkeys(actions, False), [] if over else list(actions)


SEEN: Any = DictAgents


class DictTurns(TurnToy):
    """The same in turns."""

    def __init__(self, agents: int = 2) -> None:
        super().__init__(agents, spaces.Box(-1, 99, (2,), np.float32), 2)

    observation_space, observe = SEEN.observation_space, SEEN.observe

    def begin(self) -> None:
        for agent in self.possible_agents:
            self.enter(agent)
        self.select("agent_0")

    def play(self, agent: str, action: Any) -> None:
        self.select("agent_1" if agent == "agent_0" else "agent_0")
        if self.t >= 6:
            for other in self.agents:
                self.end(other)


@pytest.mark.parametrize("cls", [DictAgents, DictTurns])
def test_keys_of_many_agents_are_dropped(cls: Any) -> None:
    config = ps.EnvConfig(cls, drop=("mission", "clock"))
    report = ps.check_env(config)
    assert report.agents is not None and report.reproducible
    assert [list(spec.obs) for spec in report.agents.specs.values()] == [["view"], ["view"]]
    assert len(rows(config)) > 8
    with pytest.raises(ConfigError, match=r"no agent's observation has 'mision'; did you mean 'mission'"):
        ps.check_env(ps.EnvConfig(cls, drop=("mision",)))
    with pytest.raises(ConfigError, match="leaves nothing of the observation of agent 'agent_1'"):
        ps.check_env(ps.EnvConfig(cls, drop=("view", "clock")))


def test_keys_of_observations_that_are_no_dicts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no agent.s observation has .x.; they are Box.*no Dicts"):
        ps.check_env(ps.EnvConfig(EchoAgents, drop=("x",)))


@pytest.mark.parametrize(
    ("method", "place"),
    [
        ("observation_space", r"its spaces of agent 'agent_0'"),
        ("action_space", r"its spaces of agent 'agent_0'"),
        ("reset", r"reset\(\) with seed 0"),
    ],
)
@pytest.mark.parametrize("cls", [EchoAgents, EchoTurns])
def test_an_error_before_the_first_step_names_the_method(cls: Any, method: str, place: str) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no licence")

    class Broken(cls):
        pass

    setattr(Broken, method, broken)
    with pytest.raises(EnvWorkerError, match=rf"Broken in {place}: RuntimeError: no licence"):
        seated(Broken)


class TwoObjectives:
    """Pays each agent for two objectives; as a Parallel environment, or taking turns."""

    def __init__(self, toy: Any) -> None:
        self.toy = toy

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.toy, name)
        if name in ("rewards", "_cumulative_rewards"):
            return {agent: np.array([reward, 10 * reward]) for agent, reward in found.items()}
        return found

    def step(self, actions: Any) -> Any:
        found = self.toy.step(actions)
        paid = found and {agent: np.array([reward, 10 * reward]) for agent, reward in found[1].items()}
        return found and (found[0], paid, *found[2:])


class TwoObjectivesTurns(TwoObjectives):
    def last(self, observe: bool = True) -> Any:
        obs, reward, *rest = self.toy.last(observe=observe)
        return obs, np.array([reward, 10 * reward]), *rest


@pytest.mark.parametrize(("cls", "many"), [(EchoAgents, TwoObjectives), (EchoTurns, TwoObjectivesTurns)])
def test_several_objectives_of_many_agents_are_added_up_by_the_wrapper_that_the_message_names(cls: Any, many: Any):
    with pytest.raises(EnvWorkerError, match=r"penstock\.envs\.wrappers:WeightedReward"):
        rows(lambda: many(cls(2)))
    once = functools.partial(WeightedReward, weights=(1, 0))
    assert rows(ps.EnvConfig(lambda: many(cls(2)), wrappers=(once,))) == rows(lambda: cls(2))
    summed = ps.EnvConfig(lambda: many(cls(2)), wrappers=("penstock.envs.wrappers:WeightedReward",))
    assert rows(summed) != rows(lambda: cls(2))
    short = functools.partial(WeightedReward, weights=(1, 0, 1))
    with pytest.raises(EnvWorkerError, match="with weights"):
        rows(ps.EnvConfig(lambda: many(cls(2)), wrappers=(short,)))
