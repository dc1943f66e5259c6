"""Counters in shared memory and the ways to wait for them, by a clock that only the test moves."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator

import pytest

from penstock.workers import control
from penstock.workers.control import WORDS, Control, Event, Spin, outnumbered, sleep_on

LOOK_S = 1e-6
LIMIT_S = 1e-4


class Clock:
    """The time of the module: each look at a counter takes `LOOK_S`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def perf_counter(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def after(self, looks: int) -> Callable[[], bool]:
        """True from this many looks on."""
        self.looks = 0

        def ready() -> bool:
            self.looks += 1
            self.now += LOOK_S
            return self.looks > looks

        return ready


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(control, "time", clock)
    return clock


@pytest.fixture
def event() -> Iterator[Event]:
    event = Event()
    yield event
    event.close()
    event.close()
    assert event.fd == -1


def is_set(event: Event) -> bool:
    poll = select.poll()
    poll.register(event.fd, select.POLLIN)
    return bool(poll.poll(0))


def test_a_condition_that_holds_is_seen_by_one_look(clock: Clock) -> None:
    assert Spin(LIMIT_S).until(clock.after(0))
    assert clock.looks == 1
    assert Spin(0.0).until(clock.after(0))


def test_without_a_limit_there_is_one_look(clock: Clock) -> None:
    assert not Spin(0.0).until(clock.after(1))
    assert clock.looks == 1


def test_the_looks_last_as_long_as_the_limit(clock: Clock) -> None:
    spin = Spin(LIMIT_S)
    assert spin.until(clock.after(90))
    assert not spin.until(clock.after(10_000))
    assert 100 <= clock.looks <= 110  # 1 before the limit counts, 100 within it, looked at in eights


def test_after_long_waits_the_looks_are_an_eighth_and_after_short_ones_as_long_again(clock: Clock) -> None:
    """The usual wait moves by an eighth of each difference: 2 limits (1 - (7/8)^n) reaches one limit at n = 6."""
    spin, looks = Spin(LIMIT_S), list[int]()
    for _ in range(8):
        assert not spin.until(clock.after(10_000))
        looks.append(clock.looks)
    assert all(100 <= n <= 110 for n in looks[:6])
    assert all(12 <= n <= 18 for n in looks[6:])
    for _ in range(4):
        assert spin.until(clock.after(3))
    assert not spin.until(clock.after(10_000))
    assert 100 <= clock.looks <= 110


def test_an_event_is_set_until_it_is_cleared_however_often_it_was_set(event: Event) -> None:
    event.clear()  # does not block
    assert not is_set(event)
    event.set()
    event.set()
    same = Event(event.fd)
    assert is_set(same)
    same.clear()
    assert not is_set(event)


def test_who_sleeps_says_so_looks_once_more_and_is_up_again_with_the_event_cleared(event: Event) -> None:
    block, seen = memoryview(bytearray(8 * WORDS)).cast("q"), list[int]()

    def ready() -> bool:
        seen.append(block[control.SLEEPS])
        return True

    event.set()
    started = time.monotonic()
    sleep_on(event, block, control.SLEEPS, ready, 100.0)
    assert seen == [1], "the other side must see that this one sleeps before it looks for the last time"
    assert block[control.SLEEPS] == 0
    assert not is_set(event)
    assert time.monotonic() - started < 50.0


def test_an_event_that_is_set_ends_a_sleep_and_so_does_the_time(event: Event) -> None:
    block = memoryview(bytearray(8 * WORDS)).cast("q")
    event.set()
    started = time.monotonic()
    sleep_on(event, block, control.SLEEPS, lambda: False, 100.0)
    assert time.monotonic() - started < 50.0
    started = time.monotonic()
    sleep_on(event, block, control.SLEEPS, lambda: False, 0.02)
    assert time.monotonic() - started >= 0.015
    assert block[control.SLEEPS] == 0


def test_blocks_do_not_overlap_and_are_the_same_words_in_every_process() -> None:
    fd = os.memfd_create("penstock-test")
    one, two = Control(fd, 3), Control(fd, 3)
    os.close(fd)
    for w, block in enumerate([*one.blocks, one.learner]):
        assert len(block) == WORDS
        for i in range(WORDS):
            block[i] = 1000 * w + i
    for w, block in enumerate([*two.blocks, two.learner]):
        assert block.tolist() == [1000 * w + i for i in range(WORDS)]


def test_no_word_of_a_block_has_two_meanings_and_writers_share_no_line() -> None:
    learner = [control.COMMAND, control.CODE, control.POOL, control.BUFFER, control.ITR, control.MODE, control.T]
    learner += [control.SENT + g for g in range(control.MAX_GROUPS)]
    worker = [control.DONE_COMMAND, control.SLEEPS, control.ROWS, control.BUSY_NS]
    worker += [control.ACTIVITY + i for i in range(control.ACTIVITY_WORDS)]
    worker += [control.DONE + g for g in range(control.MAX_GROUPS)]
    words = learner + worker
    assert len({*words}) == len(words)
    assert max(words) < WORDS
    assert not {i // 8 for i in learner} & {i // 8 for i in worker}


def test_waiters_yield_where_processes_outnumber_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert not outnumbered(3)
    assert outnumbered(4)


def test_one_that_yields_gives_its_core_away_between_looks(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()
    monkeypatch.setattr(os, "sched_yield", lambda: given.append(clock.looks))
    assert Spin(LIMIT_S, yields=True).until(clock.after(4))
    assert given == [1, 2, 3, 4]


def test_one_that_yields_sleeps_at_once_after_long_waits_and_tries_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait of ten limits moves the usual one to 1.25 limits: ln(1.25) / 0.004 = 56 waits are slept."""
    monkeypatch.setattr(os, "sched_yield", lambda: clock.pass_by(10 * LIMIT_S))
    spin, looks = Spin(LIMIT_S, yields=True), list[int]()
    assert spin.until(clock.after(1))
    for _ in range(60):
        spin.until(clock.after(1))
        looks.append(clock.looks)
    assert looks[:56] == [1] * 56
    assert looks.count(2) == 1
