"""Speed of many agents in one process with one thread: rates by processor time, by turns A B A B, and their bars.

    python benchmarks/many_agents_speed.py [--only toy,spread] [--rounds 15] [--old CHECKOUT] [--write]

`toy-K`: K agents of an environment that does next to nothing, one shared policy of PPO's size, against a loop in numpy
over the same environments, which has no episode statistics, no checks, no resume and no noise that can be reproduced.
`policies`: two of them, a policy each, against one shared. `spread`: sixteen of MPE's simple spread, against its steps
alone. `tictactoe`, `connect-four`: games by turns, against the same games with random legal moves. `gymnasium`:
environments of one agent, against another checkout of penstock (`compare.py`). `--write` puts the table into results.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import compare
import numpy as np
import torch
from floor import mlp, random_layers
from toy_agents import Toy

import penstock as ps
from penstock.core.machine import cpu_family
from penstock.envs.pettingzoo import factory_of

RESULTS = Path(__file__).parent / "results" / "many_agents.md"
HEAD = "## Speed"
SPREAD = "pettingzoo:mpe2/simple_spread_v3"
GAMES = {"tictactoe": "pettingzoo:classic/tictactoe_v3", "connect-four": "pettingzoo:classic/connect_four_v3"}
T = 64
Turn = Callable[[], int]
"""Runs for a while; returns the number of steps."""


class Loop:
    """The floor: E of `Toy`, T steps of which fill arrays [T, E * K], with a policy in numpy."""

    def __init__(self, K: int, E: int) -> None:
        self.rng, self.envs = np.random.default_rng(0), [Toy(K) for _ in range(E)]
        B = E * K
        self.names = self.envs[0].possible_agents
        self.obs = np.stack([x for e, env in enumerate(self.envs) for x in env.reset(seed=e)[0].values()])
        self.actor = random_layers(self.rng, 4, 64, 64, 2, last=0.01)
        self.critic = random_layers(self.rng, 4, 64, 64, 1, last=1.0)
        self.observations, self.actions = np.zeros((T, B, 4), np.float32), np.zeros((T, B), np.int64)
        self.logps, self.values, self.rewards = (np.zeros((T, B), np.float32) for _ in range(3))
        self.dones = np.zeros((T, B), np.bool_)

    def turn(self) -> int:
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


def sampled(env: Any, T: int, E: int, mapping: dict[str, str] | None = None) -> Turn:
    """A batch of the sampler, by policies of PPO's size: one shared, or as the mapping says."""
    ids = [*dict.fromkeys((mapping or {"": "shared"}).values())]
    policies = ps.Policies({name: ps.PPO(net=ps.Net(hidden=(64, 64))) for name in ids}, mapping)
    sampler = ps.SerialSampler(T=T, B=E).build(policies.seat(env), 1)
    sampler.initialize(policies.build(sampler.specs, 1).agents)
    itr = 0

    def turn() -> int:
        nonlocal itr
        batch, _ = sampler.obtain_samples(itr)
        itr += 1
        return batch.agent_steps

    return turn


def bare_spread(E: int) -> Turn:
    """Steps of spread with random actions that were drawn before, counted by agents."""
    envs = [factory_of(SPREAD)() for _ in range(E)]
    rng = np.random.default_rng(0)
    for e, env in enumerate(envs):
        env.reset(seed=e)
    moves = [dict(zip(envs[0].agents, row)) for row in rng.integers(0, 5, (1000, 3)).tolist()]
    at = 0

    def turn() -> int:
        nonlocal at
        for _ in range(25):
            for env in envs:
                at = (at + 1) % len(moves)
                env.step(moves[at])
                if not env.agents:
                    env.reset()
        return 25 * E * 3

    return turn


def bare_game(id_: str, moves: int) -> Turn:
    """Games with random legal moves, counted by moves."""
    env, rng = factory_of(id_)(), np.random.default_rng(0)

    def turn() -> int:
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

    return turn


@dataclass(frozen=True)
class Case:
    """Two rates that take turns, and the least ratio of the first to the second."""

    title: str
    unit: str
    names: tuple[str, str]
    make: Callable[[], tuple[Turn, Turn]]
    bar: float


def toy(K: int, E: int) -> tuple[Turn, Turn]:
    """The sampler and the floor."""
    return sampled(partial(Toy, K), T, E), Loop(K, E).turn


def two_policies() -> tuple[Turn, Turn]:
    """A policy each, and one shared."""
    env = partial(Toy, 2)
    return sampled(env, T, 8, {"agent_0": "a", "agent_1": "b"}), sampled(env, T, 8)


def game(name: str) -> tuple[Turn, Turn]:
    """The sampler and raw moves."""
    return sampled(GAMES[name], 32, 64), bare_game(GAMES[name], 2000)


