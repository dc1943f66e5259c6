"""Speed of penstock beside Stable-Baselines3 and a hand-written loop on this machine, by turns on one core (turns.py).

Making model and environments counts in `ppo` and `time_to_475`, importing the library does not: there every round starts fresh
processes. Floor: see floor.py.

    python benchmarks/speed.py --peer .venv-peer/bin/python [--only sampling,ppo] [--rounds 5] [--write]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import turns
from floor import floor_unit
from turns import Bar, Case, Who

ENV, T = "CartPole-v1", 128
PPO_SETTINGS = {"lr": 1e-3, "entropy_coef": 0.01, "discount": 0.99, "gae_lambda": 0.95, "clip": 0.2, "value_coef": 0.5,
                "max_grad_norm": 0.5, "epochs": 4, "minibatch": 512}  # fmt: skip
PPO_STEPS, SOLVED, MAX_STEPS = 200_000, 475.0, 600_000


@contextmanager
def sampling(B: int, seed: int) -> Iterator[turns.Unit]:
    """Valid environment steps of `obtain_samples` with a fresh policy."""
    import penstock as ps

    yield from _sampled(ps.SerialSampler(T=T, B=B).build(ENV, seed), seed)


@contextmanager
def native(seed: int) -> Iterator[turns.Unit]:
    """The same over 256 environments that one numpy program steps at once."""
    import penstock as ps

    yield from _sampled(ps.SerialSampler(T=64, B=256).build(_cart_poles, seed), seed)


def _cart_poles() -> Any:
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    return CartPoleVectorEnv(num_envs=256)


def _sampled(sampler: Any, seed: int) -> Iterator[turns.Unit]:
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    sampler.initialize(ps.PPO(**PPO_SETTINGS).build(sampler.spec, seed).agent)
    itr = 0

    def unit() -> float:
        nonlocal itr
        itr += 1
        return sampler.obtain_samples(itr - 1)[0].env_steps

    yield unit
    sampler.shutdown()


@contextmanager
def floor(B: int, seed: int) -> Iterator[turns.Unit]:
    """A batch of the hand-written loop."""
    yield floor_unit(ENV, T, B, seed)


@contextmanager
def ppo(seed: int) -> Iterator[turns.Unit]:
    """Environment steps of `train`, from its call to its return; the rate without building, and where the time went."""
    import torch

    import penstock as ps
    from penstock.run import trainer

    torch.set_num_threads(1)
    spent, cpu = {"sample": 0.0, "train": 0.0}, [0.0]
    step = trainer.training_step

    def counted(*arguments: Any) -> Any:
        cpu[0] = cpu[0] or time.process_time()
        result = step(*arguments)
        spent["sample"] += result.sample_s
        spent["train"] += result.train_s
        return result

    trainer.training_step = counted
    run = ps.RunConfig(steps=PPO_STEPS, seed=seed, checkpoint_interval=0, eval_episodes=0, progress="off")
    train = _trainer(ps.Experiment(ENV, ps.PPO(**PPO_SETTINGS), ps.SerialSampler(T=T, B=16), run))

    def unit() -> turns.Look:
        started = time.perf_counter()
        result = train()
        parts = {f"{name} fraction": s / (time.perf_counter() - started) for name, s in spent.items()}
        return {
            "work": result.env_steps,
            "steps/CPU s of training": result.env_steps / (time.process_time() - cpu[0]),
            **parts,
        }

    yield unit


@contextmanager
def solved(seed: int) -> Iterator[turns.Unit]:
    """From the call of `train` with the preset to its return; nothing but the preset's settings."""
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    exp = ps.override(ps.preset("ppo", ENV), {
        "run.stop": {"rollout/ep_rew_mean": SOLVED}, "run.steps": MAX_STEPS, "run.seed": seed,
        "run.checkpoint_interval": 0, "run.eval_episodes": 0, "run.progress": "off",
    })  # fmt: skip
    train = _trainer(exp)

    def unit() -> turns.Look:
        result = train()
        return {"work": 1.0, "steps": result.env_steps, "solved": float(result.stopped_by == "stop rule")}

    yield unit


def _trainer(exp: Any) -> Any:
    import penstock as ps

    train = ps.train  # its modules are imported here, as the peer's are before its clock starts

    def call() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return train(ps.override(exp, {"run.dir": f"{folder}/run"}))

    return call


def _case(B: int, *bars: Bar) -> Case:
    given = {"B": B}
    who = {
        "penstock": Who("sampling", given),
        "SB3": Who("sampling", given, "peers/sb3.py", "peer"),
        "floor": Who("floor", given),
    }
    return Case(f"sampling, {ENV}, B={B}", "steps/s", who, bars)


CASES = {
    "sampling-16": _case(16, Bar("penstock", 3.0, ("SB3",)), Bar("penstock", 0.95, ("floor",))),
    "sampling-64": _case(64, Bar("penstock", 0.92, ("floor",))),
    "native": Case("sampling, CartPoleVectorEnv, B=256", "steps/s", {"penstock": Who("native")}, (Bar("penstock", 400_000.0),)),
    "ppo": Case(f"PPO, {ENV}, {PPO_STEPS // 1000}k steps", "steps/s",
                {"penstock": Who("ppo"), "SB3": Who("ppo", {"steps": PPO_STEPS}, "peers/sb3.py", "peer")},
                (Bar("penstock", 2.6, ("SB3",)), Bar("penstock", 2.6, ("SB3",), of="steps/CPU s of training")),
                seconds=0.0, rounds=5, fresh=1),
    "time_to_475": Case(f"PPO, {ENV}, to a mean return of 475", "s",
                        {"penstock": Who("solved"), "SB3": Who("solved", {"goal": SOLVED, "steps": MAX_STEPS}, "peers/sb3.py", "peer")},
                        (Bar("penstock", 0.2, ("SB3",), below=True), Bar("penstock", 1.0, of="solved", worst=True)),
                        seconds=0.0, rounds=5, fresh=1),
}  # fmt: skip
"""`--only sampling` means both that begin so."""
MAKERS = {f.__name__: f for f in (sampling, native, floor, ppo, solved)}

if __name__ == "__main__":
    turns.main(__doc__, CASES, MAKERS, {"peer": "stable-baselines3"})
