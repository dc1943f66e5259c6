"""Learning of many agents, over seeds: a line for each run and the bar it is held to.

    python benchmarks/many_agents.py bits late matrix nim spread discount speaker tictactoe connect-four leduc
                                     [--seeds 1,2,3,4,5] [--steps N] [--out FILE]

`bits`: two policies, and MAPPO's one, 0.95 of the pairs right in 20,000 steps. `late`: a reward that is paid on the
other's move, 0.98. `matrix`: QMIX 8 and VDN 7 in the two-step game. `nim`: self-play, no wrong move from any number of
stones. `spread` and `speaker`: PPO and MAPPO, mean return of an agent; on spread it is better than -22, where random
play has -26.8. `discount`: PPO on spread after 25,600 steps, by discount. `tictactoe`: self-play, at most 2 of 100 lost
against perfect play. `connect-four`: self-play, 95 of 100 won against random play. `leduc`: self-play by OpenSpiel's rules
and by RLCard's, exploitability of main and of the average over the pool and main, below that of uniform play.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import leduc
import numpy as np
import torch

import penstock as ps
from penstock.algos.self_play import PastSelves
from penstock.envs.make import EnvConfig
from penstock.envs.toy import LatePay, Nim, TeamBits, TwoStepMatrix

SPREAD, SPEAKER = "pettingzoo:mpe2/simple_spread_v3", "pettingzoo:mpe2/simple_speaker_listener_v4"
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@dataclass(frozen=True)
class Run:
    """One kind of run: the algorithm, its environment, and the score of what it has learned."""

    name: str
    algo: Callable[[], Any]
    env: Any
    sampler: Any
    steps: int
    score: Callable[[ps.Trainer], Mapping[str, float]]
    bar: Callable[[Mapping[str, float]], bool] | None = None
    """True if the score passes; None: it is recorded without a promise."""


def episode_return(trainer: ps.Trainer, share: float) -> dict[str, float]:
    """The mean team return of 100 deterministic episodes, times `share`."""
    _, episodes = trainer.evaluate(100)
    return {"score": episodes.mean_return * share}


def nim_mistakes(trainer: ps.Trainer) -> dict[str, float]:
    """Numbers of stones from which the move is not the winning one."""
    env, main = Nim(), trainer.policy["main"]  # pyright: ignore
    wrong = 0
    for env.left in (n for n in range(1, 11) if n % 4):
        wrong += main.predict(env.observe("")) != env.left % 4 - 1
    return {"wrong": float(wrong)}


@functools.cache
def value(board: tuple[int, ...]) -> int:
    """Of a tictactoe board for the one to move, whose marks are 1 and the other's -1."""
    if is_won(board):
        return -1
    return max((-value(after(board, i)) for i in range(9) if not board[i]), default=0)


def after(board: tuple[int, ...], i: int) -> tuple[int, ...]:
    """The board as the other sees it once square i is taken."""
    return tuple(-x for x in (*board[:i], 1, *board[i + 1 :]))


def perfect(obs: Any, rng: np.random.Generator) -> int:
    """Any of the best moves of tictactoe."""
    planes = np.asarray(obs["observation"], np.int64).reshape(9, 2)
    return int(rng.choice(best_moves(tuple((planes[:, 0] - planes[:, 1]).tolist()))))


def best_moves(board: tuple[int, ...]) -> list[int]:
    """The moves of tictactoe that keep a board's value."""
    return [i for i in range(9) if not board[i] and -value(after(board, i)) == value(board)]


def is_won(board: tuple[int, ...]) -> bool:
    """One of the two has three in a line."""
    return any(board[a] and board[a] == board[b] == board[c] for a, b, c in LINES)


