"""Training from replay: on what, with which priorities, and in an order that no thread changes."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos.dqn import DQN
from penstock.core.errors import LearnerError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs.toy import ThreeStep
from penstock.learn.algorithm import Loss
from penstock.learn.policy import Policy
from penstock.learn.train_ops import samples, train_one_step
from penstock.replay import prefetch
from penstock.replay.replay import ReplaySettings
from tests.learn.small_dqn import CFG, PRIORITIZED, UNIFORM, built, parameters


def test_a_sample_carries_weights_noise_and_the_number_of_the_update() -> None:
    policy, sampler, own = built(replace(CFG, replay=PRIORITIZED))
    own.noise_size = 3
    seen: list[Any] = []
    inner = policy.postprocess_fn

    def watch(agent: Any, x: Any, cfg: Any) -> Any:
        seen.append(x)
        assert not torch.is_grad_enabled()
        return inner(agent, x, cfg)

    policy.postprocess_fn = watch
    for itr in range(6):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert [x["update"] for x in seen] == list(range(policy.updates)) and len(seen) > 5
    noise = torch.stack([x["noise"] for x in seen])
    assert noise.shape == (len(seen), 8, 3) and float(noise.min()) > 0.0 and float(noise.max()) < 1.0
    assert len(noise.unique()) > 0.99 * noise.numel()
    assert all(x["weight"].shape == (8,) and float(x["weight"].max()) == 1.0 for x in seen)
    plain = next(samples(built_and_filled(CFG), 1, np.random.default_rng(0)))[1]
    assert "weight" not in plain.rows and "noise" not in plain.rows


def built_and_filled(cfg: DQN) -> Policy:
    policy, sampler, own = built(cfg)
    for itr in range(4):
        own.replay.append(sampler.obtain_samples(itr)[0])
    return policy


def test_weights_follow_beta_by_progress_or_by_steps() -> None:
    """(min P / P)^beta with P = 1/4, 3/4 of two kinds of rows."""
    for beta, progress, expected in (
        ("linear(0, 1)", 0.5, 0.5),
        ("linear(0, 1, steps=80)", 0.0, None),
        (0.25, 0.9, 0.25),
    ):
        policy = built_and_filled(replace(CFG, replay=replace(PRIORITIZED, priority_beta=beta, priority_alpha=1.0)))
        own: Any = policy.replay_schedule
        mass = own.replay.arrays()["index.mass"]
        units, slots = np.nonzero(mass)
        drawing = own.replay.draw(4, np.random.default_rng(0))._replace(unit=units, slot=slots)
        own.replay.update_priorities(drawing, np.where(np.arange(len(units)) % 2, 3.0, 1.0))
        found = own.replay.draw(64, np.random.default_rng(1), progress)
        exponent = own.replay.appended / 80 if expected is None else expected
        assert 0 < exponent < 1
        p = own.replay.arrays()["index.mass"][found.unit, found.slot]
        np.testing.assert_allclose(found.weight, (p.min() / p) ** exponent, rtol=1e-5)
        assert found.weight.min() == pytest.approx(3.0**-exponent, rel=1e-4)


def test_a_step_that_is_stopped_updates_no_target() -> None:
    policy, sampler, own = built(CFG)
    plain, calls, after = policy.loss_fn, [0], list[int]()

    def every_second(*args: Any) -> Loss:
        calls[0] += 1
        return plain(*args)._replace(stop=calls[0] % 2 == 0)

    policy.loss_fn = every_second
    own.after_update = lambda agent, cfg, updates: after.append(updates)
    for itr in range(6):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert after == list(range(1, policy.updates + 1)) and policy.updates == math.ceil(calls[0] / 2) > 5


def test_new_priorities_go_to_the_rows_that_were_drawn() -> None:
    """Each row's priority is its own number; of a row drawn twice the last counts."""
    policy, sampler, own = built(replace(CFG, replay=replace(PRIORITIZED, priority_alpha=1.0)))
    drawn: list[Any] = []
    inner = own.replay.draw
    own.replay.draw = lambda *args: drawn.append(inner(*args)) or drawn[-1]
    for itr in range(3):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    before = own.replay.arrays()["index.mass"].copy()
    given = torch.arange(8.0) + 100.0
    plain = policy.loss_fn
    policy.loss_fn = lambda *args: Loss(plain(*args).total, {}, given + 10.0 * policy.updates)
    drawn.clear()
    start = policy.updates
    train_one_step(policy, sampler.obtain_samples(3)[0])
    expected = own.replay.arrays()["index.mass"].copy()
    expected[: len(before)][before > 0] = before[before > 0]
    for k, drawing in enumerate(drawn):
        expected[drawing.unit, drawing.slot] = 100.0 + np.arange(8) + 10.0 * (start + k) + 1e-6
    assert len(drawn) == policy.updates - start > 2
    np.testing.assert_allclose(own.replay.arrays()["index.mass"], expected, rtol=1e-9)


