from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.batch import MultiAgentBatch
from penstock.learn.comm import gathered
from penstock.learn.train_ops import training_step
from penstock.run.learners.shared_sampler import SharedSampler, order_of_ends, shared_step
from tests.learn.ranks import ThreadComm, apart, bounds, on_ranks


def test_slots_and_workers_are_shared_evenly() -> None:
    cpu = ps.CpuSampler(T=8, B=7, workers=3).shares(2)
    assert [(x.spec.B, x.workers) for x in cpu] == [(4, 2), (3, 1)]  # pyright: ignore
    serial = ps.SerialSampler(T=8, B=5, reset="batch_end").shares(3)
    assert [(x.spec, x.reset) for x in serial] == [((8, B), "batch_end") for B in (2, 2, 1)]  # pyright: ignore
    inner = ps.AsyncSampler(ps.CpuSampler(T=8, B=6, workers=4), depth=1).shares(2)
    assert [(x.spec.B, x.inner.workers, x.depth) for x in inner] == [(3, 2, 1)] * 2  # pyright: ignore
    groups = ps.AlternatingSampler(T=8, B=6, workers=2).shares(3)
    assert [(x.spec.B, x.workers, x.groups) for x in groups] == [(2, 1, 2)] * 3  # pyright: ignore
    runners = ps.RunnerSampler(runners=3, inner=ps.SerialSampler(T=8, B=2)).shares(2)
    assert [(x.spec.B, x.runners) for x in runners] == [(4, 2), (2, 1)]  # pyright: ignore


@pytest.mark.parametrize(
    ("sampler", "learners", "message"),
    [
        (ps.SerialSampler(B=3), 4, r"run\.learners=4 with sampler\.B=3.*run\.learners<=3, or sampler\.B>=4"),
        (
            ps.RunnerSampler(runners=2, inner=ps.SerialSampler(B=4)),
            3,
            r"run\.learners=3 with sampler\.runners=2.*run\.learners<=2, or more runners",
        ),
        (
            ps.RunnerSampler(runners=2, inner=ps.SerialSampler(B=4), mode="ready"),
            2,
            r"run\.learners=2 with sampler\.mode='ready'.*use mode='rounds'",
        ),
    ],
)
def test_more_learners_than_there_is_to_share(sampler: Any, learners: int, message: str) -> None:
    with pytest.raises(ps.ConfigError, match=message):
        sampler.shares(learners)


def test_plain_data_of_all_ranks() -> None:
    def work(comm: ThreadComm) -> list[Any]:
        return gathered(comm, {"rank": comm.rank, "x": np.arange(comm.rank * 5), "text": "a" * comm.rank})

    for found in on_ranks(3, work):
        assert [x["rank"] for x in found] == [0, 1, 2]
        assert [len(x["x"]) for x in found] == [0, 5, 10]
        assert [x["text"] for x in found] == ["", "a", "aa"]


def test_steps_episodes_and_metrics_are_those_of_all() -> None:
    algo = ps.PPO(epochs=1, minibatch=64, net=ps.Net(hidden=(8,)))
    slots = bounds((2, 4))

    def work(comm: ThreadComm) -> Any:
        own = slots[comm.rank] if comm.size > 1 else slice(0, 6)
        live = ps.SerialSampler(T=32, B=own.stop - own.start).build("CartPole-v1", 3, share=ps.Share(own.start, 6))
        policy = algo.build(live.spec, seed=5)
        policy.join(comm)
        sampler = SharedSampler(live, comm, slots if comm.size > 1 else [own])
        sampler.initialize(policy.agent)
        step = shared_step(training_step)
        try:
            found = [step(policy, sampler, itr) for itr in range(4)]
            sampler.told([{"faults/signal": 1.0, "sampler/env_wait": comm.rank}] * comm.size)
            return policy, found, sampler.metrics(), sampler.state_dict()
        finally:
            sampler.shutdown()

    ((one, steps, _, state),) = on_ranks(1, work)
    for policy, found, metrics, whole in on_ranks(2, work):
        assert apart(policy, one) < 1e-6
        assert [x.env_steps for x in found] == [x.env_steps for x in steps]
        for x, y in zip(found, steps):
            assert len(x.episodes) and np.array_equal(y.episodes.slot, x.episodes.slot)  # by their ends, as one's
            assert np.array_equal(y.episodes.return_, x.episodes.return_)
        assert metrics["faults/signal"] == 2.0 and metrics["sampler/env_wait"] in (0.0, 1.0)
        assert whole["journal"][5]["unseen"] == state["journal"][5]["unseen"]
        assert len(whole["pool"]["episode"]) == 6


def test_episodes_of_many_agents_are_in_the_order_of_one_learners_log() -> None:
    slots = np.array([0, 1, 0, 0, 1])
    zeros = np.zeros(5)
    episodes = ps.Episodes(zeros, slots, zeros, slots, zeros > 0)
    assert order_of_ends(MultiAgentBatch({}, 9), episodes).tolist() == [0, 0, 1, 2, 1]
