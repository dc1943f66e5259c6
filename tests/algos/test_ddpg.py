"""DDPG against a loop over rows, its targets, step sizes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.continuous import ControlAgent
from penstock.algos.ddpg import DDPG, loss_fn, postprocess_fn
from penstock.core.errors import ConfigError
from penstock.replay.replay import ReplaySettings
from penstock.samplers.serial import SerialSampler
from tests.algos.filled import BOX, Chance, Record, assert_gradients_equal, drawn, filled, part, trained

ENV = partial(Chance, BOX)
PRIORITIZED = ReplaySettings(capacity=600, index="prioritized", priority_beta=0.5)
CFG = DDPG(lr=1e-3, discount=0.9, batch_size=12, learning_starts=0, replay_ratio=12.0, replay=ReplaySettings(capacity=600),
           net=ps.Net(hidden=(6, 6), activation="relu"))  # fmt: skip


def by_hand(agent: ControlAgent, record: Record, drawing: Any, cfg: DDPG) -> tuple[Any, list[float]]:
    """Both losses and the priorities of the drawn rows."""
    critic, actor, priorities = [], [], []
    for i, (t, b) in enumerate(zip(drawing.unit.tolist(), drawing.slot.tolist())):
        total, weight, following = record.transition(t, b, cfg.n_step, cfg.discount)
        with torch.no_grad():
            target = total + weight * float(agent.target_q(following, agent.target_point(following)))
        x = record.inputs(t, b)
        unit = (torch.as_tensor(record.at(t, "action", b)) - torch.tensor([1.0, 0.25])) / torch.tensor([4.0, 0.25])
        error = agent.q(x, unit[None])[0, 0] - target
        critic.append(error.square() * (1.0 if drawing.weight is None else float(drawing.weight[i])))
        priorities.append(error.abs().item())
        actor.append(-agent.q(x, agent.point(x))[0, 0])
    return {"critic": torch.stack(critic).mean(), "actor": torch.stack(actor).mean()}, priorities


@pytest.mark.parametrize("changes", [{}, {"n_step": 3}, {"replay": PRIORITIZED}], ids=lambda c: "-".join(c) or "plain")
def test_losses_gradients_and_priorities_equal_a_slow_loop(changes: dict[str, Any]) -> None:
    cfg = replace(CFG, **changes)
    policy, record = filled(cfg, ENV)
    agent: Any = policy.agent
    assert policy.replay_schedule is not None
    if cfg.replay is PRIORITIZED:
        drawing, _ = drawn(policy)
        policy.replay_schedule.replay.update_priorities(drawing, np.linspace(0.1, 3.0, len(drawing.unit)))
    drawing, x = drawn(policy)
    with torch.no_grad():
        ready = postprocess_fn(agent, x, cfg)
    loss = loss_fn(agent, ready, cfg)
    totals, priorities = by_hand(agent, record, drawing, cfg)
    assert (
        isinstance(loss.total, dict)
        and (loss.priorities is not None) == (cfg.replay is PRIORITIZED)
        and set(loss.total) == set(totals)
    )
    for name, own in (("critic", agent.critics), ("actor", agent.actor)):
        torch.testing.assert_close(loss.total[name], totals[name], rtol=1e-4, atol=1e-5)
        parameters = list(own.parameters())
        assert_gradients_equal(loss.total[name], totals[name], parameters)
        others = [p for p in agent.parameters() if p.requires_grad and all(p is not q for q in parameters)]
        found = torch.autograd.grad(loss.total[name], others, retain_graph=True, allow_unused=True)
        assert all(g is None for g in found)
    if loss.priorities is not None:
        np.testing.assert_allclose(loss.priorities.numpy(), priorities, rtol=1e-3, atol=1e-5)


def test_both_targets_start_as_copies_and_move_by_tau_at_every_step() -> None:
    policy, states = trained(replace(CFG, tau=0.25), ENV, 3)
    assert policy.updates == len(states) - 1 > 6
    for target, own in (("target_critics", "critics"), ("target_actor", "actor")):
        assert all(torch.equal(a, b) for a, b in zip(part(states[0], target), part(states[0], own)))
        for now, before in zip(states[1:], states):
            for a, b, c in zip(part(now, target), part(before, target), part(now, own)):
                torch.testing.assert_close(a, 0.75 * b + 0.25 * c, rtol=0, atol=1e-6)


def test_each_part_has_a_step_size_of_its_own() -> None:
    for actor_lr in (None, 1e-4):
        _, states = trained(replace(CFG, actor_lr=actor_lr), ENV, 2)
        for name, lr in (("critics", 1e-3), ("actor", actor_lr or 1e-3)):
            steps = torch.cat([(b - a).abs().flatten() for a, b in zip(part(states[0], name), part(states[1], name))])
            assert float(steps.max()) == pytest.approx(lr, rel=2e-2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CFG.build(SerialSampler(T=1, B=1).build(Chance, 0).spec), ["DDPG", "discrete(4)", "DQN"]),
        (lambda: replace(CFG, net=ps.Net(recurrent="gru")).build(SerialSampler(T=1, B=1).build(ENV, 0).spec), ["DDPG", "R2D1"]),
        (lambda: DDPG(exploration_noise=-0.1), ["exploration_noise=-0.1"]),
        (lambda: DDPG(discount=-0.1), ["discount=-0.1"]),
        (lambda: DDPG(actor_lr=0.0), ["actor_lr=0.0"]),
        (lambda: DDPG(max_grad_norm=0.0), ["max_grad_norm=0.0"]),
        (lambda: DDPG(batch_size=0).build(SerialSampler(T=1, B=1).build(ENV, 0).spec), ["batch_size=0"]),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
