"""Small environments of many agents, by PettingZoo's API without its package: bases, teams, turns, and echoes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from penstock.envs.toy.base import box, one_hot, vector


class ParallelToy:
    """Agents that act at once: `begin` opens an episode, `observe` shows it to an agent, `act` advances it.

    Args:
        agents: how many there may be. seen: the observation space of each. moves: choices of an action.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "penstock_parallel_toy", "render_modes": []}
    render_mode: str | None = None

    def __init__(self, agents: int, seen: spaces.Space[Any], moves: int) -> None:
        self.possible_agents = [f"agent_{k}" for k in range(agents)]
        self.agents: list[str] = []
        self._seen, self._moves = seen, spaces.Discrete(moves)
        self.rng = np.random.default_rng()
        self.t = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Observation of an agent."""
        return self._seen

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """The moves of an agent."""
        return self._moves

    def begin(self) -> None:
        """Draws an episode's hidden values; called at each reset, with all agents there."""

    def observe(self, agent: str) -> Any:
        """The observation of an agent at step `t`, in new memory."""
        raise NotImplementedError

    def act(self, actions: dict[str, Any]) -> tuple[dict[str, float], dict[str, bool], dict[str, bool], list[str]]:
        """Rewards, terminations and truncations of a step, which `t` counts already, and who is there afterwards."""
        raise NotImplementedError

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """First observations, and empty infos."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.agents = 0, list(self.possible_agents)
        self.begin()
        return {agent: self.observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """One step by PettingZoo's Parallel API."""
        acted = self.agents
        self.t += 1
        rewards, terminations, truncations, now = self.act(actions)
        there = [*acted, *(agent for agent in now if agent not in acted)]
        obs = {agent: self.observe(agent) for agent in there}
        self.agents = now
        return obs, rewards, terminations, truncations, {agent: {} for agent in there}

    def render(self) -> None:
        """Nothing to see."""

    def close(self) -> None:
        """Nothing to end."""


class TurnToy:
    """Agents that act one after the other: `begin` opens an episode, `observe` shows it, `play` is one move.

    A move names rewards, ends, and who is next by `reward`, `end` and `select`. Agents that have ended take their dead
    step before anybody else moves.

    Args:
        agents: how many there may be. seen: the observation space of each. moves: choices of an action.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "penstock_turn_toy", "render_modes": [], "is_parallelizable": False}
    render_mode: str | None = None

    def __init__(self, agents: int, seen: spaces.Space[Any], moves: int) -> None:
        self.possible_agents = [f"agent_{k}" for k in range(agents)]
        self.agents: list[str] = []
        self._seen, self._moves = seen, spaces.Discrete(moves)
        self.rng = np.random.default_rng()
        self.agent_selection = self._next = ""
        self.rewards: dict[str, float] = {}
        self.terminations: dict[str, bool] = {}
        self.truncations: dict[str, bool] = {}
        self.infos: dict[str, dict[str, Any]] = {}
        self._cumulative_rewards: dict[str, float] = {}
        self.t = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Observation of an agent."""
        return self._seen

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """The moves of an agent."""
        return self._moves

    def begin(self) -> None:
        """Opens an episode: lets agents `enter` and `select`s who moves first."""
        raise NotImplementedError

    def observe(self, agent: str) -> Any:
        """The agent's present observation, in new memory."""
        raise NotImplementedError

    def play(self, agent: str, action: Any) -> None:
        """A move, which `t` counts already."""
        raise NotImplementedError

    def enter(self, agent: str) -> None:
        """An agent comes."""
        self.agents = [*self.agents, agent]
        self.rewards[agent], self._cumulative_rewards[agent] = 0.0, 0.0
        self.terminations[agent] = self.truncations[agent] = False
        self.infos[agent] = {}

    def select(self, agent: str) -> None:
        """Whose turn is next, once those that have ended are gone."""
        self._next = agent

    def end(self, agent: str, truncated: bool = False) -> None:
        """An agent's episode is over."""
        (self.truncations if truncated else self.terminations)[agent] = True

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Opens an episode."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.agents = 0, []
        self.rewards, self._cumulative_rewards = {}, {}
        self.terminations, self.truncations, self.infos = {}, {}, {}
        self.begin()
        self._turn()

    def last(self, observe: bool = True) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Observation of the agent to act, its reward since it acted, and its end flags."""
        agent = self.agent_selection
        seen = self.observe(agent) if observe else None
        return (
            seen,
            self._cumulative_rewards[agent],
            self.terminations[agent],
            self.truncations[agent],
            self.infos[agent],
        )

    def step(self, action: Any) -> None:
        """A move of `agent_selection`; None takes an agent that has ended out of `agents`."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            if action is not None:
                raise ValueError("when an agent is dead, the only valid action is None")
            self.agents = [other for other in self.agents if other != agent]
            for found in (
                self.rewards, self._cumulative_rewards, self.terminations, self.truncations, self.infos
            ):  # fmt: skip
                del found[agent]
            self.rewards = dict.fromkeys(self.agents, 0.0)
        else:
            self._cumulative_rewards[agent] = 0.0
            self.rewards = dict.fromkeys(self.agents, 0.0)
            self.t += 1
            self.play(agent, action)
            for other, reward in self.rewards.items():
                self._cumulative_rewards[other] += reward
        self._turn()

    def render(self) -> None:
        """Nothing to see."""

    def close(self) -> None:
        """Nothing to end."""

    def _turn(self) -> None:
        ended = [agent for agent in self.agents if self.terminations[agent] or self.truncations[agent]]
        self.agent_selection = ended[0] if ended else self._next


