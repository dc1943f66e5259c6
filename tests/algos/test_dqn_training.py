"""What DQN does as it trains: target networks, exploration, and priorities of fresh rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos.dqn import DQN
from penstock.envs.toy import RepeatPrevious
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import ReplaySettings
from penstock.samplers.serial import SerialSampler
from tests.algos.filled import Chance, Record, T, part, trained

PRIORITIZED = ReplaySettings(capacity=600, index="prioritized", priority_beta=0.5)
CFG = DQN(lr=1e-3, discount=0.9, batch_size=8, learning_starts=0, replay_ratio=4.0, n_atoms=7, v_min=-3.0, v_max=4.0,
          target_interval=5, replay=ReplaySettings(capacity=600), net=ps.Net(hidden=(6, 6), activation="relu"))  # fmt: skip


def test_hard_targets_are_copies_at_every_interval() -> None:
    policy, states = trained(replace(CFG, target_interval=3, tau=1.0), Chance, 5)
    assert policy.updates == len(states) - 1 > 9
    for i, state in enumerate(states):
        pairs = list(zip(part(state, "target"), part(states[i - i % 3], "online")))
        assert pairs and all(torch.equal(a, b) for a, b in pairs)
        assert i % 3 == 0 or not torch.equal(pairs[0][0], part(state, "online")[0])


def test_soft_targets_move_by_tau() -> None:
    _, states = trained(replace(CFG, target_interval=2, tau=0.25), Chance, 5)
    for i in range(1, len(states)):
        parts = part(states[i], "target"), part(states[i - 1], "target"), part(states[i], "online")
        for now, before, own in zip(*parts):
            expected = before if i % 2 else 0.75 * before + 0.25 * own
            torch.testing.assert_close(now, expected, rtol=0, atol=1e-6)


def test_only_the_online_network_learns() -> None:
    policy, _ = trained(replace(CFG, dueling=True), Chance, 3)
    agent: Any = policy.agent
    held = {id(p) for group in policy.optimizers["all"].param_groups for p in group["params"]}
    assert held == {id(p) for p in agent.online.parameters()}
    assert all(p.grad is None and not p.requires_grad for p in agent.target.parameters())


def test_epsilon_follows_environment_steps_after_random_actions() -> None:
    """1 until 16 steps, then linear over 40 steps, and flat; whatever the length of the run."""
    cfg = replace(CFG, learning_starts=16, epsilon="linear(0.8, 0.2, steps=40)", replay_ratio=1.0)
    sampler = SerialSampler(T=2, B=4).build(lambda: RepeatPrevious(length=1_000), 1)
    policy = cfg.build(sampler.spec, 2)
    sampler.initialize(policy.agent)
    agent: Any = policy.agent
    seen = [float(agent.epsilon[0])]
    for itr in range(7):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
        assert len(set(agent.epsilon.tolist())) == 1
        seen.append(round(float(agent.epsilon[0]), 6))
    assert seen == [1.0, 1.0, pytest.approx(0.56), pytest.approx(0.44), pytest.approx(0.32), 0.2, 0.2, 0.2]


def test_ladders_over_the_slots() -> None:
    golden = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
    ladders = {"ape-x": golden, "log-space": np.geomspace(0.0005, 0.4, 8).tolist(), "none": [0.4] * 8}
    for ladder, expected in ladders.items():
        cfg: Any = replace(CFG, epsilon=0.4, ladder=ladder)
        sampler = SerialSampler(T=2, B=8).build(Chance, 1)
        agent: Any = cfg.build(sampler.spec, 2).agent
        sampler.initialize(agent)
        agent.set_exploration(cfg, 0)
        assert agent.epsilon.tolist() == pytest.approx(expected, rel=1e-6)
        agent.set_exploration(replace(cfg, noisy=False, learning_starts=9), 8)
        assert agent.epsilon.tolist() == [1.0] * 8


@pytest.mark.parametrize("ladder", ["none", "ape-x", "log-space"])
def test_a_stored_policy_explores_as_the_run_did(ladder: Any) -> None:
    """With any number of slots: what was stored is the point of the schedule, not each slot's epsilon."""
    cfg = replace(CFG, epsilon="linear(0.8, 0.2, steps=10)", epsilon_low=0.01, learning_starts=4, ladder=ladder)
    policy, _ = trained(cfg, Chance, 5)
    other = cfg.build(policy.spec, 3)
    other.load_parameters(policy.agent.state_dict())
    for slots in (4, 7, 1):
        for agent in (policy.agent, other.agent):
            agent.set_slots(slots)
        expected: Any = policy.agent
        found: Any = other.agent
        assert found.epsilon.tolist() == expected.epsilon.tolist()
        assert float(found.epsilon.max()) == pytest.approx(0.2)


