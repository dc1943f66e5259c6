"""A run saved on the device goes on there in the same bits, and on the CPU from the same parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.run.trainer import Trainer
from tests.gpu.toys import CASES, bits


@pytest.mark.parametrize("case", CASES)
def test_goes_on_where_it_was_and_on_the_cpu(case: str, device: str, tmp_path: Path) -> None:
    with Trainer(CASES[case].experiment(device), tmp_path) as whole:
        for _ in range(4):
            whole.train()
        whole.save()
        saved = bits(whole)
        for _ in range(3):
            whole.train()
        end = bits(whole)
    for where in dict.fromkeys((device, "cpu")):
        with Trainer(CASES[case].experiment(where), tmp_path) as again:
            again.restore()
            assert bits(again) == saved
            for _ in range(3):
                again.train()
            assert again.policy.skipped == 0
            assert again.itr == 7
            if where == device:
                assert bits(again) == end


@pytest.mark.parametrize("net", [ps.Net(), ps.Net(recurrent="lstm", recurrent_size=8)], ids=["mlp", "lstm"])
def test_goes_on_with_graphs(net: Any, device: str, workers: int, tmp_path: Path) -> None:
    """States that a resume puts in place of others are captured anew."""
    algo = ps.PPO(epochs=2, minibatch=64, net=net)
    sampler = ps.AlternatingSampler(T=16, B=8, workers=workers)
    run = ps.RunConfig(steps=10_000, device=device, progress="off")
    exp = ps.Experiment("penstock.envs.toy:TMaze", algo, sampler, run)
    with Trainer(exp, tmp_path) as whole:
        for _ in range(3):
            whole.train()
        whole.save()
        for _ in range(3):
            whole.train()
        end = bits(whole)
    with Trainer(exp, tmp_path) as again:
        again.train()
        again.restore()
        for _ in range(3):
            again.train()
        assert bits(again) == end
