"""Speed of many agents in one process with one thread, against a floor, by turns (turns.py).

    python benchmarks/many_agents_speed.py [--only toy,spread] [--rounds 21] [--write]

`toy-K`: K agents of an environment that does next to nothing, one shared policy of PPO's size, against a loop in numpy
over the same environments, which has no episode statistics, no checks, no resume and no noise that can be reproduced.
`policies`: two of them, a policy each, against one shared. `spread`: sixteen of MPE's simple spread, against its steps
alone. `tictactoe`, `connect-four`: games by turns, against the same games with random legal moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import turns
from floor import mlp, random_layers
from gymnasium import spaces
from turns import Bar, Case, Who

import penstock as ps
from penstock.envs.pettingzoo import factory_of

SPREAD = "pettingzoo:mpe2/simple_spread_v3"
GAMES = {"tictactoe": "pettingzoo:classic/tictactoe_v3", "connect-four": "pettingzoo:classic/connect_four_v3"}
T = 64


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


class Loop:
    """The floor: E of `Toy`, T steps of which fill arrays [T, E * K], with a policy in numpy."""

    def __init__(self, K: int, E: int, seed: int) -> None:
        self.rng, self.envs = np.random.default_rng(seed), [Toy(K) for _ in range(E)]
        B = E * K
        self.names = self.envs[0].possible_agents
        self.obs = np.stack([x for e, env in enumerate(self.envs) for x in env.reset(seed=seed + e)[0].values()])
        self.actor = random_layers(self.rng, 4, 64, 64, 2, last=0.01)
        self.critic = random_layers(self.rng, 4, 64, 64, 1, last=1.0)
        self.observations, self.actions = np.zeros((T, B, 4), np.float32), np.zeros((T, B), np.int64)
        self.logps, self.values, self.rewards = (np.zeros((T, B), np.float32) for _ in range(3))
        self.dones = np.zeros((T, B), np.bool_)

    def unit(self) -> float:
        """T steps of every environment."""
        rng, names, obs, K = self.rng, self.names, self.obs, len(self.names)
        B = len(obs)
        slots = np.arange(B)
        for t in range(T):
            logits = mlp(obs, self.actor)
            logits -= logits.max(1, keepdims=True)
            p = np.exp(logits)
            p /= p.sum(1, keepdims=True)
            action = (p[:, :-1].cumsum(1) < rng.random((B, 1))).sum(1)
            self.observations[t], self.actions[t], self.logps[t] = obs, action, np.log(p[slots, action])
            self.values[t] = mlp(obs, self.critic)[:, 0]
            for e, env in enumerate(self.envs):
                own = slice(e * K, e * K + K)
                seen, paid, terminated, truncated, _ = env.step(dict(zip(names, action[own])))
                self.rewards[t, own] = [*paid.values()]
                self.dones[t, own] = [x or y for x, y in zip(terminated.values(), truncated.values())]
                if not env.agents:
                    seen = env.reset()[0]
                obs[own] = [*seen.values()]
        return T * B


@contextmanager
def sampled(env: Any, T: int, B: int, seed: int, mapping: dict[str, str] | None = None) -> Iterator[turns.Unit]:
    """A batch of the sampler, by policies of PPO's size: one shared, or as the mapping says. `env`: an id, or K of the toy."""
    torch.set_num_threads(1)
    ids = [*dict.fromkeys((mapping or {"": "shared"}).values())]
    policies = ps.Policies({name: ps.PPO(net=ps.Net(hidden=(64, 64))) for name in ids}, mapping)
    sampler = ps.SerialSampler(T=T, B=B).build(policies.seat(partial(Toy, env) if isinstance(env, int) else env), seed)
    sampler.initialize(policies.build(sampler.specs, seed).agents)
    itr = 0

    def unit() -> float:
        nonlocal itr
        itr += 1
        return sampler.obtain_samples(itr - 1)[0].agent_steps

    yield unit
    sampler.shutdown()


@contextmanager
def floor(K: int, E: int, seed: int) -> Iterator[turns.Unit]:
    """T steps of every environment of the loop."""
    yield Loop(K, E, seed).unit


@contextmanager
def bare_spread(E: int, seed: int) -> Iterator[turns.Unit]:
    """Steps of spread with random actions that were drawn before, counted by agents."""
    envs = [factory_of(SPREAD)() for _ in range(E)]
    rng = np.random.default_rng(seed)
    for e, env in enumerate(envs):
        env.reset(seed=seed + e)
    moves = [dict(zip(envs[0].agents, row)) for row in rng.integers(0, 5, (1000, 3)).tolist()]
    at = 0

    def unit() -> float:
        nonlocal at
        for _ in range(25):
            for env in envs:
                at = (at + 1) % len(moves)
                env.step(moves[at])
                if not env.agents:
                    env.reset()
        return 25 * E * 3

    yield unit


@contextmanager
def bare_game(id_: str, moves: int, seed: int) -> Iterator[turns.Unit]:
    """Games with random legal moves, counted by moves."""
    env, rng = factory_of(id_)(), np.random.default_rng(seed)

    def unit() -> float:
        played, drawn = 0, iter(rng.random(2 * moves).tolist())
        while played < moves:
            env.reset()
            for _ in env.agent_iter():
                obs, _, terminated, truncated, _ = env.last()
                if terminated or truncated:
                    env.step(None)
                    continue
                legal = obs["action_mask"].nonzero()[0]
                env.step(int(legal[int(next(drawn) * len(legal))]))
                played += 1
        return played

    yield unit


def case(title: str, unit: str, ours: tuple[str, Who], against: tuple[str, Who], bar: float) -> Case:
    """Two rates, and the least ratio of the first to the second."""
    return Case(title, unit, dict((ours, against)), (Bar(ours[0], bar, (against[0],)),))


def shared(env: str | int, T: int, B: int) -> tuple[str, Who]:
    """The sampler with one policy for all agents."""
    return "one shared policy", Who("sampled", {"env": env, "T": T, "B": B})


CASES = {
    **{f"toy-{K}": case(f"toy, K={K}, E={E}", "agent steps/s", shared(K, T, E), ("numpy floor", Who("floor", {"K": K, "E": E})), bar)
       for K, E, bar in ((2, 8, 0.82), (8, 8, 0.82), (32, 2, 0.82))},
    "policies": case("toy, K=2, E=8, two policies", "agent steps/s", ("two policies", Who("sampled", {
        "env": 2, "T": T, "B": 8, "mapping": {"agent_0": "a", "agent_1": "b"}})), shared(2, T, 8), 0.70),
    "spread": case("spread, E=16", "agent steps/s", shared(SPREAD, 25, 16), ("bare environment", Who("bare_spread", {"E": 16})), 0.9),
    **{name: case(f"{name}, E=64", "moves/s", shared(id_, 32, 64), ("raw moves", Who("bare_game", {"id_": id_, "moves": 500})), 0.8)
       for name, id_ in GAMES.items()},
}  # fmt: skip

if __name__ == "__main__":
    turns.main(__doc__, CASES, {f.__name__: f for f in (sampled, floor, bare_spread, bare_game)}, {})
