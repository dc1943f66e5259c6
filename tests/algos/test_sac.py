"""SAC against a loop over rows, the sign of its temperature, who learns from what, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.agents.continuous import ControlAgent
from penstock.algos.sac import SAC, loss_fn, postprocess_fn, target_entropy
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves, tree_map
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import ReplaySettings
from penstock.samplers.serial import SerialSampler
from tests.algos.filled import BOX, Chance, Record, assert_gradients_equal, drawn, filled, part, trained

ENV = partial(Chance, BOX)
UNIFORM = ReplaySettings(capacity=600)
PRIORITIZED = ReplaySettings(capacity=600, index="prioritized", priority_beta=0.5)
CFG = SAC(lr=1e-3, discount=0.9, batch_size=12, learning_starts=0, replay_ratio=12.0, replay=UNIFORM,
          net=ps.Net(hidden=(6, 6), activation="relu"))  # fmt: skip


def sampled(agent: ControlAgent, x: Inputs, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Action [2] and log-density of one row, by the density's definition: 1 - tanh^2 is 1 / cosh^2."""
    mean, log_std = agent(x)[0].double().chunk(2)
    z = torch.tensor([NormalDist().inv_cdf(float(u)) for u in noise], dtype=torch.float64)
    u = mean + log_std.clamp(-20, 2).exp() * z
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
    return torch.tanh(u).float(), (normal.log_prob(u) + 2 * u.cosh().log()).sum().float()


def by_hand(agent: ControlAgent, record: Record, drawing: Any, noise: Tensor, cfg: SAC) -> tuple[Any, list[float]]:
    """The three losses and the priorities of the drawn rows."""
    critic, actor, temperature, priorities = [], [], [], []
    assert agent.log_alpha is not None
    alpha = math.exp(agent.log_alpha.item())
    for i, (t, b) in enumerate(zip(drawing.unit.tolist(), drawing.slot.tolist())):
        total, weight, following = record.transition(t, b, cfg.n_step, cfg.discount)
        with torch.no_grad():
            action, logp = sampled(agent, following, noise[i, 2:])
            target = total + weight * (float(agent.target_q(following, action[None]).min()) - alpha * float(logp))
        x = record.inputs(t, b)
        unit = (torch.as_tensor(record.at(t, "action", b)) - torch.tensor([1.0, 0.25])) / torch.tensor([4.0, 0.25])
        error = agent.q(x, unit[None])[:, 0] - target
        critic.append(0.5 * error.square().sum() * (1.0 if drawing.weight is None else float(drawing.weight[i])))
        priorities.append(error.abs().mean().item())
        action, logp = sampled(agent, x, noise[i, :2])
        actor.append(alpha * logp - agent.q(x, action[None]).min())
        wanted = -2.0 if cfg.target_entropy is None else cfg.target_entropy
        temperature.append(-agent.log_alpha * (float(logp.detach()) + wanted))
    return {
        k: torch.stack(v).mean() for k, v in zip(("critic", "actor", "alpha"), (critic, actor, temperature))
    }, priorities


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_step": 3}, {"replay": PRIORITIZED}, {"critics": 1}, {"critics": 3, "target_entropy": 0.7}, {"alpha": 0.3}],
    ids=lambda c: "-".join(c) or "plain",
)
def test_losses_gradients_and_priorities_equal_a_slow_loop(changes: dict[str, Any]) -> None:
    """Rewards are discounted within n steps; each loss has a gradient for its own networks."""
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
    totals, priorities = by_hand(agent, record, drawing, x["noise"], cfg)
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


def test_present_and_next_actions_have_noise_of_their_own() -> None:
    policy, _ = filled(CFG, ENV)
    _, x = drawn(policy)
    assert x["noise"].shape == (12, 4) and float(x["noise"].min()) > 0.0 and float(x["noise"].max()) < 1.0
    agent: Any = policy.agent
    with torch.no_grad():
        plain = postprocess_fn(agent, x, CFG)
        changed = ps.TrainBatch(
            x.inputs, {**x.rows, "noise": torch.cat([1 - x["noise"][:, :2], x["noise"][:, 2:]], 1)}, None
        )
        again = postprocess_fn(agent, changed, CFG)
    assert torch.equal(plain["target"], again["target"]) and not torch.equal(plain["noise"], again["noise"])