def test_rows_overwritten_in_between_are_not_given_what_others_earned() -> None:
    """A drawing outlives most of its rows; what lies in their place keeps its priority."""
    cfg = replace(CFG, replay=replace(PRIORITIZED, capacity=64, priority_alpha=1.0))
    (_, sampler, own), twin = built(cfg), built(cfg)[2]
    for itr in range(12):
        batch = sampler.obtain_samples(itr)[0]
        own.replay.append(batch)
        twin.replay.append(batch)
        if itr == 9:
            drawing = own.replay.draw(200, np.random.default_rng(0))
            twin.replay.draw(200, np.random.default_rng(0))
    own.replay.update_priorities(drawing, np.full(200, 9.0))  # pyright: ignore[reportPossiblyUnboundVariable]
    seen, before = own.replay.arrays()["index.mass"], twin.replay.arrays()["index.mass"]
    oldest = 12 * 4 - 64 // 4
    kept = drawing.unit >= oldest  # pyright: ignore[reportPossiblyUnboundVariable]
    assert 0 < kept.sum() < 200
    changed = set(zip(*(x.tolist() for x in np.nonzero(seen != before))))
    rows = len(seen)
    assert changed == set(zip((drawing.unit[kept] % rows).tolist(), drawing.slot[kept].tolist()))  # pyright: ignore
    assert set(seen[seen != before]) == {9.0 + 1e-6}


@pytest.mark.parametrize("settings", [UNIFORM, PRIORITIZED], ids=["uniform", "prioritized"])
def test_a_thread_that_reads_ahead_changes_no_bit(settings: ReplaySettings) -> None:
    found = []
    for wish in (False, True, "auto"):
        policy, sampler, _ = built(replace(CFG, replay=replace(settings, prefetch=wish)))
        for itr in range(8):
            train_one_step(policy, sampler.obtain_samples(itr)[0])
        found.append(parameters(policy))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.parametrize("case", ["frames", "stacks", "floats", "sequences"])
def test_auto_reads_ahead_where_a_batch_of_observations_is_large(case: str) -> None:
    """By hand: 32 x 2 x 28,224 B = 1.8 MB of images whether or not frames are shared, 32 x 2 x 16 B of four floats.

    8 sequences x 83 rows x 1,600 B are 1.06 MB, of which the 80 trained rows are 1.02 MB, less than a MiB.
    """
    pixels = EnvSpec(LeafSpec("box", (4, 84, 84), "uint8", 0.0, 255.0), LeafSpec("discrete", (), "int64", sizes=(6,)))

    def floats(size: int) -> EnvSpec:
        return replace(pixels, obs=LeafSpec("box", (size,), "float32"))

    memory = ReplaySettings(capacity=1_000)
    small = ps.Net(hidden=(4,))
    sequences = ps.R2D1(batch_size=8, train_length=80, burn_in=1, n_step=1, state_interval=8, learning_starts=20, replay=memory,
                        net=ps.Net(hidden=(4,), recurrent="lstm", recurrent_size=4))  # fmt: skip
    algo, spec, large = {
        "frames": (DQN(replay=replace(memory, deduplicate_frames=True), batch_size=32, learning_starts=20), pixels, True),
        "stacks": (DQN(replay=memory, batch_size=32, learning_starts=20), pixels, True),
        "floats": (DQN(replay=memory, batch_size=32, learning_starts=20, net=small), floats(4), False),
        "sequences": (sequences, floats(400), True),
    }[case]  # fmt: skip
    own: Any = algo.build(spec, 0).replay_schedule
    assert own.reads_ahead(to_gpu=False) is large
    assert own.reads_ahead(to_gpu=True)


