"""Teams whose best joint return is known, by PettingZoo's Parallel API, which needs no PettingZoo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.envs.toy.base import box, one_hot

_PAYOFFS = np.array([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])


class Team:
    """Agents that act at the same time and are all given one reward; `t` counts the steps of an episode."""

    render_mode: str | None = None
    t = 0

    def __init__(
        self, name: str, agents: tuple[str, ...], shown: spaces.Space[Any], choices: int, state: spaces.Space[Any]
    ) -> None:
        self.metadata: dict[str, Any] = {"name": name, "is_parallelizable": True, "render_modes": []}
        self.possible_agents, self.agents = list(agents), list[str]()
        self.observation_spaces = dict.fromkeys(agents, shown)
        self.action_spaces: dict[str, spaces.Space[Any]] = {agent: spaces.Discrete(choices) for agent in agents}
        self.state_space = state
        self.np_random = np.random.default_rng(0)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """What an agent sees."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """What an agent does."""
        return self.action_spaces[agent]

    def begin(self) -> None:
        """Draws the hidden values of an episode; called at each reset."""

    def observe(self, i: int) -> npt.NDArray[np.float32]:
        """The observation of agent number i at step `t`, in new memory."""
        raise NotImplementedError

    def state(self) -> npt.NDArray[np.float32]:
        """What all agents together can know, in new memory."""
        raise NotImplementedError

    def act(self, actions: list[int]) -> tuple[float, bool, bool]:
        """The reward of all, terminated, truncated of a step that `t` does not count yet."""
        raise NotImplementedError

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The first observations and empty infos, by agent."""
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        self.agents, self.t = self.possible_agents[:], 0
        self.begin()
        return self._shown(), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, int]) -> tuple[dict[str, Any], ...]:
        """Observations, rewards, terminations, truncations and empty infos, by agent."""
        reward, terminated, truncated = self.act([int(actions[agent]) for agent in self.agents])
        self.t += 1
        agents = self.agents
        out = self._shown(), *(dict.fromkeys(agents, x) for x in (reward, terminated, truncated))
        if terminated or truncated:
            self.agents = []
        return *out, {agent: {} for agent in agents}

    @property
    def unwrapped(self) -> Team:
        """Itself."""
        return self

    @property
    def num_agents(self) -> int:
        """Agents that are there."""
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        """Agents that there can be."""
        return len(self.possible_agents)

    def render(self) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Holds nothing."""

    def _shown(self) -> dict[str, Any]:
        return {agent: self.observe(i) for i, agent in enumerate(self.agents)}


class TeamBit(Team):
    """Each of K agents sees a bit of its own, 0 or 1; all earn 1 where each names its own. Best return: `length`.

    At random a step earns 2^-K.
    """

    def __init__(self, agents: int = 2, length: int = 8) -> None:
        names = tuple(f"agent_{i}" for i in range(agents))
        super().__init__("team_bit", names, box(-1, 1), 2, box(-1, 1, agents))
        self._length = length

    def begin(self) -> None:
        self._bits = self.np_random.integers(0, 2, len(self.possible_agents))

    def observe(self, i: int) -> npt.NDArray[np.float32]:
        return np.array([2.0 * self._bits[i] - 1.0], np.float32)

    def state(self) -> npt.NDArray[np.float32]:
        return (2.0 * self._bits - 1.0).astype(np.float32)

    def act(self, actions: list[int]) -> tuple[float, bool, bool]:
        reward = float(actions == self._bits.tolist())
        self.begin()
        return reward, False, self.t + 1 >= self._length


class TwoStepMatrix(Team):
    """The two-step game of Rashid et al. 2018, section 6.1. Best return 8; a sum of agents' Q (VDN) can only find 7.

    The first agent's first action chooses the game of the second step: one that pays 7 whatever is done, or one that
    pays 0, 1, 1 or 8, the last if both agents choose 1. Each sees the step's game and which of the two it is.
    """

    def __init__(self) -> None:
        super().__init__("two_step_matrix", ("first", "second"), box(0, 1, 5), 2, box(0, 1, 3))

    def begin(self) -> None:
        self._game = 0

    def observe(self, i: int) -> npt.NDArray[np.float32]:
        return np.concatenate([self.state(), one_hot(i, 2)])

    def state(self) -> npt.NDArray[np.float32]:
        return one_hot(self._game, 3)

    def act(self, actions: list[int]) -> tuple[float, bool, bool]:
        if self._game == 0:
            self._game = 1 + actions[0]
            return 0.0, False, False
        return float(_PAYOFFS[self._game - 1, actions[0], actions[1]]), True, False
