"""Workers that fail while they are made, break the contract, or die in an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import EnvContractError, EnvWorkerError
from penstock.core.noise import env_seed
from penstock.envs.make import EnvConfig
from penstock.envs.toy import FaultEnv
from penstock.envs.toy.crashes import CrashEnv
from penstock.testing.records import RecordCheck
from tests.slow import slow
from tests.workers.crashing import LIMIT_S, SEED, SEEN, B, crash, leaves_nothing, live, saves_time

__all__ = ["leaves_nothing", "saves_time"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:.*(replaced|dropped)")]


@pytest.mark.parametrize(("kind", "way"), [("cpu", "raise"), *slow(("cpu", "sleep"), ("gpu", "sigkill"))])
def test_faults_while_environments_are_made(kind: str, way: str) -> None:
    with pytest.raises(EnvWorkerError, match=rf"(?s)worker \d.*({SEEN[way]}|not started within 1 s)"):
        live(kind, crash(way, "init"), fault_policy="raise", start_timeout_s=1.0 if way == "sleep" else LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "alternating"])
def test_a_worker_that_dies_while_it_starts_is_replaced(kind: str, tmp_path: Path) -> None:
    sampler = live(kind, crash("sigkill", "init", tmp_path / "once"))
    try:
        check = RecordCheck(B, seed=SEED, acted=True)
        for itr in range(3):
            check.add(sampler.obtain_samples(itr)[0])
        assert sampler.metrics()["faults/restarts"] == 1
    finally:
        sampler.shutdown()


BREACHES = ["nan_obs", "inf_obs", "wrong_shape", "wrong_dtype", "nan_reward", "short_tuple"]
BREACHED = [
    ("alternating", "str_reward", "auto"), ("alternating", "nan_obs", "restart"), ("cpu", "nan_obs", "auto"),
    *slow(*(("alternating", fault, "auto") for fault in BREACHES), ("gpu", "short_tuple", "restart"),
          ("cpu", "wrong_shape", "restart")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fault", "policy"), BREACHED)
def test_violations_of_the_contract(kind: str, fault: str, policy: str) -> None:
    sampler = live(kind, EnvConfig(FaultEnv, {"fault": fault, "at": 37}), fault_policy=policy)
    try:
        if policy == "auto":
            with pytest.raises(EnvContractError, match=r"slot \d of .*FaultEnv"):
                for itr in range(8):
                    sampler.obtain_samples(itr)
        else:
            for itr in range(8):
                batch, _ = sampler.obtain_samples(itr)
                assert np.isfinite(batch.obs).all()
            metrics = sampler.metrics()
            assert metrics["faults/contract"] == metrics["faults/restarts"] == 2
    finally:
        sampler.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "alternating"])
def test_an_evaluation_has_exact_counts_though_a_worker_dies(kind: str, tmp_path: Path) -> None:
    once, fatal = tmp_path / "once", env_seed(SEED + (1 << 40), 9, 0, evaluation=True)

    def made() -> Any:
        env = CrashEnv("sigkill", once=str(once))
        env._fatal = fatal
        return env

    sampler = live(kind, EnvConfig(made, info_keys=("echo",)))
    try:
        sampler.obtain_samples(0)
        once.touch()
        undisturbed = sampler.evaluate_agent(0, 12)
        assert "faults/signal" not in sampler.metrics()
        once.unlink()
        found = sampler.evaluate_agent(0, 12)
        assert np.bincount(found.slot, minlength=12).tolist() == [1] * 12
        assert sampler.metrics()["faults/signal"] == 1
        assert found.return_.tolist() == undisturbed.return_.tolist()
        sampler.obtain_samples(1)
    finally:
        sampler.shutdown()
