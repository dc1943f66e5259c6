"""Spans of acting, stepping and waiting: noted while a trace is going on, and at no cost while none is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import penstock as ps
from penstock.core import trace
from penstock.samplers.collector import collect
from penstock.samplers.traced_loop import loop
from penstock.testing.pools import echo_config
from penstock.testing.samplers import EchoAgent, bits

T = 6


class Notes:
    """Stands for a process's ring."""

    def __init__(self) -> None:
        self.kinds = Counter[int]()

    def add(self, kind: int, started: int) -> None:
        assert started > 0
        self.kinds[kind] += 1


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    monkeypatch.setattr(trace, "ring", notes)
    return notes


def first_batch(settings: Any) -> Any:
    sampler = settings.build(echo_config(), 3)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        return bits(sampler.obtain_samples(0)[0])
    finally:
        sampler.shutdown()


def test_without_a_trace_the_loop_is_collect() -> None:
    assert trace.ring is None
    assert loop() is collect


def test_acts_and_steps_of_a_pool_in_this_process_are_noted(notes: Notes) -> None:
    there = first_batch(ps.SerialSampler(T, 5))
    assert notes.kinds == {trace.ACT: T, trace.STEP: T}
    trace.ring = None
    assert first_batch(ps.SerialSampler(T, 5)) == there


def test_the_loop_is_chosen_when_the_sampler_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "ring", None)
    sampler = ps.SerialSampler(T, 2).build(echo_config(), 3)
    sampler.initialize(EchoAgent(sampler.spec))
    notes = Notes()
    monkeypatch.setattr(trace, "ring", notes)
    sampler.obtain_samples(0)
    assert notes.kinds == {}


class Remote:
    """A pool whose environments are elsewhere."""

    remote = True

    def __init__(self, pool: Any) -> None:
        self.groups, self.bind, self.send, self.recv = pool.groups, pool.bind, pool.send, pool.recv
        self.warmup, self.seats, self.takes_turns = pool.warmup, pool.seats, pool.takes_turns
        self.pending, self.finished = pool.pending, pool.finished


def test_an_action_server_notes_what_it_serves_sends_and_waits_for(notes: Notes) -> None:
    sampler = ps.SerialSampler(T, 5).build(echo_config(), 3)
    sampler.initialize(EchoAgent(sampler.spec))
    sampler.pool = Remote(sampler.pool)  # pyright: ignore
    sampler.obtain_samples(0)
    assert notes.kinds == {trace.SERVE: T, trace.SEND: T, trace.SERVER_WAIT: T}


def test_what_raises_is_noted_as_well(notes: Notes) -> None:
    sampler = ps.SerialSampler(T, 5).build(echo_config(), 3)
    sampler.initialize(EchoAgent(sampler.spec))

    class Broken(Remote):
        remote = False

        def __init__(self, pool: Any) -> None:
            super().__init__(pool)

            def send(group: int, row: int) -> None:
                raise OSError("unplugged")

            self.send = send

    sampler.pool = Broken(sampler.pool)  # pyright: ignore
    with pytest.raises(OSError, match="unplugged"):
        sampler.obtain_samples(0)
    assert notes.kinds == {trace.ACT: 1, trace.STEP: 1}
