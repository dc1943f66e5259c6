import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.agents.networks import Net
from penstock.algos.ppo import PPO
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.tree import tree_leaves
from penstock.envs.toy import (
    Bandit,
    BoundedBandit,
    Chain,
    ContinuousBandit,
    Endless,
    Masked,
    RepeatPrevious,
    ThreeStep,
    Toy,
)
from penstock.learn.algorithm import Loss
from penstock.learn.policy import Policy
from penstock.learn.rows.postprocess import as_tensors
from penstock.learn.train_ops import train_one_step
from penstock.samplers.serial import SerialSampler

CPU = torch.device("cpu")


class Everything(Toy):
    """Takes a Dict action of every kind and pays by its box."""

    def __init__(self) -> None:
        action = spaces.Dict(
            {"bits": spaces.MultiBinary(3), "box": spaces.Box(-2, 1, (2,)), "choices": spaces.MultiDiscrete([2, 3])}
        )
        super().__init__(spaces.Box(-1, 1, (2,)), action)

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return float(action["box"].sum()), self.t >= 4, False


def collected(env: Any, algo: PPO, batches: int = 1, T: int = 16, B: int = 8) -> tuple[Policy, list[SampleBatch]]:
    sampler = SerialSampler(T=T, B=B).build(env, seed=1)
    policy = algo.build(sampler.spec, seed=2)
    sampler.initialize(policy.agent)
    return policy, [sampler.obtain_samples(k)[0].copy() for k in range(batches)]


def spy(policy: Policy) -> list[tuple[TrainBatch, torch.Tensor]]:
    """The minibatches that the loss is given and their log ratios, as they come."""
    seen: list[tuple[TrainBatch, torch.Tensor]] = []
    loss_fn = policy.loss_fn

    def watched(agent: Any, x: TrainBatch, cfg: Any) -> Loss:
        with torch.no_grad():
            seen.append((x, agent(x.inputs, x.state)[0].log_prob(x["action"]) - x["logp"]))
        return loss_fn(agent, x, cfg)

    policy.loss_fn = watched
    return seen


@pytest.mark.parametrize("env", [Bandit, ThreeStep, Masked, BoundedBandit, Everything])
@pytest.mark.parametrize("net", [Net(), Net(hidden=(13,), shared=True), Net(squash=True), Net(prev_action=True)],
                         ids=["plain", "shared", "squashed", "previous"])  # fmt: skip
def test_the_first_ratio_is_exactly_one(env: Any, net: Net):
    policy, (batch,) = collected(env, PPO(net=net, minibatch=32, epochs=1))
    seen = spy(policy)
    train_one_step(policy, batch)
    first, *later = [log_ratio for _, log_ratio in seen]
    assert len(first) >= 8
    assert torch.equal(first, torch.zeros_like(first))
    if env is not Bandit:
        assert any(log_ratio.any() for log_ratio in later)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_first_recurrent_ratio_is_one_but_for_rounding(kind: Any):
    net = Net(hidden=(16,), recurrent=kind, recurrent_size=16, prev_action=True)
    policy, batches = collected(RepeatPrevious, PPO(net=net, minibatch=48, epochs=1), batches=2, T=12)
    assert not batches[1].valid.all()
    assert all(x.any() for x in tree_leaves(batches[1].state))
    for batch in batches:
        data = policy.postprocess(as_tensors(batch, CPU))
        with torch.no_grad():
            log_prob = policy.agent(data.inputs, data.state)[0].log_prob(data["action"])
        assert data.valid is not None
        assert (log_prob - data["logp"])[data.valid].abs().max() < 1e-5
    seen = spy(policy)
    train_one_step(policy, batches[1])
    assert [x.valid is not None and x["logp"].shape for x, _ in seen] == [(12, 4), (12, 4)]


def test_every_epoch_and_minibatch_is_one_update():
    policy, batches = collected(ThreeStep, PPO(minibatch=32, epochs=3), batches=2)
    seen = spy(policy)
    results = train_one_step(policy, batches[0])
    assert len(seen) == policy.updates == 3 * 4
    assert results["train/n_updates"] == 12
    assert policy.version == 1
    assert train_one_step(policy, batches[1])["train/n_updates"] == 24
    assert policy.version == 2
    rows = sum(len(x["logp"]) for x, _ in seen[:4])
    assert rows == batches[0].env_steps < 128


def test_metrics_are_means_over_the_updates():
    policy, (batch,) = collected(ThreeStep, PPO(minibatch=32, epochs=2, lr=1e-2))
    totals: list[float] = []
    loss_fn = policy.loss_fn

    def watched(agent: Any, x: TrainBatch, cfg: Any) -> Loss:
        loss = loss_fn(agent, x, cfg)
        totals.append(float(loss.metrics["loss"]))
        return loss

    policy.loss_fn = watched
    results = train_one_step(policy, batch)
    assert len(totals) == 8
    assert results["train/loss"] == pytest.approx(np.mean(totals), rel=1e-5)
    assert results["train/learning_rate"] == 1e-2
    assert set(results) >= {
        f"train/{name}"
        for name in ("policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction",
                     "explained_variance")
    }  # fmt: skip
    assert all(isinstance(v, float) for v in results.values())
    assert "train/skipped_updates" not in results


