"""Acting, targets, losses, gradients and optimizers of every algorithm stay on one device: no GPU is needed to see it.

torch's fake tensors know shapes and devices and hold no numbers; an operation on tensors of two devices is an error. Of
the batches, which lie on the CPU, agents and losses are shown what a run would move to the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import penstock as ps
from penstock.agents.example_step import _opening  # pyright: ignore[reportPrivateUsage]
from penstock.core.batch import SampleBatch
from penstock.core.tree import tree_leaves, tree_map
from penstock.learn.rows.minibatch import minibatches
from penstock.learn.step.gradients import gradients_of
from penstock.learn.train_ops import train_one_step

THERE = "meta"
"""The device, of which torch has all operations without a driver."""
RELU = ps.Net(hidden=(16,), activation="relu")
NORMS = ps.Net(hidden=(16,), activation="relu", normalize_obs=True, normalize_reward=True)
FED = ps.Net(hidden=(16,), recurrent="lstm", recurrent_size=8, normalize_obs=True, prev_action=True, prev_reward=True)
SDE = ps.Net(hidden=(16,), activation="relu", use_sde=True)
PER = ps.ReplaySettings(capacity=1_000, index="prioritized")
SMALL: dict[str, Any] = {
    "batch_size": 8, "replay_ratio": 1.0, "learning_starts": 16, "net": RELU, "replay": ps.ReplaySettings(capacity=1_000),
}  # fmt: skip
ON_POLICY: dict[str, Any] = {"epochs": 1, "minibatch": 16}
QUICK = {"rainbow", "sac-norms"}
CASES: dict[str, tuple[str, Any]] = {
    "ppo": ("CartPole-v1", ps.PPO(**ON_POLICY)),
    "ppo-lstm": ("CartPole-v1", ps.PPO(**ON_POLICY, net=FED)),
    "ppo-norms": ("Pendulum-v1", ps.PPO(**ON_POLICY, net=NORMS)),
    "ppo-sde": ("Pendulum-v1", ps.PPO(**ON_POLICY, net=SDE)),
    "ppo-squash": ("Pendulum-v1", ps.PPO(**ON_POLICY, net=ps.Net(squash=True))),
    "a2c": ("CartPole-v1", ps.A2C()),
    "impala": ("CartPole-v1", ps.IMPALA()),
    "appo": ("CartPole-v1", ps.APPO(**ON_POLICY)),
    "bc": ("CartPole-v1", ps.BC()),
    "marwil": ("CartPole-v1", ps.MARWIL()),
    "dqn": ("CartPole-v1", ps.DQN(**SMALL)),
    "rainbow": (
        "CartPole-v1",
        ps.DQN(**{**SMALL, "replay": PER}, noisy=True, dueling=True, distributional="c51", n_step=3),
    ),
    "quantiles": ("CartPole-v1", ps.DQN(**SMALL, distributional="quantile", eps_eval=0.05)),
    "r2d1": (
        "CartPole-v1",
        ps.R2D1(
            net=FED, batch_size=2, burn_in=4, train_length=8, state_interval=16, learning_starts=48,
            replay=ps.ReplaySettings(capacity=1_000, index="prioritized", fresh_priority="agent"),
        ),
    ),
    "sac": ("Pendulum-v1", ps.SAC(**SMALL)),
    "sac-norms": ("Pendulum-v1", ps.SAC(**{**SMALL, "net": NORMS})),
    "sac-sde": ("Pendulum-v1", ps.SAC(**{**SMALL, "net": SDE})),
    "td3": ("Pendulum-v1", ps.TD3(**SMALL)),
    "ddpg": ("Pendulum-v1", ps.DDPG(**SMALL)),
    "cql": ("Pendulum-v1", ps.CQL(**SMALL)),
    "iql": ("Pendulum-v1", ps.IQL(**SMALL)),
    "rebrac": ("Pendulum-v1", ps.ReBRAC(**SMALL)),
    "discrete-sac": ("CartPole-v1", ps.DiscreteSAC(**SMALL)),
}  # fmt: skip


class Elsewhere(FakeTensorMode):
    """Fake tensors, of which every number that is asked for is 1 or True, and every mask holds everywhere."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default and args[0].device.type == THERE:
            self.asked += 1
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=THERE)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == THERE:
            self.asked += 1
            return True if args[0].dtype is torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def there(x: Any) -> Any:
    """What a move to the device makes of a tensor or array, but for its numbers."""
    x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=THERE)


