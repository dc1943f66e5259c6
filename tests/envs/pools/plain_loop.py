"""A plain loop over PettingZoo environments, and the driver that plays the same through a pool."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch, allocate_batch, poison
from penstock.core.noise import env_seed
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves
from penstock.envs.agent_observations import read_agents
from penstock.envs.make import EnvConfig
from penstock.envs.pools.factory import pool_for
from penstock.envs.pools.settings import PoolSettings
from penstock.envs.seats import PolicyMap, seat_agents
from tests.params import slow_but


def turn_about(agent: str, episode: int, seed: int) -> str:
    return "a" if (int(agent[-1]) + episode) % 2 else "b"


_SEATINGS: dict[str, tuple[int, tuple[str, ...], Any, Any]] = {
    "one": (1, ("s",), None, None),
    "idle": (2, ("s",), None, {"s": 3}),  # a seat that idles for ever
    "shared": (5, ("s",), None, None),
    "two": (2, ("a", "b"), {"agent_0": "a", "agent_1": "b"}, None),
    "three": (5, ("a", "b", "c"), {f"agent_{k}": "abcab"[k] for k in range(5)}, {"c": 2}),
    "in turn": (3, ("a", "b"), turn_about, {"a": 2, "b": 2}),
}
SEATINGS = slow_but(
    [f"{name}-{T}" for name, T in zip(_SEATINGS, (64, 1, 5, 2, 1, 5))],
    {f"{name}-{T}": (*seating, T) for name, seating in _SEATINGS.items() for T in (1, 2, 5, 64)},
)
"""Agents, policies, who plays for whom, seats, and rows of a batch."""


def seated(
    env: Any,
    policies: tuple[str, ...] = ("shared",),
    mapping: PolicyMap | None = None,
    seats: Any = None,
    **config: Any,
) -> EnvConfig:
    """The settings of an environment of many agents, seated."""
    made = EnvConfig(env, **config)
    return replace(made, seating=seat_agents(read_agents(made), policies, mapping, seats))


def choice(obs: Any) -> Any:
    """An action of the echo environments, [N, 6] -> [N]: a function of the observation alone."""
    return (np.asarray(obs, np.float64) @ np.array([3, 1, 5, 7, 11, 13])).astype(np.int64) % 3


@dataclass
class Played:
    """What became of one agent in one episode."""

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    """(observation, action, reward, terminated, truncated, next observation)."""
    return_: float = 0.0
    terminated: bool = False

    def discounted(self, gamma: float) -> float:
        """What it earned before its first turn, and the rewards of its turns, each later one worth less."""
        early = self.return_ - sum(row[2] for row in self.rows)
        return early + sum(gamma**k * row[2] for k, row in enumerate(self.rows))


def plain_parallel(env: Any, seed: int) -> tuple[dict[str, Played], int]:
    """One episode of a Parallel environment, and its steps."""
    obs, _ = env.reset(seed=seed)
    obs = {a: o.copy() for a, o in obs.items()}
    played: dict[str, Played] = defaultdict(Played)
    steps = 0
    while env.agents:
        agents = list(env.agents)
        actions = {a: choice(obs[a][None])[0] for a in agents}
        after, rewards, terminations, truncations, _ = env.step(actions)
        for a in agents:
            played[a].rows.append(
                (
                    tuple(obs[a]), int(actions[a]), float(rewards[a]), bool(terminations[a]), bool(truncations[a]),
                    tuple(after[a]),
                )
            )  # fmt: skip
            played[a].return_ += float(rewards[a])
            played[a].terminated |= bool(terminations[a])
        obs.update({a: o.copy() for a, o in after.items()})
        steps += 1
    return dict(played), steps


def plain_turns(env: Any, seed: int) -> tuple[dict[str, Played], int]:
    """One episode of an AEC environment, and its moves."""
    env.reset(seed=seed)
    played: dict[str, Played] = defaultdict(Played)
    open_: dict[str, tuple[Any, int]] = {}
    moves = 0
    while env.agents:
        a = env.agent_selection
        obs, reward, terminated, truncated, _ = env.last()
        played[a].return_ += float(reward)
        if a in open_:
            seen, action = open_.pop(a)
            played[a].rows.append((seen, action, float(reward), bool(terminated), bool(truncated), tuple(obs)))
        if terminated or truncated:
            played[a].terminated = bool(terminated)
            env.step(None)
            continue
        action = int(choice(obs[None])[0])
        open_[a] = (tuple(obs), action)
        env.step(action)
        moves += 1
    return dict(played), moves


def name_of(obs: Any) -> tuple[int, int]:
    """Agent and episode that an echo observation is of."""
    return int(obs[0]), int(obs[1])


class Driver:
    """Plays the loop's part over a pool, with one buffer or two, and takes down every row, by agent and episode."""

    def __init__(self, config: EnvConfig, E: int, T: int, buffers: int = 1, seed: int = 0, **pool: Any) -> None:
        self.pool: Any = pool_for(config, seed, slice(0, E), PoolSettings(**pool))
        self.E, self.T = E, T
        self.buffers = [
            [
                allocate_batch(spec, BatchSpec(T, E * n), {"mark": np.float32(0)}, None, self.pool.info_keys)
                for spec, n in zip(self.pool.specs, self.pool.seats)
            ]
            for _ in range(buffers)
        ]
        for batches in self.buffers:
            for batch in batches:
                poison(batch)
        self.rows: dict[tuple[int, int], list[tuple[Any, ...]]] = defaultdict(list)
        self.episodes: list[tuple[int, int, dict[int, tuple[Any, ...]]]] = []
        self.k = 0
        self.moves = 0
        self.tail: list[tuple[Any, ...]] | None = None

    def play(self, batches: int) -> Driver:
        """Fills so many batches."""
        for _ in range(batches):
            outs = self.buffers[self.k % len(self.buffers)]
            self.pool.bind(outs)
            if len(self.buffers) > 1:
                for batch in self.buffers[(self.k + 1) % len(self.buffers)]:
                    poison(batch)
            (self._turns if self.pool.takes_turns else self._lockstep)(outs)
            self._take(outs)
            self.k += 1
        return self

    def _lockstep(self, outs: list[SampleBatch]) -> None:
        for row in range(self.T):
            for p, out in enumerate(outs):
                out.action[row] = choice(seen(out)[row])
                out.info["mark"][row] = out.action[row]
                self.pool.send(p, row)
            assert [self.pool.recv() for _ in outs] == list(range(len(outs)))

    def _turns(self, outs: list[SampleBatch]) -> None:
        for out in outs:
            out.version[...] = self.k
        sweep = 0
        while not all(self.pool.finished(p) for p in range(len(outs))):
            for p, out in enumerate(outs):
                slots, rows = self.pool.pending(p)
                assert len(slots) == len(rows) == len({*slots.tolist()})
                self.moves += len(slots)
                out.action[rows, slots] = choice(seen(out)[rows, slots]) if len(slots) else 0
                out.info["mark"][rows, slots] = out.action[rows, slots]
            for p in range(len(outs)):
                self.pool.send(p, sweep)
            for _ in outs:
                self.pool.recv()
            sweep += 1

    def _take(self, outs: list[SampleBatch]) -> None:
        for p, out in enumerate(outs):
            obs = seen(out)
            if self.tail is not None:
                for x, y in zip(self._edge(out, 0), self.tail[p]):
                    np.testing.assert_array_equal(x, y)
            for t, b in np.argwhere(out.valid).tolist():
                row = (
                    tuple(obs[t, b]), int(out.action[t, b]), float(out.reward[t, b]), bool(out.terminated[t, b]),
                    bool(out.truncated[t, b]), tuple(obs[t + 1, b]),
                )  # fmt: skip
                assert out.info["mark"][t, b] == out.action[t, b]
                rows = self.rows[name_of(row[0])]
                assert bool(out.first[t, b]) == (not rows), (p, t, b)
                if rows:
                    assert int(out.prev_action[t, b]) == rows[-1][1]
                    assert float(out.prev_reward[t, b]) == rows[-1][2]
                rows.append(row)
            idle = ~out.valid[:-1]
            assert not out.reward[:-1][idle].any()
            assert not out.action[:-1][idle].any() or not self.pool.takes_turns
            assert not out.terminated[~out.valid].any() and not out.truncated[~out.valid].any()
            for x in tree_leaves((out.obs, out.prev_reward)):
                assert np.isfinite(x).all() and not (x == -4242).any()
        self.tail = [tuple(x.copy() for x in self._edge(out, -1)) for out in outs]
        log = self.pool.log
        for e in range(self.E):
            for m in range(int(log.count[e])):
                agents = {
                    k: (
                        int(log.policy[e, m, k]), float(log.return_[e, m, k]), float(log.discounted[e, m, k]),
                        int(log.length[e, m, k]), bool(log.terminated[e, m, k]),
                    )
                    for k in np.flatnonzero(log.policy[e, m] >= 0).tolist()
                }  # fmt: skip
                self.episodes.append((e, int(log.steps[e, m]), agents))

    def _edge(self, out: SampleBatch, t: int) -> tuple[Any, ...]:
        return (*[x[t] for x in tree_leaves(out.obs)], out.first[t], out.prev_action[t], out.prev_reward[t])


