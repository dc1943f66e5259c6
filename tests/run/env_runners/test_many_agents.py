"""EnvRunner and EnvRunnerGroup in environments of many agents: seats, batches, metrics and weights by policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.actors.backend import RunnerError
from penstock.envs.toy import LatePay, TeamBits
from tests.samplers.many import bits

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forked")]

PPO = ps.PPO(minibatch=32, epochs=1, net=ps.Net(hidden=(4,)))
TWO = ps.Policies({"a": PPO, "b": PPO}, {"agent_0": "a", "agent_1": "b"})


def experiment(env: Any, algo: Any = TWO, T: int = 8, B: int = 4) -> ps.Experiment:
    return ps.Experiment(env, algo, ps.SerialSampler(T=T, B=B), ps.RunConfig(seed=3))


@pytest.mark.parametrize("env", [TeamBits, LatePay])
@pytest.mark.parametrize("seated", [False, True])
def test_an_env_runner_holds_several_policies(env: Any, seated: bool) -> None:
    runner: Any = ps.EnvRunner(experiment(TWO.seat(env) if seated else env))
    batch = runner.sample()
    assert isinstance(batch, ps.MultiAgentBatch) and set(batch) == {"a", "b"}
    assert "train/a/loss" in runner.learn_on_batch(batch)
    assert set(runner.get_weights("a")) == set(runner.get_weights("b"))
    runner.close()


@pytest.mark.parametrize("backend", ["in-process", "processes"])
@pytest.mark.parametrize("env", [TeamBits, LatePay])
def test_a_group_collects_what_one_sampler_of_all_slots_does(env: Any, backend: Any) -> None:
    with ps.EnvRunnerGroup(experiment(env, T=5, B=2), 2, backend) as group, ps.EnvRunnerGroup(
        experiment(env, T=5, B=4), 0
    ) as one:  # fmt: skip
        for _ in range(4):
            here, there = one.sample(), group.sample()
            assert isinstance(there, ps.MultiAgentBatch) and there.env_steps == here.env_steps
            assert bits(there) == bits(here)
        metrics = group.local_worker.learn_on_batch(there)
        assert {"train/a/loss", "train/b/loss"} <= set(metrics)
        group.sync_weights()
        own = group.local_worker.get_weights()
        for weights in group.foreach(lambda runner: runner.get_weights()):
            assert set(weights) == {"a", "b"}
            assert all(np.array_equal(own[p][name], x) for p in own for name, x in weights[p].items())
        assert group.sample()["a"].version.max() == 1


@pytest.mark.parametrize("runners", [0, 2])
def test_a_group_of_env_runners_holds_several_policies(runners: int) -> None:
    with ps.EnvRunnerGroup(experiment(TeamBits), num_env_runners=runners, backend="in-process") as group:
        batch: Any = group.sample()
        assert set(batch) == {"a", "b"} and batch.environments == 4 * max(runners, 1)
        assert group.local_worker.learn_on_batch(batch)
        group.sync_weights()


def test_one_algorithm_plays_all_agents() -> None:
    with ps.EnvRunnerGroup(experiment(TeamBits, PPO), 2, "in-process") as group:
        batch = group.sample()
        assert isinstance(batch, ps.MultiAgentBatch) and list(batch) == ["shared"]
        group.local_worker.learn_on_batch(batch)
        assert all(isinstance(x, np.ndarray) for x in group.local_worker.get_weights().values())


def test_weights_by_policy() -> None:
    exp = experiment(TeamBits)
    one, other = ps.EnvRunner(exp), ps.EnvRunner(exp)
    one.learn_on_batch(one.sample())
    before, weights = other.get_weights(), one.get_weights()
    assert set(weights) == {"a", "b"} and set(one.get_weights(["b"])) == {"b"}
    other.set_weights({"b": weights["b"]}, version=7)
    now = other.get_weights()
    assert all(np.array_equal(now["a"][name], x) for name, x in before["a"].items())
    assert all(np.array_equal(now["b"][name], x) for name, x in weights["b"].items())
    assert any(not np.array_equal(x, before["b"][name]) for name, x in weights["b"].items())
    assert set(other.sample()["a"].version[1].tolist()) == {7}
    with pytest.raises(ps.ConfigError, match=r"no policy 'c' here"):
        one.get_weights("c")
    with pytest.raises(
        ps.ConfigError, match=r"arrays by name for the policies \['a', 'b'\]; expected them by policy id"
    ):
        one.set_weights(weights["a"])
    one.close()
    other.close()
    single = ps.EnvRunner(ps.Experiment("CartPole-v1", PPO, ps.SerialSampler(4, 2)))
    with pytest.raises(ps.ConfigError, match=r"no policy 'a' here; known: shared"):
        single.get_weights("a")
    single.close()


def test_the_state_is_that_of_another_runner_of_the_same_place() -> None:
    one, other = ps.EnvRunner(experiment(LatePay)), ps.EnvRunner(experiment(LatePay))
    for _ in range(2):
        one.learn_on_batch(one.sample())
    other.set_state(one.get_state())
    for _ in range(2):
        here, there = one.sample(), other.sample()
        assert bits(here) == bits(there)
        assert one.learn_on_batch(here) == other.learn_on_batch(there)
    one.close()
    other.close()


@pytest.mark.filterwarnings("ignore:runner .*the runner is replaced")
@pytest.mark.parametrize("env", [TeamBits, LatePay])
def test_columns_of_a_lost_runner_stand_still(env: Any) -> None:
    with ps.EnvRunnerGroup(experiment(env), 2, "in-process", fault_policy="drop") as group:
        first = group.sample()
        group.runners.lost(1, RunnerError("signal", "killed"))
        second = group.sample()
        for policy in ("a", "b"):
            before, after = first[policy], second[policy]
            half = after.spec.B // 2
            assert after.valid[:, :half].any() and not after.valid[:, half:].any()
            assert np.array_equal(after.obs[0], before.obs[-1]) and np.array_equal(after.first[0], before.first[-1])
            assert np.array_equal(after.obs[1:, half:], np.repeat(after.obs[:1, half:], 8, 0))
        group.local_worker.learn_on_batch(second)
