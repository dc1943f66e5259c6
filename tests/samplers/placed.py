"""Samplers by the places where they put work, agents to run in them, and the bits of their updates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

import penstock as ps
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.toy import PixelCatch, TMaze
from penstock.learn.rows.postprocess import as_tensors
from penstock.testing.samplers import bits

PLACES: dict[str, Callable[..., Any]] = {
    "serial": ps.SerialSampler,
    "cpu-1": lambda T, B, **k: ps.CpuSampler(T, B, workers=1, **k),
    "cpu-2": lambda T, B, **k: ps.CpuSampler(T, B, workers=2, **k),
    "cpu-3": lambda T, B, **k: ps.CpuSampler(T, B, workers=3, **k),
    "cpu-4": lambda T, B, **k: ps.CpuSampler(T, B, workers=4, **k),
    "gpu-1": lambda T, B, **k: ps.GpuSampler(T, B, workers=1, **k),
    "gpu-2": lambda T, B, **k: ps.GpuSampler(T, B, workers=2, **k),
    "alternating-2": lambda T, B, **k: ps.AlternatingSampler(T, B, workers=2, **k),
    "alternating-3": lambda T, B, **k: ps.AlternatingSampler(T, B, workers=2, groups=3, **k),
    "no-overlap": lambda T, B, **k: ps.NoOverlapAlternatingSampler(T, B, workers=2, **k),
    "async-serial-0": lambda T, B, **k: ps.AsyncSerialSampler(ps.SerialSampler(T, B, **k), depth=0),
    "async-cpu-0": lambda T, B, **k: ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2, **k), depth=0),
    "async-alternating-0": lambda T, B, **k: ps.AsyncAlternatingSampler(
        ps.AlternatingSampler(T, B, workers=2, **k), depth=0
    ),
}
"""SerialSampler and every sampler that must give its batches."""


CASES: dict[str, tuple[Any, Any]] = {
    "pendulum": ("Pendulum-v1", ps.PPO(epochs=4, minibatch=64, net=ps.Net(normalize_obs=True, normalize_reward=True))),
    "cartpole": ("CartPole-v1", ps.PPO(epochs=4, minibatch=64)),
    "lstm": (TMaze, ps.PPO(epochs=4, minibatch=64, net=ps.Net(recurrent="lstm", recurrent_size=16))),
    "gsde": (
        "Pendulum-v1",
        ps.PPO(epochs=1, minibatch=64, net=ps.Net(use_sde=True, sde_sample_freq=5, log_std_init=-2.0)),
    ),
    "cnn": (EnvConfig(PixelCatch, {"scale": 5}), ps.PPO(epochs=1, minibatch=64)),
}


def live(settings: Any, env: Any, algo: Any) -> tuple[Any, Any]:
    sampler = settings.build(env, 5)
    policy = algo.build(sampler.spec, seed=5)
    sampler.initialize(policy.agent)
    return sampler, policy


def digest(policy: Any) -> str:
    leaves = [x for x in tree_leaves(dict(policy.agent.state_dict())) if isinstance(x, torch.Tensor)]
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in leaves)).hexdigest()


def run(settings: Any, env: Any, algo: Any, updates: int, evaluate: bool = False) -> tuple[list[Any], str]:
    """Of every update the bits of batch, values and episodes; and a digest of the parameters in the end."""
    sampler, policy = live(settings, env, algo)
    out: list[Any] = []
    try:
        for itr in range(updates):
            batch, episodes = sampler.obtain_samples(itr)
            values = policy.agent.values(as_tensors(batch, policy.device)).numpy().tobytes()
            out.append((bits(batch), values, episodes.return_.tobytes(), episodes.slot.tobytes()))
            ps.train_one_step(policy, batch)
            if evaluate and itr % 2:
                found = sampler.evaluate_agent(itr, 5, deterministic=itr % 4 == 1)
                out.append((found.return_.tobytes(), found.length.tobytes()))
    finally:
        sampler.shutdown()
    return out, digest(policy)


_SERIAL: dict[Any, Any] = {}


def serial(case: str, T: int, B: int, updates: int, evaluate: bool = False, **kwargs: Any) -> Any:
    """What a SerialSampler gives, computed once for all tests that compare with it."""
    key = case, T, B, updates, evaluate, tuple(kwargs.items())
    if key not in _SERIAL:
        _SERIAL[key] = run(ps.SerialSampler(T, B, **kwargs), *CASES[case], updates, evaluate)
    return _SERIAL[key]


def differences(a: Any, b: Any) -> list[str]:
    """Which leaves of which batch differ."""
    found: list[str] = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x[0], dict):
            found += [f"{i}: {key}" for key in x[0] if x[0][key] != y[0][key]]
        found += [f"{i}: part {k}" for k in range(len(x)) if not isinstance(x[k], dict) and x[k] != y[k]]
    return found