def test_noisy_networks_explore_in_the_place_of_epsilon() -> None:
    policy, _ = trained(replace(CFG, noisy=True, learning_starts=10), Chance, 1)
    agent: Any = policy.agent
    assert agent.epsilon.tolist() == [1.0] * 4
    policy, _ = trained(replace(CFG, noisy=True, learning_starts=10), Chance, 3)
    agent = policy.agent
    assert agent.epsilon.tolist() == [0.0] * 4
    assert bool(agent.online.advantage.noise_in.any()) and bool(agent.target.advantage.noise_in.any())
    agent.set_exploration(replace(CFG, noisy=True, noisy_epsilon=0.1), 10_000)
    assert agent.epsilon.tolist() == [pytest.approx(0.1)] * 4


@pytest.mark.slow
def test_an_evaluation_is_at_random_by_eps_eval_alike_in_every_sampler() -> None:
    found: list[list[float]] = []
    serial, cpu = SerialSampler(T=2, B=4), ps.CpuSampler(T=2, B=4, workers=2)
    for settings, eps_eval in ((serial, 0.0), (serial, 0.0), (serial, 0.5), (cpu, 0.5)):
        sampler = settings.build(RepeatPrevious, 1)
        policy = replace(CFG, eps_eval=eps_eval).build(sampler.spec, 2)
        sampler.initialize(policy.agent)
        found.append(sampler.evaluate_agent(3, 40).return_.tolist())
        sampler.shutdown()
    assert found[0] == found[1] != found[2] == found[3]


@pytest.mark.parametrize("scaled", [False, True])
def test_fresh_rows_have_the_error_that_the_agent_saw(scaled: bool) -> None:
    """|sum of rewards + discount^n max Q - Q| by the networks that acted."""
    net = replace(CFG.net, normalize_reward=scaled)
    settings = replace(PRIORITIZED, fresh_priority="agent", priority_alpha=1.0)
    cfg = replace(CFG, n_step=3, replay=settings, net=net)
    sampler = SerialSampler(T=T, B=3).build(Chance, 1)
    policy = cfg.build(sampler.spec, 2)
    sampler.initialize(policy.agent)
    agent: Any = policy.agent
    if scaled:
        agent.reward_scaler.moments.var.fill_(4.0)
    kept = []
    assert policy.replay_schedule is not None
    for itr in range(8):
        batch = sampler.obtain_samples(itr)[0]
        kept.append(batch.copy())
        policy.replay_schedule.replay.append(batch)
    record, mass = Record(kept), policy.replay_schedule.replay.arrays()["index.mass"]
    checked = 0
    for t in range(8 * T - 4):
        for b in range(3):
            if not record.at(t, "valid", b):
                assert mass[t, b] == 0.0
                continue
            total, weight, following = record.transition(t, b, 3, 0.9)
            with torch.no_grad():
                q = agent(record.inputs(t, b))[0, int(record.at(t, "action", b)) - 2]
                error = total / (2 if scaled else 1) + weight * float(agent(following).max()) - float(q)
            assert mass[t, b] == pytest.approx(abs(error) + 1e-6, rel=1e-3, abs=1e-5)
            checked += 1
    assert checked > 50
