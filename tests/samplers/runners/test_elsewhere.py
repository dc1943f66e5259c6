"""The same bits from runners in other processes and on Ray, there in one cluster; faults of both."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

import penstock as ps
from penstock.envs.make import EnvConfig
from penstock.processes import serialization
from penstock.run.env_runners.group import EnvRunnerGroup
from penstock.samplers.runners.settings import RunnerSampler
from penstock.testing.samplers import bits
from tests.samplers.placed import CASES, differences, live, run
from tests.samplers.runners.test_faults import Seeded
from tests.samplers.runners.test_placement import runners
from tests.slow import slow

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One cluster for all tests of this file, which the samplers find and leave."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")
    from penstock.actors.cluster import start_ray

    found = start_ray(num_cpus=8)
    yield found
    found.close()


@pytest.fixture(params=["processes", *slow("ray")])
def backend(request: pytest.FixtureRequest) -> str:
    """Processes are forks of this one; those that begin as users' do are in the loop over them."""
    request.getfixturevalue({"processes": "forked", "ray": "cluster"}[request.param])
    return request.param


UPDATES = [("pendulum", 3, "cpu", 0), ("cartpole", 1, "alternating", 0), ("lstm", 2, "serial", 1)]


@pytest.mark.parametrize(
    ("backend", "case", "n", "inner", "depth"),
    [
        *(("processes", *x) for x in UPDATES[1:]),
        *slow(("processes", *UPDATES[0]), *(("ray", *x) for x in UPDATES)),
    ],
    indirect=["backend"],
)
def test_updates_are_equal_bit_for_bit(case: str, n: int, inner: str, depth: int, backend: str) -> None:
    one = ps.AsyncSampler(ps.SerialSampler(9, 6), depth=depth) if depth else ps.SerialSampler(9, 6)
    batches, parameters = run(one, *CASES[case], 5, True)
    there, parameters_there = run(runners(n, inner, 9, 6, backend, depth), *CASES[case], 5, True)
    assert differences(batches, there) == []
    assert parameters == parameters_there


def test_goes_on_without_runners_and_back(backend: str) -> None:
    env, algo = CASES["lstm"]
    one, _ = live(runners(2, "serial", 8, 6, backend), env, algo)
    two, _ = live(ps.SerialSampler(8, 6), env, algo)
    try:
        for itr in range(3):
            one.obtain_samples(itr)
        two.load_state_dict(one.state_dict())
        for itr in range(3, 5):
            assert bits(one.obtain_samples(itr)[0]) == bits(two.obtain_samples(itr)[0])
        one.load_state_dict(two.state_dict())
        assert bits(one.obtain_samples(5)[0]) == bits(two.obtain_samples(5)[0])
    finally:
        one.shutdown()
        two.shutdown()


class Ends(Seeded):
    """The second instance raises, exits, hangs or kills itself in step 20; a file counts the instances."""

    def __init__(self, how: str, path: str) -> None:
        with open(path, "ab", buffering=0) as file:
            file.write(b"x")
            self.nth = file.tell()  # after its own x, however many are written at the same time
        self.how, self.steps = how, 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.nth == 2 and self.steps == 20:
            if self.how == "raise":
                raise RuntimeError("the arm is stuck")
            if self.how == "exit":
                os._exit(3)
            if self.how == "hang":
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.filterwarnings("ignore:runner .*the runner is replaced")
@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("processes", "exit"),
        *slow(("processes", "hang"), ("processes", "kill"), *(("ray", how) for how in ("exit", "hang", "kill"))),
    ],
    indirect=["backend"],
)
def test_a_runner_is_lost_and_replaced(how: str, backend: Any, tmp_path: Any) -> None:
    env = EnvConfig(Ends, {"how": how, "path": str(tmp_path / "count")})
    settings = RunnerSampler(2, ps.SerialSampler(8, 1), backend, deadline_s=2.0, object_store_mb=80)
    sampler, policy = live(settings, env, ps.PPO(epochs=1))
    try:
        slowest, whole = 0.0, 0
        for itr in range(400):
            begun = time.monotonic()
            batch, _ = sampler.obtain_samples(itr)
            slowest = max(slowest, time.monotonic() - begun)
            ps.train_one_step(policy, batch)
            whole += bool(batch.valid.any(0).all())
            if itr > 5 and batch.valid.any(0).all() and sampler.metrics().get("faults/restarts"):
                break
            time.sleep(0.05)
        metrics = sampler.metrics()
    finally:
        sampler.shutdown()
    kinds = {"exit": ("faults/exit", "faults/signal"), "hang": ("faults/timeout",), "kill": ("faults/signal",)}[how]
    assert sum(metrics.get(kind, 0) for kind in kinds) == metrics["faults/restarts"] == 1
    assert metrics["group/runners"] == 2 and whole
    looked = 4.0 if backend == "ray" else 0.0  # a task on its node says where it hangs, for which a process may start
    assert slowest < (2.0 + 1.5 + looked if how == "hang" else 1.5)


