"""Reading ahead: in a thread, with a limit, and with the bits of reading in turn."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import LearnerError
from penstock.core.tree import tree_leaves
from penstock.replay import prefetch
from penstock.replay.prefetch import PendingRead
from penstock.replay.replay import Replay, ReplaySettings, make_view
from tests.replay.oracle import SPEC, random_batches


def test_a_reading_returns_what_was_read_in_another_thread() -> None:
    seen: list[Any] = []

    def read() -> int:
        seen.append(threading.current_thread())
        return 42

    reading = PendingRead(read, "a number")
    assert reading.result() == 42 and reading.settle() and reading.result() == 42
    assert seen == [seen[0]] and seen[0] is not threading.current_thread() and seen[0].daemon


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    reading = PendingRead(lambda: 1 // 0, "nothing")
    assert reading.settle()
    with pytest.raises(ZeroDivisionError):
        reading.result()


def test_a_reading_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "READ_TIMEOUT_S", 0.02)
    let_go = threading.Event()
    reading = PendingRead(lambda: let_go.wait(20), "a batch in /slow")
    assert not reading.settle()
    with pytest.raises(LearnerError, match=r"^a batch in /slow was not read within 0\.02 s; resume"):
        reading.result()
    let_go.set()


def filled(index: Any) -> Replay:
    settings = ReplaySettings(capacity=200, index=index)
    replay = Replay(SPEC, settings, make_view(settings, SPEC, 2))
    for batch, _ in random_batches(0, 6, 3, 12):
        replay.append(batch)
    return replay


@pytest.mark.parametrize("index", ["uniform", "prioritized"])
def test_samples_are_the_same_whichever_thread_reads(index: Any) -> None:
    """Each is drawn before the one before it is used: new priorities count from the next but one on."""
    streams = []
    for ahead in (False, True):
        replay, rng, found = filled(index), np.random.default_rng(1), []
        for drawing, x in replay.samples(5, 8, rng, noise_size=2, prefetch=ahead):
            found += [x.copy() for x in (drawing.unit, drawing.slot, *tree_leaves(x))]
            replay.update_priorities(drawing, np.arange(8.0))
            rng.random(3)  # as noisy layers do between
        streams.append(found)
    assert len(streams[0]) == len(streams[1]) > 5 * 6
    assert all(np.array_equal(a, b) for a, b in zip(*streams))


def test_noise_lies_in_the_open_interval_and_every_sample_is_made_ready() -> None:
    rng = np.random.default_rng(0)
    for _, x in filled("uniform").samples(3, 4, rng, noise_size=5, ready=lambda x: x.rows):  # pyright: ignore
        noise: Any = x["noise"]
        assert noise.shape == (4, 5) and noise.dtype == np.float32 and 0.0 < noise.min() <= noise.max() < 1.0


def test_no_samples_draw_nothing() -> None:
    rng = np.random.default_rng(0)
    assert list(filled("uniform").samples(0, 4, rng, prefetch=True)) == []
    assert rng.random() == np.random.default_rng(0).random()


def test_whoever_leaves_waits_for_the_reading_that_goes_on() -> None:
    replay, ended = filled("uniform"), []
    read = replay.read

    def slow(drawing: Any) -> Any:
        time.sleep(0.05)
        out = read(drawing)
        ended.append(1)
        return out

    replay.read = slow  # pyright: ignore[reportAttributeAccessIssue]
    going = replay.samples(4, 4, np.random.default_rng(0), prefetch=True)
    next(going)
    going.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(ended) == 2  # the sample taken, and the one that was being read