def expected_losses(trainer: ps.Trainer) -> dict[str, float]:
    """Tictactoe games in 100 that main's likeliest moves lose where the other draws any of the best ones; exact."""
    main = trainer.policy["main"]  # pyright: ignore

    def lost(board: tuple[int, ...], mine: bool) -> float:
        if is_won(board) or all(board):
            return float(mine and is_won(board))
        planes = np.array([[x == 1, x == -1] for x in board], np.int8).reshape(3, 3, 2)
        obs = {"observation": planes, "action_mask": np.array([x == 0 for x in board], np.int8)}
        moves = [int(main.predict(obs))] if mine else best_moves(board)
        return sum(lost(after(board, i), not mine) for i in moves) / len(moves)

    return {"expected_lost": round(50.0 * (lost((0,) * 9, True) + lost((0,) * 9, False)), 3)}


def random_move(obs: Any, rng: np.random.Generator) -> int:
    """Any legal move."""
    return int(rng.choice(np.flatnonzero(obs["action_mask"])))


def against(
    trainer: ps.Trainer, other: Callable[[Any, np.random.Generator], int], games: int = 100
) -> dict[str, float]:
    """Games won and lost by main's likeliest moves, half of them as the first to move."""
    env: Any = replace(trainer.exp.env_config).make()
    rng, main = np.random.default_rng(0), trainer.policy["main"]  # pyright: ignore
    won = lost = 0
    for game in range(games):
        env.reset(seed=game)
        mine, total = env.possible_agents[game % 2], 0.0
        while env.agents:
            agent = env.agent_selection
            obs, reward, terminated, truncated, _ = env.last()
            total += reward if agent == mine else 0.0
            if terminated or truncated:
                env.step(None)
            else:
                env.step(int(main.predict(obs)) if agent == mine else other(obs, rng))
        won, lost = won + (total > 0), lost + (total < 0)
    env.close()
    return {"won": float(won), "lost": float(lost)}


def exploited(trainer: ps.Trainer, rules: leduc.Rules) -> dict[str, float]:
    """Exploitability of main, of the average over the pool and main, each with equal weight, and of uniform play."""
    main, selves = (trainer.policy[name].agent for name in ("main", "opponent"))  # pyright: ignore
    assert isinstance(selves, PastSelves)
    kept = [member for member, serial in zip(selves.members, selves.serial.tolist()) if serial > 0]
    chances = [leduc.chances_of(agent, rules) for agent in (*kept, main)]
    return {
        "main": leduc.exploitability(chances[-1], rules),
        "average": leduc.exploitability(leduc.average(chances, rules), rules),
        "uniform": rules.uniform,
        "selves": float(len(chances)),
    }


def against_perfect(trainer: ps.Trainer) -> dict[str, float]:
    """100 games of tictactoe against perfect play, and what is to be expected of them."""
    return against(trainer, perfect) | expected_losses(trainer)


def two_of(make: Callable[[], Any], mapping: Mapping[str, str]) -> ps.Policies:
    """Policies that are alike, one for each id."""
    return ps.Policies({name: make() for name in dict.fromkeys(mapping.values())}, mapping)