def move(policy: ps.Policy) -> None:
    """As `agent.to(device)` and optimizers made there."""
    known: dict[int, Tensor] = {}
    for module in policy.agent.modules():
        for name, x in [*module._parameters.items(), *module._buffers.items()]:
            if x is None:
                continue
            if id(x) not in known:
                known[id(x)] = there(x)
                if isinstance(x, torch.nn.Parameter):
                    known[id(x)] = torch.nn.Parameter(known[id(x)], requires_grad=x.requires_grad)
            held: Any = module._parameters if name in module._parameters else module._buffers
            held[name] = known[id(x)]
    policy.optimizers = policy.optimizer_fn(policy.agent, policy.settings)


def devices(tree: Any) -> set[str]:
    return {x.device.type for x in tree_leaves(tree) if isinstance(x, Tensor)}


@pytest.mark.parametrize("case", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES])
def test_everything_stays_on_the_device(case: str) -> None:
    env, algo = CASES[case]
    sampler = ps.SerialSampler(16, 4).build(env, 0)
    source = algo.build(sampler.spec, seed=0)
    source.prepare(sampler.batch_spec, sampler.initialize(source.agent)["info"])
    batches = [sampler.obtain_samples(itr)[0].copy() for itr in range(5)]
    sampler.shutdown()
    for batch in batches[:4]:
        train_one_step(source, batch)
    policy = algo.build(sampler.spec, seed=0)
    policy.agent.set_slots(4)
    with Elsewhere() as mode:
        move(policy)
        act(policy, mode)
        batch: SampleBatch = tree_map(there, batches[4])
        policy.observe(batch)
        minibatch = one(policy, batch) if source.replay_schedule is None else drawn(policy, source)
        assert devices((tuple(minibatch.inputs), dict(minibatch.rows))) == {THERE}
        loss = policy.loss_fn(policy.agent, minibatch, policy.settings)
        for parameters, gradients, _ in gradients_of(loss, policy.optimizers).values():
            for p, gradient in zip(parameters, gradients):
                p.grad = gradient
        for name in loss.total if isinstance(loss.total, dict) else policy.optimizers:
            policy.optimizers[name].step()
        schedule = policy.replay_schedule
        if schedule is not None and schedule.after_update is not None:
            schedule.after_update(policy.agent, policy.settings, 1)
        if policy.renews_noise:
            policy.agent.renew_noise(np.random.default_rng(0))
        policy.set_progress(0.5, 1_000)


def act(policy: ps.Policy, mode: Elsewhere) -> None:
    """With noise and without; nothing of a tensor is asked, which no CUDA graph could hold."""
    inputs, state = _opening(policy.agent, policy.spec, 4)
    noise = torch.full((4, policy.agent.noise_size), 0.5, device=THERE)
    mode.asked = 0
    with torch.inference_mode():
        for uniforms in (noise, None):
            assert devices(policy.agent.act(inputs, state, uniforms)) == {THERE}
    assert mode.asked == 0


def one(policy: ps.Policy, batch: SampleBatch) -> Any:
    data = policy.postprocess_fn(policy.agent, batch, policy.settings)
    return next(iter(minibatches(data, policy.minibatch, policy.shuffler(), 1, None)))


def drawn(policy: ps.Policy, source: ps.Policy) -> Any:
    schedule = source.replay_schedule
    assert schedule is not None
    _, x = next(
        iter(
            schedule.replay.samples(
                1, schedule.batch_size, np.random.default_rng(0), 0.5, noise_size=schedule.noise_size, prefetch=False,
                ready=lambda sample: tree_map(there, sample),
            )
        )
    )  # fmt: skip
    with torch.no_grad():
        return policy.postprocess_fn(policy.agent, replace(x, rows={**x.rows, "update": 1}), policy.settings)


def test_two_devices_are_told_apart() -> None:
    with Elsewhere(), pytest.raises(RuntimeError, match="same device"):
        _ = torch.zeros(3, device=THERE) + torch.zeros(3)