def test_a_loss_that_says_stop_ends_the_passes_without_a_step():
    policy, (batch,) = collected(ThreeStep, PPO(minibatch=32, epochs=3))
    loss_fn, parameters = policy.loss_fn, []

    def stopping(agent: Any, x: TrainBatch, cfg: Any) -> Loss:
        parameters.append([p.clone() for p in agent.parameters()])
        return loss_fn(agent, x, cfg)._replace(stop=len(parameters) == 6)

    policy.loss_fn = stopping
    results = train_one_step(policy, batch)
    assert (policy.updates, len(parameters), results["train/stopped_after"]) == (5, 6, 5.0)
    assert all(torch.equal(a, b) for a, b in zip(parameters[-1], policy.agent.parameters()))
    policy.loss_fn = loss_fn
    assert "train/stopped_after" not in train_one_step(policy, batch)


def test_skipped_updates_show_in_the_metrics():
    policy, (batch,) = collected(ThreeStep, PPO(minibatch=32, epochs=1))
    loss_fn, calls = policy.loss_fn, []

    def broken_once(agent: Any, x: TrainBatch, cfg: Any) -> Loss:
        loss = loss_fn(agent, x, cfg)
        calls.append(1)
        return loss._replace(total=loss.total * float("nan")) if len(calls) == 2 else loss

    policy.loss_fn = broken_once
    results = train_one_step(policy, batch)
    assert results["train/skipped_updates"] == 1
    assert results["train/n_updates"] == 3
    assert np.isfinite(results["train/loss"])


def test_the_record_is_left_alone():
    policy, (batch,) = collected(Everything, PPO(minibatch=32, net=Net(normalize_obs=True, normalize_reward=True)))
    before = [x.tobytes() for x in tree_leaves(batch)]
    for _ in range(2):
        train_one_step(policy, batch)
    assert [x.tobytes() for x in tree_leaves(batch)] == before


def test_the_same_start_gives_the_same_bits():
    def parameters(minibatch: int = 32) -> list[bytes]:
        policy, batches = collected(Everything, PPO(minibatch=minibatch), batches=3)
        for batch in batches:
            train_one_step(policy, batch)
        return [p.detach().numpy().tobytes() for p in policy.agent.parameters()]

    assert parameters() == parameters()
    assert parameters() != parameters(64)


def test_the_first_batch_only_sets_statistics():
    for net in (Net(normalize_obs=True), Net(normalize_reward=True)):
        policy, batches = collected(Chain, PPO(net=net, epochs=4, minibatch=32), batches=3)
        seen = spy(policy)
        before = [p.clone() for p in policy.agent.parameters()]
        results = train_one_step(policy, batches[0])
        assert not seen
        assert all(torch.equal(a, b) for a, b in zip(before, policy.agent.parameters()))
        assert (policy.version, policy.updates) == (1, 0)
        assert results["train/n_updates"] == 0
        assert not policy.agent.needs_statistics
        train_one_step(policy, batches[1])
        assert policy.updates == len(seen) == 16


def test_a_batch_is_trained_with_the_statistics_it_was_collected_with():
    algo = PPO(net=Net(normalize_obs=True), minibatch=32, normalize_value=False)
    policy, batches = collected(Chain, algo, batches=2)
    train_one_step(policy, batches[0])
    frozen = {name: x.clone() for name, x in policy.agent.named_buffers()}
    loss_fn = policy.loss_fn

    def watched(agent: Any, x: TrainBatch, cfg: Any) -> Loss:
        assert all(torch.equal(x, frozen[name]) for name, x in agent.named_buffers())
        return loss_fn(agent, x, cfg)

    policy.loss_fn = watched
    train_one_step(policy, batches[1])
    counts = [x for name, x in policy.agent.named_buffers() if name.endswith("count")]
    assert [int(c) for c in counts] == [batches[0].env_steps + batches[1].env_steps]


def test_targets_are_made_of_scaled_rewards_and_the_record_keeps_its_own():
    policy, batches = collected(Endless, PPO(net=Net(normalize_reward=True), discount=0.9, gae_lambda=0.0), batches=2)
    train_one_step(policy, batches[0])
    assert policy.agent.reward_scaler is not None  # pyright: ignore
    deviation = float(policy.agent.reward_scaler.moments.var.sqrt())  # pyright: ignore
    assert deviation != pytest.approx(1, abs=0.1)
    batch = as_tensors(batches[1], CPU)
    data, value = policy.postprocess(batch), policy.agent.values(batch)
    assert data.valid is not None
    expected = 1 / deviation + 0.9 * value[1:]
    torch.testing.assert_close(data["return"][data.valid], expected[data.valid])
    assert batch.reward.max() == 1


def test_a_batch_without_a_valid_row_trains_nothing():
    """One slot, one row and episodes of one step: every other batch is a single reset row."""
    policy, batches = collected(ContinuousBandit, PPO(epochs=12), batches=4, T=1, B=1)
    assert [b.env_steps for b in batches] == [1, 0, 1, 0]
    for batch in batches:
        before = policy.updates
        results = train_one_step(policy, batch)
        assert policy.updates - before == 12 * batch.env_steps
        assert all(np.isfinite(v) for k, v in results.items() if k != "train/explained_variance")
    assert policy.skipped == 0


def test_tensors_are_views_of_the_record():
    _, (batch,) = collected(Chain, PPO())
    tensors = as_tensors(batch, CPU)
    batch.reward[0, 0] = 42
    assert tensors.reward[0, 0] == 42
    again = as_tensors(tensors, CPU)
    assert again.reward.data_ptr() == tensors.reward.data_ptr()


def test_a_learner_that_is_copied_learns_the_same():
    policy, batches = collected(Chain, PPO(minibatch=32), batches=2)
    train_one_step(policy, batches[0])
    twin = copy.deepcopy(policy)
    for p in (policy, twin):
        train_one_step(p, batches[1])
    assert all(torch.equal(a, b) for a, b in zip(policy.agent.parameters(), twin.agent.parameters()))