class TeamBits(ParallelToy):
    """Two agents each see one half of a pair of bits; the team is paid 1 where both play what they see, else 0.

    Args:
        length: steps of an episode.
    """

    def __init__(self, length: int = 8) -> None:
        super().__init__(2, box(-1, 1), 2)
        self._length = length
        self._bits = [0, 0]

    def begin(self) -> None:
        self._bits = self.rng.integers(0, 2, 2).tolist()

    def observe(self, agent: str) -> Any:
        return vector(2.0 * self._bits[self.possible_agents.index(agent)] - 1.0)

    def act(self, actions: dict[str, Any]) -> tuple[dict[str, float], dict[str, bool], dict[str, bool], list[str]]:
        paid = float([int(actions[agent]) for agent in self.agents] == self._bits)
        self._bits = self.rng.integers(0, 2, 2).tolist()
        over, agents = self.t >= self._length, list(self.agents)
        return (
            dict.fromkeys(agents, paid),
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, over),
            [] if over else agents,
        )


class LatePay(TurnToy):
    """Two agents in turn play the bit that they see; the 1 for a right move is paid with the other's next move.

    Args:
        length: moves of an episode.
    """

    def __init__(self, length: int = 8) -> None:
        super().__init__(2, box(-1, 1), 2)
        self._length = length
        self._bit, self._owed = 0, 0.0

    def begin(self) -> None:
        self._bit, self._owed = int(self.rng.integers(2)), 0.0
        for agent in self.possible_agents:
            self.enter(agent)
        self.select(self.agents[0])

    def observe(self, agent: str) -> Any:
        return vector(2.0 * self._bit - 1.0)

    def play(self, agent: str, action: Any) -> None:
        (other,) = (each for each in self.agents if each != agent)
        self.rewards[other] = self._owed
        self._owed = float(int(action) == self._bit)
        self._bit = int(self.rng.integers(2))
        self.select(other)
        if self.t >= self._length:
            self.rewards[agent] = self._owed
            for each in self.agents:
                self.end(each, truncated=True)


class Nim(TurnToy):
    """Two agents take 1 to 3 of `stones` in turn; the agent that takes the last one wins 1, the other loses 1.

    The agent to move can win against any play if the number is not a multiple of 4. The mask shows the legal moves.
    """

    def __init__(self, stones: int = 10) -> None:
        self._stones = stones
        seen = spaces.Dict({"observation": box(0, 1, stones + 1), "action_mask": spaces.MultiBinary(3)})
        super().__init__(2, seen, 3)
        self.left = stones

    def begin(self) -> None:
        self.left = int(self.rng.integers(2, self._stones + 1))
        for agent in self.possible_agents:
            self.enter(agent)
        self.select(self.agents[0])

    def observe(self, agent: str) -> Any:
        return {
            "observation": one_hot(self.left, self._stones + 1),
            "action_mask": np.array([self.left > n for n in range(3)], np.int8),
        }

    def play(self, agent: str, action: Any) -> None:
        self.left -= int(action) + 1
        (other,) = (each for each in self.agents if each != agent)
        self.select(other)
        if self.left == 0:
            self.rewards.update({agent: 1.0, other: -1.0})
            self.end(agent)
            self.end(other)


def echo_space() -> spaces.Box:
    """Observation of the echo environments: agent, episode, step, own steps, last own action, a random number."""
    return box(-(2.0**24), 2.0**24, 6)


