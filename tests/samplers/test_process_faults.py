from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock as ps
from penstock.core.errors import EnvContractError, EnvWorkerError
from penstock.core.noise import env_seed
from penstock.envs.conformance import echo_config
from penstock.envs.make import EnvConfig
from penstock.envs.record_check import RecordCheck
from penstock.envs.toy import FaultEnv
from penstock.envs.toy.crashes import CrashEnv
from penstock.envs.toy.plumbing import SeedEcho
from penstock.samplers.conformance import EchoAgent

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*(replaced|dropped)")]

SAMPLERS: dict[str, Any] = {
    "cpu": ps.CpuSampler, "gpu": ps.GpuSampler, "alternating": ps.AlternatingSampler,
    "no-overlap": ps.NoOverlapAlternatingSampler,
}  # fmt: skip
SEED, T, B, SLOT = 4, 8, 4, 3
EPISODE = 2
SLACK_S = 5.0
"""After which a fault was not seen but run into by chance; far below the 20 s that a worker is given elsewhere."""


def held() -> tuple[set[int], int, list[str]]:
    """Children, open descriptors, and names in shared memory."""
    return (
        {p.pid for p in psutil.Process().children(recursive=True)},
        len(os.listdir("/proc/self/fd")),
        os.listdir("/dev/shm"),
    )


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    gc.collect()
    before = held()
    yield
    gc.collect()
    children, descriptors, shared = held()
    assert children == before[0], "a process is left"
    assert descriptors == before[1], "a descriptor is left"
    assert shared == before[2], "a segment is left"
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:penstock" in line], (
        "a mapping is left"
    )


def live(kind: str, env: Any, **settings: Any) -> Any:
    # Short only where something hangs: on a busy machine a worker may well wait for its turn.
    given = {"step_timeout_s": 20.0, "start_timeout_s": 30.0, **settings}
    sampler = SAMPLERS[kind](T=T, B=B, workers=2, **given).build(env, SEED)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
    except BaseException:
        sampler.shutdown()
        raise
    return sampler


def crash(way: str, where: Any = "step", once: Path | None = None, at: int = 0, **kwargs: Any) -> EnvConfig:
    given = {"way": way, "where": where, "seed": SEED, "slot": SLOT, "episode": EPISODE, "at": at,
             "once": None if once is None else str(once), **kwargs}  # fmt: skip
    return EnvConfig(CrashEnv, given, info_keys=("echo",), checks="always")


RAISES = {"raise": "ValueError: the arm fell off", "odd_error": "odd 3: two arguments", "interrupt": "KeyboardInterrupt",
          "exit": "SystemExit: 7"}  # fmt: skip
DIES = {"os_exit": "exit code 0", "sigkill": r"signal 9 \(SIGKILL\)", "sigsegv": r"signal 11 \(SIGSEGV\)",
        "null": r"signal 11 \(SIGSEGV\)", "abort": r"signal 6 \(SIGABRT\)", "orphan": "signal 9"}  # fmt: skip
HANG_S = 1.0
HANGS = dict.fromkeys(("sleep", "busy", "stop"), "no progress for 1 s")
KIND = (
    dict.fromkeys(RAISES, "exception")
    | dict.fromkeys(DIES, "signal")
    | dict.fromkeys(HANGS, "timeout")
    | {"os_exit": "exit"}
)
SEEN = {**RAISES, **DIES, **HANGS}
PLACES = [(way, "step") for way in SEEN] + [(way, "reset") for way in ("raise", "sigkill", "sleep")]


def pairs(shift: int) -> list[tuple[str, str, str]]:
    """Every place with one sampler, and one way of each kind of fault with all of them."""
    kinds = list(SAMPLERS)
    return [
        (kind, way, where)
        for i, (way, where) in enumerate(PLACES)
        for k, kind in enumerate(kinds)
        if (way in ("raise", "sigkill", "sleep") and where == "step") or (i + k + shift) % len(kinds) == 0
    ]


def patience(way: str) -> float:
    return HANG_S if way in HANGS else 20.0


