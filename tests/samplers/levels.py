"""Environments whose observations and lengths depend on the calls they have had, and samplers of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock.core.batch import MultiAgentBatch
from penstock.envs.toy import EchoAgents, EchoTurns
from penstock.testing.samplers import EchoAgent, bits
from tests.samplers import many
from tests.samplers.test_many_agents import THREE, echoes

B = 4
_LAST = np.array([0, 0, 0, 0, 0, 1], np.float32)


class Levels(gym.Env[Any, Any]):
    """The observation is level, level at the reset, gravity, number of spawned things, and a sum of all so far."""

    observation_space = spaces.Box(-1e6, 1e6, (5,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, slot: int = 0) -> None:
        self.slot, self.level, self.gravity, self.spawned = slot, 0, 9.81, list[str]()
        self._opened = self._t = self._length = self._sum = 0
        self.secret = object()

    def set_level(self, level: int, *, extra: int = 0) -> int:
        self.level = level + extra
        return self.slot

    def spawn(self, *things: str) -> list[str]:
        self.spawned += things
        self._sum += 1
        return self.spawned

    def fail(self, slot: int) -> str:
        self.level += 1
        if self.slot == slot:
            raise ValueError(f"no level for {slot}")
        return "well"

    def die(self, path: str) -> str:
        if self.slot == 1 and os.path.exists(path):
            os.unlink(path)
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._opened, self._t, self._sum = self.level, 0, 0
        self._length = int(self.np_random.integers(2, 20))
        return self._obs(), {}

    def step(self, action: int) -> Any:
        self._t += 1
        drawn = int(self.np_random.integers(10))
        self._sum = (31 * self._sum + 7 * self.level + int(action) + drawn + len(self.spawned)) % 9973
        return self._obs(), self.gravity * self.level, self._t >= self._length, False, {}

    def _obs(self) -> Any:
        return np.array([self.level, self._opened, self.gravity, len(self.spawned), self._sum], np.float32)


class Saved(Levels):
    """The same with a state of its own."""

    scale = 1.0

    def get_state(self) -> dict[str, Any]:
        own = {key: value for key, value in vars(self).items() if key[1:] in ("opened", "t", "length", "sum")}
        return {**own, "level": self.level, "rng": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.np_random.bit_generator.state = state.pop("rng")
        vars(self).update(state)


class Scaled(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper with an attribute of its own."""

    scale = 1.0

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, float(reward) * self.scale, *rest


class ParallelLevels(EchoAgents):
    """Observations show the level."""

    level = 0

    def set_level(self, level: int) -> int:
        self.level = level
        return level

    def observe(self, agent: str) -> Any:
        return EchoAgents.observe(self, agent) + np.float32(1000 * self.level) * _LAST


class TurnLevels(EchoTurns):
    """The same for agents that take turns."""

    level = 0

    def set_level(self, level: int) -> int:
        self.level = level
        return level

    def observe(self, agent: str) -> Any:
        return EchoTurns.observe(self, agent) + np.float32(1000 * self.level) * _LAST


def many_levels(kind: str) -> Any:
    """Settings of such an environment of many agents."""
    from dataclasses import replace

    config = echoes(kind, THREE)
    return replace(config, env=ParallelLevels if kind == "parallel" else TurnLevels)


Between = Callable[[Any, int], Any]
"""What is called between batches: (envs, number of the batch before, -1 before the first) -> values."""


def single(envs: Any, k: int) -> Any:
    """Calls in environments of one agent, each kind of them."""
    if k == -1:
        return envs.call("set_level", 2, extra=1), envs.set("gravity", 1.5)
    if k == 1:
        return envs.call("spawn", "a", "b", slots=[2, 0]), envs.set("scale", 0.5, slots=[1, 2])
    if k == 2:
        return envs.call("set_level", 5), envs.set("gravity", 3.7), envs.set("gravity", 1.62), envs.get("gravity")
    if k == 4:
        return envs.get("level"), envs.call("spawn", "c"), envs.call("set_level", 7, evaluation=True)
    return envs.get("spawned", slots=[0])


def levels(envs: Any, k: int) -> Any:
    """Calls in environments of many agents."""
    if k % 2:
        return envs.call("set_level", k + 2, slots=[0, 3]), envs.call("set_level", 2 * k + 2, slots=[1, 2])
    return envs.get("level"), envs.call("set_level", k, evaluation=True) and None


def live(settings: Any, config: Any, many_agents: bool = False, seed: int = 3) -> Any:
    sampler = settings.build(config, seed)
    sampler.initialize(many.agents_of(sampler) if many_agents else EchoAgent(sampler.spec))
    return sampler


def played(sampler: Any, between: Between, batches: Sequence[int], evaluate: Sequence[int] = ()) -> list[Any]:
    """Bits of batches and episodes, values of calls, and evaluations; before batch 0 there is a call too."""
    found: list[Any] = []
    if batches[0] == -1:
        found.append(between(sampler.envs, -1))
        batches = batches[1:]
    for k in batches:
        batch, episodes = sampler.obtain_samples(k)
        shown = many.bits(batch) if isinstance(batch, MultiAgentBatch) else bits(batch)
        found += [shown, repr(episodes.to_plain()), between(sampler.envs, k)]
        if k in evaluate:
            found.append(repr(sampler.evaluate_agent(k, 5).to_plain()))
    return found