class EchoAgents(ParallelToy):
    """Agents that come, go and end at random, and say in every observation where they are; for conformance.

    The observation is `echo_space`; rewards are small multiples of 1/8 plus a quarter of the action, so that sums are
    exact.

    Args:
        agents: how many there may be. length: steps after which the last ones end. steady: all are there from the
            first step to the last. masks: infos hold action masks.
    """

    def __init__(self, agents: int = 3, length: int = 9, steady: bool = False, masks: bool = False) -> None:
        super().__init__(agents, echo_space(), 3)
        self._length, self._steady, self._masks = length, steady, masks
        self._episode, self._noise = 0.0, 0.0
        self._age: dict[str, int] = {}
        self._played: dict[str, float] = {}
        self._waiting: list[str] = []

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        obs, _ = super().reset(seed, options)
        return obs, self._infos(obs)

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        *rest, infos = super().step(actions)
        return *rest, self._infos(infos)

    def begin(self) -> None:
        self._episode = float(self.rng.integers(0, 1 << 24))
        self._played, self._age = {}, dict.fromkeys(self.possible_agents, 0)
        if not self._steady:
            there = self.rng.random(len(self.agents)) < 0.6
            there[int(self.rng.integers(len(there)))] = True
            self.agents = [agent for agent, is_there in zip(self.possible_agents, there) if is_there]
        self._waiting = [agent for agent in self.possible_agents if agent not in self.agents]
        self._noise = float(self.rng.integers(0, 1000))

    def observe(self, agent: str) -> Any:
        k = self.possible_agents.index(agent)
        return vector(k, self._episode, self.t, self._age[agent], self._played.get(agent, -1.0), self._noise)

    def act(self, actions: dict[str, Any]) -> tuple[dict[str, float], dict[str, bool], dict[str, bool], list[str]]:
        draw = self.rng.random
        rewards: dict[str, float] = {}
        terminations, truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self._noise = float(self.rng.integers(0, 1000))
        over = self.t >= self._length
        for agent in self.agents:
            self._age[agent] += 1
            self._played[agent] = float(actions[agent])
            rewards[agent] = int(draw() * 8) / 8 + 0.25 * float(actions[agent])
            if over or (not self._steady and draw() < 0.12):
                (terminations if draw() < 0.5 else truncations)[agent] = True
        now = [agent for agent in self.agents if not (terminations[agent] or truncations[agent])]
        if now and self._waiting and draw() < 0.3:
            now.append(self._waiting.pop(0))
        return rewards, terminations, truncations, now

    def _infos(self, agents: Any) -> dict[str, Any]:
        if not self._masks:
            return {agent: {"echo": self._noise} for agent in agents}
        return {agent: {"echo": self._noise, "action_mask": np.array([1, self.t % 2, 1], np.int8)} for agent in agents}


class EchoTurns(TurnToy):
    """The same for agents that take turns: random order, rewards off turn, ends off turn and before the first turn.

    Args:
        agents: how many there may be. length: moves after which all end. steady: turns go round, nobody ends early.
    """

    def __init__(self, agents: int = 3, length: int = 12, steady: bool = False) -> None:
        super().__init__(agents, echo_space(), 3)
        self._length, self._steady = length, steady
        self._episode, self._noise = 0.0, 0.0
        self._age: dict[str, int] = {}
        self._played: dict[str, float] = {}
        self._waiting: list[str] = []

    def begin(self) -> None:
        self._episode = float(self.rng.integers(0, 1 << 24))
        self._noise = float(self.rng.integers(0, 1000))
        self._played, self._age = {}, dict.fromkeys(self.possible_agents, 0)
        come: Sequence[bool] = [self._steady or self.rng.random() < 0.7 for _ in self.possible_agents]
        if not any(come):
            come = [True] * len(come)
        self._waiting = [agent for agent, there in zip(self.possible_agents, come) if not there]
        for agent, there in zip(self.possible_agents, come):
            if there:
                self.enter(agent)
        self.select(self.agents[0])

    def observe(self, agent: str) -> Any:
        k = self.possible_agents.index(agent)
        return vector(k, self._episode, self.t, self._age[agent], self._played.get(agent, -1.0), self._noise)

    def play(self, agent: str, action: Any) -> None:
        draw = self.rng.random
        self._noise = float(self.rng.integers(0, 1000))
        self._age[agent] += 1
        self._played[agent] = float(action)
        over = self.t >= self._length
        for other in self.agents:
            self.infos[other] = {"echo": self._noise}
            self.rewards[other] = int(draw() * 8) / 8 + 0.25 * float(action) * (other == agent)
            if over or (not self._steady and draw() < 0.08):
                self.end(other, draw() < 0.5)
        if not over and self._waiting and draw() < 0.2:
            self.enter(self._waiting.pop(0))
        going = [x for x in self.agents if not (self.terminations[x] or self.truncations[x])]
        if going:
            if self._steady:
                after = [x for x in going if self.possible_agents.index(x) > self.possible_agents.index(agent)]
                self.select((after or going)[0])
            else:
                self.select(going[int(self.rng.integers(len(going)))])
