"""Discrete SAC against a loop over rows and actions, the sign of its temperature, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.agents.discrete_control import DiscreteControlAgent
from penstock.algos.discrete_sac import DiscreteSAC, loss_fn, postprocess_fn
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves, tree_map
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import ReplaySettings
from penstock.samplers.serial import SerialSampler
from tests.algos.filled import BOX, Chance, Record, assert_gradients_equal, drawn, filled, part, trained

PRIORITIZED = ReplaySettings(capacity=600, index="prioritized", priority_beta=0.5)
CFG = DiscreteSAC(lr=1e-3, discount=0.9, batch_size=12, learning_starts=0, replay_ratio=12.0,
                  replay=ReplaySettings(capacity=600), net=ps.Net(hidden=(6, 6), activation="relu"))  # fmt: skip


def legal_of(x: Any) -> list[int]:
    return [a for a in range(4) if not isinstance(x.obs, dict) or x.obs["action_mask"][0, a]]


def chances(agent: DiscreteControlAgent, x: Any) -> Tensor:
    """pi [A] of one row: a softmax over the legal actions, 0 for the others."""
    logits, legal = agent.actor(x, agent.prepared(x.obs))[0], legal_of(x)
    p = torch.zeros(4)
    return p.index_put((torch.tensor(legal),), logits[legal].softmax(0))


def by_hand(agent: DiscreteControlAgent, record: Record, drawing: Any, cfg: DiscreteSAC) -> tuple[Any, list[float]]:
    """The three losses and the priorities of the drawn rows."""
    critic, actor, temperature, priorities = [], [], [], []
    alpha = math.exp(agent.log_alpha.item())
    for i, (t, b) in enumerate(zip(drawing.unit.tolist(), drawing.slot.tolist())):
        total, weight, following = record.transition(t, b, cfg.n_step, cfg.discount)
        with torch.no_grad():
            p, q = chances(agent, following).tolist(), agent.target_q(following).amin(0)[0].tolist()
            value = sum(p[a] * (q[a] - alpha * math.log(p[a])) for a in legal_of(following))
        x = record.inputs(t, b)
        error = agent.q(x)[:, 0, int(record.at(t, "action", b)) - 2] - (total + weight * value)
        critic.append(0.5 * error.square().sum() * (1.0 if drawing.weight is None else float(drawing.weight[i])))
        priorities.append(error.abs().mean().item())
        p, q, legal = chances(agent, x), agent.q(x).amin(0)[0].tolist(), legal_of(x)
        actor.append(torch.stack([p[a] * (alpha * p[a].log() - q[a]) for a in legal]).sum())
        entropy = -sum(p[a].item() * math.log(p[a].item()) for a in legal)
        temperature.append(agent.log_alpha[0] * (entropy - cfg.entropy_share * math.log(len(legal))))
    return {
        k: torch.stack(v).mean() for k, v in zip(("critic", "actor", "alpha"), (critic, actor, temperature))
    }, priorities


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_step": 3}, {"replay": PRIORITIZED}, {"critics": 3, "entropy_share": 0.98}, {"alpha": 0.3}],
    ids=lambda c: "-".join(c) or "plain",
)
def test_losses_gradients_and_priorities_equal_a_slow_loop(changes: dict[str, Any], masked: bool) -> None:
    cfg = replace(CFG, **changes)
    policy, record = filled(cfg, partial(Chance, masked=masked))
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
    assert isinstance(loss.total, dict) and (loss.priorities is not None) == (cfg.replay is PRIORITIZED)
    assert set(loss.total) == ({"critic", "actor", "alpha"} if cfg.alpha == "auto" else {"critic", "actor"})
    own = {"critic": agent.critics.parameters(), "actor": agent.actor.parameters(), "alpha": [agent.log_alpha]}
    for name, total in loss.total.items():
        torch.testing.assert_close(total, totals[name], rtol=1e-4, atol=1e-5)
        parameters = list(own.pop(name))
        assert_gradients_equal(total, totals[name], parameters)
        others = [p for p in agent.parameters() if p.requires_grad and all(p is not q for q in parameters)]
        assert all(g is None for g in torch.autograd.grad(total, others, retain_graph=True, allow_unused=True))
    if loss.priorities is not None:
        np.testing.assert_allclose(loss.priorities.numpy(), priorities, rtol=1e-3, atol=1e-5)


def test_the_soft_value_by_hand() -> None:
    """Q = (-1, 1), alpha 0.5, pi(1) = 1 / (1 + e^-4) = 0.98201: soft V = 1.00907."""

    class Fixed:
        log_alpha = torch.tensor([math.log(0.5)])
        scaled_reward = staticmethod(lambda reward: reward)
        target_q = staticmethod(lambda x: torch.tensor([[[-1.0, 1.0]], [[3.0, 1.5]]]))

        def __call__(self, x: Any) -> Tensor:
            return torch.tensor([[-1.0, 1.0]]).div(0.5).log_softmax(-1)

    rows = {"next": None, "return": torch.zeros(1), "discount": torch.ones(1)}
    ready = postprocess_fn(Fixed(), ps.TrainBatch(None, rows, None), CFG)  # pyright: ignore
    assert float(ready["target"]) == pytest.approx(1.00907, abs=1e-5)


@pytest.mark.parametrize(("share", "sign"), [(1.0, 1.0), (0.0, -1.0)])
def test_temperature_rises_where_entropy_is_too_small(share: float, sign: float) -> None:
    """The largest entropy is more than any policy has, none is less."""
    _, states = trained(replace(CFG, entropy_share=share, alpha_lr=3e-2), partial(Chance, masked=True), 3)
    moved = states[1]["log_alpha"] - states[0]["log_alpha"]
    assert float(moved) == pytest.approx(sign * 3e-2, rel=1e-3)


def test_targets_start_as_copies_and_move_by_tau_every_interval() -> None:
    policy, states = trained(replace(CFG, tau=0.25, target_interval=2), Chance, 4)
    assert policy.updates == len(states) - 1 > 6
    assert all(torch.equal(a, b) for a, b in zip(part(states[0], "critics"), part(states[0], "target_critics")))
    for i in range(1, len(states)):
        parts = part(states[i], "target_critics"), part(states[i - 1], "target_critics"), part(states[i], "critics")
        for now, before, own in zip(*parts):
            torch.testing.assert_close(now, before if i % 2 else 0.75 * before + 0.25 * own, rtol=0, atol=1e-6)


def test_each_part_has_a_step_size_of_its_own_on_one_schedule() -> None:
    policy, states = trained(replace(CFG, lr="linear(1e-3, 0)", actor_lr=2e-3, alpha_lr=5e-3), Chance, 3)
    for name, lr in (("critics", 1e-3), ("actor", 2e-3)):
        steps = torch.cat([(b - a).abs().flatten() for a, b in zip(part(states[0], name), part(states[1], name))])
        assert float(steps.max()) == pytest.approx(lr, rel=2e-2)
    policy.set_progress(0.5)
    now = [policy.optimizers[k].param_groups[0]["lr"] for k in ("critic", "actor", "alpha")]
    assert now == pytest.approx([5e-4, 1e-3, 2.5e-3])


def test_a_stored_policy_goes_on_to_the_same_bits() -> None:
    env = partial(Chance, masked=True)
    sampler = SerialSampler(T=5, B=4).build(env, 1)
    cfg = replace(CFG, replay=PRIORITIZED, net=replace(CFG.net, normalize_obs=True, normalize_reward=True))
    policies = [cfg.build(sampler.spec, 2) for _ in range(2)]
    sampler.initialize(policies[0].agent)
    for itr in range(6):
        batch = sampler.obtain_samples(itr)[0]
        for policy in policies if itr >= 3 else policies[:1]:
            train_one_step(policy, batch.copy())
        if itr == 2:
            policies[1].prepare(sampler.batch_spec)
            state = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, policies[0].state_dict())
            policies[1].load_state_dict(state, {k: v.copy() for k, v in policies[0].arrays().items()})
    first, second = (tree_leaves(p.state_dict()["agent"]) for p in policies)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert policies[0].updates == policies[1].updates > 40


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CFG.build(SerialSampler(T=1, B=1).build(partial(Chance, BOX), 0).spec), ["DiscreteSAC", "box[2]", "SAC for"]),
        (lambda: replace(CFG, net=ps.Net(recurrent="gru")).build(SerialSampler(T=1, B=1).build(Chance, 0).spec), ["R2D1"]),
        (lambda: DiscreteSAC(alpha=0.0), ["alpha=0.0"]),
        (lambda: DiscreteSAC(entropy_share=1.1), ["entropy_share=1.1"]),
        (lambda: DiscreteSAC(critics=0), ["critics=0"]),
        (lambda: DiscreteSAC(tau=0.0), ["tau=0.0"]),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
