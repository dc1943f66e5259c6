"""Rows of environments of many agents as a sampler records them, compared with those of a plain loop."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from penstock.core.noise import env_seed
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.samplers.episodes import Episodes
from penstock.testing.samplers import EchoAgent

Row = tuple[Any, ...]
"""(observation, action, reward, terminated, truncated, next observation)."""


def bits(batch: Any) -> bytes:
    """All of a MultiAgentBatch."""
    return b"".join(x.tobytes() for part in batch.values() for x in tree_leaves(part))


def agents_of(sampler: Any) -> dict[str, EchoAgent]:
    """An agent for each policy that records what it is shown and remembers, and acts by noise."""
    return {policy: EchoAgent(spec) for policy, spec in sampler.specs.items()}


class Rows:
    """Takes down every valid row by agent and episode, and checks what ties rows and batches together.

    Args:
        depth: training steps by which the parameters that act are older than a batch.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self.rows: dict[tuple[int, int], list[Row]] = defaultdict(list)
        self.episodes: list[Episodes] = []
        self.steps = self.agent_steps = self.moved = 0
        self._tail: dict[str, list[Any]] = {}

    def take(self, batch: Any, episodes: Episodes, k: int) -> None:
        """The next batch, of number k."""
        self.episodes.append(episodes)
        self.steps += batch.env_steps
        self.agent_steps += batch.agent_steps
        for policy, out in batch.items():
            edge = [out.obs, out.first, out.prev_action, out.prev_reward]
            for x, y in zip(edge, self._tail.get(policy, [])):
                np.testing.assert_array_equal(x[0], y)
            self._tail[policy] = [x[-1].copy() for x in edge]
            assert not out.reward[:-1][~out.valid[:-1]].any()
            self._check_agent(out, k)
            for t, b in np.argwhere(out.valid).tolist():
                obs = out.obs[t, b]
                rows = self.rows[int(obs[0]), int(obs[1])]
                assert bool(out.first[t, b]) == (not rows)
                if rows:
                    assert (int(out.prev_action[t, b]), float(out.prev_reward[t, b])) == rows[-1][1:3]
                what = (out.action, out.reward, out.terminated, out.truncated)
                rows.append((tuple(obs), *(x[t, b].item() for x in what), tuple(out.obs[t + 1, b])))

    def _check_agent(self, out: Any, k: int) -> None:
        """What the agent was shown and remembered in a valid row is what the record shows."""
        shown, held, valid = out.info["shown"], out.info["held"], out.valid
        for name, x in (
            ("obs", out.obs),
            ("action", out.prev_action),
            ("reward", out.prev_reward),
            ("first", out.first),
        ):
            np.testing.assert_array_equal(shown[name][valid], x[:-1][valid], err_msg=name)
        version = max(k - self._depth, 0)
        moved = out.version[0] < version
        assert (out.version[0][valid[0]] <= version).all()
        assert (out.version[1:][valid[1:]] == version).all()
        self.moved += int((moved & valid[0]).sum())
        for b in np.flatnonzero(valid.any(0)).tolist():
            age, total = out.state["age"][b], np.float32(out.state["return"][b])
            for t in np.flatnonzero(valid[:, b]).tolist():
                if out.first[t, b]:
                    age, total = 0, np.float32(0)
                else:
                    total += out.prev_reward[t, b]
                assert (held["age"][t, b], held["return"][t, b]) == (age, total), (t, b)
                age += 1

    def compare(self, config: EnvConfig, seed: int, slots: range, discount: float = 0.99, cut: int = 0) -> int:
        """Raises AssertionError unless rows and episodes are those of plain loops with the same actions.

        Args:
            slots: numbers of the environments. cut: episodes of each that faults may have cut, whose rows end early.

        Returns:
            the number of rows.
        """
        env: Any = config.make()
        taken = sum(map(len, self.rows.values()))
        found = defaultdict[int, list[tuple[Episodes, int]]](list)
        for episodes in self.episodes:
            for i, e in enumerate(episodes.slot.tolist()):
                found[e].append((episodes, i))
        for e, slot in enumerate(slots):
            played = 0
            for n in range(len(found[e]) + cut + 1):
                rows, returns, steps = self._replay(env, env_seed(seed, slot, n), config)
                if steps is None:
                    assert cut or played == len(found[e]), "an episode that never ended is none of the last"
                    continue
                episodes, i = found[e][played]
                played += 1
                parts = episodes.parts
                assert parts is not None
                assert episodes.length[i] == steps
                assert episodes.return_[i] == sum(returns.values())
                for j, name in enumerate(parts.agents):
                    assert (parts.policy[i, j] >= 0) == (name in returns), name
                    if name in returns:
                        own = [row[2] for row in rows[name]]
                        assert (parts.return_[i, j], parts.length[i, j]) == (returns[name], len(own))
                        if own and sum(own) == returns[name]:  # nothing was paid before the first turn
                            expected = sum(discount**t * r for t, r in enumerate(own))
                            np.testing.assert_allclose(parts.discounted_return[i, j], expected, 1e-12, 1e-12)
            assert played == len(found[e])
        assert not any(self.rows.values()), "rows of episodes that nobody plays"
        return taken

    def _replay(
        self, env: Any, seed: int, config: EnvConfig
    ) -> tuple[dict[str, list[Row]], dict[str, float], int | None]:
        """Rows and returns of one episode by agent, and its steps; None if the record ends before it does."""
        assert config.seating is not None
        play = self._turns if config.seating.turns else self._parallel
        rows: dict[str, list[Row]] = defaultdict(list)
        returns: dict[str, float] = {}
        steps, episode = play(env, seed, rows, returns)
        for k, name in enumerate(env.possible_agents):
            mine = self.rows.get((k, episode), [])
            if mine and rows[name] and mine[0][0] != rows[name][0][0]:
                mine = []  # of another episode of that number
            elif mine:
                del self.rows[k, episode]
            known = len(rows[name]) if steps is None else None  # turns may follow one that is open
            assert mine[:known] == rows[name][: len(mine)], (name, episode)
            assert steps is None or len(mine) == len(rows[name])
        return rows, returns, steps

    def _parallel(self, env: Any, seed: int, rows: Any, returns: dict[str, float]) -> tuple[int | None, int]:
        obs, _ = env.reset(seed=seed)
        episode, steps, names = int(next(iter(obs.values()))[1]), 0, env.possible_agents
        while env.agents:
            agents = list(env.agents)
            recorded = [self.rows.get((names.index(a), episode), []) for a in agents]
            if any(len(mine) <= len(rows[a]) for a, mine in zip(agents, recorded)):
                return None, episode
            actions = {a: mine[len(rows[a])][1] for a, mine in zip(agents, recorded)}
            before = {a: tuple(obs[a]) for a in agents}
            obs, reward, terminated, truncated, _ = env.step(actions)
            for a in agents:
                flags = bool(terminated[a]), bool(truncated[a])
                rows[a].append((before[a], actions[a], float(reward[a]), *flags, tuple(obs[a])))
                returns[a] = returns.get(a, 0.0) + float(reward[a])
            steps += 1
        return steps, episode

    def _turns(self, env: Any, seed: int, rows: Any, returns: dict[str, float]) -> tuple[int | None, int]:
        env.reset(seed=seed)
        open_: dict[str, tuple[Any, int]] = {}
        episode, moves, names = -1, 0, env.possible_agents
        while env.agents:
            a = env.agent_selection
            obs, reward, terminated, truncated, _ = env.last()
            episode = int(obs[1])
            returns[a] = returns.get(a, 0.0) + float(reward)
            if a in open_:
                rows[a].append((*open_.pop(a), float(reward), bool(terminated), bool(truncated), tuple(obs)))
            if terminated or truncated:
                env.step(None)
                continue
            recorded = self.rows.get((names.index(a), episode), [])
            if len(recorded) <= len(rows[a]):
                return None, episode
            action = recorded[len(rows[a])][1]
            open_[a] = (tuple(obs), action)
            env.step(action)
            moves += 1
        return moves, episode