def seen(out: SampleBatch) -> Any:
    """The echo observation in a batch, whatever stands beside it."""
    return out.obs["obs"] if isinstance(out.obs, dict) else out.obs


def compare(driver: Driver, config: EnvConfig, seed: int = 0, gamma: float = 0.99, first: int = 0) -> int:
    """Raises AssertionError unless every row and every logged episode is that of the plain loop; returns the rows."""
    env: Any = config.make()
    plain = plain_turns if config.seating is not None and config.seating.turns else plain_parallel
    taken, logged = 0, 0
    for e in range(driver.E):
        mine = [episode for episode in driver.episodes if episode[0] == e]
        for n in range(len(mine) + 1):
            played, steps = plain(env, env_seed(seed, first + e, n))
            (episode,) = {int(row[0][1]) for x in played.values() for row in x.rows}
            for agent, expected in played.items():
                k = env.possible_agents.index(agent)
                rows = driver.rows.pop((k, episode), [])
                assert rows == expected.rows[: len(rows)], (e, n, agent)
                taken += len(rows)
                if n < len(mine):
                    assert len(rows) == len(expected.rows), (e, n, agent)
            if n < len(mine):
                _, length, agents = mine[n]
                logged += 1
                assert length == steps
                assert {env.possible_agents[k] for k in agents} == set(played)
                for k, (_, return_, discounted, own, terminated) in agents.items():
                    expected = played[env.possible_agents[k]]
                    assert (return_, own, terminated) == (expected.return_, len(expected.rows), expected.terminated)
                    np.testing.assert_allclose(discounted, expected.discounted(gamma), rtol=1e-12, atol=1e-12)
                assert sum(x[1] for x in agents.values()) == sum(x.return_ for x in played.values())
    assert not driver.rows, "rows of episodes that nobody plays"
    assert logged == len(driver.episodes)
    return taken
