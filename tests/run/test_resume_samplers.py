from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps

pytestmark = pytest.mark.timeout(120)

SAMPLERS: dict[str, Any] = {
    "cpu": ps.CpuSampler(T=32, B=8, workers=2),
    "gpu": ps.GpuSampler(T=32, B=8, workers=2),
    "alternating": ps.AlternatingSampler(T=32, B=8, workers=2, reset="batch_end"),
    "async-0": ps.AsyncSerialSampler(ps.SerialSampler(T=32, B=8), depth=0),
    "async-1": ps.AsyncSerialSampler(ps.SerialSampler(T=32, B=8), depth=1),
}


def experiment(sampler: Any, run_dir: Path, steps: int) -> ps.Experiment:
    run = ps.RunConfig(
        steps=steps, seed=3, dir=str(run_dir), eval_interval=1024, eval_episodes=4, progress="off", tensorboard=False
    )
    net = ps.Net(normalize_obs=True, normalize_reward=True)
    return ps.Experiment("CartPole-v1", ps.PPO(minibatch=64, net=net), sampler, run)


def parameters(policy: Any) -> dict[str, bytes]:
    return {name: x.numpy().tobytes() for name, x in policy.agent.state_dict().items()}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(kind: str, tmp_path: Path) -> None:
    whole = ps.train(experiment(SAMPLERS[kind], tmp_path / "whole", 4096))
    ps.train(experiment(SAMPLERS[kind], tmp_path / "cut", 2048))
    resumed = ps.resume(tmp_path / "cut", {"run.steps": 4096})
    assert parameters(resumed.policy) == parameters(whole.policy)
    assert resumed.episodes.return_.tolist() == whole.episodes.return_.tolist()


def test_samplers_end_with_the_same_bits(tmp_path: Path) -> None:
    serial = parameters(ps.train(experiment(ps.SerialSampler(T=32, B=8), tmp_path / "serial", 2048)).policy)
    for kind in ("cpu", "gpu", "async-0"):
        assert parameters(ps.train(experiment(SAMPLERS[kind], tmp_path / kind, 2048)).policy) == serial
