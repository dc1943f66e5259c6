"""IMPALA and APPO in every sampler: the same parameters wherever work is placed, and exact resume with batches ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.toy import TMaze
from penstock.run.trainer import Trainer
from tests.params import slow_but
from tests.samplers.placed import PLACES, differences, run

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

LSTM = ps.Net(hidden=(16,), recurrent="lstm", recurrent_size=8)
NORMALIZED = ps.Net(hidden=(16,), normalize_obs=True, normalize_reward=True)
APPO: dict[str, Any] = {"minibatch": 32, "epochs": 2, "target_interval": 3}
CASES: dict[str, tuple[Any, Any]] = {
    "impala": ("CartPole-v1", ps.IMPALA()),
    "impala-lstm": (TMaze, ps.IMPALA(net=LSTM)),
    "appo": ("Pendulum-v1", ps.APPO(net=NORMALIZED, **APPO)),
    "appo-lstm": (TMaze, ps.APPO(net=LSTM, **APPO)),
}
_SERIAL: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("case", "place"),
    slow_but(
        "impala-alternating-2 appo-async-serial-0",
        {f"{case}-{place}": (case, place) for case in CASES for place in ("cpu-2", "alternating-2", "async-serial-0")},
    ),
)
def test_updates_are_equal_bit_for_bit_wherever_work_is_placed(case: str, place: str) -> None:
    if case not in _SERIAL:
        _SERIAL[case] = run(ps.SerialSampler(16, 7), *CASES[case], 10)
    batches, parameters = _SERIAL[case]
    there, parameters_there = run(PLACES[place](16, 7), *CASES[case], 10)
    assert differences(batches, there) == []
    assert parameters == parameters_there


@pytest.mark.parametrize("case", ["impala", pytest.param("appo", marks=pytest.mark.slow)])
def test_two_batches_ahead_are_the_same_from_run_to_run(case: str) -> None:
    inner = ps.SerialSampler(16, 7), ps.CpuSampler(16, 7, workers=2)
    (one, parameters), (other, parameters_there) = (
        run(ps.AsyncSampler(sampler, depth=2), *CASES[case], 8) for sampler in inner
    )
    assert differences(one, other) == []
    assert parameters == parameters_there
    assert parameters != run(ps.SerialSampler(16, 7), *CASES[case], 8)[1]


@pytest.mark.parametrize(
    ("case", "depth"),
    slow_but([], {f"{case}-{depth}": (case, depth) for case in ("impala", "appo") for depth in (1, 2)}),
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(case: str, depth: int, tmp_path: Path) -> None:
    algo = ps.IMPALA(net=LSTM, max_lag=1) if case == "impala" else ps.APPO(net=NORMALIZED, **APPO)
    sampler = ps.AsyncSerialSampler(ps.SerialSampler(T=16, B=4), depth=depth)
    run_config = ps.RunConfig(steps=1024, seed=3, eval_interval=512, eval_episodes=2, progress="off", log_interval=1)
    exp = ps.Experiment("CartPole-v1", algo, sampler, run_config)
    whole = ps.train(ps.override(exp, {"run.dir": str(tmp_path / "whole")}))
    ps.train(ps.override(exp, {"run.dir": str(tmp_path / "cut"), "run.steps": 512}))
    resumed = ps.resume(tmp_path / "cut", {"run.steps": 1024})
    assert digests(resumed.policy) == digests(whole.policy)
    assert resumed.episodes.return_.tolist() == whole.episodes.return_.tolist()
    assert resumed.policy.stale_rows == whole.policy.stale_rows
    assert (whole.policy.stale_rows > 0) is (case == "impala" and depth == 2)


def digests(policy: Any) -> dict[str, bytes]:
    return {name: x.numpy().tobytes() for name, x in policy.agent.state_dict().items()}


def test_a_bound_below_the_depth_leaves_the_rows_of_all_later_batches_out() -> None:
    sampler = ps.AsyncSerialSampler(ps.SerialSampler(T=8, B=4), depth=2)
    exp = ps.Experiment(
        "CartPole-v1", ps.IMPALA(max_lag=1), sampler, ps.RunConfig(steps=10_000, seed=3, progress="off")
    )
    with Trainer(exp) as trainer:
        steps = [trainer.train() for _ in range(6)]
        collected = trainer.env_steps
    assert [x["sampler/lag"] for x in steps] == [0, 1, 2, 2, 2, 2]
    assert trainer.policy.updates == 2
    fresh = collected - steps[-1]["train/stale_rows"]
    assert steps[-1]["train/stale_rows"] - steps[2]["train/stale_rows"] > 80
    assert 0 < fresh <= 64
    assert all("train/rho_mean" in x for x in steps)


def test_others_are_told_which_algorithms_take_stale_batches() -> None:
    exp = ps.Experiment("CartPole-v1", ps.A2C(), ps.AsyncSerialSampler(ps.SerialSampler(5, 4), depth=1))
    with pytest.raises(ConfigError, match=r"depth=1 .*and A2C learns only from.*or PPO, APPO or IMPALA"):
        Trainer(exp)