@pytest.mark.parametrize(("wanted", "sign"), [(50.0, 1.0), (-50.0, -1.0)])
def test_temperature_rises_where_entropy_is_too_small(wanted: float, sign: float) -> None:
    """By its own step size: Adam's first step is as long as that."""
    _, states = trained(replace(CFG, target_entropy=wanted, alpha_lr=3e-2), ENV, 3)
    moved = states[1]["log_alpha"] - states[0]["log_alpha"]
    assert float(moved) == pytest.approx(sign * 3e-2, rel=1e-4)
    assert all(sign * float(b["log_alpha"] - a["log_alpha"]) > 0 for a, b in zip(states, states[1:]))


def test_a_fixed_temperature_stays() -> None:
    policy, states = trained(replace(CFG, alpha=0.3), ENV, 3)
    assert all(float(s["log_alpha"]) == pytest.approx(math.log(0.3)) for s in states)
    assert set(policy.optimizers) == {"critic", "actor"}
    assert float(trained(CFG, ENV, 1)[1][0]["log_alpha"]) == 0.0


def test_entropy_kept_to_is_minus_the_number_of_elements() -> None:
    policy, _ = filled(CFG, ENV)
    agent: Any = policy.agent
    assert target_entropy(agent, CFG) == -2.0 and target_entropy(agent, replace(CFG, target_entropy=0.5)) == 0.5


def test_each_part_has_a_step_size_of_its_own_on_one_schedule() -> None:
    cfg = replace(CFG, lr="linear(1e-3, 0)", actor_lr=2e-3, alpha_lr=5e-3)
    policy, states = trained(cfg, ENV, 3)
    for name, lr in (("critics", 1e-3), ("actor", 2e-3)):
        steps = torch.cat([(b - a).abs().flatten() for a, b in zip(part(states[0], name), part(states[1], name))])
        assert float(steps.max()) == pytest.approx(lr, rel=1e-2)
    policy.set_progress(0.75)
    assert [policy.optimizers[k].param_groups[0]["lr"] for k in ("critic", "actor", "alpha")] == pytest.approx(
        [2.5e-4, 5e-4, 1.25e-3]
    )


def test_targets_start_as_copies_and_move_by_tau_every_interval() -> None:
    policy, states = trained(replace(CFG, tau=0.25, target_interval=2), ENV, 4)
    assert policy.updates == len(states) - 1 > 6
    assert all(torch.equal(a, b) for a, b in zip(part(states[0], "critics"), part(states[0], "target_critics")))
    for i in range(1, len(states)):
        parts = part(states[i], "target_critics"), part(states[i - 1], "target_critics"), part(states[i], "critics")
        for now, before, own in zip(*parts):
            torch.testing.assert_close(now, before if i % 2 else 0.75 * before + 0.25 * own, rtol=0, atol=1e-6)


def test_a_stored_policy_goes_on_to_the_same_bits() -> None:
    sampler = SerialSampler(T=5, B=4).build(ENV, 1)
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
        (lambda: CFG.build(SerialSampler(T=1, B=1).build(Chance, 0).spec), ["SAC", "discrete(4)", "DiscreteSAC"]),
        (lambda: replace(CFG, net=ps.Net(recurrent="gru")).build(SerialSampler(T=1, B=1).build(ENV, 0).spec), ["SAC", "R2D1"]),
        (lambda: SAC(alpha=0.0), ["alpha=0.0"]),
        (lambda: SAC(critics=0), ["critics=0"]),
        (lambda: SAC(tau=1.5), ["tau=1.5"]),
        (lambda: SAC(actor_lr=-1.0), ["actor_lr=-1.0"]),
        (lambda: SAC(target_interval=0), ["target_interval=0"]),
        (lambda: SAC(alpha="often"), ["alpha", "often"]),  # pyright: ignore[reportArgumentType]
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