@pytest.mark.parametrize(("kind", "way", "where"), pairs(0))
def test_the_error_names_slot_and_cause(kind: str, way: str, where: str) -> None:
    sampler = live(kind, crash(way, where), fault_policy="raise", step_timeout_s=patience(way))
    seed = env_seed(SEED, SLOT, EPISODE)
    place = rf"worker \d, pid \d+: slot {SLOT} of .*CrashEnv in {where}\(\) at episode {EPISODE}, step 0, seed {seed}"
    started = time.monotonic()
    try:
        with pytest.raises(EnvWorkerError, match=rf"(?s){place}.*{SEEN[way]}") as error:
            for itr in range(12):
                started = time.monotonic()
                sampler.obtain_samples(itr)
        took = time.monotonic() - started
        assert took < (HANG_S if way in HANGS else 0.0) + SLACK_S, "not seen by its deadline"
        if where == "step":
            assert "last action" in str(error.value).splitlines()[0]
        if way in RAISES:
            assert "Traceback" in str(error.value)
            assert "crashes.py" in str(error.value)
        if way in ("sigsegv", "null", "abort", "sleep"):
            assert "crashes.py" in str(error.value), "the fault handler wrote nothing"
    finally:
        sampler.shutdown()


@pytest.mark.parametrize(("kind", "way", "where"), pairs(2))
def test_a_replacement_keeps_the_batches_coming(kind: str, way: str, where: str, tmp_path: Path) -> None:
    policy = "restart" if way in RAISES else "auto"
    env = crash(way, where, tmp_path / "once")
    sampler = live(kind, env, fault_policy=policy, step_timeout_s=patience(way))
    check = RecordCheck(B, seed=SEED, acted=True, faults=True)
    lost = 0
    try:
        for itr in range(14):
            batch, _ = sampler.obtain_samples(itr)
            check.add(batch)
            lost += sum(int(T - t) for b in range(B) if (t := _cut_at(batch, b)) is not None)
        metrics = sampler.metrics()
        assert metrics[f"faults/{KIND[way]}"] == metrics["faults/restarts"] == 1
        assert metrics["faults/lost_steps"] == lost > 0
        assert (where == "step") <= check.cuts <= 2, "the slots of one worker are cut, and no others"
    finally:
        sampler.shutdown()


def _cut_at(batch: Any, b: int) -> int | None:
    """The row from which slot b stands still without being valid to the end of the batch."""
    rows = np.nonzero(batch.valid[:, b] | batch.first[1:, b])[0]
    t = int(rows[-1]) + 1 if len(rows) else 0
    return t if t < T else None


KILLS = 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_echo_passes_under_random_kills(kind: str, reset: Any) -> None:
    env = EnvConfig(CrashEnv, {"where": "never", "nap_s": 0.0005}, info_keys=("echo",), checks="always")
    sampler = live(kind, env, reset=reset)
    workers = sampler._pool._workers.workers
    check = RecordCheck(B, seed=SEED, reset=reset, acted=True, faults=True)
    rng, over, killed = random.Random(1), threading.Event(), list[int]()

    def killer() -> None:
        """Each worker in turn, or one might use up its budget; and each process once: a busy machine buries it late."""
        while len(killed) < KILLS and not over.wait(0.01 + 0.15 * rng.random()):
            child = workers[len(killed) % len(workers)]
            pid = child.process.pid
            if child.up and not child.exited and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        itr, until = 0, time.monotonic() + 90.0
        while len(killed) < KILLS and time.monotonic() < until:
            check.add(sampler.obtain_samples(itr)[0])
            itr += 1
        for more in range(itr, itr + 3):
            check.add(sampler.obtain_samples(more)[0])
        assert sampler.metrics()["faults/signal"] == len(killed) == KILLS
    finally:
        over.set()
        thread.join(5)
        sampler.shutdown()


