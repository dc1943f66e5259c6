"""Environments of others: what Conform cures each message names, and what it does not cure stays refused."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import penstock as ps
from penstock.core.errors import ConfigError, EnvContractError
from penstock.envs.builtin import is_builtin_wrapper
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig
from penstock.envs.toy.agents import EchoAgents, EchoTurns
from penstock.envs.toy.base import box, vector
from penstock.envs.wrappers import Conform

CONFORM = "penstock.envs.wrappers:Conform"
TWO = spaces.Box(-99, 99, (2,), np.float32)


class Theirs(gym.Env[Any, Any]):
    """Counts its steps; each part of what it returns goes through a function."""

    action_space = spaces.Discrete(2)

    def __init__(
        self, space: Any = TWO, obs: Any = np.float32, reward: Any = float, end: Any = bool, info: Any = dict
    ) -> None:
        self.observation_space, self.obs, self.reward, self.end, self.info = space, obs, reward, end, info

    def seen(self) -> Any:
        return self.obs(np.array([self.t, 0.5], np.float32))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), self.info()

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.seen(), self.reward(self.t), self.end(self.t == 5), self.end(False), self.info()


class OldStep(Theirs):
    def step(self, action: Any) -> Any:
        obs, reward, _, _, _ = super().step(action)
        return obs, reward, self.t == 5, {"TimeLimit.truncated": True} if self.t == 5 else {}


class BareReset(Theirs):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0]


class OneMemory(Theirs):
    """Shows one array that it writes over."""

    memory = np.zeros(2, np.float32)

    def seen(self) -> Any:
        self.memory[:] = self.t
        return self.memory


def first(x: Any) -> int:
    return int(x[0])


DICT = spaces.Dict(a=TWO, b=spaces.Discrete(9))
PAIR = spaces.Tuple((spaces.Discrete(9), spaces.MultiBinary(1)))
CASES = {
    "reward [1]": {"reward": lambda t: np.array([t], np.float32)},
    "reward in a list": {"reward": lambda t: [float(t)]},
    "reward tensor": {"reward": lambda t: torch.tensor(t)},
    "int flags": {"end": int},
    "0-d flags": {"end": np.array},
    "[1] flags": {"end": lambda x: np.array([x])},
    "no info": {"info": lambda: None},
    "another mapping": {"info": lambda: MappingProxyType({})},
    "float64": {"obs": np.float64},
    "a list": {"obs": lambda x: x.tolist()},
    "a tensor": {"obs": torch.from_numpy},
    "[1, 2] for [2]": {"obs": lambda x: x[None]},
    "whole floats for uint8": {"space": spaces.Box(0, 255, (1,), np.uint8), "obs": lambda x: x[:1].astype(np.float64)},
    "[1] for a choice": {"space": spaces.Discrete(9), "obs": lambda x: np.array([int(x[0])])},
    "a float for a choice": {"space": spaces.Discrete(9), "obs": lambda x: float(x[0])},
    "bools for bits": {"space": spaces.MultiBinary(1), "obs": lambda x: np.array([x[0] > 2])},
    "another mapping of float64": {
        "space": DICT,
        "obs": lambda x: MappingProxyType({"a": x.astype(float), "b": first(x)}),
    },
    "a list for a tuple": {"space": PAIR, "obs": lambda x: [first(x), np.ones(1, np.int8)]},
}


@pytest.mark.parametrize("name", CASES)
def test_what_conform_cures_names_it_and_is_cured(name: str) -> None:
    with pytest.raises(EnvContractError, match=CONFORM):
        check_env(EnvConfig(Theirs, CASES[name]))
    config = EnvConfig(Theirs, CASES[name], wrappers=(CONFORM,), checks="always")
    assert check_env(config).reproducible
    live = ps.SerialSampler(T=8, B=2).build(config, seed=0)
    live.initialize(ps.PPO().build(live.spec).agent)
    batch, episodes = live.obtain_samples(0)
    live.shutdown()
    assert batch.terminated[4].all() and not batch.truncated.any()
    assert batch.reward[:5, 0].tolist() == [1, 2, 3, 4, 5]
    assert episodes.return_.tolist() == [15, 15]
    obs: Any = batch.obs
    leaf = obs["a"] if isinstance(obs, dict) else obs[0] if isinstance(obs, tuple) else obs
    if name != "bools for bits":
        assert leaf[:6, 0].reshape(6, -1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("cls", [OldStep, BareReset, OneMemory])
def test_old_signatures_and_reused_memory(cls: Any) -> None:
    with pytest.raises(EnvContractError, match=CONFORM):
        check_env(cls)
    assert check_env(EnvConfig(cls, wrappers=(CONFORM,))).reproducible
    env = EnvConfig(cls, wrappers=(CONFORM,)).make()
    env.reset(seed=0)
    found = [env.step(0) for _ in range(5)]
    assert [x[2:4] for x in found[3:]] == [(False, False), (cls is not OldStep, cls is OldStep)]
    assert [x[0][0] for x in found] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "changed",
    [
        {"reward": lambda t: np.array([1.0, 2.0])},
        {"reward": lambda t: None},
        {"end": lambda x: 2},
        {"end": lambda x: None},
        {"obs": lambda x: x[:1]},
        {"obs": lambda x: "text"},
        {"obs": lambda x: [[1.0], [1.0, 2.0]]},
        {"space": spaces.Box(0, 255, (2,), np.uint8), "obs": lambda x: x},  # 0.5 is no whole number
        {"space": spaces.Box(0, 255, (2,), np.uint8), "obs": lambda x: [300, -1]},
        {"space": spaces.Discrete(9), "obs": lambda x: 0.5},
        {"space": PAIR, "obs": lambda x: [1]},
        {"info": lambda: 3},
    ],
)
def test_what_means_something_else_stays_refused_and_no_message_promises_a_cure(changed: dict[str, Any]) -> None:
    said: list[str] = []
    for wrappers in ((), (CONFORM,)):
        with pytest.raises(EnvContractError) as error:
            check_env(EnvConfig(Theirs, changed, wrappers=wrappers))
        said.append(str(error.value))
    assert said[0] == said[1] and CONFORM not in said[0]


def test_a_sound_environment_keeps_its_bits() -> None:
    batches: list[Any] = []
    for wrappers in ((), (Conform,)):
        live = ps.SerialSampler(T=64, B=3).build(EnvConfig("CartPole-v1", wrappers=wrappers), seed=0)
        live.initialize(ps.PPO().build(live.spec).agent)
        batches.append(live.obtain_samples(0)[0].copy())
        live.shutdown()
    for name in ("obs", "reward", "terminated", "truncated", "action"):
        assert getattr(batches[0], name).tobytes() == getattr(batches[1], name).tobytes()


def test_keys_that_are_numbers_are_text() -> None:
    odd: Any = OrderedDict({0: TWO, 1: spaces.Discrete(9)})
    case = {"space": spaces.Dict(odd), "obs": lambda x: {0: x, 1: first(x)}}
    with pytest.raises(ConfigError, match=CONFORM):
        check_env(EnvConfig(Theirs, case))
    assert check_env(EnvConfig(Theirs, case, wrappers=(CONFORM,))).spec.obs.keys() == {"0", "1"}


def test_text_that_is_shown_later_passes_through() -> None:
    case = {"space": spaces.Dict(a=TWO, m=spaces.Text(4)), "obs": lambda x: {"a": x.tolist(), "m": "go"}}
    assert check_env(EnvConfig(Theirs, case, wrappers=(CONFORM,), text=4)).spec.obs["m"].shape == (4,)


def test_a_batch_is_refused_and_a_stored_run_may_name_it() -> None:
    batch = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")])
    with pytest.raises(ConfigError, match="Conform around SyncVectorEnv, a batch of environments; wrap each"):
        Conform(batch)  # pyright: ignore[reportArgumentType]
    assert is_builtin_wrapper(CONFORM)


class TheirsAtOnce(EchoAgents):
    """Agents are numbers, flags too, rewards are arrays, observations lists; agent 1 ends first, and is paid later."""

    def __init__(self, late: float = 0.0, names: Any = int) -> None:
        super().__init__()
        self.late, self.names = late, names
        self.possible_agents = [names(i) for i in range(3)]

    def observation_space(self, agent: Any) -> Any:
        return box(-99, 99)

    def action_space(self, agent: Any) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        return {agent: [0.0] for agent in self.agents}, dict.fromkeys(self.agents)

    def step(self, actions: Any) -> Any:
        self.t, acted = self.t + 1, list(self.agents)
        assert list(actions) == acted
        ends = {agent: int(self.t == 6 or (agent == acted[1] and self.t == 2)) for agent in acted}
        self.agents = [agent for agent in acted if not ends[agent]]
        rewards = {agent: np.array([1.0]) for agent in acted}
        if self.t == 4 and self.late:
            rewards[self.possible_agents[1]] = np.array([self.late])
        obs = {agent: np.array([self.t]) for agent in acted}
        return obs, rewards, ends, dict.fromkeys(acted, 0), dict.fromkeys(acted)


class Late(TheirsAtOnce):
    """Sound but for its late rewards."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed)
        return dict.fromkeys(obs, vector(0)), {agent: {} for agent in infos}

    def step(self, actions: Any) -> Any:
        obs, rewards, *ends, infos = super().step(actions)
        bools = [{agent: bool(x) for agent, x in flags.items()} for flags in ends]
        paid = {agent: float(x[0]) for agent, x in rewards.items()}
        return {agent: vector(self.t) for agent in obs}, paid, *bools, {agent: {} for agent in infos}


