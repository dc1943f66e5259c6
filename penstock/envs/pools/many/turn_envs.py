"""TurnEnvs: the present agents of each of E turn-based environments, and their records so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from penstock.core.tree import tree_structure, tree_unflatten
from penstock.envs.pools.many.agent_envs import AgentEnvs, EpisodeRecorder
from penstock.envs.pools.many.contract import agents_violation, turn_violation
from penstock.envs.pools.many.turn_columns import Player, SeatColumn
from penstock.envs.pools.many.turn_journal import TurnJournal
from penstock.envs.pools.many.turn_source import turn_source
from penstock.envs.pools.messages import fail


class TurnEnvs:
    """The agents of E AEC environments.

    Args:
        limit: moves of an episode that its journal keeps.
    """

    def __init__(self, host: AgentEnvs, recorder: EpisodeRecorder, limit: int) -> None:
        self.host, self.recorder, self._limit = host, recorder, limit
        E = len(host.envs)
        self.players: list[dict[str, Player]] = [{} for _ in range(E)]
        """For each environment the agents in `env.agents`."""
        self.agents: list[list[str]] = [[] for _ in range(E)]
        """`env.agents` as it was last seen."""
        self.gone: list[set[str]] = [set() for _ in range(E)]
        """Agents that have ended in this episode."""
        self.sources = list(host.envs)
        """For each environment the innermost AEC object, which holds `agent_selection`."""
        self.moves = [0] * E
        self.journals = [TurnJournal(limit) for _ in range(E)]

    def forget(self, e: int) -> None:
        """Nobody is in environment e."""
        self.players[e].clear()
        self.agents[e], self.gone[e], self.moves[e] = [], set(), 0
        self.recorder.forget(e)

    def open(self, e: int, again: bool = False) -> None:
        """The next episode of an environment, or the same `again`."""
        self.host.reset(e, again)
        self.host.episode_table[e, 2], self.host.activity[4] = 0, 1
        self.sources[e] = turn_source(self.host.envs[e])
        self.forget(e)
        self.journals[e] = TurnJournal(self._limit)

    def close(self, e: int) -> None:
        """The episode of an environment is over."""
        if not self.moves[e]:
            self.host.refuse(e, "reset", None, "the episode is over before any agent took a turn; let one act first")
        self.recorder.close(e, self.moves[e])
        self.host.finish(e)

    def changed(self, e: int, now: Sequence[str]) -> None:
        """Agents have come, which is well, or gone without their last step."""
        before = self.agents[e]
        if found := agents_violation(before, (), now, self.gone[e], self.host.index):
            self.host.refuse(e, "step", *found)
        for agent in now:
            if agent not in before:
                self.players[e][agent] = Player()
        self.agents[e] = list(now)

    def end(self, e: int, agent: str, player: Player, terminated: Any) -> None:
        """An agent's episode is over, with a turn or without one."""
        policy = self.host.seats[e].policy[agent]
        if player.column is not None:
            player.column.closed = True
        self.recorder.end(
            e, agent, policy, float(player.return_), float(player.discounted), player.turns, bool(terminated)
        )
        self.host.seats[e].leave(agent)
        del self.players[e][agent]
        self.gone[e].add(agent)
        self.agents[e] = [other for other in self.agents[e] if other != agent]

    def snapshot(self, e: int, columns: Sequence[SeatColumn]) -> dict[str, Any]:
        """Who is there, by places among the environment's columns, as plain data."""
        return {
            "players": {
                agent: [
                    None if x.column is None else columns.index(x.column), x.return_, x.discounted, x.weight, x.turns
                ]
                for agent, x in self.players[e].items()
            },
            "moves": self.moves[e],
            "gone": sorted(self.gone[e]),
        }  # fmt: skip

    def restore(self, e: int, found: dict[str, Any], columns: Sequence[SeatColumn], seats: Sequence[int]) -> None:
        """Inverse of `snapshot`, for an environment that has come to where it was.

        Args:
            seats: that an environment has of each policy.
        """
        self.gone[e], self.agents[e] = {*found["gone"]}, list(self.host.envs[e].agents)
        for agent, (i, *sums) in found["players"].items():
            player = self.players[e][agent] = Player()
            player.return_, player.discounted, player.weight, player.turns = sums
            if i is not None:
                player.column = column = columns[i]
                self.host.seats[e].put(agent, column.policy, column.index - e * seats[column.policy])
        self.moves[e] = found["moves"]

    def action_of(self, agent: str, leaves: list[Any]) -> Any:
        """An agent's action out of its leaves."""
        spec = next(x for x in self.host.seating.specs if self.host.showing.fits(agent, x))
        return tree_unflatten(tree_structure(spec.action), leaves)

    def state(self, e: int, env: Any) -> Any:
        """The state that stands in every observation; None if none does."""
        showing = self.host.showing
        joint = {agent: env.observe(agent) for agent in env.agents} if showing.state == "joint" else {}
        return self.host.state_of(e, "step", joint)

    def real(self, e: int, agent: str, result: Any) -> float:
        """The reward as a float. Raises if the turn breaks the contract."""
        if found := turn_violation(result, agent, self.agents[e], self.host.index):
            self.host.refuse(e, "step", *found)
        return float(result[1])

    def earned(self, e: int, agent: str) -> float:
        """The reward of an agent since it acted, also between its turns. Raises if the environment does not keep it."""
        earned = getattr(self.host.envs[e], "_cumulative_rewards", None)
        if earned is None:
            self.host.refuse(
                e,
                "step",
                agent,
                f"its episode is to be cut after {self.moves[e]:,} moves, and the environment has no "
                "_cumulative_rewards, in which PettingZoo's AEC API keeps what agents have earned since they acted; "
                "keep it, or end episodes earlier",
            )
        return float(earned[agent])

    def look_at_lost(self, e: int, acted: str) -> None:
        """Counts rewards of a move to agents that had ended before it or are absent; they reach no batch."""
        env, gone = self.host.envs[e], self.gone[e]
        rewards = getattr(env, "rewards", None)
        for agent, reward in rewards.items() if isinstance(rewards, Mapping) else ():
            if (agent in gone or agent not in env.agents) and np.any(reward):
                self.host.lose(e, agent, reward, [acted])

    def fail(self, e: int, error: BaseException, result: Any) -> NoReturn:
        """Raises for an exception on the way to a turn."""
        env = self.host.envs[e]
        selected = getattr(env, "agent_selection", None)
        if found := turn_violation(result, selected, self.agents[e], self.host.index, look=result is not None):
            self.host.refuse(e, "step", *found)
        fail(self.host.where(e, "step", selected), error, None)
