"""An environment of two levels: agent_0 moves once in so many moves, and sets the goal that agent_1 works for."""

from __future__ import annotations

from typing import Any

from penstock.envs.toy.agents import TurnToy
from penstock.envs.toy.base import box, vector


class Boss(TurnToy):
    """agent_0 moves in every 20th move; an episode has 90 to 109 moves, so that slots fall out of step."""

    def __init__(self, every: int = 20) -> None:
        super().__init__(2, box(-1, 9, 2), 2)
        self.every, self.goal, self.bit, self.length = every, 0, 0, 90

    def begin(self) -> None:
        for agent in self.possible_agents:
            self.enter(agent)
        self.goal, self.bit, self.length = 0, int(self.rng.integers(2)), 90 + int(self.rng.integers(20))
        self.select("agent_0")

    def observe(self, agent: str) -> Any:
        seen = self.bit if agent == "agent_0" else self.goal
        return vector(2.0 * seen - 1.0, self.t / 20)

    def play(self, agent: str, action: Any) -> None:
        if agent == "agent_0":
            self.goal = int(action)
            self.rewards[agent] = float(self.goal == self.bit)
            self.select("agent_1")
        else:
            self.rewards[agent] = float(int(action) == self.goal)
            self.select("agent_0" if self.t % self.every == 0 else "agent_1")
        if self.t % self.every == 0:
            self.bit = int(self.rng.integers(2))
        if self.t >= self.length:
            for other in self.agents:
                self.end(other, truncated=True)