def runs() -> dict[str, list[Run]]:
    """All runs by the name of their task."""

    def ppo() -> Any:
        return ps.PPO(lr=2e-3, epochs=4)

    def mpe(algo: Any) -> Any:
        """The settings of the preset for spread."""
        return ps.preset(algo.__name__.lower(), SPREAD).algo

    def qmix(mixer: Any) -> Any:
        return replace(ps.preset("qmix", "penstock.envs.toy:TwoStepMatrix").algo, mixer=mixer)  # pyright: ignore

    def games(name: str, env: str, score: Any, bar: Any, instead: Any = None) -> Run:
        """Self-play by the preset of an environment, in it or in another one."""
        exp = ps.preset("self-play", env)
        return Run(f"{name}/self-play", lambda: exp.algo, instead or env, exp.sampler, exp.run.steps, score, bar)

    bits = {"agent_0": "a", "agent_1": "b"}
    matrix, mpe_sampler = EnvConfig(TwoStepMatrix, state="env"), ps.SerialSampler(T=25, B=32)
    tictactoe, connect = "pettingzoo:classic/tictactoe_v3", "pettingzoo:classic/connect_four_v3"
    half, third = (functools.partial(episode_return, share=1 / n) for n in (2, 3))
    cards = "pettingzoo:classic/leduc_holdem_v4"
    late, of_pairs = (functools.partial(episode_return, share=1 / n) for n in (8, 16))
    few = ps.SerialSampler(T=4, B=8)
    return {
        "bits": [Run("bits/ppo+ppo", lambda: two_of(ppo, bits), TeamBits, ps.SerialSampler(T=64, B=8), 20_000, of_pairs,
                     lambda x: x["score"] >= 0.95),
                 Run("bits/mappo", lambda: ps.preset("mappo", "penstock.envs.toy:TeamBits").algo, TeamBits,
                     ps.SerialSampler(T=32, B=8), 20_000, of_pairs, lambda x: x["score"] >= 0.95)],
        "late": [Run("late/ppo", ppo, LatePay, ps.SerialSampler(T=32, B=8), 20_000, late, lambda x: x["score"] >= 0.98)],
        "matrix": [Run("matrix/qmix", lambda: qmix("qmix"), matrix, few, 10_000, half, lambda x: x["score"] == 8.0),
                   Run("matrix/vdn", lambda: qmix("vdn"), matrix, few, 10_000, half, lambda x: x["score"] == 7.0)],
        "nim": [Run("nim/self-play", lambda: ps.preset("self-play", "penstock.envs.toy:Nim").algo, Nim,
                    ps.SerialSampler(T=16, B=16), 60_000, nim_mistakes, lambda x: x["wrong"] == 0)],
        "spread": [Run(f"spread/{algo.__name__}", functools.partial(mpe, algo), SPREAD, mpe_sampler, 100_000, third,
                       lambda x: x["score"] > -22.0) for algo in (ps.PPO, ps.MAPPO)],
        "discount": [Run(f"discount/{x}", lambda x=x: replace(mpe(ps.PPO), lr=7e-4, discount=x), SPREAD, mpe_sampler,
                         25_600, third) for x in (0.9, 0.95, 0.99)],
        "speaker": [Run(f"speaker/{name.upper()}", functools.partial(lambda x: ps.preset(x, SPEAKER).algo, name), SPEAKER,
                        mpe_sampler, 1_000_000, half) for name in ("ppo", "mappo")],
        "tictactoe": [games("tictactoe", tictactoe, against_perfect, lambda x: x["lost"] <= 2)],
        "connect-four": [games("connect-four", connect, functools.partial(against, other=random_move),
                               lambda x: x["won"] >= 95)],
        "leduc": [games(f"leduc/{rules.name}", cards, functools.partial(exploited, rules=rules),
                        lambda x: x["average"] < x["uniform"], env)
                  for rules, env in ((leduc.LEDUC_POKER, leduc.LeducPoker), (leduc.RLCARD, None))],
    }  # fmt: skip


def play(run: Run, seed: int, steps: int | None) -> dict[str, Any]:
    """A run from its start to its score."""
    started, budget = time.monotonic(), steps or run.steps
    config = ps.RunConfig(steps=budget, seed=seed)
    exp = ps.Experiment(env=run.env, algo=run.algo(), sampler=run.sampler, run=config)
    found: dict[str, float] = {}
    with ps.Trainer(exp) as trainer:
        while trainer.env_steps < budget:
            found = trainer.train()
        score = run.score(trainer)
    passed = None if run.bar is None else bool(run.bar(score))
    kept = {name: x for name, x in found.items() if name.startswith("self_play/")}
    seconds = round(time.monotonic() - started, 1)
    return {"run": run.name, "seed": seed, "steps": trainer.env_steps, **score, "passed": passed, "s": seconds, **kept}


def main() -> int:
    """Plays the tasks asked for; 1 if one misses its bar."""
    known = runs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=[*known])
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    good = True
    for run in (run for task in args.tasks for run in known[task]):
        for seed in map(int, args.seeds.split(",")):
            found = play(run, seed, args.steps)
            good &= found["passed"] is not False
            line = json.dumps(found)
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(f"{line}\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
