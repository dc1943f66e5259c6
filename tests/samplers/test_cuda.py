from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.noise import Noise, Purpose
from penstock.envs.toy import TMaze
from penstock.samplers.collector import collect
from penstock.samplers.cuda import GraphedAgent
from penstock.testing.samplers import bits

ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def again(run: Callable[[], None]) -> Callable[[], None]:
    """What a capture does on the CPU: warm up, and run once more for each replay."""
    run()
    run()
    return run


@pytest.mark.parametrize("net", [ps.Net(), ps.Net(recurrent="lstm", recurrent_size=8)], ids=["mlp", "lstm"])
def test_a_graphed_agent_acts_like_the_agent(net: Any) -> None:
    def batches(graphed: bool) -> list[Any]:
        sampler = ps.SerialSampler(9, 6).build(TMaze, 2)
        policy = ps.PPO(net=net).build(sampler.spec, seed=1)
        sampler.initialize(policy.agent)
        stage: Any = sampler._stage
        acting: Any = GraphedAgent(policy.agent, again) if graphed else policy.agent
        out: list[Any] = []
        for itr in range(4):
            noise = Noise(2, Purpose.ACT, itr)
            collect(stage.pool, acting, stage.batches[0], stage.views[0], stage.states, noise)
            out.append(bits(stage.batches[0]))
            with torch.no_grad():
                for p in policy.agent.parameters():  # a graph reads parameters where they are
                    p.mul_(1.01)
        sampler.shutdown()
        return out

    assert batches(graphed=True) == batches(graphed=False)


def test_a_device_that_is_not_here_is_refused_at_build() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is here")
    with pytest.raises(ConfigError, match=r"sampler.device='cuda' is not here.*use 'cpu'"):
        ps.GpuSampler(8, 4, 2, device="cuda").build("CartPole-v1")


@ON_CUDA
@pytest.mark.parametrize("net", [ps.Net(), ps.Net(recurrent="lstm", recurrent_size=8)], ids=["mlp", "lstm"])
def test_graphs_on_a_device_change_nothing(net: Any) -> None:
    def batches(graph: bool) -> list[Any]:
        sampler = ps.AlternatingSampler(16, 8, 2, device="cuda", cuda_graph=graph).build(TMaze, 2)
        sampler.initialize(ps.PPO(net=net).build(sampler.spec, seed=1).agent)
        try:
            return [bits(sampler.obtain_samples(itr)[0]) for itr in range(4)]
        finally:
            sampler.shutdown()

    assert batches(graph=True) == batches(graph=False)
