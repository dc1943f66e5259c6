"""An asynchronous sampler's two sides in one process: versions of parameters, releases of batches, and their states."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.samplers.async_live import AsyncLive
from penstock.samplers.async_process import AsyncHost
from penstock.testing.pools import echo_config
from penstock.testing.samplers import EchoAgent, bits
from penstock.workers import control
from penstock.workers.control import Control, Event
from penstock.workers.faults import Faults
from penstock.workers.messages import SpawnArgs, WorkerSettings

SEED, T, B = 4, 8, 3


class Here:
    """Stands for `Workers`: an AsyncHost in this process, which collects while the other side waits.

    An eager one collects all that it may, another one the batch that is waited for.
    """

    def __init__(self, eager: bool = True) -> None:
        self.eager, self.up, self.closed = eager, True, 0
        self.faults, self.workers = Faults("auto"), [self]
        self.fds = [os.memfd_create("penstock-test") for _ in range(8)]
        self.memory_fds = self.fds[:5]
        self.events = Event(), Event()
        wakes, wakes_learner = (event.fd for event in self.events)
        page, mailbox, report = self.fds[5:]
        spawn_args = SpawnArgs(0, 1, os.getpid(), page, wakes, wakes_learner, mailbox, report, list(self.memory_fds))
        self.control = Control(page, 1)
        self.host, self.rings = AsyncHost(spawn_args, WorkerSettings((), 0, [])), 0

    def start(self, live: Any) -> Any:
        return [[self.host.read(message) for message in live.messages(0, False)]]

    def call(self, messages: Any, watch: Any = None) -> Any:
        (mine,) = messages
        if watch is not None:
            watch()
        return [[self.host.read(message) for message in mine]]

    def wait(self, ready: Callable[[], bool]) -> None:
        block = self.host.block
        while not ready() or (self.eager and block[control.SENT] > block[control.DONE]):
            assert block[control.SENT] > block[control.DONE], "it waits for a batch that nobody may collect"
            self.host.collect(block[control.DONE])

    def wake(self, w: int) -> None:
        self.rings += 1

    def close(self) -> None:
        self.closed += 1
        if self.closed == 1:
            self.host.inner.shutdown()
            for event in self.events:
                event.close()
            for fd in self.fds:
                os.close(fd)


class Shows(EchoAgent):
    """Records the parameter that it acts with."""

    def act(self, inputs: Any, state: Any, noise: Any) -> Any:
        action, info, state = super().act(inputs, state, noise)
        return action, {**info, "parameter": self.unused.detach().expand(len(inputs.first))}, state


def here(eager: bool = True, **settings: Any) -> tuple[AsyncLive, Here, Any]:
    """A live sampler whose agent's parameter is 0."""
    there = Here(eager)
    settings = {"depth": 1, **settings}
    live = AsyncLive(ps.AsyncSampler(ps.SerialSampler(T, B), **settings), echo_config(), SEED, there)  # type: ignore
    agent = Shows(live.spec)
    live.initialize(agent)
    return live, there, agent


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def acted_with(eager: bool, depth: int, weights: str, first: int = 0) -> list[tuple[int, float]]:
    """Of each batch the version that it names, and the parameter that acted, which is 100 + version."""
    live, _, agent = here(eager, depth=depth, weights=weights)
    found: list[tuple[int, float]] = []
    for itr in range(first, first + 5):
        agent.unused.data.fill_(100.0 + itr)
        batch, _ = live.obtain_samples(itr)
        assert len({*batch.version[batch.valid].tolist()}) == 1
        assert len({*batch.info["parameter"].flat}) == 1
        found.append((int(batch.version[0, 0]), float(batch.info["parameter"][0, 0])))
    live.shutdown()
    return found


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 7])
def test_exact_weights_are_those_of_the_depth_and_at_first_the_first(eager: bool, depth: int, first: int) -> None:
    versions = [max(itr - depth, first) for itr in range(first, first + 5)]
    assert acted_with(eager, depth, "exact", first) == [(v, 100.0 + v) for v in versions]


def test_newest_weights_are_those_published_last() -> None:
    """A process that collects as soon as it may takes batch k + 1 with version k; one that is late version k + 1."""
    assert acted_with(True, 1, "newest") == [(v, 100.0 + v) for v in (0, 0, 1, 2, 3)]
    assert acted_with(False, 1, "newest") == [(v, 100.0 + v) for v in (0, 1, 2, 3, 4)]


