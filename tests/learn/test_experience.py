"""Training from replay: how often, on what, with which priorities, and in an order that no thread changes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.algos.dqn import DQN
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves
from penstock.envs.toy import RepeatPrevious, ThreeStep
from penstock.learn.algorithm import Loss
from penstock.learn.experience import Experience, samples
from penstock.learn.policy import Policy
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import ReplaySettings
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler

UNIFORM = ReplaySettings(capacity=400)
PRIORITIZED = ReplaySettings(capacity=400, index="prioritized")
CFG = DQN(lr=1e-3, batch_size=8, replay_ratio=4.0, learning_starts=20, target_interval=3, replay=UNIFORM,
          net=ps.Net(hidden=(8,), activation="relu"))  # fmt: skip


def built(cfg: DQN, env: Any = ThreeStep, T: int = 4, B: int = 4, seed: int = 2) -> tuple[Policy, LiveSampler, Any]:
    sampler = SerialSampler(T=T, B=B).build(env, 1)
    policy = cfg.build(sampler.spec, seed)
    sampler.initialize(policy.agent)
    return policy, sampler, policy.experience


def parameters(policy: Policy) -> list[Tensor]:
    return [x.clone() for x in tree_leaves(policy.agent.state_dict()) if isinstance(x, Tensor)]


class Counted:
    """A replay that only says how many samples it holds."""

    def __init__(self, index: str = "uniform", capacity: int = 10**6) -> None:
        self.settings = SimpleNamespace(index=index, capacity=capacity)
        self.held = 0

    def __len__(self) -> int:
        return self.held


RATIOS = [(1, 10), (1, 3), (1, 1), (3, 2), (8, 1), (7, 3), (256, 1), (37, 100)]


@pytest.mark.parametrize("ratio", RATIOS, ids=lambda r: f"{r[0]}:{r[1]}")
def test_the_ratio_is_exact_whatever_the_shapes(ratio: tuple[int, int]) -> None:
    """After every batch the gradient steps are floor(ratio * rows / size), counted from the start, in whole numbers."""
    exact, rng = Fraction(*ratio), np.random.default_rng(ratio[0])
    for T, B, batch, rows, starts in itertools.product((1, 5, 128), (1, 3, 16), (1, 32, 256), (1, 80), (0, 7, 1_000)):
        replay: Any = Counted()
        own = Experience(replay, batch, float(exact), starts, sample_rows=rows)
        for _ in range(40):
            own.collected += int(rng.integers(T * B // 2, T * B + 1))  # some rows are no steps
            replay.held = max(0, own.collected - 3)
            own.trained += own.due()
            counted = max(0, own.collected - starts)
            expected = math.floor(counted * exact / (batch * rows))
            assert own.trained == expected or (own.trained == 0 and not replay.held)
            if counted:
                assert own.metrics()["replay/ratio"] == pytest.approx(own.trained * batch * rows / counted)


@pytest.mark.parametrize(("T", "B", "batch", "ratio", "starts", "n"), [
    (1, 1, 4, 4.0, 5, 1), (4, 4, 8, 4.0, 20, 1), (3, 5, 7, 2.5, 0, 3), (8, 2, 32, 0.5, 16, 1), (2, 3, 4, 12.0, 1, 5),
])  # fmt: skip
def test_a_policy_takes_the_steps_that_are_due(T: int, B: int, batch: int, ratio: float, starts: int, n: int) -> None:
    """Only valid rows count, of an environment that resets every fourth row."""
    cfg = replace(CFG, batch_size=batch, replay_ratio=ratio, learning_starts=starts, n_step=n)
    policy, sampler, own = built(cfg, T=T, B=B)
    rows = 0
    for itr in range(16):
        batch_ = sampler.obtain_samples(itr)[0]
        rows += int(batch_.valid.sum())
        results = train_one_step(policy, batch_)
        due = math.floor(max(0, rows - starts) * Fraction(ratio) / batch)
        assert own.collected == rows and policy.updates == own.trained == (due if len(own.replay) else 0)
        assert results["replay/size"] == len(own.replay) and results["train/n_updates"] == policy.updates
    assert rows < 16 * T * B and policy.updates > 0


def test_what_cannot_be_drawn_yet_stays_due() -> None:
    policy, sampler, own = built(replace(CFG, batch_size=2, replay_ratio=2.0, learning_starts=0, n_step=6), RepeatPrevious,
                                 T=2, B=1)  # fmt: skip
    seen = []
    for itr in range(5):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
        seen.append((len(own.replay), policy.updates))
    assert seen == [(0, 0), (0, 0), (1, 6), (3, 8), (5, 10)]


def test_a_queue_gives_each_sample_once() -> None:
    cfg = replace(CFG, replay=replace(UNIFORM, index="fifo"), replay_ratio=1.0, learning_starts=0, batch_size=4)
    policy, sampler, own = built(cfg, RepeatPrevious)
    drawn: list[tuple[int, int]] = []
    inner = own.replay.draw

    def watch(*args: Any) -> Any:
        drawing = inner(*args)
        drawn.extend(zip(drawing.unit.tolist(), drawing.slot.tolist()))
        return drawing

    own.replay.draw = watch
    for itr in range(8):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert len(drawn) == len(set(drawn)) == own.trained * 4 >= own.collected - 4
    assert drawn == sorted(drawn)
    with pytest.raises(ConfigError, match=r"replay_ratio=4\.0 with replay\.index='fifo'"):
        built(replace(cfg, replay_ratio=4.0))


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
        own: Any = policy.experience
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
    for prefetch in (False, True, "auto"):
        policy, sampler, _ = built(replace(CFG, replay=replace(settings, prefetch=prefetch)))
        for itr in range(8):
            train_one_step(policy, sampler.obtain_samples(itr)[0])
        found.append(parameters(policy))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


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


def test_it_says_how_often_it_trains() -> None:
    for ratio, words in (
        (4.0, "one update of 8 every 2 steps after the first 20"),
        (32.0, "4 updates of 8 every step"),
    ):
        policy, sampler, own = built(replace(CFG, replay_ratio=ratio))
        policy.prepare(sampler.batch_spec)
        assert words in own.describe() and "400 rows" in own.describe()


def test_counters_are_stored() -> None:
    policy, sampler, own = built(CFG)
    for itr in range(4):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    state, (other, _, held) = own.state_dict(), built(CFG)
    other.prepare(sampler.batch_spec)
    held.load_state_dict(state, own.replay.arrays())
    assert (held.collected, held.trained, len(held.replay)) == (own.collected, own.trained, len(own.replay))
    assert held.due() == own.due() == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 500}, ["replay.capacity=400", "batch_size=500", "replay.capacity >= 500"]),
        ({"learning_starts": 401}, ["replay.capacity=400", "learning_starts=401"]),
        ({"replay_ratio": 0.0}, ["replay_ratio=0.0", "positive"]),
        ({"batch_size": 0}, ["batch_size=0"]),
        ({"learning_starts": -1}, ["learning_starts=-1"]),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        built(replace(CFG, **changes))
    assert all(word in str(error.value) for word in words), str(error.value)