class TheirTurns(EchoTurns):
    """The same, in turn, of two agents."""

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = [0, 1]  # pyright: ignore

    def observation_space(self, agent: Any) -> Any:
        return box(-99, 99)

    def action_space(self, agent: Any) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents, self.agent_selection = 0, [0, 1], 0  # pyright: ignore
        self.rewards = {agent: [0.0] for agent in self.agents}  # pyright: ignore
        self._cumulative_rewards = dict(self.rewards)  # pyright: ignore
        self.terminations: Any = dict.fromkeys(self.agents, 0)
        self.truncations: Any = dict.fromkeys(self.agents, 0)
        self.infos = dict.fromkeys(self.agents)  # pyright: ignore

    def observe(self, agent: Any) -> Any:
        return [float(self.t)]

    def last(self, observe: bool = True) -> Any:
        i: Any = self.agent_selection
        return self.observe(i), self._cumulative_rewards[i], self.terminations[i], self.truncations[i], self.infos[i]

    def step(self, action: Any) -> Any:
        agent: Any = self.agent_selection
        if self.terminations[agent]:
            assert action is None
            self.agents = [other for other in self.agents if other != agent]
        else:
            self.t += 1
            self._cumulative_rewards[agent] = [1.0]  # pyright: ignore
            if self.t == 6:
                self.terminations = dict.fromkeys(self.agents, 1)  # pyright: ignore
        others = [other for other in self.agents if other != agent]
        self.agent_selection = others[0] if others else agent


