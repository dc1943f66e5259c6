from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.learn.slot_partition import SlotPartition
from tests.algos.taught import TaughtDAgger
from tests.learn.ranks import ThreadComm, apart, batches_of, bounds, on_ranks, trained
from tests.params import slow_but

CLOSE = 1e-6
SMALL = ps.Net(hidden=(16,), activation="relu")
SOON: dict[str, Any] = {"net": SMALL, "learning_starts": 64}
BOXES: dict[str, Any] = {**SOON, "batch_size": 64, "replay_ratio": 32}


def kept(**settings: Any) -> ps.ReplaySettings:
    return ps.ReplaySettings(capacity=1_000, **settings)


CASES: dict[str, tuple[str, Any, int, int, tuple[int, ...]]] = {
    "dqn": ("CartPole-v1", ps.DQN(**SOON, replay_ratio=16, replay=kept()), 8, 8, (4, 4)),
    "boot-dqn": ("CartPole-v1", ps.BootDQN(**SOON, heads=3, replay_ratio=64, replay=kept()), 8, 8, (3, 5)),
    "dqn-per": (
        "CartPole-v1",
        ps.DQN(
            **SOON,
            replay_ratio=32,
            n_step=3,
            ladder="ape-x",
            target_interval=20,
            replay=kept(index="prioritized", fresh_priority="agent"),
        ),
        8,
        8,
        (3, 5),
    ),
    "dqn-with-empty-shares": (
        "CartPole-v1",
        ps.DQN(net=SMALL, learning_starts=16, replay_ratio=2, batch_size=2, replay=kept(index="prioritized")),
        4,
        8,
        (1, 7),
    ),
    "noisy-c51": (
        "CartPole-v1",
        ps.DQN(
            **SOON,
            replay_ratio=32,
            distributional="c51",
            noisy=True,
            v_min=0.0,
            v_max=50.0,
            target_interval=1,
            tau=0.01,
        ),
        4,
        8,
        (3, 5),
    ),
    "fifo": ("CartPole-v1", ps.DQN(**SOON, replay_ratio=1, batch_size=8, replay=kept(index="fifo")), 8, 8, (4, 4)),
    "sac": ("Pendulum-v1", ps.SAC(**BOXES, replay=kept()), 8, 8, (4, 4)),
    "sac-normalised": (
        "Pendulum-v1",
        replace(ps.SAC(**BOXES, replay=kept()), net=replace(SMALL, normalize_obs=True)),
        8,
        8,
        (2, 6),
    ),
    "tqc": ("Pendulum-v1", ps.TQC(**BOXES, quantiles=5, replay=kept()), 8, 8, (4, 4)),
    "td3": ("Pendulum-v1", ps.TD3(**BOXES, replay=kept()), 8, 8, (2, 3, 3)),
    "fast-td3": (
        "Pendulum-v1",
        ps.TD3(**BOXES, replay=kept(), distributional="c51", v_min=-200.0, v_max=0.0, exploration_noise_low=0.01),
        8,
        8,
        (3, 5),
    ),
    "ddpg": ("Pendulum-v1", ps.DDPG(**BOXES, replay=kept()), 8, 8, (4, 4)),
    "discrete-sac": ("CartPole-v1", ps.DiscreteSAC(**BOXES, replay=kept()), 8, 8, (4, 4)),
    "dagger": ("CartPole-v1", TaughtDAgger(**BOXES, replay=kept()), 8, 8, (3, 5)),
    "cql": ("CartPole-v1", ps.CQL(**BOXES, replay=kept()), 8, 8, (4, 4)),
    "cql-boxes": ("Pendulum-v1", ps.CQL(**BOXES, threshold=1.0, replay=kept()), 8, 8, (4, 4)),
    "rebrac": ("Pendulum-v1", ps.ReBRAC(**BOXES, replay=kept()), 8, 8, (3, 5)),
    "iql": ("CartPole-v1", ps.IQL(**BOXES, replay=kept()), 8, 8, (3, 5)),
    "r2d1": (
        "CartPole-v1",
        ps.R2D1(
            net=ps.Net(hidden=(16,), recurrent="lstm", recurrent_size=8),
            learning_starts=128,
            batch_size=4,
            burn_in=4,
            train_length=16,
            state_interval=16,
            n_step=2,
            replay=kept(index="prioritized", fresh_priority="agent"),
        ),
        16,
        6,
        (2, 4),
    ),
}


