"""Every kind of learning works on the device: toys are learned, in other precisions, compiled, and evaluated alongside."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError, LearnerError
from penstock.learn.precision import require_bf16
from penstock.run.trainer import Trainer
from tests.gpu.toys import CASES, bits


@pytest.mark.parametrize("case", CASES)
def test_learns_its_toy(case: str, device: str) -> None:
    with Trainer(CASES[case].experiment(device)) as trainer:
        results = [trainer.train() for _ in range(CASES[case].batches)]
        assert trainer.policy.device.type == torch.device(device).type
        assert {x.device.type for x in trainer.policy.agent.state_dict().values() if isinstance(x, torch.Tensor)} == {
            trainer.policy.device.type
        }
        assert trainer.policy.skipped == 0
        assert all(isinstance(x, float) for x in results[-1].values())
        assert trainer.evaluate()[1].mean_return >= CASES[case].score


@pytest.mark.parametrize("case", ["ppo", "dqn-frames-per", "sac"])
def test_learns_its_toy_by_bf16_products(case: str, device: str) -> None:
    try:
        require_bf16(torch.device(device))
    except ConfigError as error:
        pytest.skip(str(error))
    with Trainer(CASES[case].experiment(device, precision="bf16")) as trainer:
        for _ in range(CASES[case].batches):
            trainer.train()
        assert trainer.evaluate()[1].mean_return >= CASES[case].score


@pytest.mark.parametrize("case", ["ppo", "sac"])
def test_learns_its_toy_compiled(case: str, device: str) -> None:
    with warnings.catch_warnings(), Trainer(CASES[case].experiment(device, compile=True)) as trainer:
        warnings.filterwarnings("error", message="run.compile")
        for _ in range(CASES[case].batches):
            trainer.train()
        assert trainer.evaluate()[1].mean_return >= CASES[case].score


@pytest.mark.parametrize("case", CASES)
def test_one_seed_gives_the_same_bits(case: str, device: str) -> None:
    found: list[Any] = []
    for _ in range(2):
        with Trainer(CASES[case].experiment(device)) as trainer:
            for _ in range(4):
                trainer.train()
            found.append(bits(trainer))
    assert found[0] == found[1]


@pytest.mark.parametrize("case", CASES)
def test_evaluations_leave_training_alone(case: str, device: str) -> None:
    found: list[Any] = []
    for evaluates in (False, True):
        with Trainer(CASES[case].experiment(device)) as trainer:
            for _ in range(4):
                trainer.train()
                if evaluates:
                    trainer.evaluate(8)
            found.append(bits(trainer))
    assert found[0] == found[1]


def test_a_full_device_names_what_to_lower(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, which has no limit of its own, the loss says that it is full."""
    with Trainer(CASES["ppo"].experiment(device)) as trainer:
        trainer.train()
        loss_fn = trainer.policy.loss_fn

        def large(*args: Any) -> Any:
            if trainer.policy.device.type == "cpu":
                raise torch.OutOfMemoryError("out of memory")
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
            return loss_fn(*args)

        monkeypatch.setattr(trainer.policy, "loss_fn", large)
        with pytest.raises(
            LearnerError, match=r"out of memory.*; lower algo\.minibatch=64, sampler\.T=32, sampler\.B=16"
        ):
            trainer.train()
        monkeypatch.setattr(trainer.policy, "loss_fn", loss_fn)
        trainer.train()


def test_a_policy_of_the_device_predicts_and_is_loaded_without_it(device: str, tmp_path: Any) -> None:
    exp = CASES["ppo"].experiment(device, dir=str(tmp_path / "run"))
    result = ps.train(exp)
    assert result.policy.device.type == torch.device(device).type
    obs = [[-1.0], [1.0]]
    assert ps.load(tmp_path / "run").predict(obs).tolist() == result.policy.predict(obs).tolist() == [0, 1]
