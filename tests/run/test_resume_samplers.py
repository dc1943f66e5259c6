from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

SERIAL = ps.SerialSampler(T=16, B=4)
DEPTH_0, DEPTH_1 = (ps.AsyncSerialSampler(SERIAL, depth) for depth in (0, 1))


def experiment(sampler: Any, run_dir: Path, steps: int) -> ps.Experiment:
    run = ps.RunConfig(steps=steps, seed=3, dir=str(run_dir), eval_interval=192, eval_episodes=2, progress="off")
    net = ps.Net(normalize_obs=True, normalize_reward=True)
    return ps.Experiment("CartPole-v1", ps.PPO(epochs=2, minibatch=32, net=net), sampler, run)


def parameters(policy: Any) -> dict[str, bytes]:
    return {name: x.numpy().tobytes() for name, x in policy.agent.state_dict().items()}


ALTERNATING = ps.AlternatingSampler(T=16, B=4, workers=2, reset="batch_end")


@pytest.mark.parametrize("sampler", [ALTERNATING, DEPTH_1], ids=["alternating", "async-1"])
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(sampler: Any, tmp_path: Path) -> None:
    whole = ps.train(experiment(sampler, tmp_path / "whole", 320))
    ps.train(experiment(sampler, tmp_path / "cut", 128))
    resumed = ps.resume(tmp_path / "cut", {"run.steps": 320})
    assert parameters(resumed.policy) == parameters(whole.policy)
    assert resumed.episodes.return_.tolist() == whole.episodes.return_.tolist()


def test_samplers_end_with_the_same_bits(tmp_path: Path) -> None:
    serial, depth_0 = (ps.train(experiment(s, tmp_path / type(s).__name__, 320)) for s in (SERIAL, DEPTH_0))
    assert parameters(serial.policy) == parameters(depth_0.policy)
