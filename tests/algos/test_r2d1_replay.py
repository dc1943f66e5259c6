"""What R2D1 keeps: priorities of fresh sequences against a slow loop, stored state, a uniform replay, resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos.r2d1 import loss_fn, postprocess_fn
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.toy import RepeatPrevious, TMaze
from penstock.learn.train_ops import samples, train_one_step
from penstock.run.trainer import Trainer
from penstock.samplers.serial import SerialSampler
from tests.algos.r2d1_slow import BY_AGENT, SMALL, drawn, replay_of, slow_priority, slow_target, trained
from tests.run.stacked_frames import Dot


@pytest.mark.parametrize("env", [lambda: TMaze(3), lambda: RepeatPrevious(length=5)], ids=["terminated", "truncated"])
def test_fresh_sequences_have_the_priority_of_what_the_agent_saw(env: Any) -> None:
    cfg = replace(SMALL, learning_starts=3_000)
    policy, kept = trained(env, cfg, 12)
    replay = replay_of(policy)
    rows = {
        name: np.concatenate([getattr(x, name) for x in kept])
        for name in ("reward", "terminated", "truncated", "valid")
    }
    q, q_max = (np.concatenate([x.info[name] for x in kept]) for name in ("q", "q_max"))
    assert replay.index.head == (48 - (4 + 8 + 3)) // 4 + 1
    mass = replay.index.arrays()["mass"]
    for unit in range(replay.index.head):
        for b in range(4):
            start = 4 * unit + cfg.burn_in
            own = [
                rows["reward"][:, b],
                q_max[:, b],
                *(rows[name][:, b] for name in ("terminated", "truncated", "valid")),
            ]
            errors = [abs(q[t, b] - slow_target(*own, t, cfg)) for t in range(start, start + 8) if rows["valid"][t, b]]
            assert mass[unit, b] == pytest.approx((slow_priority(errors, cfg.eta) + 1e-6) ** 0.7, rel=1e-4)
    error = np.array([slow_priority([0.25], cfg.eta)])
    replay.index.update(np.array([0]), np.array([0]), error)
    assert replay.index.arrays()["mass"][0, 0] == pytest.approx((0.25 + 1e-6) ** 0.7)


class Rich(RepeatPrevious):
    """Pays 5."""

    def act(self, action: Any) -> tuple[float, bool, bool]:
        reward, terminated, truncated = super().act(action)
        return 5 * reward, terminated, truncated


@pytest.mark.parametrize(
    ("env", "clip", "lost"),
    [
        (lambda: TMaze(3), False, ()),
        (lambda: RepeatPrevious(length=4), False, ()),
        (lambda: Rich(length=4), False, ()),
        (lambda: Rich(length=4), True, ()),
        (lambda: TMaze(3), False, (9, 17)),
        (lambda: RepeatPrevious(length=4), False, (9, 17)),
    ],
    ids=["terminated", "truncated", "rich", "clipped", "terminated, gaps", "truncated, gaps"],
)
def test_before_any_update_the_loss_gives_the_priority_that_fresh_sequences_had(
    env: Any, clip: bool, lost: tuple[int, ...]
) -> None:
    """Both networks are then the one that acted. What follows a batch that was lost is masked in sequences across it.

    A batch is an episode and its reset row, so that the values before a gap are known.
    """
    cfg = replace(SMALL, batch_size=250, learning_starts=3_900, state_interval=5, burn_in=5, train_length=15,
                  net=replace(SMALL.net, clip_reward=clip))  # fmt: skip
    sampler = SerialSampler(T=5, B=4).build(env, 1)
    policy = cfg.build(sampler.spec, 2)
    sampler.initialize(policy.agent)
    for itr in range(24):
        batch = sampler.obtain_samples(itr)[0]
        if itr not in lost:
            train_one_step(policy, batch)
    drawing, x = drawn(policy)
    agent: Any = policy.agent
    with torch.no_grad():
        loss = loss_fn(agent, postprocess_fn(agent, x, cfg), cfg)
    index = replay_of(policy).index
    assert loss.priorities is not None and len({*zip(drawing.unit, drawing.slot)}) > 0.7 * len(index)
    expected = (loss.priorities.numpy() + 1e-6) ** 0.7
    np.testing.assert_allclose(index.arrays()["mass"][drawing.unit, drawing.slot], expected, rtol=1e-4)
    partly = x.valid[5:10].any(0) & ~x.valid[10:].any(0)
    assert policy.updates == 0 and bool(partly.any()) == bool(lost)


def test_a_sequence_begins_with_the_state_that_was_recorded_there() -> None:
    """Also after a batch that does not go on where the last one ended, as after a resume that lost a slot."""
    cfg = replace(SMALL, replay=replace(BY_AGENT, index="uniform"), learning_starts=3_000)
    sampler = SerialSampler(T=2, B=3).build(lambda: TMaze(3), 1)
    policy = cfg.build(sampler.spec, 2)
    sampler.initialize(policy.agent)
    recorded: dict[bytes, Any] = {}
    last = np.zeros(3, np.float32)
    for itr in range(40):
        batch = sampler.obtain_samples(itr)[0].copy()
        if itr in (0, 19):  # lost: nothing follows on batch 18
            continue
        batch.reward[:] = np.random.default_rng(itr).random(batch.reward.shape)  # tells which row a sample begins at
        batch.prev_reward[0], last = last, batch.reward[-1].copy()
        for b in range(3):
            recorded[batch.reward[:, b].tobytes()] = tree_map(lambda s, b=b: s[b], batch.state)
        train_one_step(policy, batch)
    head, units = replay_of(policy).storage.head, replay_of(policy).index
    assert head == 38 * 2 + 4 and len(units) > 20
    for _ in range(20):
        _, x = drawn(policy)
        for n in range(cfg.batch_size):
            state = recorded[x["reward"][:2, n].numpy().tobytes()]
            assert all(np.array_equal(a[n].numpy(), b) for a, b in zip(tree_leaves(x.state), tree_leaves(state)))


@pytest.mark.parametrize("env", [lambda: TMaze(3), lambda: RepeatPrevious(length=5)], ids=["terminated", "truncated"])
def test_a_replayed_sequence_has_the_values_that_the_agent_saw(env: Any) -> None:
    """State, previous action and reward, and resets inside: the unroll of a network that never trained repeats acting."""
    policy, _ = trained(env, replace(SMALL, learning_starts=3_000), 30)
    agent: Any = policy.agent
    storage, shown_first = replay_of(policy).storage, 0
    for seed in range(5):
        drawing, x = next(samples(policy, 1, np.random.default_rng(seed)))
        with torch.no_grad():
            q = agent(x.inputs, x.state)
        rows = drawing.unit * SMALL.state_interval + np.arange(len(x.valid))[:, None]
        recorded = storage.info("['q']", rows, np.broadcast_to(drawing.slot, rows.shape))
        chosen = q[:-1].gather(-1, x["action"].long().unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(chosen[x.valid], torch.from_numpy(recorded)[x.valid])
        others = ~x.inputs.first[1:]
        assert torch.equal(x.inputs.prev_action[1:][others], x["action"][others])
        assert torch.equal(x.inputs.prev_reward[1:][others], x["reward"][others])
        shown_first += int(x.inputs.first[1:].sum())
        blank = x.inputs._replace(prev_action=x.inputs.prev_action ^ 1, prev_reward=x.inputs.prev_reward + 1)
        with torch.no_grad():
            other = agent(blank, x.state)
        opens = x.inputs.first
        assert torch.equal(other[opens], q[opens]) and not torch.isclose(other[~opens], q[~opens]).all(-1).any()
    assert shown_first > 20


def test_weights_and_priorities_by_hand() -> None:
    """Errors 1 and 16 of equally many sequences, alpha 1/2, beta 1/2: four times as likely, and half the weight."""
    replay = replace(BY_AGENT, priority_alpha=0.5, priority_beta=0.5)
    policy, _ = trained(RepeatPrevious, replace(SMALL, batch_size=500, learning_starts=3_999, replay=replay), 24)
    index = replay_of(policy).index
    units, slots = (x.ravel() for x in np.indices((index.head, 4)))
    assert len(units) == len(index) == 84
    index.update(units, slots, np.where(slots % 2, 16.0, 1.0))
    drawing, x = drawn(policy)
    often = drawing.slot % 2 == 1
    assert often.mean() == pytest.approx(0.8, abs=0.01)
    np.testing.assert_allclose(x["weight"].numpy(), np.where(often, 0.5, 1.0), rtol=1e-5)


def test_what_was_trained_on_has_the_priority_of_its_loss() -> None:
    """The last of 20 training steps takes more than one; a sequence of the last draw has the priority it left there."""
    policy, _ = trained(lambda: TMaze(3), SMALL, 20)
    kept: list[Any] = []
    index = replay_of(policy).index
    update, loss_fn = index.update, policy.loss_fn

    def recorded(*args: Any) -> Any:
        kept.append(loss_fn(*args))
        return kept[-1]

    policy.loss_fn = recorded
    seen: list[Any] = []
    index.update = lambda *args: (seen.append(args), update(*args))
    sampler = SerialSampler(T=4, B=4).build(lambda: TMaze(3), 7)
    sampler.initialize(policy.agent)
    for itr in range(6):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert len(kept) == len(seen) >= 3
    for loss, (unit, slot, priority) in zip(kept, seen):
        np.testing.assert_array_equal(priority, loss.priorities.numpy())
        last = {(u, b): p for u, b, p in zip(unit.tolist(), slot.tolist(), priority.tolist())}
    mass = index.arrays()["mass"]
    for (u, b), p in last.items():  # pyright: ignore[reportPossiblyUnboundVariable]
        assert mass[u % len(mass), b] == pytest.approx((p + 1e-6) ** 0.7)


def test_frames_kept_once_and_files_train_to_the_same_bits(tmp_path: Path) -> None:
    kept = {"deduplicate_frames": False}, {"deduplicate_frames": True, "dir": str(tmp_path)}
    found: list[Any] = []
    for each in kept:
        cfg = replace(SMALL, batch_size=2, replay_ratio=1.0, replay=replace(BY_AGENT, capacity=400, **each))
        policy, _ = trained(Dot, cfg, 16, B=2)
        found.append((policy.updates, [x.detach().numpy().tobytes() for x in policy.agent.parameters()]))
    assert found[0] == found[1] and found[0][0] > 5


def test_a_uniform_replay_needs_no_priorities() -> None:
    policy, _ = trained(RepeatPrevious, replace(SMALL, replay=replace(BY_AGENT, index="uniform")), 20)
    _, x = drawn(policy)
    assert policy.updates > 5 and "weight" not in x.rows


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [SerialSampler(T=4, B=4), ps.AlternatingSampler(T=4, B=4, workers=1)])
def test_a_killed_run_goes_on_with_the_same_bits(sampler: Any, tmp_path: Path) -> None:
    """Within episodes, that is with the recurrent state of its actors."""
    exp = ps.Experiment("penstock.envs.toy:RepeatPrevious", SMALL, sampler, ps.RunConfig(steps=10_000, seed=3))

    def steps(trainer: Trainer, count: int) -> list[dict[str, float]]:
        rows = [trainer.train() for _ in range(count)]
        return [{k: v for k, v in row.items() if k.startswith(("train/", "replay/", "rollout/"))} for row in rows]

    with Trainer(exp, tmp_path / "whole") as whole:
        steps(whole, 15)
        expected = steps(whole, 15)
    with Trainer(exp, tmp_path / "part") as first:
        steps(first, 15)
        first.save()
    with Trainer(exp, tmp_path / "part") as second:
        second.restore()
        assert steps(second, 15) == expected
    pairs = zip(whole.policy.agent.state_dict().items(), second.policy.agent.state_dict().items())
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs) and whole.policy.updates > 10
