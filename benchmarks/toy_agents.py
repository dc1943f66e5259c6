"""K agents of next to no work, on which what a sampler costs beside its environments shows.

It imports nothing of penstock: peers measure on it in environments of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


class Toy:
    """K agents see 4 numbers and are paid for a bit of them, for 32 steps: a microsecond of work for each agent."""

    metadata: dict[str, Any] = {"name": "toy"}  # noqa: RUF012
    render_mode = None

    def __init__(self, K: int) -> None:
        self.possible_agents = [f"agent_{k}" for k in range(K)]
        self.agents: list[str] = []
        self._seen, self._moves = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)
        self.rng = np.random.default_rng()
        self.t = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """What an agent sees."""
        return self._seen

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """A bit."""
        return self._moves

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Opens an episode."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.agents = 0, self.possible_agents[:]
        return self._draw(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """One step by PettingZoo's Parallel API."""
        agents, seen = self.agents, self.seen
        self.t += 1
        over = self.t >= 32
        rewards = {agent: 1.0 if (seen[k, 0] > 0.5) == actions[agent] else 0.0 for k, agent in enumerate(agents)}
        obs, infos = self._draw(), {agent: {} for agent in agents}
        if over:
            self.agents = []
        return obs, rewards, dict.fromkeys(agents, False), dict.fromkeys(agents, over), infos

    def close(self) -> None:
        """Nothing to end."""

    def _draw(self) -> dict[str, Any]:
        self.seen = self.rng.random((len(self.agents), 4), np.float32)
        return {agent: self.seen[k] for k, agent in enumerate(self.agents)}