@pytest.mark.parametrize("case", slow_but("fifo", [*CASES]))
def test_learners_on_shares_equal_one_on_the_whole(case: str) -> None:
    env, algo, T, B, widths = CASES[case]
    spec, batches = batches_of(env, algo, T, B, 16 if case in ("r2d1", "dqn-with-empty-shares") else 6)
    ((one, results),) = trained(algo, spec, batches, [B])
    many = trained(algo, spec, batches, widths)
    assert one.updates >= 20
    assert one.replay_schedule is not None
    for policy, found in many:
        assert policy.updates == one.updates
        assert apart(policy, many[0][0]) == 0.0
        assert found == many[0][1]
        assert policy.replay_schedule is not None
        assert policy.replay_schedule.collected == one.replay_schedule.collected
        assert len(policy.replay_schedule.replay) == len(one.replay_schedule.replay)
    assert apart(one, many[0][0]) < CLOSE
    assert apart(one, algo.build(spec, seed=5)) > 1e-3
    assert many[0][1][-1] == pytest.approx(results[-1], abs=1e-4, rel=1e-4)


def test_learners_of_crossq_normalise_by_their_shares_and_agree_on_the_mean() -> None:
    """The mean of shares' means is that of the whole; the mean of their variances is less, by that of their means."""
    algo = ps.CrossQ(**BOXES, policy_delay=2, warmup_updates=4, replay=kept())
    spec, batches = batches_of("Pendulum-v1", algo, 8, 8, 4)
    ((one, _),) = trained(algo, spec, batches, [8])
    (many, results), (twin, others) = trained(algo, spec, batches, (3, 5))
    assert many.updates == one.updates >= 20
    assert apart(many, twin) == 0.0 and results == others

    def moments(policy: ps.Policy) -> list[torch.Tensor]:
        state = policy.agent.state_dict()
        return [state[f"critics.stack.norms.0.{name}"][:, 0, :3] for name in ("mean", "variance")]

    (mean, variance), (own_mean, own_variance) = moments(one), moments(many)
    torch.testing.assert_close(own_mean, mean, atol=CLOSE, rtol=0.0)
    assert (own_variance < variance).all()
    torch.testing.assert_close(own_variance, variance, atol=0.0, rtol=0.1)


def test_each_learner_keeps_the_rows_of_its_own_slots_alone() -> None:
    env, algo, T, B, widths = CASES["dqn-per"]
    spec, batches = batches_of(env, algo, T, B, 2)
    for (policy, _), width in zip(trained(algo, spec, batches, widths), widths):
        assert policy.replay_schedule is not None
        storage = policy.replay_schedule.replay.storage
        assert storage is not None
        assert storage.slots == width
        assert storage.rows == 126  # of a capacity for 8 slots


def drawn(priority: Any) -> tuple[list[Any], list[Any]]:
    """Priorities of all units after an update: in one learner's index, and in those of three."""
    algo = CASES["dqn-per"][1]
    spec, batches = batches_of("CartPole-v1", algo, 8, 6, 3)
    places = bounds((1, 3, 2))

    def work(comm: ThreadComm) -> list[Any]:
        policy = algo.build(spec, seed=5)
        policy.join(comm)
        assert policy.replay_schedule is not None
        replay, found = policy.replay_schedule.replay, []
        own = places[comm.rank] if comm.size > 1 else slice(0, 6)
        for k, batch in enumerate(batches):
            replay.append(batch[:, own])
            for drawing, x in replay.samples(2, 5, np.random.default_rng(k), noise_size=3):
                assert x["weight"].shape == x["return"].shape
                mine = np.flatnonzero((drawing.slot >= own.start) & (drawing.slot < own.stop))
                assert len(x["return"]) == max(len(mine), 1)
                assert (x.valid is None) == bool(len(mine))
                replay.update_priorities(drawing, priority(drawing)[mine] if len(mine) else np.array([99.0]))
                found.append(replay.arrays()["index.mass"].copy())
        return found

    (one,) = on_ranks(1, work)
    many = on_ranks(3, work)
    return one, many


