"""An EnvRunnerGroup in a loop of one's own: samples, weights, functions and state of its workers, wherever they live."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import penstock as ps
from penstock.actors.backend import RunnerError
from penstock.core.errors import ConfigError
from penstock.run.plan import Plan
from penstock.testing.samplers import bits

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

T, B = 8, 2
EXP = ps.Experiment(
    "CartPole-v1", ps.PPO(epochs=2, minibatch=8, net=ps.Net(hidden=(8,))), ps.SerialSampler(T, B), ps.RunConfig(seed=3)
)
PLACES = ("in-process", "processes")


@pytest.fixture(params=PLACES)
def workers(request: pytest.FixtureRequest) -> Generator[Any]:
    with ps.EnvRunnerGroup(EXP, 2, request.param) as group:
        yield group


def serial(batches: int, slots: int = 2 * B) -> list[Any]:
    """Batches of one SerialSampler, with the policy trained on each of them."""
    sampler = ps.SerialSampler(T, slots).build("CartPole-v1", seed=3)
    policy = EXP.algo.build(sampler.spec, seed=3)
    sampler.initialize(policy.agent)
    found: list[Any] = []
    for itr in range(batches):
        found.append(bits(sampler.obtain_samples(itr)[0].copy()))
        ps.train_one_step(policy, sampler.last_batch)
    sampler.shutdown()
    return found


def version_of(runner: Any) -> int:
    return runner._version


def scaled(runner: Any, factor: float) -> float:
    return factor * runner.sample().valid.size


# The loop.


def test_a_loop_of_ones_own_collects_the_batches_of_one_process(workers: Any) -> None:
    policy = workers.local_worker.policy
    found: list[Any] = []
    for _ in range(3):
        workers.sync_weights()
        batch = ps.concat_samples(workers.get([w.sample.remote() for w in workers.remote_workers]))
        found.append(batch)
        ps.train_one_step(policy, batch)
    assert [batch.version[0, 0] for batch in found] == [1, 2, 3]
    for batch in found:
        batch.version[...] -= 1  # a sampler counts from 0
    assert [bits(batch) for batch in found] == serial(3)


def test_sample_is_one_fragment_of_each_side_by_side(workers: Any) -> None:
    workers.sync_weights()
    one = workers.sample()
    assert one.spec == (T, 2 * B)
    assert workers.sample().spec == (T, 2 * B)
    one.version[...] = 0
    assert bits(one) == serial(1)[0]


def test_without_remote_workers_the_local_one_samples() -> None:
    with ps.EnvRunnerGroup(EXP, 0, "in-process") as workers:
        assert workers.remote_workers == []
        found = workers.sample()
        assert bits(found) == serial(1, B)[0]
        workers.sync_weights()
        assert workers.foreach(version_of) == []
        assert workers.foreach(version_of, local=True) == [-1]


def test_learn_on_batch_trains_the_local_worker(workers: Any) -> None:
    before = workers.local_worker.get_weights()
    result = workers.local_worker.learn_on_batch(workers.sample())
    assert "train/value_loss" in result
    after = workers.local_worker.get_weights()
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    workers.sync_weights()
    for there in workers.get([w.get_weights.remote() for w in workers.remote_workers]):
        assert all(np.array_equal(after[name], there[name]) for name in after)


def test_sample_async_yields_fragments_with_the_newest_weights(workers: Any) -> None:
    workers.sync_weights()
    stream = workers.sample_async(max_in_flight=2)
    assert {int(next(stream).version[0, 0]) for _ in range(3)} == {1}
    for _ in range(3):
        workers.sync_weights()
    later = [int(next(stream).version[0, 0]) for _ in range(12)]
    assert later == sorted(later)
    assert later[-1] == 4
    assert len(set(later)) <= 2, "requests that waited act with version 1, all others with the newest"


def test_an_error_of_a_call_is_that_of_the_runner(workers: Any) -> None:
    calls = [w.apply.remote(scaled) for w in workers.remote_workers]
    with pytest.raises(RunnerError, match=r"runner 0.*apply\(\) raised TypeError.*factor"):
        workers.get(calls)
    assert workers.get([w.ping.remote() for w in workers.remote_workers])


# Every worker.


def test_foreach_and_apply_call_a_function_with_every_runner(workers: Any) -> None:
    assert workers.foreach(scaled, 2.0) == [2.0 * T * B] * 2
    assert workers.foreach(scaled, 1.0, local=True) == [1.0 * T * B] * 3
    assert workers.get([workers.remote_workers[1].apply.remote(scaled, 3.0)]) == [3.0 * T * B]
    assert workers.alive == [0, 1]


def test_ping_tells_the_processes_apart(workers: Any) -> None:
    pids = workers.get([w.ping.remote() for w in workers.remote_workers])
    if workers.backend.name == "in-process":
        assert set(pids) == {os.getpid()}
    else:
        assert len({*pids, os.getpid()}) == 3


def test_each_evaluates_with_its_own_weights(workers: Any) -> None:
    workers.sync_weights()
    calls = [w.evaluate.remote(0, 3) for w in workers.remote_workers]
    found = [ps.Episodes(**plain) for plain in workers.get(calls)]
    assert [len(episodes) for episodes in found] == [3, 3]
    here = ps.Episodes(**workers.local_worker.evaluate(0, 3))
    for episodes in found:
        assert episodes.return_.tolist() == here.return_.tolist()


def test_get_metrics_are_of_the_episodes_since_the_last_call(workers: Any) -> None:
    for _ in range(12):
        workers.sample()
    first = workers.get([w.get_metrics.remote() for w in workers.remote_workers])
    assert all(found["rollout/ep_rew_mean"] > 1 for found in first)
    assert all("rollout/ep_rew_mean" not in found for found in
               workers.get([w.get_metrics.remote() for w in workers.remote_workers]))  # fmt: skip


@pytest.mark.parametrize("algo", [EXP.algo, ps.DQN(learning_starts=8, batch_size=4, net=ps.Net(hidden=(8,)))])
@pytest.mark.parametrize("place", PLACES)
def test_the_state_of_a_worker_is_that_of_another_one_of_its_place(algo: Any, place: Any) -> None:
    with ps.EnvRunnerGroup(replace(EXP, algo=algo), 1, place) as one, ps.EnvRunnerGroup(
        replace(EXP, algo=algo), 1, place
    ) as two:  # fmt: skip
        (first,), (second,) = one.remote_workers, two.remote_workers
        for _ in range(3):
            (batch,) = one.get([first.sample.remote()])
            one.get([first.learn_on_batch.remote(batch)])
        (state,) = one.get([first.get_state.remote()])
        two.get([second.set_state.remote(state)])
        for _ in range(2):
            (here,), (there,) = one.get([first.sample.remote()]), two.get([second.sample.remote()])
            assert bits(here) == bits(there)
            (trained,), (again,) = one.get([first.learn_on_batch.remote(here)]), two.get(
                [second.learn_on_batch.remote(there)]
            )  # fmt: skip
            assert {k: v for k, v in trained.items() if k[:5] == "train"} == {
                k: v for k, v in again.items() if k[:5] == "train"
            }


def test_a_replay_is_as_wide_as_the_batch_of_the_group() -> None:
    algo = ps.DQN(learning_starts=8, batch_size=4, net=ps.Net(hidden=(8,)))
    with ps.EnvRunnerGroup(replace(EXP, algo=algo), 3, "in-process") as workers:
        for _ in range(2):
            metrics = ps.train_one_step(workers.local_worker.policy, workers.sample())
        assert np.isfinite(metrics["train/loss"])
        assert workers.local_worker.policy.arrays()["valid"].shape[1] == 3 * B


def test_the_local_worker_makes_environments_only_when_it_plays() -> None:
    cpu = replace(EXP, sampler=ps.CpuSampler(T, B, workers=1))
    with ps.EnvRunnerGroup(cpu, 1, "in-process") as workers:
        own = psutil.Process()
        before = {child.pid for child in own.children(recursive=True)}
        ps.train_one_step(workers.local_worker.policy, workers.sample())
        workers.sync_weights()
        assert {child.pid for child in own.children(recursive=True)} == before
        assert workers.local_worker.sample().spec == (T, B)
        assert {child.pid for child in own.children(recursive=True)} > before
    runner = ps.EnvRunner(EXP)
    runner.close()
    runner.close()
    with pytest.raises(ConfigError, match="the runner was closed"):
        runner.sample()


# Weights.


def test_weights_are_set_whole_or_not_at_all() -> None:
    runner = ps.EnvRunner(EXP)
    before = runner.get_weights()
    *_, last = before
    changed = {name: x + 1 for name, x in before.items()}
    for wrong in (np.full(before[last].shape, "x"), before[last] + 1j, None, [object()]):
        with pytest.raises(ConfigError, match=rf"set_weights got {last} of shape .*real numbers"):
            runner.set_weights({**changed, last: wrong})  # pyright: ignore[reportArgumentType]
    for given, version in ((None, None), ([1], None), (changed, "x")):
        with pytest.raises(ConfigError, match="expected the arrays by name that"):
            runner.set_weights(given, version)  # pyright: ignore[reportArgumentType]
    assert all((x == before[name]).all() for name, x in runner.get_weights().items())
    runner.set_weights({name: x.astype(x.dtype.newbyteorder(">")) for name, x in changed.items()})
    assert all((x == changed[name]).all() for name, x in runner.get_weights().items())
    runner.close()


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    runner = ps.EnvRunner(EXP)
    runner.sample()
    state = runner.get_state()
    data = bytes(state["state"])
    for broken in (b"", data[:7], data[: len(data) // 2], data[:8] + b"[" + data[9:]):
        with pytest.raises(ps.CheckpointError, match="no state of an EnvRunner"):
            runner.set_state({**state, "itr": 77, "state": broken})
    for other in ({}, {**state, "itr": "x"}):
        with pytest.raises(ps.CheckpointError, match="no state of an EnvRunner"):
            runner.set_state(other)
    assert runner.get_state()["itr"] == state["itr"] == 1
    runner.close()


def test_a_state_holds_the_rows_of_a_replay_that_lie_on_a_device() -> None:
    replay = ps.ReplaySettings(capacity=60, device="learner")
    algo = ps.DQN(batch_size=8, learning_starts=8, replay=replay, net=ps.Net(hidden=(8,)))
    one, other = (ps.EnvRunner(ps.Experiment("CartPole-v1", algo, ps.SerialSampler(4, 2))) for _ in range(2))
    for _ in range(3):
        one.learn_on_batch(one.sample())
    other.set_state(one.get_state())
    assert one.learn_on_batch(one.sample()) == other.learn_on_batch(other.sample())
    for name, x in one.policy.arrays().items():  # pyright: ignore
        assert np.array_equal(x, other.policy.arrays()[name]), name  # pyright: ignore
        assert name != "obs" or np.any(x)
    one.close()
    other.close()


@pytest.mark.parametrize("place", [(1, 1), (0, 0), (-1, 1), ("a", 1), (0, 2.0)])
def test_a_runner_is_one_of_so_many(place: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected 0 <= index < runners"):
        ps.EnvRunner(EXP, *place)


def test_weights_of_another_shape_are_refused(workers: Any) -> None:
    runner = workers.local_worker
    weights = runner.get_weights()
    name = next(iter(weights))
    short = {key: x for key, x in weights.items() if key != name}
    with pytest.raises(ConfigError, match=rf"got {len(short)} arrays, this agent has {len(weights)}; '{name}' is not"):
        runner.set_weights(short)
    with pytest.raises(ConfigError, match=rf"got {name} of shape \(1, 2\), dtype float32; this agent's has"):
        runner.set_weights({**weights, name: np.zeros((1, 2), np.float32)})
    with pytest.raises(RunnerError, match=rf"'{name}' is not in both"):
        workers.get([workers.remote_workers[0].set_weights.remote(short)])
    other = replace(EXP, algo=ps.PPO(net=ps.Net(hidden=(16,))))
    with ps.EnvRunnerGroup(other, 1, "in-process") as others, pytest.raises(
        RunnerError, match=r"the weights have \d+ bytes; expected \d+"
    ):  # fmt: skip
        others.get([others.remote_workers[0].take_weights.remote(workers.runners.publish(runner.agent), 1)])


def test_set_weights_are_acted_with_and_stamped() -> None:
    runner = ps.EnvRunner(EXP)
    weights = runner.get_weights()
    assert runner.sample().version.tolist() == [[0] * B] * T
    runner.set_weights({name: np.zeros_like(x) for name, x in weights.items()}, version=7)
    assert all(not x.any() for x in runner.get_weights().values())
    assert set(runner.sample().version.ravel().tolist()) == {7}
    runner.set_weights(weights)
    assert set(runner.sample().version.ravel().tolist()) == {8}
    runner.close()


# What it is made of.


def test_runners_of_an_experiment_have_its_slots_one_after_the_other() -> None:
    shares = Plan.of(EXP).among(3)
    assert [x.share for x in shares] == [ps.Share(0, 6), ps.Share(2, 6), ps.Share(4, 6)]
    whole = serial(1, 6)[0]
    runners = [ps.EnvRunner(EXP, i, 3) for i in range(3)]
    agent = runners[0].policy.agent
    assert all(torch.equal(x, y) for x, y in zip(agent.parameters(), runners[2].policy.agent.parameters()))
    assert bits(ps.concat_samples([runner.sample() for runner in runners])) == whole
    for runner in runners:
        runner.close()


@pytest.mark.parametrize(
    ("runners", "options", "message"),
    [
        (-1, {}, r"num_env_runners=-1 with min_runners=1"),
        (2, {"min_runners": 3}, r"num_env_runners=2 with min_runners=3; .*min_runners of at most as many"),
        (2, {"backend": "proceses"}, r"unknown backend 'proceses'; did you mean 'processes'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(runners: int, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ps.EnvRunnerGroup(EXP, runners, **{"backend": "in-process", **options})


def test_a_runner_that_dies_in_sample_is_named_and_its_columns_are_not_valid() -> None:
    with ps.EnvRunnerGroup(EXP, 2, "processes") as workers:
        workers.get([w.sample.remote() for w in workers.remote_workers])
        workers.backend.kill(workers.remote_workers[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = workers.sample()
        assert found.spec == (T, 2 * B) and found.valid[:, :B].any(0).all() and not found.valid[:, B:].any()
        assert any("runner 1" in str(w.message) for w in caught)
        assert sum(workers.faults.counts.values()) >= 1


@pytest.mark.slow
def test_import_of_penstock_and_of_the_group_imports_no_ray() -> None:
    import subprocess
    import sys

    code = (
        "import sys, penstock as ps; ps.EnvRunnerGroup, ps.RunnerSampler, ps.EnvRunner; assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_function_that_raises_costs_no_runner() -> None:
    with ps.EnvRunnerGroup(EXP, 2, "in-process") as workers:
        with pytest.raises(ps.EnvWorkerError, match="ZeroDivisionError") as found:
            workers.foreach(lambda runner: 1 / 0)
        assert "Traceback" in found.value.__notes__[0]
        assert workers.alive == [0, 1] and not workers.faults.counts
        assert workers.sample().valid.any()
    for used in (workers.sample, workers.sync_weights, lambda: next(workers.sample_async())):
        with pytest.raises(ps.ConfigError, match="was closed"):
            used()


@pytest.mark.filterwarnings("ignore:runner .*the runner is replaced")
def test_a_replacement_begins_with_the_weights_that_were_synced_last() -> None:
    with ps.EnvRunnerGroup(EXP, 2, "in-process", fault_policy="restart") as workers:
        ps.train_one_step(workers.local_worker.policy, workers.sample())
        workers.sync_weights()
        workers.runners.lost(1, RunnerError("signal", "killed"))
        versions = [set(workers.sample().version.ravel().tolist()) for _ in range(2)]
        assert versions[-1] == {1}
        own, there = workers.local_worker.get_weights(), workers.foreach(lambda runner: runner.get_weights())
        assert all(np.array_equal(own[name], x[name]) for x in there for name in own)


def test_asynchronous_fragments_are_of_the_newest_weights() -> None:
    with ps.EnvRunnerGroup(EXP, 2, "in-process") as workers:
        stream = workers.sample_async(max_in_flight=1)
        versions = []
        for _ in range(6):
            batch = next(stream)
            versions.append(int(batch.version.max()))
            workers.local_worker.policy.version += 1
        assert versions == sorted(versions) and versions[-1] >= 3


@pytest.mark.parametrize(
    ("made", "says"),
    [(lambda: ps.EnvRunnerGroup("CartPole-v1"), r"'CartPole-v1' .str.; expected an Experiment"),
     (lambda: ps.EnvRunner("CartPole-v1"), r"'CartPole-v1' .str.; expected an Experiment"),
     (lambda: ps.EnvRunnerGroup(EXP, num_workers=2), "has no 'num_workers'")],
)  # fmt: skip
def test_what_makes_no_group(made: Any, says: str) -> None:
    with pytest.raises(ps.ConfigError, match=says):
        made()