def test_batches_and_evaluations_are_those_of_the_inner_sampler() -> None:
    live, _, agent = here(depth=0)
    inner = ps.SerialSampler(T, B).build(echo_config(), SEED)
    inner.initialize(agent)
    for itr in range(3):
        (batch, episodes), (same, own) = live.obtain_samples(itr), inner.obtain_samples(itr)
        assert bits(batch) == bits(same)
        assert bits(live.last_batch) == bits(batch)
        assert episodes.return_.tolist() == own.return_.tolist()
        assert live.metrics() == {"sampler/lag": 0.0, "sampler/lag_min": 0.0, "sampler/lag_max": 0.0}
        assert live.evaluate_agent(itr, 3).return_.tolist() == inner.evaluate_agent(itr, 3).return_.tolist()
    live.shutdown()


def test_an_evaluation_has_the_parameters_of_now_and_can_be_stopped() -> None:
    live, there, agent = here(depth=2)
    agent.unused.data.fill_(5.0)
    live.obtain_samples(0)
    heard: list[Any] = []
    evaluate = there.host.inner.evaluate_agent

    def listens(itr: int, episodes: int, deterministic: bool, give_up: Any, slots: int, max_steps: int) -> Any:
        heard.append((itr, episodes, deterministic, give_up(), slots, max_steps, there.host.agents[0].unused.item()))
        return evaluate(itr, episodes, deterministic)

    there.host.inner.evaluate_agent = listens
    agent.unused.data.fill_(6.0)
    assert len(live.evaluate_agent(4, 3, False)) == 3
    live.evaluate_agent(5, 2, True, lambda: True)
    live.evaluate_agent(6, 2, slots=1, max_steps=9)
    assert heard == [
        (4, 3, False, False, 16, 27_000, 6.0), (5, 2, True, True, 16, 27_000, 6.0), (6, 2, True, False, 1, 9, 6.0)
    ]  # fmt: skip
    batch, _ = live.obtain_samples(1)
    assert (batch.info["parameter"] == 5.0).all(), "the batches ahead are not disturbed"
    live.shutdown()


def test_a_batch_out_of_order_is_refused_and_the_first_may_have_any_number() -> None:
    live, _, _ = here()
    live.obtain_samples(7)
    for itr in (7, 9, 0):
        with pytest.raises(ConfigError, match=rf"obtain_samples\({itr}\), but batch 8 is next; this sampler collects"):
            live.obtain_samples(itr)
    live.obtain_samples(8)
    live.shutdown()


def test_a_release_is_as_far_ahead_as_the_depth_and_wakes_who_sleeps_alone() -> None:
    live, there, _ = here(depth=2)
    live.obtain_samples(0)
    assert (there.host.block[control.SENT], there.rings) == (3, 0)
    there.host.block[control.SLEEPS] = 1
    live.obtain_samples(1)
    assert (there.host.block[control.SENT], there.rings) == (4, 1)
    live.shutdown()
    live.shutdown()
    assert there.closed == 2


def test_a_batch_stays_while_those_ahead_are_collected() -> None:
    live, there, _ = here(depth=2)
    for itr in range(5):
        batch, _ = live.obtain_samples(itr)
        assert there.host.block[control.DONE] == itr + 3, "all that may be collected has been"
        assert (batch.version[batch.valid] == max(itr - 2, 0)).all(), "another batch was written over it"
    live.shutdown()


def test_a_state_of_another_depth_is_refused() -> None:
    one, _, _ = here(depth=2)
    assert one.state_dict() == {"released": 0}
    one.obtain_samples(0)
    state = one.state_dict()
    assert (state["released"], state["next"], [*state["waiting"]]) == (3, 1, ["1", "2"])
    two, _, _ = here(depth=1)
    two.load_state_dict({"released": 0})
    with pytest.raises(CheckpointError, match=r"the checkpoint holds 2 batches ahead; this sampler has depth=1"):
        two.load_state_dict(state)
    for live in (one, two):
        live.shutdown()


def test_a_state_with_waiting_batches_goes_on_in_another_process() -> None:
    one, _, agent = here(depth=2)
    for itr in range(3):
        agent.unused.data.fill_(itr)
        one.obtain_samples(itr)
    two, _, other = here(depth=2)
    two.load_state_dict(one.state_dict())
    assert two.cut_slots == []
    for itr in range(3, 8):
        agent.unused.data.fill_(itr)
        other.unused.data.fill_(itr)
        (batch, episodes), (same, found) = one.obtain_samples(itr), two.obtain_samples(itr)
        assert bits(batch) == bits(same)
        assert episodes.to_plain().keys() == found.to_plain().keys()
        assert episodes.return_.tolist() == found.return_.tolist()
    for live in (one, two):
        live.shutdown()
