"""Runs whose policy keeps rows until it has enough of them: the same bits in every sampler, and after kill -9."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import penstock as ps

if TYPE_CHECKING:
    from tests.conftest import Zygote
from tests.run.resumed import Same, checkpoints, logged

MEMORY = ps.Net(hidden=(8,), recurrent="gru", recurrent_size=8, normalize_obs=True, normalize_reward=True)
ALGO = ps.Policies(
    {"boss": ps.PPO(net=MEMORY, epochs=2, minibatch=16), "hand": ps.PPO(net=ps.Net(hidden=(8,)), epochs=1)},
    {"agent_0": "boss", "agent_1": "hand"},
    min_rows={"boss": 20},
)
SERIAL = ps.SerialSampler(T=16, B=4)
PLACES: dict[str, Any] = {
    "serial": SERIAL,
    "cpu": ps.CpuSampler(T=16, B=4, workers=2),
    "gpu": ps.GpuSampler(T=16, B=4, workers=2),
    "async-0": ps.AsyncSerialSampler(SERIAL, 0),
    "runners": ps.RunnerSampler(runners=2, inner=ps.SerialSampler(T=16, B=2), backend="processes"),
}
LATE = ps.AsyncSerialSampler(SERIAL, 1)


def experiment(run: Path, sampler: Any, steps: int = 2_400, **changes: Any) -> ps.Experiment:
    given: dict[str, Any] = {"eval_episodes": 0, "checkpoint_interval": 250, "log_interval": 1, **changes}
    config = ps.RunConfig(steps=steps, seed=3, dir=str(run), progress="off", **given)
    return ps.Experiment("tests.learn.rows.boss:Boss", ALGO, sampler, config)


def parameters(run: Path) -> dict[str, torch.Tensor]:
    found = ps.load(run)
    assert isinstance(found, ps.PolicySet)
    return found.parameters()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "place", [x if x == "cpu" else pytest.param(x, marks=pytest.mark.slow) for x in list(PLACES)[1:]]
)
def test_every_sampler_has_the_same_rows_wait(place: str, tmp_path: Path) -> None:
    found = [ps.train(experiment(tmp_path / name, PLACES[name], 1_200)) for name in ("serial", place)]
    one, other = (parameters(result.run_dir) for result in found)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert found[0].metrics["train/boss/kept_rows"] == found[1].metrics["train/boss/kept_rows"]
    assert 2 <= found[0].metrics["train/boss/n_updates"] <= 2 * 1_200 / 20 / 20


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_that_wait_at_a_checkpoint_are_there_again(late: bool, same_run: Same, tmp_path: Path) -> None:
    sampler = LATE if late else SERIAL
    ps.train(experiment(tmp_path / "whole", sampler, 1_800))
    cut = ps.train(experiment(tmp_path / "cut", sampler, 700))
    assert cut.metrics["train/boss/kept_rows"] > 0
    ps.resume(tmp_path / "cut", {"run.steps": 1_800})
    if late:
        one, other = parameters(tmp_path / "whole"), parameters(tmp_path / "cut")
        assert all(torch.equal(one[name], other[name]) for name in one)
    else:
        same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("metric", "hint"),
    [("train/boss/loss", ""), ("train/boss/losss", "'train/boss/loss'"), ("train/bos/loss", "'train/hand/loss'")],
)
def test_a_stop_rule_awaits_the_metrics_of_a_policy_whose_rows_wait(metric: str, hint: str, tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", SERIAL, 1_200, stop={metric: 1e9})
    if hint:
        with pytest.raises(ps.ConfigError, match=f"{metric!r}, which this run does not report; did you mean .*{hint}"):
            ps.train(exp)
    else:
        assert ps.train(exp).env_steps >= 1_200


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("place", ["serial", "cpu", "late"])
def test_a_killed_run_goes_on_with_the_rows_that_waited(
    place: str, zygote: Zygote, ended_by: Callable[..., Any], tmp_path: Path
) -> None:
    sampler = LATE if place == "late" else PLACES[place]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert zygote.train(experiment(whole, sampler)).succeed()["stopped_by"] == "steps"

    def begin() -> Any:
        shutil.rmtree(run, ignore_errors=True)
        return zygote.train(experiment(run, sampler))

    ended_by(begin, lambda: checkpoints(run) and logged(run) >= 7)
    assert checkpoints(run)[-1] < 2_400
    zygote.resume(run).succeed()
    one, other = parameters(whole), parameters(run)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_learners_keep_the_rows_of_one_and_go_on_as_one(tmp_path: Path) -> None:
    found = {n: ps.train(experiment(tmp_path / str(n), SERIAL, 900, learners=n)) for n in (1, 2)}
    for name in ("train/boss/kept_rows", "train/boss/n_updates"):
        assert found[1].metrics[name] == found[2].metrics[name] > 0
    again = {n: ps.resume(tmp_path / str(n), {"run.steps": 1_400, "run.learners": 3 - n}) for n in (1, 2)}
    assert again[1].metrics["train/boss/n_updates"] == again[2].metrics["train/boss/n_updates"]
    one, other = (parameters(tmp_path / str(n)) for n in (1, 2))
    for name, x in one.items():
        if not name.endswith("_extra_state"):
            torch.testing.assert_close(x, other[name], rtol=1e-3, atol=1e-4)