AGENTS, MOVES = "agent steps/s", "moves/s"
CASES = {
    **{f"toy-{K}": Case(f"toy, K={K}, E={E}", AGENTS, ("one shared policy", "numpy floor"), partial(toy, K, E), bar)
       for K, E, bar in ((2, 8, 0.55), (8, 8, 0.75), (32, 2, 0.75))},
    "policies": Case("toy, K=2, E=8", AGENTS, ("two policies", "one shared policy"), two_policies, 0.70),
    "spread": Case("spread, E=16", AGENTS, ("one shared policy", "bare environment"),
                   lambda: (sampled(SPREAD, 25, 16), bare_spread(16)), 0.9),
    **{name: Case(f"{name}, E=64", MOVES, ("one shared policy", "raw moves"), partial(game, name), 0.8)
       for name in GAMES},
}  # fmt: skip
"""By name; `--only toy` means all that begin so."""


def rate(turn: Turn, seconds: float) -> float:
    """Steps per second of processor time over at least so many."""
    steps, started = 0, time.process_time()
    while (spent := time.process_time() - started) < seconds:
        steps += turn()
    return steps / spent


def measure(case: Case, rounds: int, seconds: float) -> tuple[float, float, float, float]:
    """Medians of both rates and of each round's ratio, and the ratio of upper deciles; the first rounds warm up."""
    turns = case.make()
    for turn in turns:
        rate(turn, 1.0)
    rates = [[rate(turn, seconds) for turn in turns] for _ in range(rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*rates))
    best, bests = (float(np.quantile(column, 0.9)) for column in zip(*rates))
    return ours, theirs, statistics.median(x / y for x, y in rates), best / bests


def gymnasium(old: Path, pairs: int) -> list[list[str]]:
    """The cases of `compare.py` as rows of the table."""
    rows: list[list[str]] = []
    for name, (title, _, _) in compare.CASES.items():
        found = [compare.pair(old, Path(__file__).parents[1], name, 8, i + 1) for i in range(pairs)]
        before, after = (statistics.median(column) for column in zip(*found))
        ratio = statistics.median(y / x for x, y in found)
        best, bests = (max(column) for column in reversed([*zip(*found)]))
        names = "now", "before"
        rows.append(row(title.removesuffix(", steps/s"), "steps/s", names, after, before, ratio, best / bests, 0.97))
        print(" | ".join(rows[-1]), flush=True)
    return rows


def row(
    title: str, unit: str, names: tuple[str, str], ours: float, theirs: float, ratio: float, quiet: float, bar: float
) -> list[str]:
    """A row of the table."""
    held = "yes" if ratio >= bar else "NO"
    rates = f"{names[0]} {ours:,.0f}", f"{names[1]} {theirs:,.0f}"
    return [title, unit, *rates, f"{ratio:.3f}", f"{quiet:.3f}", f"{bar:.2f}", held]


def write(rows: list[list[str]], command: str) -> None:
    """Puts the table into the results, in the place of the one before."""
    table = [["case", "unit", "rate", "against", "ratio", "upper deciles", "bar", "held"], ["---"] * 8, *rows]
    about = (
        f"`{command}`, {datetime.date.today()}, {platform.machine()} by {cpu_family()[0]}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, numpy {np.__version__}: one thread, processor time, medians of rounds in which both take "
        "turns. The ratio of upper deciles is that of turns that other work on the machine disturbed least."
    )
    text = "\n".join([HEAD, "", about, "", *(f"| {' | '.join(cells)} |" for cells in table), ""])
    found = RESULTS.read_text() if RESULTS.exists() else "# Many agents\n"
    before, _, after = found.partition(HEAD)
    _, next_, rest = after.partition("\n## ")
    RESULTS.write_text(f"{before.rstrip()}\n\n{text}{next_ and next_ + rest}")


def main() -> int:
    """Measures the cases asked for; 1 if one misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help=f"cases by comma, by how they begin, of {', '.join(CASES)}, gymnasium"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn (0.5)")
    parser.add_argument("--old", type=Path, help="a checkout to compare environments of one agent with")
    parser.add_argument("--pairs", type=int, default=5, help="of processes, for those")
    parser.add_argument("--write", action="store_true", help=f"the table into {RESULTS.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = tuple(args.only.split(","))
    rows: list[list[str]] = []
    for name, case in CASES.items():
        if name.startswith(wanted):
            found = measure(case, args.rounds, args.seconds)
            rows.append(row(case.title, case.unit, case.names, *found, case.bar))
            print(" | ".join(rows[-1]), flush=True)
    if args.old is not None and "gymnasium".startswith(wanted):
        rows += gymnasium(args.old.resolve(), args.pairs)
    if args.write:
        write(rows, f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip())
    return int(any(cells[-1] == "NO" for cells in rows))


if __name__ == "__main__":
    sys.exit(main())
