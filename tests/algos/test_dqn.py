"""DQN's loss in every combination against a loop over rows and actions, numbers by hand, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.agents.q_agent import QAgent
from penstock.algos.dqn import DQN, loss_fn, postprocess_fn
from penstock.core.errors import ConfigError
from penstock.replay.replay import ReplaySettings
from penstock.samplers.serial import SerialSampler
from tests.algos.filled import BOX, Chance, Record, T, assert_gradients_equal, drawn, filled

UNIFORM = ReplaySettings(capacity=600)
PRIORITIZED = ReplaySettings(capacity=600, index="prioritized", priority_beta=0.5)
CFG = DQN(discount=0.9, batch_size=12, learning_starts=0, huber_delta=0.5, n_atoms=5, v_min=-3.0, v_max=4.0, replay=UNIFORM,
          net=ps.Net(hidden=(6, 6), activation="relu"))  # fmt: skip


def projected(p: list[float], reward: float, discount: float, cfg: DQN) -> list[float]:
    """Bellemare et al. 2017, algorithm 1, with the mass of an exact hit kept."""
    step = (cfg.v_max - cfg.v_min) / (cfg.n_atoms - 1)
    out = [0.0] * cfg.n_atoms
    for j in range(cfg.n_atoms):
        moved = min(max(reward + discount * (cfg.v_min + j * step), cfg.v_min), cfg.v_max)
        at = (moved - cfg.v_min) / step
        low = min(math.floor(at), cfg.n_atoms - 2)
        out[low] += p[j] * (low + 1 - at)
        out[low + 1] += p[j] * (at - low)
    return out


def huber(x: Tensor, delta: float) -> Tensor:
    return 0.5 * x * x if abs(x.item()) <= delta else delta * (x.abs() - 0.5 * delta)


def q_of(out: Tensor, cfg: DQN) -> list[float]:
    """Expected returns of the actions of one row [A] or [A, K]."""
    if cfg.distributional == "none":
        return out.tolist()
    if cfg.distributional == "quantile":
        return [sum(each) / len(each) for each in out.tolist()]
    atoms = [cfg.v_min + i * (cfg.v_max - cfg.v_min) / (cfg.n_atoms - 1) for i in range(cfg.n_atoms)]
    return [sum(p * z for p, z in zip(each.softmax(0).tolist(), atoms)) for each in out]


def by_hand(agent: QAgent, record: Record, drawing: Any, cfg: DQN) -> tuple[Tensor, list[float]]:
    """Loss and priorities of the drawn rows, from the record."""
    losses: list[Tensor] = []
    priorities: list[float] = []
    for i, (t, b) in enumerate(zip(drawing.unit.tolist(), drawing.slot.tolist())):
        total, weight, following = record.transition(t, b, cfg.n_step, cfg.discount)
        legal = following.obs["action_mask"][0].tolist() if isinstance(following.obs, dict) else [1] * 4
        with torch.no_grad():
            out = agent.bootstrap(following)[0]
            chooser = q_of(agent(following)[0] if cfg.double else out, cfg)
        best = max((a for a in range(4) if legal[a]), key=lambda a, q=chooser: q[a])
        chosen = agent(record.inputs(t, b))[0][int(record.at(t, "action", b)) - 2]
        if cfg.distributional == "c51":
            target = projected(out[best].softmax(0).tolist(), total, weight, cfg)
            each = torch.stack([-m * logp for m, logp in zip(target, chosen.log_softmax(0))]).sum()
            priorities.append(each.item())
        elif cfg.distributional == "quantile":
            each, K = torch.zeros(()), cfg.n_atoms
            for m in range(K):
                for target in (total + weight * out[best]).tolist():
                    error = target - chosen[m]
                    tau = (2 * m + 1) / (2 * K)
                    each = each + abs(tau - (error.item() < 0)) * huber(error, cfg.huber_delta) / K
            priorities.append(abs(total + weight * float(out[best].mean()) - chosen.mean().item()))
        else:
            error = chosen - (total + weight * float(out[best]))
            each = huber(error, cfg.huber_delta)
            priorities.append(abs(error.item()))
        losses.append(each * (1.0 if drawing.weight is None else float(drawing.weight[i])))
    return torch.stack(losses).mean(), priorities


COMBINATIONS = list(itertools.product(["none", "c51", "quantile"], [False, True], [1, 3], [False, True], [False, True]))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(map(str, c)))
def test_every_combination_equals_a_slow_loop(combination: tuple[Any, ...]) -> None:
    """Loss, gradient and priorities, with both kinds of end in the batch; half of them with action masks."""
    distributional, double, n, dueling, rainbow = combination
    cfg = replace(CFG, distributional=distributional, double=double, n_step=n, dueling=dueling, noisy=rainbow,
                  replay=PRIORITIZED if rainbow else UNIFORM)  # fmt: skip
    policy, record = filled(cfg, partial(Chance, masked=dueling))
    agent: Any = policy.agent
    assert policy.replay_schedule is not None
    if rainbow:  # priorities that differ, so that weights do
        drawing, _ = drawn(policy)
        policy.replay_schedule.replay.update_priorities(drawing, np.linspace(0.1, 3.0, len(drawing.unit)))
    drawing, x = drawn(policy)
    with torch.no_grad():
        ready = postprocess_fn(agent, x, cfg)
    loss = loss_fn(agent, ready, cfg)
    total, priorities = by_hand(agent, record, drawing, cfg)
    assert isinstance(loss.total, Tensor) and (loss.priorities is not None) == (rainbow or distributional != "none")
    torch.testing.assert_close(loss.total, total, rtol=1e-4, atol=1e-6)
    if loss.priorities is not None:
        np.testing.assert_allclose(loss.priorities.numpy(), priorities, rtol=1e-3, atol=1e-5)
    assert_gradients_equal(loss.total, total, list(agent.online.parameters()))


def test_the_batches_above_hold_every_kind_of_row() -> None:
    policy, record = filled(replace(CFG, n_step=3, replay=PRIORITIZED), Chance)
    drawing, x = drawn(policy)
    at = list(zip(drawing.unit.tolist(), drawing.slot.tolist()))
    assert any(record.at(t, "truncated", b) for t, b in at) and any(record.at(t, "terminated", b) for t, b in at)
    assert {round(float(d), 4) for d in x["discount"]} == {0.0, 0.9, 0.81, 0.729}
    assert len(at) > len({t // T for t, _ in at})


def test_the_loss_of_two_rows_by_hand() -> None:
    """Q = (1, 3) and (2, 0); a terminated row of return 2, a truncated one of return 1 whose next is worth (5, 7)."""

    class Fixed:
        online = torch.tensor([[1.0, 3.0], [2.0, 0.0]], requires_grad=True)
        following = torch.tensor([[9.0, 8.0], [6.0, 4.0]])
        target = torch.tensor([[50.0, 60.0], [5.0, 7.0]])

        def __call__(self, which: str) -> Tensor:
            return self.online if which == "now" else self.following

        def bootstrap(self, which: str) -> Tensor:
            return self.target

        expected = staticmethod(lambda out: out)
        greedy = staticmethod(lambda inputs, q: q.argmax(-1))
        index = staticmethod(lambda action: action)
        scaled_reward = staticmethod(lambda reward: reward)
        unless_stuck = staticmethod(lambda inputs, x: x)

    agent: Any = Fixed()
    rows = {"next": "then", "return": torch.tensor([2.0, 1.0]), "discount": torch.tensor([0.0, 0.5]),
            "action": torch.tensor([1, 0]), "weight": torch.tensor([1.0, 0.25])}  # fmt: skip
    found: list[Any] = []
    for double in (True, False):
        cfg = replace(CFG, double=double, huber_delta=1.0)
        ready = postprocess_fn(agent, ps.TrainBatch("now", rows, None), cfg)  # pyright: ignore[reportArgumentType]
        loss = loss_fn(agent, ready, cfg)
        found.append((ready["target"].tolist(), loss.total.item(), loss.priorities.tolist()))  # pyright: ignore
    # Double: the online network prefers action 0 afterwards, which the target network gives 5, else 7 is taken.
    assert found[0] == ([2.0, 3.5], pytest.approx((0.5 + 0.25 * 1.0) / 2), [1.0, 1.5])
    assert found[1] == ([2.0, 4.5], pytest.approx((0.5 + 0.25 * 2.0) / 2), [1.0, 2.5])


def test_rewards_are_scaled_or_clipped_for_targets() -> None:
    for net, expected in ((replace(CFG.net, clip_reward=True), np.sign), (CFG.net, lambda x: x)):
        policy, record = filled(replace(CFG, net=net), Chance)
        drawing, x = drawn(policy)
        rewards = [record.at(t, "reward", b) for t, b in zip(drawing.unit, drawing.slot)]
        assert x["return"].tolist() == pytest.approx(expected(rewards), rel=1e-6)
    policy, _ = filled(replace(CFG, net=replace(CFG.net, normalize_reward=True)), Chance)
    agent: Any = policy.agent
    agent.reward_scaler.moments.var.fill_(16.0)
    _, x = drawn(policy)
    with torch.no_grad():
        scaled = postprocess_fn(agent, x, CFG)["target"]
        agent.reward_scaler.moments.var.fill_(1.0)
        plain = postprocess_fn(agent, x, CFG)["target"]
    torch.testing.assert_close(plain - scaled, 0.75 * x["return"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DQN(net=ps.Net(recurrent="lstm")), ["net.recurrent='lstm'", "R2D1"]),
        (lambda: DQN().build(SerialSampler(T=1, B=1).build(partial(Chance, BOX), 0).spec), ["box[2]", "SAC"]),
        (lambda: DQN(v_min=1.0, v_max=1.0), ["v_min=1.0"]),
        (lambda: DQN(n_atoms=1), ["n_atoms=1"]),
        (lambda: DQN(target_interval=0), ["target_interval=0"]),
        (lambda: DQN(tau=0.0), ["tau=0.0"]),
        (lambda: DQN(discount=1.1), ["discount=1.1"]),
        (lambda: DQN(epsilon="linear(1.5, 0)"), ["epsilon=linear(1.5, 0)"]),
        (lambda: DQN(epsilon_low=0.0), ["epsilon_low=0.0"]),
        (lambda: DQN(lr="linear(0, 1)"), ["lr=linear(0, 1)"]),
        (lambda: DQN(distributional="c51", replay=replace(PRIORITIZED, fresh_priority="agent")), ["C51", "'max'"]),
    ],
)
def test_settings_that_contradict_are_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
