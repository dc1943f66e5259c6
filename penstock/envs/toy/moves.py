"""Games of turns whose best play is known, by PettingZoo's AEC API, which needs no PettingZoo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from penstock.core.spec import MASK_KEY
from penstock.envs.toy.base import box, one_hot, vector


class Moves:
    """Two agents that move in turn; `t` counts the moves of an episode. Both end with the same move."""

    render_mode: str | None = None
    t = 0

    def __init__(self, name: str, shown: spaces.Space[Any], choices: int) -> None:
        self.metadata: dict[str, Any] = {"name": name, "is_parallelizable": False, "render_modes": []}
        self.possible_agents, self.agents = ["first", "second"], list[str]()
        self.observation_spaces = dict.fromkeys(self.possible_agents, shown)
        self.action_spaces = {agent: spaces.Discrete(choices) for agent in self.possible_agents}
        self.np_random = np.random.default_rng(0)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """What an agent sees."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """What an agent does."""
        return self.action_spaces[agent]

    def begin(self) -> None:
        """Draws the hidden values of an episode; called at each reset."""

    def observe(self, agent: str) -> Any:
        """What an agent sees at move `t`, in new memory."""
        raise NotImplementedError

    def act(self, i: int, action: int) -> tuple[tuple[float, float], bool]:
        """The rewards of both and the end, of a move of agent i that `t` does not count yet."""
        raise NotImplementedError

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Opens an episode; the first agent is to move."""
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        self.agents, self.t = self.possible_agents[:], 0
        self.agent_selection = self.agents[0]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.begin()

    def last(self, observe: bool = True) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Observation, reward since its last move, terminated, truncated and info of the agent that is to move."""
        agent = self.agent_selection
        shown = self.observe(agent) if observe else None
        reward = self._cumulative_rewards[agent]
        return shown, reward, self.terminations[agent], self.truncations[agent], self.infos[agent]

    def step(self, action: Any) -> None:
        """A move of `agent_selection`; None once it has ended."""
        agent = self.agent_selection
        if self.terminations[agent]:
            if action is not None:
                raise ValueError("when an agent is dead, the only valid action is None")
            self._leave(agent)
            return
        i = self.possible_agents.index(agent)
        self._cumulative_rewards[agent] = 0.0
        rewards, over = self.act(i, int(action))
        self.t += 1
        for name, reward in zip(self.possible_agents, rewards):
            self.rewards[name] = reward
            self._cumulative_rewards[name] += reward
            self.terminations[name] = over
        self.agent_selection = self.possible_agents[1 - i]

    def agent_iter(self, max_iter: int = 1 << 63) -> Any:
        """The agents in the order of their turns, until none is left."""
        for _ in range(max_iter):
            if not self.agents:
                return
            yield self.agent_selection

    @property
    def unwrapped(self) -> Moves:
        """Itself."""
        return self

    @property
    def num_agents(self) -> int:
        """Agents in the game."""
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        """Agents that there can be."""
        return len(self.possible_agents)

    def render(self) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Holds nothing."""

    def _leave(self, agent: str) -> None:
        for table in (self.terminations, self.truncations, self.rewards, self._cumulative_rewards, self.infos):
            del table[agent]
        self.agents.remove(agent)
        if self.agents:
            self.agent_selection = self.agents[0]


class PaidLater(Moves):
    """Each agent sees a bit and names it; the reward of 1 comes with the other's move. Best return of each: `turns`.

    Credit that is given by who moved, and not by whose reward it is, learns nothing here.
    """

    def __init__(self, turns: int = 4) -> None:
        super().__init__("paid_later", box(-1, 1), 2)
        self._turns = turns

    def begin(self) -> None:
        self._bits, self._owed = self.np_random.integers(0, 2, 2).tolist(), [0.0, 0.0]

    def observe(self, agent: str) -> Any:
        return vector(2.0 * self._bits[self.possible_agents.index(agent)] - 1.0)

    def act(self, i: int, action: int) -> tuple[tuple[float, float], bool]:
        paid = [0.0, 0.0]
        paid[1 - i], self._owed[1 - i] = self._owed[1 - i], 0.0
        self._owed[i] = float(action == self._bits[i])
        self._bits[i] = int(self.np_random.integers(0, 2))
        over = self.t + 1 == 2 * self._turns + 1  # one move more, which pays the second agent's last
        if over:
            self._owed[i] = 0.0
        return (paid[0], paid[1]), over


class Nim(Moves):
    """Agents take 1 to 3 of `stones` in turn; who takes the last one wins 1 and the other loses 1.

    The agent to move wins if the stones are no multiple of 4, by leaving one; from 4 k it loses to best play.
    """

    def __init__(self, stones: int = 10) -> None:
        shown = spaces.Dict({"stones": box(0, 1, stones), MASK_KEY: spaces.MultiBinary(3)})
        super().__init__("nim", shown, 3)
        self._stones = stones

    def begin(self) -> None:
        self._left = self._stones

    def observe(self, agent: str) -> Any:
        legal = np.arange(1, 4) <= max(1, self._left)
        return {"stones": one_hot(self._left - 1, self._stones), MASK_KEY: legal.astype(np.int8)}

    def act(self, i: int, action: int) -> tuple[tuple[float, float], bool]:
        self._left -= action + 1
        if self._left > 0:
            return (0.0, 0.0), False
        return (1.0 - 2.0 * i, 2.0 * i - 1.0), True