@pytest.mark.parametrize("cls", [TheirsAtOnce, TheirTurns])
def test_agents_of_others_are_conformed(cls: Any) -> None:
    with pytest.raises(EnvContractError, match=CONFORM):
        check_env(cls)
    config = EnvConfig(cls, wrappers=(CONFORM,))
    report = check_env(config)
    assert report.reproducible and report.agents is not None
    assert list(report.agents.specs) == [str(i) for i in range(len(cls().possible_agents))]
    algo = ps.Policies({"x": ps.PPO()})
    live = ps.SerialSampler(T=16, B=2).build(algo.seat(config), seed=0)
    live.initialize(algo.build(live.specs).agents)
    _, episodes = live.obtain_samples(0)
    live.shutdown()
    assert (
        len(episodes) >= 2 and (episodes.return_ == (6 + 2 + 6 if cls is TheirsAtOnce else episodes.return_[0])).all()
    )
    assert episodes.return_[0] > 0


@pytest.mark.parametrize("names", [str, int])
def test_late_rewards_are_left_out(names: Any) -> None:
    late = EnvConfig(Late, {"late": 7.0, "names": names}, checks="always")
    with pytest.raises(EnvContractError, match=rf"a reward after an agent's end.* reaches nobody.*{CONFORM}"):
        check_env(late)
    assert check_env(replace(late, wrappers=(CONFORM,))).reproducible


def test_pools_name_it_for_agents_too() -> None:
    class IntFlags(EchoAgents):
        def step(self, actions: Any) -> Any:
            obs, rewards, ends, cuts, infos = super().step(actions)
            return {agent: vector(0) for agent in obs}, rewards, {a: int(x) for a, x in ends.items()}, cuts, infos

    with pytest.raises(EnvContractError, match=CONFORM):
        check_env(IntFlags)