def test_a_read_that_does_not_end_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = built_and_filled(replace(CFG, replay=replace(UNIFORM, prefetch=True)))
    own: Any = policy.replay_schedule
    let_go, read = threading.Event(), own.replay.read
    own.replay.read = lambda drawing: read(drawing) if let_go.wait(30) else None
    monkeypatch.setattr(prefetch, "READ_TIMEOUT_S", 0.05)
    with pytest.raises(
        LearnerError, match=r"a batch of 8 samples of replay in memory was not read within 0\.05 s; resume"
    ):
        next(samples(policy, 2, np.random.default_rng(0)))
    waiting = [x for x in threading.enumerate() if x.name.startswith("replay")]
    assert len(waiting) == 1 and waiting[0].daemon  # else the process could not end
    let_go.set()
    waiting[0].join(30)


def test_a_reader_that_fails_says_why_and_one_that_is_left_ends() -> None:
    policy = built_and_filled(replace(CFG, replay=replace(UNIFORM, prefetch=True)))
    own: Any = policy.replay_schedule
    going = samples(policy, 5, np.random.default_rng(0))
    next(going)
    going.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not [x for x in threading.enumerate() if x.name == "replay" and not x.daemon]
    own.replay.read = lambda drawing: 1 // 0
    with pytest.raises(ZeroDivisionError):
        next(samples(policy, 2, np.random.default_rng(0)))


def test_a_run_is_a_function_of_its_seed() -> None:
    found = []
    for seed in (2, 2, 3):
        policy, sampler, _ = built(replace(CFG, noisy=True), seed=seed)
        for itr in range(5):
            train_one_step(policy, sampler.obtain_samples(itr)[0])
        found.append(parameters(policy)[-1])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_a_step_that_is_skipped_moves_no_target_and_no_priority() -> None:
    """It counts as trained, so that the ratio does not ask for it again."""
    policy, sampler, own = built(replace(CFG, replay=PRIORITIZED, target_interval=1))
    for itr in range(3):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    before, updates, trained = parameters(policy), policy.updates, own.trained
    mass = own.replay.arrays()["index.mass"].copy()
    plain = policy.loss_fn
    policy.loss_fn = lambda *args: (loss := plain(*args))._replace(total=loss.total * math.nan)  # pyright: ignore
    results = train_one_step(policy, sampler.obtain_samples(3)[0])
    assert policy.updates == updates and own.trained > trained and policy.skipped == own.trained - trained
    assert results["train/skipped_updates"] == policy.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(policy)))
    now = own.replay.arrays()["index.mass"][: len(mass)][mass > 0]
    np.testing.assert_array_equal(now, mass[mass > 0])


def test_ends_that_only_targets_see() -> None:
    """A life lost in the middle of an episode: nothing follows it in targets, though the record goes on."""

    class Lives(ThreeStep):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, _ = super().step(action)
            return obs, reward, terminated, truncated, {"life_lost": float(obs[0] == 2)}

    env = ps.EnvConfig(Lives, info_keys=("life_lost",))
    for key, discounts in (("life_lost", {1.0: 0.99, 2.0: 0.0, 3.0: 0.0}), ("", {1.0: 0.99, 2.0: 0.99, 3.0: 0.0})):
        policy, sampler, _ = built(replace(CFG, net=replace(CFG.net, terminal_info=key)), env)
        for itr in range(4):
            train_one_step(policy, sampler.obtain_samples(itr)[0])
        _, x = next(samples(policy, 1, np.random.default_rng(0)))
        seen = dict(zip(x["next"].obs[:, 0].tolist(), [round(d, 6) for d in x["discount"].tolist()]))
        assert seen == discounts


def test_the_noise_of_layers_follows_from_the_version_where_nothing_is_trained() -> None:
    def after_a_batch(drawn_before: int) -> Any:
        policy, sampler, own = built(replace(CFG, noisy=True, learning_starts=100))
        own.rng.random(drawn_before)
        train_one_step(policy, sampler.obtain_samples(0)[0])
        assert own.trained == 0
        return [x.clone() for x in policy.agent.online.buffers()]

    once, again = after_a_batch(0), after_a_batch(7)
    assert once and all(map(torch.equal, once, again))