def test_an_exception_reaches_the_driver(backend: Any, tmp_path: Any) -> None:
    env = EnvConfig(Ends, {"how": "raise", "path": str(tmp_path / "count")})
    sampler, _ = live(RunnerSampler(1, ps.SerialSampler(8, 2), backend, object_store_mb=80), env, ps.PPO())
    try:
        with pytest.raises(ps.EnvWorkerError, match=r"(?s)runner \d .*the arm is stuck"):
            for itr in range(20):
                sampler.obtain_samples(itr)
    finally:
        sampler.shutdown()


def test_a_wrong_environment_is_a_config_error(backend: Any) -> None:
    with pytest.raises(ps.ConfigError, match="NoSuchEnv"):
        RunnerSampler(1, ps.SerialSampler(8, 1), backend, object_store_mb=80).build("NoSuchEnv-v0")


def test_other_versions_are_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "versions", lambda packages: {"penstock": "9.9", "torch": "2.0"})
    with pytest.raises(ps.ConfigError, match=r"runner \d on .* has penstock .* \(here 9.9\)"):
        RunnerSampler(1, ps.SerialSampler(8, 1), backend).build(Seeded)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_loop_over_actors() -> None:
    import ray

    exp = ps.Experiment("CartPole-v1", ps.PPO(epochs=1), ps.SerialSampler(16, 4))
    with EnvRunnerGroup(exp, num_env_runners=2) as workers:
        for _ in range(2):
            batch = ps.concat_samples(ray.get([w.sample.remote() for w in workers.remote_workers]))
            assert tuple(batch.spec) == (16, 8) and batch.valid.any()
            result = ps.train_one_step(workers.local_worker.policy, batch)
            assert np.isfinite(result["train/loss"])
            weights = ray.put(workers.local_worker.get_weights())
            ray.get([w.set_weights.remote(weights) for w in workers.remote_workers])
        own = workers.local_worker.get_weights()
        for there in workers.foreach(lambda runner: runner.get_weights()):
            assert all(np.array_equal(own[name], there[name]) for name in own)


@pytest.mark.slow
def test_the_loop_over_processes() -> None:
    exp = ps.Experiment("CartPole-v1", ps.PPO(epochs=1), ps.SerialSampler(16, 4))
    with EnvRunnerGroup(exp, num_env_runners=2, backend="processes") as workers:
        for _ in range(2):
            batch = ps.concat_samples(workers.get([w.sample.remote() for w in workers.remote_workers]))
            assert tuple(batch.spec) == (16, 8) and batch.valid.any()
            ps.train_one_step(workers.local_worker.policy, batch)
            workers.sync_weights()
        own = workers.local_worker.get_weights()
        for there in workers.foreach(lambda runner: runner.get_weights()):
            assert all(np.array_equal(own[name], there[name]) for name in own)


def connections(process: psutil.Process) -> list[Any]:
    try:
        return process.net_connections("inet")
    except psutil.NoSuchProcess:  # it ended in between
        return []


@pytest.mark.slow
def test_everything_listens_on_loopback_alone(cluster: Any) -> None:
    me = psutil.Process()
    listening = [
        connection.laddr.ip
        for process in [me, *me.children(recursive=True)]
        for connection in connections(process)
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert all("127.0.0.1" in x or "::1" in x for x in cluster.listeners)
