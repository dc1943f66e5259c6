"""Samplers that act on the device: graphs change nothing, placement changes nothing, and new weights are acted by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.envs.toy import TMaze
from penstock.learn.rows.postprocess import as_tensors
from penstock.testing.samplers import bits

T, B = 16, 8
NETS = {"mlp": ps.Net(normalize_obs=True), "lstm": ps.Net(recurrent="lstm", recurrent_size=8)}
SERVED = {
    "gpu": ps.GpuSampler,
    "alternating": ps.AlternatingSampler,
    "no-overlap-alternating": ps.NoOverlapAlternatingSampler,
}


@pytest.fixture
def live() -> Iterator[Any]:
    made: list[Any] = []

    def live(settings: Any, net: ps.Net, learns_on: str) -> tuple[Any, Any]:
        sampler = settings.build(TMaze, 2)
        made.append(sampler)
        policy = ps.PPO(net=net).build(sampler.spec, seed=1, device=learns_on)
        sampler.initialize(policy.agent)
        return sampler, policy

    yield live
    for sampler in made:
        sampler.shutdown()


def batches(sampler: Any, policy: Any, count: int = 5) -> list[Any]:
    """Copies of batches, between which parameters move where they are."""
    out: list[Any] = []
    for itr in range(count):
        batch = sampler.obtain_samples(itr)[0]
        out.append(batch.copy())
        policy.observe(as_tensors(batch, policy.device))
        with torch.no_grad():
            for p in policy.agent.parameters():
                p.mul_(1.05)
        if itr == 2:
            sampler.evaluate_agent(itr, 4)
    return out


def assert_close(one: list[Any], other: list[Any]) -> None:
    """Equal actions; numbers as they are where sums may have another order."""
    for a, b in zip(one, other, strict=True):
        assert (a.action == b.action).all()
        assert (a.valid == b.valid).all()
        np.testing.assert_allclose(a.info["logp"], b.info["logp"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("learns", ["there", "here"])
def test_graphs_change_nothing(kind: str, net: str, learns: str, live: Any, device: str, workers: int) -> None:
    """`here`: the agent learns on the CPU, and a copy of it acts on the device."""
    where = device if learns == "there" else "cpu"
    on, off = (
        batches(*live(SERVED[kind](T, B, workers, device=device, cuda_graph=graph), NETS[net], where))
        for graph in (True, False)
    )
    assert [bits(x) for x in on] == [bits(x) for x in off]
    assert_close(on, batches(*live(ps.SerialSampler(T, B), NETS[net], where)))


@pytest.mark.parametrize("net", NETS)
def test_workers_on_the_cpu_act_as_the_device(net: str, live: Any, device: str, workers: int) -> None:
    serial = batches(*live(ps.SerialSampler(T, B), NETS[net], device))
    assert_close(serial, batches(*live(ps.CpuSampler(T, B, workers), NETS[net], device)))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("kind", ["serial", "cpu", "gpu", "alternating"])
def test_asynchronous_samplers_publish_from_the_device(
    kind: str, net: str, live: Any, device: str, workers: int
) -> None:
    """At depth 0 they are the synchronous sampler, with the weights of the moment."""
    served = {"gpu": ps.GpuSampler, "alternating": ps.AlternatingSampler}
    if kind in served:
        inner: Any = served[kind](T, B, workers, device=device)
    else:
        inner = ps.SerialSampler(T, B) if kind == "serial" else ps.CpuSampler(T, B, workers)
    assert_close(
        batches(*live(ps.SerialSampler(T, B), NETS[net], device)),
        batches(*live(ps.AsyncSampler(inner, depth=0), NETS[net], device)),
    )


def test_noisy_exploration_reaches_the_copy_that_acts(live: Any, device: str, workers: int) -> None:
    """Epsilon and noisy layers lie in buffers, which follow the agent to the device."""
    found: list[Any] = []
    for settings in (ps.SerialSampler(T, B), ps.GpuSampler(T, B, workers, device=device)):
        sampler = settings.build(TMaze, 2)
        try:
            policy = ps.DQN(noisy=True, net=ps.Net(hidden=(16,), activation="relu")).build(sampler.spec, seed=1)
            sampler.initialize(policy.agent)
            actions: list[Any] = []
            for itr in range(3):
                policy.agent.renew_noise(np.random.default_rng(itr))
                actions.append(sampler.obtain_samples(itr)[0].action.copy())
            found.append(np.stack(actions))
        finally:
            sampler.shutdown()
    assert (found[0] == found[1]).all()
