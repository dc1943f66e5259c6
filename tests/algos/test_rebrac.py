"""ReBRAC and TD3+BC: losses against a slow loop over rows, tasks of known answers, and what does not fit them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs import toy
from penstock.learn.policy import Policy
from penstock.replay.replay import Replay
from penstock.replay.view import Transitions
from tests.algos.filled import BOX, Chance, Record, assert_gradients_equal, drawn, filled
from tests.algos.off_policy_slow import normal, q_of_point
from tests.algos.test_control_probes import Lever, near, q
from tests.replay.test_endings import B, filled as filled_from, records
from tests.replay.test_view import SPEC as CHOICES, STEPS, elsewhere, golden

BOXES = partial(Chance, BOX)
MINI: dict[str, Any] = {"batch_size": 24, "discount": 0.8, "replay": ps.ReplaySettings(capacity=600)}
REBRAC = ps.ReBRAC(**MINI, actor_bc=0.3, critic_bc=0.7, net=ps.Net(hidden=(8, 8), activation="relu", norm="critic"))
TD3BC = ps.TD3BC(**MINI, net=ps.Net(hidden=(8, 8), activation="relu"))


def unit(action: Any) -> Tensor:
    """[2] in [-1, 1] of an action in the environment's units."""
    return ((torch.as_tensor(action) - torch.tensor([1.0, 0.25])) / torch.tensor([4.0, 0.25])).clamp(-1, 1)


def slow_target(agent: Any, record: Record, t: int, b: int, noise: Tensor, cfg: Any) -> float:
    """r + discount * (min Q - critic_bc * |a' - a_data'|^2), with the penalty only where an action followed."""
    total, weight, following = record.transition(t, b, cfg.n_step, cfg.discount)
    limit, action = cfg.target_noise_clip, []
    for point, z in zip(agent.target_point(following)[0].tolist(), normal(noise)):
        action.append(min(max(point + min(max(cfg.target_noise * z, -limit), limit), -1.0), 1.0))
    value = float(agent.target_q(following, torch.tensor([action])).min())
    last = t
    while last < t + cfg.n_step - 1 and not (record.at(last, "terminated", b) or record.at(last, "truncated", b)):
        last += 1
    if not (record.at(last, "terminated", b) or record.at(last, "truncated", b)):
        apart = torch.tensor(action) - unit(record.at(last + 1, "action", b))
        value -= cfg.critic_bc * float(apart.square().sum())
    return total + weight * value


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("cfg", [REBRAC, TD3BC], ids=["rebrac", "td3-bc"])
def test_losses_and_gradients_equal_a_slow_loop(cfg: ps.ReBRAC, n_step: int) -> None:
    """Of TD3+BC, alpha times the actor's loss is that of its paper: mean (mu - a)^2 - alpha Q_1 / mean |Q_1|."""
    cfg = replace(cfg, n_step=n_step)
    policy, record = filled(cfg, BOXES)
    agent: Any = policy.agent
    drawing, x = drawn(policy)
    with torch.no_grad():
        ready = policy.postprocess_fn(agent, TrainBatch(x.inputs, {**x.rows, "update": 1}, None), cfg)
    loss: Any = policy.loss_fn(agent, ready, cfg)
    critic, apart, values = [], [], []
    for i, (t, b) in enumerate(zip(drawing.unit, drawing.slot)):
        one, taken = record.inputs(t, b), record.at(t, "action", b)
        target = slow_target(agent, record, t, b, x["noise"][i], cfg)
        assert float(ready["target"][i]) == pytest.approx(target, rel=1e-4, abs=1e-4)
        critic.append((q_of_point(agent, one, taken) - target).square().sum())
        action = agent.point(one)
        of_all = agent.q(one, action)[:, 0]
        values.append(of_all[0] if cfg.mean_distance else of_all.min())
        apart.append((action[0] - unit(taken)).square())
    value, distance = torch.stack(values), torch.stack(apart)
    size = value.detach().abs().mean()
    expected = {"critic": torch.stack(critic).mean()}
    if cfg.mean_distance:
        alpha = 2.5
        expected["actor"] = (distance.mean() - alpha * value.mean() / size) / alpha
    else:
        expected["actor"] = (cfg.actor_bc * distance.sum(1) - value / size).mean()
    assert loss.total.keys() == expected.keys()
    for name, network in (("critic", agent.critics), ("actor", agent.actor)):
        torch.testing.assert_close(loss.total[name], expected[name], rtol=1e-4, atol=1e-5)
        assert_gradients_equal(loss.total[name], expected[name], [*network.parameters()])
    held = x.rows.get("has_next_action")
    assert held is None if cfg.critic_bc == 0.0 else 0 < held.sum() < len(held)
    first = policy.loss_fn(agent, replace(ready, rows={**ready.rows, "update": 0}), cfg)
    assert set(first.total) == {"critic"}  # the actor steps every second time