def test_priorities_are_those_of_one_learner_bit_for_bit() -> None:
    one, many = drawn(lambda drawing: (1.0 + drawing.unit + drawing.slot / 7).astype(np.float32))
    for found in many:
        assert all(np.array_equal(x, y) for x, y in zip(one, found))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "learner"])
def test_a_checkpoint_of_learners_is_that_of_one(device: Any) -> None:
    """State and arrays of two ranks, loaded by one learner and by three, which then go on as one would have."""
    env, algo, T, B, _ = CASES["sac-normalised"]
    algo = replace(algo, replay=kept(device=device))
    spec, batches = batches_of(env, algo, T, B, 6)
    ((one, _),) = trained(algo, spec, batches, [B])
    gathered: list[Any] = []

    def first_half(comm: ThreadComm) -> None:
        policy = algo.build(spec, seed=5)
        policy.join(comm)
        own = bounds((5, 3))[comm.rank]
        for batch in batches[:3]:
            ps.multi_gpu_train_one_step(policy, batch[:, own])
        state, arrays = policy.state_dict(), {name: np.asarray(x) for name, x in policy.arrays().items()}
        gathered.append((state, arrays))

    on_ranks(2, first_half)
    (state, arrays), _ = gathered
    assert arrays["obs"].shape[1] == B

    def second_half(comm: ThreadComm) -> ps.Policy:
        policy = algo.build(spec, seed=5)
        policy.join(comm)
        own = bounds((8,) if comm.size == 1 else (1, 3, 4))[comm.rank]
        policy.prepare(ps.BatchSpec(T, own.stop - own.start))
        policy.load_state_dict(state, arrays)
        for batch in batches[3:]:
            ps.multi_gpu_train_one_step(policy, batch[:, own])
        return policy

    for size in (1, 3):
        for policy in on_ranks(size, second_half):
            assert policy.updates == one.updates
            assert apart(policy, one) < CLOSE


def test_a_gap_that_one_learner_needs_is_left_by_all() -> None:
    env, algo, T, B, widths = CASES["dqn"]
    spec, batches = batches_of(env, algo, T, B, 5)
    del batches[2]  # so that the fourth does not begin where the second ended
    for x in (batches[1], batches[2]):
        x.obs[-1 if x is batches[1] else 0, :4] = 0.0  # but in the columns of the first rank it does
        x.prev_action[-1 if x is batches[1] else 0, :4] = 0
        x.prev_reward[-1 if x is batches[1] else 0, :4] = 0.0
        x.first[-1 if x is batches[1] else 0, :4] = False
    ((one, _),) = trained(algo, spec, batches, [B])
    many = trained(algo, spec, batches, widths)
    heads = [p.replay_schedule.replay.storage.head for p, _ in [(one, None), *many]]  # pyright: ignore
    assert len(set(heads)) == 1 and heads[0] > 4 * T
    assert apart(one, many[0][0]) < CLOSE


def test_shards_and_learners_are_refused() -> None:
    algo = ps.DQN(**SOON, replay=kept(shards=2, shard_backend="in-process"))
    spec, _ = batches_of("CartPole-v1", ps.DQN(**SOON), 2, 2, 1)
    with pytest.raises(ps.ConfigError, match=r"without replay\.shards=2"):
        on_ranks(2, lambda comm: algo.build(spec).join(comm))


def test_columns_of_one_rank_are_its_batch() -> None:
    def work(comm: ThreadComm) -> torch.Tensor:
        partition = SlotPartition(comm)
        partition.fit((2, 3)[comm.rank])
        x = torch.arange(10.0).reshape(2, 5)[:, partition.local_slots]
        assert np.array_equal(partition.sum_array(np.array([1.0, comm.rank])), [2.0, 1.0])
        return partition.gather(x)

    for whole in on_ranks(2, work):
        assert torch.equal(whole, torch.arange(10.0).reshape(2, 5))
