"""TD3 against a loop over rows: smoothed and clipped target actions, the delayed actor, step sizes, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.continuous import ControlAgent
from penstock.algos.td3 import TD3, loss_fn, postprocess_fn
from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.replay.replay import ReplaySettings
from penstock.samplers.serial import SerialSampler
from tests.algos.filled import BOX, Chance, Record, assert_gradients_equal, drawn, filled, part, trained

ENV = partial(Chance, BOX)
UNIFORM = ReplaySettings(capacity=600)
PRIORITIZED = ReplaySettings(capacity=600, index="prioritized", priority_beta=0.5)
CFG = TD3(lr=1e-3, discount=0.9, batch_size=12, learning_starts=0, replay_ratio=12.0, replay=UNIFORM,
          net=ps.Net(hidden=(6, 6), activation="relu"))  # fmt: skip


def by_hand(
    agent: ControlAgent, record: Record, drawing: Any, noise: torch.Tensor, cfg: TD3
) -> tuple[Any, list[float]]:
    """Both losses and the priorities of the drawn rows."""
    critic, actor, priorities = [], [], []
    for i, (t, b) in enumerate(zip(drawing.unit.tolist(), drawing.slot.tolist())):
        total, weight, following = record.transition(t, b, cfg.n_step, cfg.discount)
        with torch.no_grad():
            limit, action = cfg.target_noise_clip, []
            for j in range(2):
                moved = min(max(cfg.target_noise * NormalDist().inv_cdf(float(noise[i, j])), -limit), limit)
                action.append(min(max(float(agent.target_point(following)[0, j]) + moved, -1.0), 1.0))
            target = total + weight * float(agent.target_q(following, torch.tensor([action])).min())
        x = record.inputs(t, b)
        unit = (torch.as_tensor(record.at(t, "action", b)) - torch.tensor([1.0, 0.25])) / torch.tensor([4.0, 0.25])
        error = agent.q(x, unit[None])[:, 0] - target
        critic.append(error.square().sum() * (1.0 if drawing.weight is None else float(drawing.weight[i])))
        priorities.append(error.abs().mean().item())
        actor.append(-agent.q(x, agent.point(x))[0, 0])
    return {"critic": torch.stack(critic).mean(), "actor": torch.stack(actor).mean()}, priorities


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_step": 3}, {"replay": PRIORITIZED}, {"critics": 3}, {"target_noise": 3.0}, {"target_noise_clip": 0.01}],
    ids=lambda c: "-".join(c) or "plain",
)
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
        ready = postprocess_fn(agent, TrainBatch(x.inputs, {**x.rows, "update": 1}, None), cfg)
    loss = loss_fn(agent, ready, cfg)
    totals, priorities = by_hand(agent, record, drawing, x["noise"], cfg)
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


def test_target_actions_by_hand() -> None:
    """mu' = 0.2, 0.9, 0.2, noise 0.2 z with z = 1, 1, 10: 0.4, 1 (the box), 0.7 (clipped at 0.5)."""
    seen: list[torch.Tensor] = []
    points = torch.tensor([[0.2], [0.9], [0.2]])

    class Fixed:
        target_point = staticmethod(lambda following: points)
        scaled_reward = staticmethod(lambda reward: reward)

        def target_q(self, following: Any, action: torch.Tensor) -> torch.Tensor:
            seen.append(action)
            return torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])

    z = torch.tensor([[1.0], [1.0], [4.0]], dtype=torch.float64)
    rows = {"next": None, "noise": torch.distributions.Normal(0.0, 1.0).cdf(z), "return": torch.ones(3),
            "discount": torch.tensor([0.5, 0.0, 0.5])}  # fmt: skip
    agent: Any = Fixed()
    ready = postprocess_fn(agent, TrainBatch(None, rows, None), CFG)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(seen[0].float(), torch.tensor([[0.4], [1.0], [0.7]]))
    assert ready["target"].tolist() == [1.5, 1.0, 2.0]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_actor_and_targets_move_every_delayed_step(delay: int) -> None:
    """And both at the same ones; the targets by tau."""
    policy, states = trained(replace(CFG, policy_delay=delay, tau=0.25), ENV, 3)
    assert policy.updates == len(states) - 1 > 6
    for target, own in (("target_critics", "critics"), ("target_actor", "actor")):
        assert all(torch.equal(a, b) for a, b in zip(part(states[0], target), part(states[0], own)))
    for i in range(1, len(states)):
        now, before, due = states[i], states[i - 1], i % delay == 0
        assert all(torch.equal(a, b) for a, b in zip(part(now, "actor"), part(before, "actor"))) != due
        assert not torch.equal(part(now, "critics")[0], part(before, "critics")[0])
        for target, own in (("target_critics", "critics"), ("target_actor", "actor")):
            for a, b, c in zip(part(now, target), part(before, target), part(now, own)):
                torch.testing.assert_close(a, 0.75 * b + 0.25 * c if due else b, rtol=0, atol=1e-6)


def test_each_part_has_a_step_size_of_its_own_on_one_schedule() -> None:
    policy, states = trained(replace(CFG, lr="linear(1e-3, 0)", actor_lr=2e-3, policy_delay=1), ENV, 3)
    for name, lr in (("critics", 1e-3), ("actor", 2e-3)):
        steps = torch.cat([(b - a).abs().flatten() for a, b in zip(part(states[0], name), part(states[1], name))])
        assert float(steps.max()) == pytest.approx(lr, rel=1e-2)
    policy.set_progress(0.75)
    assert [policy.optimizers[k].param_groups[0]["lr"] for k in ("critic", "actor")] == pytest.approx([2.5e-4, 5e-4])


def test_exploration_noise_is_a_schedule() -> None:
    policy, _ = trained(replace(CFG, exploration_noise="linear(0.5, 0.1, steps=16)"), ENV, 1)
    agent: Any = policy.agent
    assert policy.replay_schedule is not None
    steps = policy.replay_schedule.collected
    assert 0 < steps < 16 and float(agent.spread) == pytest.approx(0.5 - 0.4 * steps / 16)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CFG.build(SerialSampler(T=1, B=1).build(Chance, 0).spec), ["TD3", "discrete(4)", "DQN"]),
        (lambda: replace(CFG, net=ps.Net(recurrent="gru")).build(SerialSampler(T=1, B=1).build(ENV, 0).spec), ["TD3", "R2D1"]),
        (lambda: TD3(policy_delay=0), ["policy_delay=0"]),
        (lambda: TD3(target_noise=-0.1), ["target_noise=-0.1"]),
        (lambda: TD3(exploration_noise="linear(0.1, -1)"), ["exploration_noise=linear(0.1, -1)"]),
        (lambda: TD3(critics=0), ["critics=0"]),
        (lambda: TD3(tau=0.0), ["tau=0.0"]),
        (lambda: TD3(lr=0.0), ["lr=0.0"]),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
