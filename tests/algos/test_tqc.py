"""TQC: targets, losses and gradients by hand, sb3-contrib's loss on one batch, tasks of known answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.critics import StackedMLP
from penstock.algos import tqc
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs import toy
from penstock.learn.train_ops import train_one_step

SPEC = EnvSpec(LeafSpec("box", (1,), "float32", -9.0, 9.0), LeafSpec("box", (1,), "float32", -1.0, 1.0))
CFG = ps.TQC(critics=2, quantiles=3, drop=1, alpha=0.5, net=ps.Net(hidden=(4,), activation="relu"))
Z = torch.tensor([[[0.0, 1.0, 3.0], [0.5, 0.5, 2.0]], [[-1.0, 0.25, 4.0], [2.0, 1.0, 0.0]]])  # [N, k, M]
TARGET = torch.tensor([[0.2, 0.9, 1.4, 2.5], [-0.5, 0.0, 3.0, 1.0]])


def inputs(*obs: float) -> Inputs:
    return Inputs(torch.tensor(obs).unsqueeze(1), None, None, None)  # pyright: ignore[reportArgumentType]


def agent_of(cfg: ps.TQC = CFG) -> Any:
    agent: Any = cfg.build(SPEC).agent
    agent.set_exploration(cfg, 10**6)
    return agent


def test_targets_are_the_least_atoms_of_all_critics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 atoms the 2 largest are dropped: of all together, not one of each critic."""
    agent = agent_of()
    x = TrainBatch(inputs(0.0, 1.0), {"next": inputs(2.0, 3.0), "noise": torch.rand(2, 2), "return": torch.tensor(
        [10.0, 20.0]), "discount": torch.tensor([0.5, 0.0])}, None)  # fmt: skip
    atoms = torch.tensor([[[1.0, 2.0, 3.0], [9.0, 8.0, 7.0]], [[4.0, 5.0, 6.0], [0.0, 0.0, 0.0]]])  # [k, N, M]
    monkeypatch.setattr(agent, "target_q", lambda *_: atoms)
    logp = torch.tensor([0.4, 0.8])
    monkeypatch.setattr(agent, "sample", lambda *_: (torch.zeros(2, 1), logp))
    found = tqc.postprocess_fn(agent, x, CFG)["target"]
    assert found[0].tolist() == pytest.approx([10.0 + 0.5 * (z - 0.5 * 0.4) for z in (1.0, 2.0, 3.0, 4.0)])
    assert found[1].tolist() == pytest.approx([20.0] * 4)


def test_the_critics_loss_is_sb3_contribs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs, 0.3227 by `quantile_huber_loss(z, target, sum_over_quantiles=False)`, is a mean over critics: ours a sum."""
    agent = agent_of()
    z = Z.transpose(0, 1).clone().requires_grad_()
    monkeypatch.setattr(agent, "q", lambda *_: z)
    x = TrainBatch(inputs(0.0, 1.0), {"noise": torch.rand(2, 1), "action": torch.zeros(2, 1), "target": TARGET}, None)
    loss = tqc.loss_fn(agent, x, CFG)
    totals: Any = loss.total
    assert float(totals["critic"].detach()) == pytest.approx(2 * 0.3227, abs=2e-4)
    by_hand = 0.0
    for n in range(2):
        for k in range(2):
            for m, tau in enumerate((1 / 6, 1 / 2, 5 / 6)):
                for y in TARGET[n].tolist():
                    u = y - float(Z[n, k, m])
                    huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                    by_hand += abs(tau - (u < 0)) * huber / (2 * 3 * 4)
    assert float(totals["critic"].detach()) == pytest.approx(by_hand, rel=1e-5)
    (slope,) = torch.autograd.grad(totals["critic"], z)
    assert slope.abs().sum() > 0.0
    assert loss.priorities is None


def test_the_actor_goes_up_the_mean_of_all_quantiles(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_of()
    x = TrainBatch(inputs(0.0, 1.0), {"noise": torch.rand(2, 1), "action": torch.zeros(2, 1), "target": TARGET}, None)
    loss = tqc.loss_fn(agent, x, CFG)
    action, logp = agent.sample(x.inputs, x["noise"])
    stack: StackedMLP = agent.critics.stack
    z = stack(torch.cat([x.inputs.obs, action], 1))  # pyright: ignore[reportArgumentType, reportCallIssue]
    expected = (0.5 * logp - z.mean((0, 2))).mean()
    totals: Any = loss.total
    torch.testing.assert_close(totals["actor"], expected)
    weights = [*agent.actor.parameters()]
    for a, b in zip(torch.autograd.grad(totals["actor"], weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(a, b)


def test_weights_of_prioritized_replay_count_and_priorities_come_back() -> None:
    agent = agent_of()
    rows = {"noise": torch.rand(2, 1), "action": torch.zeros(2, 1), "target": TARGET}
    both = tqc.loss_fn(agent, TrainBatch(inputs(0.0, 1.0), {**rows, "weight": torch.tensor([2.0, 0.0])}, None), CFG)
    one = {name: x[:1] for name, x in rows.items()}
    alone = tqc.loss_fn(agent, TrainBatch(inputs(0.0), one, None), CFG)
    totals: Any = (both.total, alone.total)
    torch.testing.assert_close(totals[0]["critic"], totals[1]["critic"])
    with torch.no_grad():
        q = agent.q(inputs(0.0, 1.0), torch.zeros(2, 1)).mean((0, 2))
    torch.testing.assert_close(both.priorities, (q - TARGET.mean(1)).abs())


SOFT = ps.TQC(lr="linear(3e-2, 0)", discount=0.9, batch_size=32, replay_ratio=6.0, learning_starts=100, alpha=0.005,
              tau=0.2, quantiles=5, drop=0, replay=ps.ReplaySettings(capacity=4_000), net=CFG.net)  # fmt: skip


def test_the_best_action_is_found() -> None:
    sampler = ps.SerialSampler(T=32, B=8).build(toy.ContinuousBandit, 0)
    policy = replace(SOFT, net=ps.Net(hidden=(32,), activation="relu")).build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    for itr in range(12):
        policy.set_progress(itr / 12)
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert sampler.evaluate_agent(0, 16).mean_return > -0.02


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"drop=25 of quantiles=25 leaves none; expected drop < quantiles"):
        ps.TQC(drop=25)
    choice = EnvSpec(SPEC.obs, LeafSpec("discrete", (), "int64", sizes=(2,)))
    with pytest.raises(ConfigError, match=r"TQC needs one box.*DQN"):
        ps.TQC().build(choice)
    with pytest.raises(ConfigError, match=r"TQC with critics of your own.*use SAC"):
        ps.TQC(agent=lambda spec, cfg: ps.control_agent(spec, cfg, critics=torch.nn.Identity())).build(SPEC)


def test_one_quantile_and_one_critic_act_like_any_other() -> None:
    agent = agent_of(ps.TQC(critics=1, quantiles=1, drop=0))
    assert agent.q(inputs(0.0, 1.0), torch.zeros(2, 1)).shape == (1, 2, 1)
    assert np.isfinite(agent.q(inputs(0.0), torch.zeros(1, 1)).detach().numpy()).all()
