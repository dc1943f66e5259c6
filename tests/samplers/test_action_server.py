"""An ActionServer serves by agents or their copies, reports shares of the time, and locks buffers in memory."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.core.spec import EnvSpec, LeafSpec
from penstock.samplers import action_server
from penstock.samplers.action_server import ActionServer
from penstock.testing.samplers import EchoAgent

SPEC = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(4,)))
CPU = SimpleNamespace(device=torch.device("cpu"))


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def perf_counter(self) -> float:
        return self.now


class Loop:
    """Stands for `collect`: takes `took` seconds, in `waited` of which the pool waits."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.took, self.waited = clock, 0.0, 0.0
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, pool: Any, *rest: Any) -> None:
        self.calls.append((pool, *rest))
        self.clock.now += self.took
        pool.wait_s += self.waited


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop(Clock())
    monkeypatch.setattr(action_server, "loop", lambda: loop)
    monkeypatch.setattr(action_server, "time", loop.clock)
    return loop


def a_pool(evaluation: bool = False) -> Any:
    return SimpleNamespace(evaluation=evaluation, wait_s=100.0, takes_turns=False)


def elsewhere(server: ActionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has agents count as on another device than the server's, which here is the CPU."""
    server.device = torch.device("cpu")
    monkeypatch.setattr(action_server, "agent_device", lambda agent: torch.device("cuda:1"))


def test_shares_of_the_sampling_time_add_up_and_leave_evaluations_out(loop: Loop) -> None:
    """3 + 1 s of sampling, of which 1 + 0.5 s are waits: 0.375 and 0.625."""
    server, pool = ActionServer(None), a_pool()
    assert server.metrics() == {}
    loop.took, loop.waited = 3.0, 1.0
    server.serve(pool, [EchoAgent(SPEC)], [], [CPU], [], None)
    loop.took, loop.waited = 20.0, 15.0
    server.serve(a_pool(evaluation=True), [EchoAgent(SPEC)], [], [CPU], [], None)
    loop.took, loop.waited = 1.0, 0.5
    server.serve(pool, [EchoAgent(SPEC)], [], [CPU], [], None)
    assert server.metrics() == {"sampler/env_wait": 0.375, "sampler/agent_wait": 0.625}


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_loop_gets_what_it_takes(loop: Loop, evaluation: bool) -> None:
    pool, agent, noise = a_pool(evaluation), EchoAgent(SPEC), object()
    ActionServer(None).serve(pool, [agent], ["batch"], [CPU], ["state"], noise)
    assert loop.calls == [(pool, [agent], ["batch"], [CPU], ["state"], noise)]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_agent_that_is_where_it_should_act_acts_itself(loop: Loop, device: str | None) -> None:
    agents = [EchoAgent(SPEC), EchoAgent(SPEC)]
    ActionServer(device).serve(a_pool(), agents, [], [CPU], [], None)
    acting = loop.calls[0][1]
    assert all(x is y for x, y in zip(acting, agents, strict=True))


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_copy_follows_the_parameters_of_its_agent(
    loop: Loop, evaluation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, agents = ActionServer("cpu"), [EchoAgent(SPEC), EchoAgent(SPEC)]
    elsewhere(server, monkeypatch)
    seen: list[Any] = []
    for n in range(3):
        for policy, agent in enumerate(agents):
            agent.unused.data.fill_(10.0 * policy + n)
        server.serve(a_pool(evaluation), agents, [], [CPU], [], None)
        acting = loop.calls[-1][1]
        assert [x.unused.item() for x in acting] == [n, 10.0 + n]
        assert all(x is not y for x, y in zip(acting, agents))
        seen.append(acting)
    assert all(x is y for acting in seen for x, y in zip(acting, seen[0])), "a copy is made once"
    server.close()
    server.serve(a_pool(evaluation), agents, [], [CPU], [], None)
    assert loop.calls[-1][1][0] is not seen[0][0], "closing forgets it"


def test_graphs_are_for_cuda_devices_and_training_only(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def graphed(agent: Any, capture: Any) -> Any:
        made.append(("graph of", agent))
        return made[-1]

    monkeypatch.setattr(action_server, "GraphedAgent", graphed)
    agent, cuda = EchoAgent(SPEC), SimpleNamespace(device=torch.device("cuda:0"))
    for graph, view, evaluation in ((True, CPU, False), (False, cuda, False), (True, cuda, True)):
        ActionServer(None, graph).serve(a_pool(evaluation), [agent], [], [view], [], None)
        assert loop.calls[-1][1] == [agent]
    server = ActionServer(None)
    server.serve(a_pool(), [agent], [], [cuda], [], None)
    first = loop.calls[-1][1][0]
    assert first == ("graph of", agent)
    server.serve(a_pool(), [agent], [], [cuda], [], None)
    assert loop.calls[-1][1][0] is first, "a graph is kept from batch to batch"


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is locked in memory at the moment, each with its device."""
    held: list[Any] = []
    monkeypatch.setattr(action_server, "pin", lambda batches, device: held.append((batches, str(device))) or True)
    monkeypatch.setattr(action_server, "unpin", lambda batches, device: held.remove((batches, str(device))))
    return held


def places(to: Any, evaluation: bool = False) -> Any:
    return SimpleNamespace(place=lambda batches, states: (to, "states there"), evaluation=evaluation)


def on_cuda() -> ActionServer:
    server = ActionServer(None)
    server.device = torch.device("cuda:1")
    return server


def test_buffers_are_locked_in_memory_for_cuda_alone_and_unlocked_once(locked: list[Any]) -> None:
    batches, moved = ["here"], ["there"]
    agent: Any = copy.deepcopy(EchoAgent(SPEC))
    server = ActionServer(None)
    assert server.place(places(moved), batches, "states", [agent]) == (moved, "states there")  # type: ignore
    assert locked == [], "nothing on a CUDA device reads them"
    server = on_cuda()
    assert server.place(places(batches), batches, "states", [agent]) == (batches, "states there")  # type: ignore
    assert locked == [], "they were not moved"
    server.place(places(moved), batches, "states", [agent])  # type: ignore
    assert locked == [(moved, "cuda:1")]
    server.close()
    server.close()
    assert locked == []


def test_buffers_of_one_evaluation_are_locked_at_a_time(locked: list[Any]) -> None:
    server, agent = on_cuda(), EchoAgent(SPEC)
    for moved, evaluation in ((["training"], False), (["few"], True), (["many"], True)):
        server.place(places(moved, evaluation), ["here"], "states", [agent])  # type: ignore
    assert [batches for batches, _ in locked] == [["training"], ["many"]]
    server.close()
    assert locked == []


def test_what_the_driver_does_not_lock_is_not_unlocked(locked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_server, "pin", lambda batches, device: False)
    server = on_cuda()
    server.place(places(["there"]), ["here"], "states", [EchoAgent(SPEC)])  # type: ignore
    server.close()


def test_a_device_without_a_number_is_the_agents_own(loop: Loop) -> None:
    """`cuda` was not `cuda:0`, so an agent there was copied for every batch; on the CPU `cpu:0` shows the same."""
    agent = EchoAgent(SPEC)
    ActionServer("cpu:0").serve(a_pool(), [agent], [], [CPU], [], None)
    assert loop.calls[0][1][0] is agent


def test_a_copy_follows_buffers_that_no_checkpoint_holds(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    server, agent = ActionServer("cpu"), EchoAgent(SPEC)
    agent.register_buffer("exploration", torch.zeros(1), persistent=False)
    elsewhere(server, monkeypatch)
    for chance in (0.5, 0.25):
        agent.exploration.fill_(chance)
        server.serve(a_pool(), [agent], [], [CPU], [], None)
        assert loop.calls[-1][1][0].exploration.item() == chance