def test_the_next_action_by_hand() -> None:
    """The golden episodes: 0, 1, 2 truncated | 3, 4 terminated | 5 cut by what follows; n = 1, and 2."""
    for n, following, has in ((1, [1, 2, 0, 4, 0, 0], [1, 1, 0, 1, 0, 0]), (2, [2, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0])):
        replay = Replay(CHOICES, ps.ReplaySettings(capacity=60), Transitions(n, 0.5, next_action=True))
        replay.append(golden())
        newest = replay.view.read(replay.storage, np.array([7]), np.array([0]), np.zeros((1, 0)))  # pyright: ignore
        assert not newest["has_next_action"][0]
        replay.append(elsewhere())
        shown = replay.view.read(replay.storage, np.array(STEPS), np.zeros(6, np.int64), np.zeros((6, 0)))  # pyright: ignore
        found = np.asarray(shown["has_next_action"])
        assert found.tolist() == [bool(x) for x in has]
        assert np.asarray(shown["next_action"])[found].tolist() == [a for a, x in zip(following, has) if x]


@pytest.mark.parametrize("n_step", [1, 3])
def test_the_next_action_where_environments_reset_in_the_step_of_an_end(n_step: int) -> None:
    spec, batches, record = records(7, 11)
    view = Transitions(n_step, 0.9, next_action=True)
    storage: Any = filled_from(spec, batches, view).storage
    t, b = (x.ravel() for x in np.meshgrid(np.arange(storage.oldest, storage.head - n_step + 1), np.arange(B)))
    shown: Any = view.read(storage, t, b)
    held = 0
    for i, (row, slot) in enumerate(zip(t, b)):
        ends = (record.terminated | record.truncated)[row : row + n_step, slot]
        goes_on = not ends.any() and row + n_step < storage.head
        assert shown["has_next_action"][i] == goes_on
        if goes_on:
            held += 1
            assert shown["next_action"][i] == record.action[row + n_step, slot]
    assert 0 < held < len(t)


FAST: dict[str, Any] = {
    "lr": "linear(3e-2, 0)", "discount": 0.9, "batch_size": 32, "replay_ratio": 6.0, "learning_starts": 4_000, "tau": 0.2,
    "replay": ps.ReplaySettings(capacity=4_000), "net": ps.Net(hidden=(32,), activation="relu"),
}  # fmt: skip


def learned(env: Any, algo: Any, batches: int) -> tuple[Policy, Any]:
    """A policy that has learned from batches of random actions alone."""
    sampler = ps.SerialSampler(T=32, B=8).build(env, 0)
    policy = algo.build(sampler.spec, 0)
    policy.replay_schedule.learning_starts = 100
    sampler.initialize(policy.agent)
    for itr in range(batches):
        policy.set_progress(itr / batches)
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    return policy, sampler


@pytest.mark.parametrize("kind", [ps.ReBRAC, ps.TD3BC])
def test_the_better_action_of_random_ones_is_learned(kind: Any) -> None:
    """Held loosely, the actor goes where Q is largest; held tightly, to the mean of the data, which is 0."""
    policy, sampler = learned(partial(Lever, toy.Match), kind(**FAST, actor_bc=0.01), 7)
    assert sampler.evaluate_agent(0, 32).mean_return == 1.0
    assert q(policy, [[-1.0], [1.0]]) == near([1.0, 1.0], 0.25)
    agent: Any = learned(partial(Lever, toy.Match), kind(**FAST, actor_bc=100.0), 5)[0].agent
    inputs = ps.Inputs(torch.tensor([[-1.0], [1.0]]), None, None, None)  # pyright: ignore[reportArgumentType]
    assert agent.point(inputs).abs().max() < 0.25


def test_ends_and_time_limits() -> None:
    """The value of a state before an end has no more of the penalty than the states before it."""
    loose = ps.ReBRAC(**FAST, actor_bc=0.01, critic_bc=0.0)
    policy, _ = learned(partial(Lever, toy.ThreeStep), loose, 6)
    assert q(policy, [[0.0], [1.0], [2.0]]) == near([2.71, 1.9, 1.0], 0.15)
    policy, _ = learned(partial(Lever, partial(toy.Endless, 2)), replace(loose, discount=0.5), 6)
    assert q(policy, [[0.0]]) == near([2.0], 0.1)


def test_the_penalty_lowers_values_by_what_it_weighs() -> None:
    """Held to 0 by the data's mean, a' is 0 and a_data' uniform in [-1, 1], so that |a' - a_data'|^2 is 1/3 on average."""
    held = ps.ReBRAC(**FAST, actor_bc=100.0, critic_bc=0.6, target_noise=0.0)
    policy, _ = learned(partial(Lever, toy.TwoStep), held, 6)
    assert q(policy, [[1.0], [0.0]]) == near([1.0, 0.9 * (1.0 - 0.6 / 3)], 0.07)


def test_norms_stand_in_the_critics_alone() -> None:
    names = dict(ps.ReBRAC().build(EnvSpec(LeafSpec("box", (2,), "float32"), LeafSpec("box", (1,), "float32", low=-1.0,
                                                                                    high=1.0))).agent.named_parameters())  # fmt: skip
    assert {name.split(".")[0] for name in names if "norm" in name} == {"critics", "target_critics"}
    with pytest.raises(ConfigError, match=r"net.norm='critic' needs a critic apart from the actor"):
        ps.DQN(net=ps.Net(norm="critic")).build(CHOICES)


def test_other_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ReBRAC needs one box.*DQN"):
        ps.ReBRAC().build(EnvSpec(LeafSpec("box", (1,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,))))