@pytest.mark.parametrize("kind", ["cpu", "alternating"])
def test_drop_goes_on_without_the_slots_of_the_worker(kind: str) -> None:
    sampler = live(kind, crash("sigkill"), fault_policy="drop")
    try:
        for itr in range(14):
            batch, _ = sampler.obtain_samples(itr)
        gone = ~batch.valid.any(0)
        assert gone.sum() == 2
        assert gone[SLOT]
        assert sampler.metrics() | {"faults/signal": 1.0} == sampler.metrics()
        assert "faults/restarts" not in sampler.metrics()
        state = sampler.state_dict()
        assert state["pool"]["ended"][SLOT]
    finally:
        sampler.shutdown()


def test_past_the_budget_the_error_is_raised() -> None:
    sampler = live("gpu", EnvConfig(FaultEnv, {"fault": "sigkill_in_step", "at": 1}))
    try:
        with pytest.raises(EnvWorkerError, match=r"(?s)killed by signal 9.*was replaced 5 times within 10 minutes"):
            for itr in range(40):
                sampler.obtain_samples(itr)
        assert sampler.metrics()["faults/restarts"] >= 5
    finally:
        sampler.shutdown()


@pytest.mark.parametrize("way", ["raise", "sigkill", "sleep", "exit"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_faults_while_environments_are_made(kind: str, way: str) -> None:
    with pytest.raises(EnvWorkerError, match=rf"(?s)worker \d.*({SEEN[way]}|not started within 1 s)"):
        live(kind, crash(way, "init"), fault_policy="raise", start_timeout_s=1.0 if way == "sleep" else 30.0)


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


BREACHES = ["nan_obs", "inf_obs", "wrong_shape", "wrong_dtype", "nan_reward", "str_reward", "short_tuple"]
BREACHED = [("alternating", fault, policy) for fault in BREACHES for policy in ("auto", "restart")] + [
    ("cpu", "nan_obs", "auto"), ("cpu", "short_tuple", "restart"),
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


@pytest.mark.parametrize("kind", ["cpu", "alternating"])
def test_an_evaluation_has_exact_counts_though_a_worker_dies(kind: str) -> None:
    sampler = live(kind, EnvConfig(CrashEnv, {"where": "never", "nap_s": 0.01}, info_keys=("echo",)))
    try:
        sampler.obtain_samples(0)
        undisturbed = sampler.evaluate_agent(0, 12)
        timer = threading.Timer(0.05, lambda: os.kill(sampler._pool._workers.workers[1].process.pid, 9))
        timer.start()
        found = sampler.evaluate_agent(0, 12)
        timer.join(5)
        assert np.bincount(found.slot, minlength=12).tolist() == [1] * 12
        assert sampler.metrics()["faults/signal"] == 1
        same = found.return_ == undisturbed.return_[np.argsort(undisturbed.slot)][found.slot]
        assert 6 <= same.sum() < 12, "the slots of one worker play other episodes, and no others"
        sampler.obtain_samples(1)
    finally:
        sampler.shutdown()


def test_async_tree_is_started_anew(tmp_path: Path) -> None:
    settings = ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=1, start_timeout_s=30)
    sampler = settings.build(echo_config(), SEED)
    check = RecordCheck(B, seed=None, acted=True, faults=True)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        for itr in range(12):
            if itr in (4, 8):
                os.kill(sampler._workers.workers[0].process.pid, 9)
            check.add(sampler.obtain_samples(itr)[0])
        assert sampler.metrics()["faults/restarts"] == 2
        assert len(sampler.evaluate_agent(3, 5)) == 5
    finally:
        sampler.shutdown()


def test_async_errors_name_the_slot() -> None:
    sampler = ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=1), depth=1).build(crash("raise"), SEED)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        with pytest.raises(EnvWorkerError, match=rf"slot {SLOT} of .*the arm fell off"):
            for itr in range(12):
                sampler.obtain_samples(itr)
    finally:
        sampler.shutdown()


def test_each_episode_of_the_echo_is_known_to_this_file() -> None:
    assert SeedEcho.longest < 12 * T, "EPISODE must come within the batches of the tests"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert env_seed(SEED, SLOT, EPISODE) == CrashEnv(where="never", seed=SEED, slot=SLOT, episode=EPISODE)._fatal
