from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.noise import Noise, Purpose
from penstock.envs.toy import TMaze
from penstock.samplers import cuda
from penstock.samplers.collector import collect
from penstock.samplers.cuda import GraphedAgent
from penstock.testing.samplers import bits


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
        own: Any = sampler._training
        acting: Any = GraphedAgent(policy.agent, again) if graphed else policy.agent
        out: list[Any] = []
        for itr in range(4):
            noise = Noise(2, Purpose.ACT, itr)
            collect(own.pool, [acting], own.batches, own.views[0], own.states, noise)
            out.append(bits(own.batches[0]))
            with torch.no_grad():
                for p in policy.agent.parameters():  # a graph reads parameters where they are
                    p.mul_(1.01)
        sampler.shutdown()
        return out

    assert batches(graphed=True) == batches(graphed=False)


@pytest.fixture
def lstm() -> Iterator[Any]:
    """A live sampler of two groups in this process, and what collects its next batch by a graphed agent."""
    sampler: Any = ps.AlternatingSampler(9, 6, 2).build(TMaze, 2)
    net = ps.Net(recurrent="lstm", recurrent_size=8)
    sampler.initialize(ps.PPO(net=net).build(sampler.spec, seed=1).agent)
    yield sampler
    sampler.shutdown()


def test_graphs_of_states_that_were_replaced_are_given_back(lstm: Any) -> None:
    """Each restart of a worker and each resume makes new states, and so a new capture."""
    own = lstm._training
    graphed: Any = GraphedAgent(lstm._installed.agent, again)
    for itr in range(5):
        collect(own.pool, [graphed], own.batches, own.views[0], own.states, Noise(2, Purpose.ACT, itr))
        assert len(graphed._graphs) == 2
        if itr == 2:
            own.forget_slots([1])
        elif itr == 3:
            own.set_states(own.get_states())


def test_an_agent_that_cannot_be_captured_acts_without_a_graph() -> None:
    def fails(run: Callable[[], None]) -> Callable[[], None]:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    def batches(capture: Any) -> list[Any]:
        sampler: Any = ps.SerialSampler(9, 6).build(TMaze, 2)
        sampler.initialize(ps.PPO(net=ps.Net(recurrent="lstm", recurrent_size=8)).build(sampler.spec, seed=1).agent)
        own = sampler._training
        acting: Any = GraphedAgent(sampler._installed.agent, capture)
        for itr in range(2):
            collect(own.pool, [acting], own.batches, own.views[0], own.states, Noise(2, Purpose.ACT, itr))
        found = bits(own.batches[0])
        sampler.shutdown()
        return [found]

    with pytest.warns(
        UserWarning, match="act.. of ActorCritic cannot be captured.*not permitted.*acts without"
    ) as all_:
        refused = batches(fails)
    assert len(all_) == 1
    assert refused == batches(again)


def test_want_of_memory_is_no_reason_to_act_without_a_graph() -> None:
    def fails(run: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    sampler: Any = ps.SerialSampler(4, 4).build(TMaze, 2)
    sampler.initialize(ps.PPO().build(sampler.spec, seed=1).agent)
    own = sampler._training
    with pytest.raises(torch.OutOfMemoryError):
        acting: Any = GraphedAgent(sampler._installed.agent, fails)
        collect(own.pool, [acting], own.batches, own.views[0], own.states, Noise(2, Purpose.ACT, 0))
    sampler.shutdown()


class FakeCuda:
    """Stands for `torch.cuda`: a driver that locks no memory, and what was done while which device was current."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.current, self.seen = status, 0, list[tuple[str, int]]()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = SimpleNamespace(wait_stream=lambda other: None)
        replaced: dict[str, Any] = {
            "device": self.device,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=lambda *_: self.note("register") or self.status,
                cudaHostUnregister=lambda *_: self.note("unregister") or self.status,
            ),
            "Stream": lambda: self.note("stream") or stream,
            "current_stream": lambda: stream,
            "stream": lambda which: contextlib.nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=None),
            "graph": lambda graph, capture_error_mode: self.note(capture_error_mode) or contextlib.nullcontext(),
        }
        for name, stand_in in replaced.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(cuda, "_clear_error", lambda device: self.note(f"cleared {device}"))

    def note(self, what: str) -> None:
        self.seen.append((what, self.current))

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.current, before = device.index, self.current
        yield
        self.current = before


def test_a_graph_is_captured_on_the_agents_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is current: `run.device="cuda:1"` makes none so, nor do the ranks of a gang."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    cuda.cuda_capture(lambda: fake.note("run"), torch.device("cuda:1"))
    assert fake.seen == [("stream", 1), *[("run", 1)] * 3, ("thread_local", 1), ("run", 1)]


@pytest.mark.parametrize("status", [0, 2])
def test_memory_that_the_driver_does_not_lock_is_used_as_it_is(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device = FakeCuda(status), torch.device("cuda:1")
    fake.install(monkeypatch)
    batches: Any = [np.zeros(8), np.zeros(0)]
    if not status:
        assert cuda.pin(batches, device)
        cuda.unpin(batches, device)
        assert fake.seen == [("register", 1), ("unregister", 1)]
        return
    with pytest.warns(UserWarning, match="does not lock 64 bytes of memory .cudaHostRegister: status 2.*ulimit -l"):
        assert not cuda.pin(batches, device)
    cuda.unpin(batches, device)
    assert fake.seen == [("register", 1), ("cleared cuda:1", 1), ("unregister", 1), ("cleared cuda:1", 1)]


def test_a_device_that_is_not_here_is_refused_at_build() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is here")
    with pytest.raises(ConfigError, match=r"sampler.device='cuda' is not here.*use 'cpu'"):
        ps.GpuSampler(8, 4, 2, device="cuda").build("CartPole-v1")
