"""Loops of one's own: schedules move by the steps trained on, and what is no policy or batch is named."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.toy import TeamBits
from penstock.learn.train_ops import train_on_replay

NET = ps.Net(hidden=(8,))
DQN = ps.DQN(learning_starts=50, replay_ratio=1, batch_size=8, lr="linear(1e-3, 1e-4)", net=NET)
PPO = ps.PPO(minibatch=32, epochs=1, lr="linear(1e-3, 0)", clip="linear(0.2, 0.1, 0.5)", net=NET)


def loop(algo: Any, steps: int, train: Any = ps.train_one_step, **build: Any) -> Any:
    """The policy after at least so many steps, its last metrics, and the steps."""
    sampler = ps.SerialSampler(T=8, B=4).build("CartPole-v1", seed=1)
    policy = algo.build(sampler.spec, seed=1, **build)
    sampler.initialize(policy.agent)
    metrics: dict[str, float] = {}
    itr = done = 0
    while done < steps:
        batch, _ = sampler.obtain_samples(itr)
        metrics = train(policy, batch)
        itr, done = itr + 1, done + batch.env_steps
    sampler.shutdown()
    return policy, metrics, done


@pytest.mark.parametrize("train", [ps.train_one_step, train_on_replay])
def test_an_own_loop_explores_less_and_less(train: Any) -> None:
    policy, _, done = loop(DQN, 160, train, total_steps=1_600)
    assert policy.agent.epsilon.tolist() == [pytest.approx(0.05)] * 4 and policy.progress == done / 1_600
    policy, _, done = loop(DQN, 60, train, total_steps=1_600)
    assert policy.agent.epsilon.tolist() == [pytest.approx(1 - 0.95 * done / 160)] * 4
    assert policy.settings.lr == pytest.approx(1e-3 - 9e-4 * done / 1_600)


@pytest.mark.parametrize("algo", [DQN, PPO], ids=["dqn", "ppo"])
def test_it_has_the_bits_of_a_run_of_as_many_steps(algo: Any, tmp_path: Any) -> None:
    policy, metrics, _ = loop(algo, 320, total_steps=320)
    run = ps.RunConfig(steps=320, seed=1, dir=str(tmp_path / "run"), progress="off", eval_episodes=0)
    result = ps.train(ps.Experiment("CartPole-v1", algo, ps.SerialSampler(T=8, B=4), run))
    for name, x in result.policy.agent.state_dict().items():
        if name not in ("explored", "epsilon"):  # which a run leaves where its last batch was collected
            assert torch.equal(x, policy.agent.state_dict()[name]), name
    assert metrics["train/learning_rate"] == result.metrics["train/learning_rate"]


def test_without_a_total_schedules_that_stand_still_are_told_once() -> None:
    with pytest.warns(
        UserWarning, match=r"lr='linear\(1e-3, 0\)', clip=.*total_steps=100_000.*lr='linear\(1e-3, 0, s"
    ) as w:
        policy, metrics, _ = loop(PPO, 90)
    assert len([x for x in w if "total_steps" in str(x.message)]) == 1
    assert metrics["train/learning_rate"] == 1e-3 and policy.progress == 0.0


@pytest.mark.parametrize(
    ("algo", "build"),
    [
        (ps.PPO(minibatch=32, epochs=1, net=NET), {}),
        (ps.PPO(minibatch=32, epochs=1, lr="linear(1e-3, 0, steps=64)", net=NET), {}),
        (PPO, {"total_steps": 100}),
    ],
)
def test_nothing_is_told_where_nothing_stands_still(algo: Any, build: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy, metrics, done = loop(algo, 90, **build)
    if algo.lr != 3e-4:
        assert metrics["train/learning_rate"] < 1e-3
    assert policy.clock.env_steps == done


def test_whoever_sets_progress_keeps_the_time() -> None:
    def train(policy: Any, batch: Any) -> Any:
        policy.set_progress(0.5)
        return ps.train_one_step(policy, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy, metrics, _ = loop(PPO, 90, train)
    assert metrics["train/learning_rate"] == 5e-4 and policy.clock.env_steps == 0


def test_policies_of_many_agents_count_steps_of_environments() -> None:
    algo = ps.Policies({"a": PPO, "b": DQN}, {"agent_0": "a", "agent_1": "b"})
    sampler = ps.SerialSampler(T=8, B=4).build(algo.seat(TeamBits), seed=1)
    policies = algo.build(sampler.specs, total_steps=640)
    sampler.initialize(policies.agents)
    steps = 0
    for itr in range(4):
        batch, _ = sampler.obtain_samples(itr)
        steps += batch.env_steps
        ps.train_one_step(policies, batch)
    assert {name: policy.progress for name, policy in policies.items()} == dict.fromkeys("ab", steps / 640)
    sampler.shutdown()


def test_time_is_part_of_the_state() -> None:
    policy, *_ = loop(PPO, 90, total_steps=320)
    other, *_ = loop(PPO, 0, total_steps=320)
    other.load_state_dict(policy.state_dict())
    assert (other.progress, other.settings.lr) == (policy.progress, policy.settings.lr)


@pytest.mark.parametrize("total", [0, -5, 1.5, True])
def test_a_total_is_a_number_of_steps(total: Any) -> None:
    with pytest.raises(ConfigError, match=r"total_steps=.*expected"):
        loop(PPO, 0, total_steps=total)


def test_the_policy_of_an_env_runner_knows_the_runs_length() -> None:
    run = ps.RunConfig(steps=320, seed=1)
    runner = ps.EnvRunner(ps.Experiment("CartPole-v1", DQN, ps.SerialSampler(T=8, B=4), run))
    batch = runner.sample()
    assert not isinstance(batch, ps.MultiAgentBatch)
    runner.learn_on_batch(batch)
    assert 0.0 < runner.policy.progress <= 0.1


def a_batch(many: bool = False) -> tuple[Any, Any]:
    algo = ps.Policies({"x": PPO}) if many else PPO
    config: Any = algo.seat(TeamBits) if isinstance(algo, ps.Policies) else "CartPole-v1"
    sampler = ps.SerialSampler(T=8, B=4).build(config, seed=1)
    policy: Any = algo.build(sampler.specs if many else sampler.spec, total_steps=100)
    sampler.initialize(policy.agents if many else policy.agent)
    batch = sampler.obtain_samples(0)[0].copy()
    sampler.shutdown()
    return policy, batch


def test_what_is_no_policy_is_named() -> None:
    policy, batch = a_batch()
    trainer: Any = type("Trainer", (), {"policy": policy})()
    for given, words in (
        (PPO, r"settings, PPO\(\.\.\.\).*algo\.build\(sampler\.spec\)"),
        (ps.PPO, r"the class PPO.*ps\.PPO\(\)\.build"),
        (trainer, r"Trainer; expected a live policy: its own"),
        (batch, r"SampleBatch in place of the policy"),
        (policy.agent, "ActorCritic in place of the policy"),
    ):
        with pytest.raises(ConfigError, match=f"train_one_step got {words}"):
            ps.train_one_step(given, batch)
    with pytest.raises(ConfigError, match="train_on_replay got a policy of PPO, which has no replay; use train_one_st"):
        train_on_replay(policy, batch)


def test_what_is_no_batch_is_named() -> None:
    policy, batch = a_batch()
    policies, many = a_batch(many=True)
    for given, words in (
        (batch[3:3], r"a batch of T=0, B=4; expected at least one row"),
        (batch[:, 2:2], r"a batch of T=8, B=0"),
        ((batch, None), r"tuple; .*obtain_samples returns \(batch, episodes\)"),
        (policy.postprocess(batch), r"a TrainBatch, which is post-processed"),
        (many, r"a MultiAgentBatch of the policies \['x'\]"),
        (None, r"NoneType; expected the SampleBatch"),
    ):
        with pytest.raises(ConfigError, match=f"train_one_step got {words}"):
            ps.train_one_step(policy, given)
    with pytest.raises(ConfigError, match="train_one_step got NoneType"):
        ps.train_one_step(policies, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="learn_on_batch got SampleBatch; expected a TrainBatch"):
        policy.learn_on_batch(batch)
    with pytest.raises(ConfigError, match=r"MultiAgentBatch\[slice\(0, 3, None\)\]; .*batch\['x'\]\[0:3\]"):
        many[0:3]
    with pytest.raises(ConfigError, match=r"SampleBatch\['rewards'\]; .*batch\.reward.*did you mean .*'reward'"):
        batch["rewards"]
    with pytest.raises(ConfigError, match=r"SampleBatch\[array"):
        batch[np.array([1, 2])]
