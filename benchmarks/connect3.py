"""Connect-3 on 6 x 2 by its presets: the share of positions in which the likeliest move keeps the value, as it learns.

    python -m benchmarks.connect3 [--algo self-play|ppo] [--seeds 1,2,3] [--steps N] [--every N]

Positions are all 19,944 that legal moves lead to from the empty board and in which the game goes on, each counted once,
however seldom the policy itself comes there. Exploitability is exact, of likeliest moves from the empty board.
"""

from __future__ import annotations

import argparse
import time

import penstock as ps
from penstock.run.playing.sides import playing
from tests.connect3 import share_right

ENV = "penstock.envs.toy:Connect3"


def learn(algo: str, seed: int, steps: int | None, every: int) -> None:
    """Trains once and prints a row every so many moves, and one at the end."""
    exp = ps.preset(algo, ENV)
    changes = {"run.seed": seed, "run.steps": steps or exp.run.steps}
    measured = {"run.eval_episodes": 1, "run.eval_exploitability": True}
    exp = ps.override(exp, {**changes, **measured})
    trainer, due, started = ps.Trainer(exp), every, time.perf_counter()
    over = False
    while not over:
        trainer.train()
        over = trainer.env_steps >= exp.run.steps
        if trainer.env_steps >= due or over:
            due += every
            share = share_right(playing(trainer.policy, "agent_0")[1].agent)
            lost = trainer.evaluate()[0]["eval/exploitability"]
            took = time.perf_counter() - started
            print(f"| {algo} | {seed} | {trainer.env_steps:,} | {share:.1%} | {lost} | {took:.0f} s |", flush=True)


def main() -> None:
    """A table of all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=["self-play", "ppo"], default="self-play")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, default=50_000)
    args = parser.parse_args()
    print(
        "| algorithm | seed | moves | positions played right | exploitability | wall time |\n|---|---|---|---|---|---|"
    )
    for seed in map(int, args.seeds.split(",")):
        learn(args.algo, seed, args.steps, args.every)


if __name__ == "__main__":
    main()
