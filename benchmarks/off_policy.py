"""Steps per second of SAC, TD3 and DQN with one gradient step for each environment step, beside other libraries.

Peers are Stable-Baselines3, its JAX twin SBX, jitted, and for DQN one plain file of torch as CleanRL writes them. Same
networks (256 x 256), batch (256; DQN 128), one thread each, by turns on one core (turns.py). PPO is that of CartPole, 16 x
128 steps and 4 epochs of minibatches of 512. Among the contestants is the product that updates are made of, [batch, 256] x
[256, 256], to say what share of its rate an update reaches. Last, penstock with two threads on two cores beside one.

    python benchmarks/off_policy.py --peer PYTHON [--sbx PYTHON] [--only sac] [--rounds 21] [--seconds 0.25] [--write]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import turns
from turns import Bar, Case, Who

import penstock as ps
from penstock.agents.mlp import product
from penstock.run.trainer import Trainer

WARM, STEPS = 500, 16
MEMORY = ps.ReplaySettings(capacity=100_000)
SETUPS: dict[str, tuple[str, ps.Algorithm, ps.SerialSampler | None]] = {
    "sac": ("Pendulum-v1", ps.SAC(learning_starts=WARM, replay=MEMORY), None),
    "td3": ("Pendulum-v1", ps.TD3(learning_starts=WARM, replay=MEMORY), None),
    "dqn": ("CartPole-v1", ps.DQN(batch_size=128, replay_ratio=128, learning_starts=WARM, double=False, target_interval=10_000,
                                  replay=MEMORY), None),
    "ppo": ("CartPole-v1", ps.PPO(lr=1e-3, entropy_coef=0.01, value_coef=0.5, epochs=4, minibatch=512), ps.SerialSampler(T=128, B=16)),
}  # fmt: skip


@contextmanager
def training(algo: str, seed: int, threads: int = 1) -> Iterator[turns.Unit]:
    """Iterations of a warm trainer, counted in environment steps."""
    torch.set_num_threads(threads)
    env, settings, sampler = SETUPS[algo]
    with Trainer(ps.Experiment(env, settings, sampler, ps.RunConfig(steps=10**9, seed=seed))) as trainer:

        def steps(n: int) -> float:
            before = trainer.env_steps
            while trainer.env_steps < before + n:
                trainer.train()
            return trainer.env_steps - before

        steps(WARM + 200)
        yield lambda: steps(STEPS)


@contextmanager
def products(batch: int, seed: int) -> Iterator[turns.Unit]:
    """Ten [batch, 256] x [256, 256] by the library that an update of that size uses."""
    torch.set_num_threads(1)
    x, w = torch.randn(batch, 256), torch.randn(256, 256)

    def unit() -> float:
        for _ in range(10):
            product(x, w)
        return 10

    yield unit


def case(algo: str, batch: int, count: int, bars: dict[str, float]) -> Case:
    """`count`: products of an update, an actor's counted by half in TD3; 0 if it is not made of them."""
    peer = "peers/sb3.py"
    steps = 2048 if algo == "ppo" else STEPS
    who = {
        "penstock": Who("training", {"algo": algo}),
        "SB3": Who("training", {"algo": algo, "steps": steps}, peer, "peer"),
        "SBX": Who("training", {"algo": algo, "steps": steps, "library": "sbx"}, peer, "sbx"),
        **({"plain": Who("training", {"steps": STEPS}, "peers/plain_dqn.py")} if "plain" in bars else {}),
        **({"products": Who("products", {"batch": batch})} if count else {}),
    }

    def share(found: turns.Found) -> list[str]:
        if not count:
            return []
        step, one = (min(x["cpu"] / x["work"] for x in found[name]) for name in ("penstock", "products"))
        return [f"share of the rate of products: {count * one / step:.2f}, by best looks"]

    return Case(
        f"{algo}, {SETUPS[algo][0]}",
        "steps/s",
        who,
        tuple(Bar("penstock", x, (name,)) for name, x in bars.items()),
        notes=share,
    )


CASES = {
    "sac": case("sac", 256, 15, {"SB3": 1.3, "SBX": 1.1}),
    "td3": case("td3", 256, 12, {"SB3": 1.3, "SBX": 1.1}),
    "dqn": case("dqn", 128, 4, {"SB3": 1.4, "SBX": 1.3, "plain": 1.3}),
    "ppo": case("ppo", 512, 0, {"SBX": 1.6}),
    **{f"threads-{algo}": Case(f"{algo}, two threads beside one", "steps/s", {
        f"{word}": Who("training", {"algo": algo, "threads": n}) for n, word in ((2, "two threads"), (1, "one thread"))
    }, (Bar("two threads", 1.4, ("one thread",)),), clock="wall", one_core=False) for algo in ("sac", "td3")},
}  # fmt: skip

if __name__ == "__main__":
    turns.main(__doc__, CASES, {"training": training, "products": products},
               {"peer": "stable-baselines3", "sbx": "sbx-rl"})  # fmt: skip
