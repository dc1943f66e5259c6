"""Runs on the device of `tests/far.py`, in a process of their own: prints as JSON what `tests/learn/test_waits.py` looks at.

python -m tests.far_cases some | all
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

os.environ["PENSTOCK_NATIVE"] = "0"  # what is compared on the CPU is torch's, too

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.core.batch import TrainBatch
from penstock.core.errors import NonFiniteError
from penstock.learn.algorithm import Loss
from penstock.learn.optimizers import Adam, RAdam, RMSprop, take_step
from penstock.learn.step.gradients import gradients_of, set_gradients
from penstock.tensor_envs import CartPole, TensorToy
from tests.far import WAITS, Far, install

SMALL = ps.Net(hidden=(16,))
REPLAY: dict[str, Any] = {"batch_size": 16, "replay_ratio": 2, "learning_starts": 32, "net": SMALL}
HELD = ps.ReplaySettings(capacity=1_000, prefetch=False)
THERE = ps.ReplaySettings(capacity=1_000, device="learner")


class Reach(TensorToy):
    """Boxes, for SAC."""

    def __init__(self, num_envs: int = 1, device: str = "cpu", same_step: bool = False) -> None:
        from gymnasium import spaces

        super().__init__(num_envs, device, spaces.Box(-9, 9, (2,)), spaces.Box(-1, 1, (2,)), 7, same_step)

    def fresh(self) -> Tensor:
        return torch.zeros(self.num_envs, 2, device=self.device)

    def advance(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        after = (state + action).clamp(-9, 9)
        return after, -after.square().sum(1), after.abs().amax(1) > 8

    def observe(self, state: Tensor) -> Tensor:
        return state.clone()


RUNS: dict[str, tuple[Any, Any]] = {
    "ppo": (CartPole, ps.PPO(epochs=3, minibatch=32, net=SMALL)),
    "ppo-1": (CartPole, ps.PPO(epochs=1, minibatch=32, net=SMALL)),
    "ppo-normalised": (
        CartPole,
        ps.PPO(epochs=4, minibatch=32, net=ps.Net(hidden=(16,), normalize_obs=True, normalize_reward=True)),
    ),
    "a2c": (CartPole, ps.A2C(net=SMALL)),
    "pqn": (CartPole, ps.PQN(epochs=3, minibatch=32, net=SMALL)),
    "dqn": (CartPole, ps.DQN(**REPLAY, epsilon=0.1, replay=HELD)),
    "sac": (Reach, ps.SAC(**REPLAY, replay=HELD)),
    "fast-sac": (
        Reach,
        ps.SAC(
            **{**REPLAY, "net": ps.Net(hidden=(16,), normalize_obs=True)},
            replay=HELD,
            distributional="c51",
            policy_delay=2,
            clipped_double=False,
        ),
    ),
    "fast-td3": (
        Reach,
        ps.TD3(**REPLAY, replay=HELD, distributional="c51", exploration_noise_low=0.01, target_actor=False, n_step=3),
    ),
    "dqn-there": (CartPole, ps.DQN(**REPLAY, epsilon=0.1, replay=THERE)),
    "resets-there": (partial(Reach, same_step=True), ps.SAC(**REPLAY, replay=THERE)),
    "fast-td3-there": (Reach, ps.TD3(**REPLAY, replay=THERE, distributional="c51", target_actor=False, n_step=3)),
}


def waits(env: Any, algo: Any, T: int) -> dict[str, Any]:
    """Waits of the third batch of 8 slots."""
    sampler = ps.SerialSampler(T=T, B=8).build(ps.EnvConfig(env, {"device": "far"}), 1)
    policy = algo.build(sampler.spec, 0, "far")
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    out: dict[str, Any] = {}
    for itr in range(3):
        WAITS.clear()
        batch, _ = sampler.obtain_samples(itr)
        env_steps = batch.env_steps
        out["sampling"] = dict(WAITS)
        before = policy.updates
        WAITS.clear()
        ps.train_one_step(policy, batch, env_steps)
        out["training"], out["updates"] = dict(WAITS), policy.updates - before
    sampler.shutdown()
    return out


def nets(device: str) -> list[nn.Linear]:
    torch.manual_seed(3)
    return [nn.Linear(3, 2).to(device), nn.Linear(3, 1).to(device)]


MAKE: dict[str, Any] = {
    "adam": lambda p: Adam(p, lr=0.1, eps=1e-5),
    "adamw": lambda p: Adam(p, lr=0.1, weight_decay=0.1, decoupled=True),
    "rmsprop": lambda p: RMSprop([{"params": list(p)}], lr=0.1, alpha=0.99, eps=1e-5, foreach=True),
    "radam": lambda p: RAdam([{"params": list(p)}], lr=0.1, betas=(0.8, 0.6), eps=1e-5, weight_decay=0.1, foreach=True),
    "torch's fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "one's own": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


HOW: dict[str, dict[str, Any]] = {
    "one": {"apart": False, "groups": False},
    "groups": {"apart": False, "groups": True},
    "apart": {"apart": True, "groups": False},
    "learners": {"apart": False, "groups": True, "learners": 2},
}


def bits(optimizers: Mapping[str, Any], modules: Sequence[nn.Module]) -> str:
    """Parameters and optimizers, every digit of them."""
    return told([x.state_dict() for x in (*optimizers.values(), *modules)])


def told(x: Any) -> str:
    if isinstance(x, Tensor):
        return str((x.held if isinstance(x, Far) else x.detach()).tolist())
    if isinstance(x, Mapping):
        return str({k: told(v) for k, v in x.items()})
    return str([told(v) for v in x]) if isinstance(x, (list, tuple)) else str(x)


def steps(kind: str, device: str, *, apart: bool, groups: bool, learners: int = 1) -> dict[str, Any]:
    """Updates with finite and other losses: what is the same before and after, and the end."""
    modules = nets(device)
    params = [list(m.parameters()) for m in modules]
    parts = {"a": params[0], "b": params[1]} if apart else {"all": params[0] + params[1]}
    optimizers: dict[str, Any] = {name: MAKE[kind](p) for name, p in parts.items()}
    group_of = {id(p): f"group{i}" for i, held in enumerate(params) for p in held} if groups else {}
    torch.manual_seed(5)
    x = torch.randn(4, 3).to(device)
    kept, norms = [], None
    for scale in (1.0, 100.0, float("nan"), 3.0, float("inf"), 0.01, 2.0):
        finite = torch.tensor(scale).isfinite().item()

        def loss(factor: float) -> Loss:
            totals = [m(x).square().sum() for m in modules]
            totals[0] = totals[0] * factor
            return Loss(dict(zip("ab", totals)) if apart else totals[0] + totals[1], {})

        def summed(found: Any) -> Any:
            """What the all-reduce makes of these gradients and of those of a learner whose are finite."""
            other = gradients_of(loss(1.0), optimizers)
            return {
                k: g._replace(values=[v + w for v, w in zip(g.values, other[k].values)], total=g.total + other[k].total)
                for k, g in found.items()
            }

        before = bits(optimizers, modules)
        norms = set_gradients(loss(scale), optimizers, 1.0, summed if learners > 1 else None, group_of)
        for optimizer in optimizers.values():
            take_step(optimizer, norms.refused)
        kept.append((bits(optimizers, modules) == before) is not finite)
    assert norms is not None
    return {"as it should": kept, "end": bits(optimizers, modules), "groups": list(norms.of)}


def poisoned(policy: Any, batch: Any, by: float, times: int) -> list[bool]:
    """Gradient steps on rows with a bad advantage; True for each that changed nothing."""
    data = policy.postprocess(batch)
    bad = TrainBatch(data.inputs, {**data.rows, "advantage": data["advantage"] * by}, data.valid, data.state)
    minibatch = next(iter(ps.minibatches(bad, None, policy.shuffler())))
    same = []
    for _ in range(times):
        before = bits(policy.optimizers, [policy.agent])
        policy.learn_on_batch(minibatch)
        same.append(bits(policy.optimizers, [policy.agent]) == before)
    return same


def errors() -> dict[str, Any]:
    """Of PPO whose rows turn bad."""
    sampler = ps.SerialSampler(T=16, B=8).build(ps.EnvConfig(CartPole, {"device": "far"}), 1)
    policy = RUNS["ppo"][1].build(sampler.spec, 0, "far")
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    batch, _ = sampler.obtain_samples(0)
    ps.train_one_step(policy, batch)
    out: dict[str, Any] = {"updates": policy.updates, "same": poisoned(policy, batch, float("nan"), 3)}
    metrics = ps.train_one_step(policy, sampler.obtain_samples(1)[0])
    out |= {"counted": (policy.updates, policy.skipped), "metrics": metrics}
    poisoned(policy, batch, float("inf"), 10)
    try:
        policy.settle()
    except NonFiniteError as error:
        out["error"] = str(error)
    sampler.shutdown()
    return out


def main() -> None:
    some = sys.argv[1] == "some"
    runs = {name: RUNS[name] for name in ("ppo", "resets-there")} if some else RUNS
    with install():
        found: dict[str, Any] = {
            "waits": {name: {T: waits(*run, T) for T in (8, 12)} for name, run in runs.items()},
            "steps": {
                f"{kind}, {more}": [steps(kind, device, **how) for device in ("far", "cpu")]
                for kind in (("adam", "rmsprop", "radam") if some else MAKE)
                for more, how in HOW.items()
            },
            "errors": errors(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
