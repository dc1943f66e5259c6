"""One suite over every backend. The clusters of Ray's tests are their own: `--dist worksteal` may split this file."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.actors.backend import RunnerError
from penstock.actors.in_process import InProcess
from penstock.actors.link import LentDescriptor
from penstock.actors.on_ray import INLINE_BYTES, Ray
from penstock.actors.processes import Processes
from penstock.core.errors import ConfigError
from tests.actors.echo import Echo
from tests.slow import slow

pytestmark = pytest.mark.timeout(200)
PATIENCE_S = 60.0
APART = ["processes", *slow("ray")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock[ray]'")
    backend = Ray(cluster_cpus=8)
    yield backend.cluster
    backend.close()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "ray":
        request.getfixturevalue("cluster")
    made = {"in-process": InProcess, "processes": Processes, "ray": Ray}[request.param]()
    yield made
    made.close()


every = pytest.mark.parametrize("backend", ["in-process", *APART], indirect=True)
apart = pytest.mark.parametrize("backend", APART, indirect=True)


def failure(backend: Any, call: Any, timeout_s: float = PATIENCE_S) -> RunnerError:
    with pytest.raises(RunnerError) as found:
        backend.result(call, timeout_s)
    return found.value


def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@every
def test_calls_to_a_runner_are_carried_out_in_order(backend: Any) -> None:
    runners = [backend.start(Echo, (i, "x"), f"runner {i}") for i in range(2)]
    calls = [backend.call(runners[i % 2], "note", i) for i in range(6)] + [runners[0].note.remote("end")]
    waiting, seen = list(calls), []
    while waiting:
        found = backend.wait(waiting, PATIENCE_S)
        assert found and found == [c for c in waiting if c in found], "in the order of the calls"
        seen += found
        waiting = [c for c in waiting if c not in found]
    assert [backend.result(c, 0.5) for c in calls] == [[0], [1], [0, 2], [1, 3], [0, 2, 4], [1, 3, 5], [0, 2, 4, "end"]]
    assert [backend.result(r.given.remote(), PATIENCE_S) for r in runners] == [(0, "x"), (1, "x")]
    assert backend.wait([], 0.0) == []


@every
def test_what_runners_say_comes_back_as_it_was(backend: Any) -> None:
    runner = backend.start(Echo, (), "runner 0")
    said = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": [1, None, True, "text", b"\0bytes"],
        "c": (1.5, {"d": 2}),
    }
    found = backend.result(runner.echo.remote(said), PATIENCE_S)
    assert found["a"].dtype == np.float32 and found["a"].tolist() == said["a"].tolist()  # type: ignore[attr-defined]
    assert {k: v for k, v in found.items() if k != "a"} == {k: v for k, v in said.items() if k != "a"}


@every
def test_an_error_is_told_with_its_traceback_and_the_runner_lives(backend: Any) -> None:
    runner = backend.start(Echo, (), "runner 5")
    first, second = runner.fail.remote("two\nlines"), runner.echo.remote(1)
    error = failure(backend, first)
    assert error.kind == "exception"
    assert "runner 5" in str(error) and "ValueError: two\nlines" in str(error)
    assert "in fail" in error.trace and "KeyError: 'inner'" in error.trace and "\x1b" not in error.trace
    assert backend.result(second, PATIENCE_S) == 1


@every
def test_the_error_of_the_constructor_is_that_of_every_call(backend: Any) -> None:
    runner = backend.start(Echo, ("fail",), "runner 6")
    for call in [runner.echo.remote(1), runner.echo.remote(2)]:
        error = failure(backend, call)
        assert error.kind == "exception"
        assert "runner 6" in str(error) and "ValueError: refused ('fail',)" in str(error)
        assert "in __init__" in error.trace


@every
@pytest.mark.parametrize("n", [INLINE_BYTES, 5_000_000, *slow(0, 1, INLINE_BYTES + 1)])
def test_what_was_put_reaches_every_call_and_may_be_overwritten_after(backend: Any, n: int) -> None:
    runners = [backend.start(Echo, (), f"runner {i}") for i in range(2)]
    data = (np.arange(n) % 251).astype(np.uint8)
    expected = int(data.sum(dtype=np.int64))
    there = backend.put([data[: n // 3], data[n // 3 :]])
    data[:] = 7
    calls = [backend.call(r, "total", there, k) for r in runners for k in (1, 2)]
    del there
    gc.collect()
    assert [backend.result(c, PATIENCE_S) for c in calls] == [[True, n, expected], [True, n, 2 * expected]] * 2


@every
def test_a_runner_that_exits_is_gone(backend: Any) -> None:
    runner = backend.start(Echo, (), "runner 0")
    error = failure(backend, runner.die.remote("exit"))
    assert error.kind == "exit" and "3" in str(error) and "runner 0" in str(error)
    assert failure(backend, runner.echo.remote(1)).kind == "exit"


@every
def test_a_killed_runner_says_so_and_others_live(backend: Any) -> None:
    one, two = (backend.start(Echo, (), f"runner {i}") for i in range(2))
    assert backend.result(one.echo.remote(1), PATIENCE_S) == 1
    backend.kill(one)
    backend.kill(one)
    error = failure(backend, one.echo.remote(1))
    assert error.kind == "exit" and "runner 0 was killed by its owner" in str(error).replace("<", "").replace(">", "")
    assert backend.result(two.echo.remote(2), PATIENCE_S) == 2


@pytest.mark.slow
@apart
@pytest.mark.parametrize("how", ["kill", "crash"])
def test_a_death_by_a_signal_is_told_with_the_last_words(backend: Any, how: str) -> None:
    runner = backend.start(Echo, (), "runner 3")
    error = failure(backend, runner.die.remote(how))
    assert error.kind == "signal" and "runner 3" in str(error)
    assert "last words" in error.trace
    assert failure(backend, runner.echo.remote(1)).kind == "signal"


@pytest.mark.slow
@apart
def test_a_runner_that_hangs_times_out_and_can_be_killed_with_what_it_started(backend: Any) -> None:
    runner = backend.start(Echo, (), "runner 0")
    pids = [
        backend.result(runner.where.remote(), PATIENCE_S)["pid"],
        backend.result(runner.start_child.remote(), PATIENCE_S),
    ]
    hanging, after = runner.sleep.remote(500.0), runner.echo.remote(1)
    assert backend.wait([hanging, after], 0.2) == []
    error = failure(backend, hanging, 0.2)
    assert error.kind == "timeout" and "runner 0" in str(error) and "0.2 s" in str(error)
    backend.kill(runner)
    assert sorted(map(id, backend.wait([hanging, after], PATIENCE_S))), "a call to a dead runner has ended"
    assert {failure(backend, call).kind for call in (hanging, after)} == {"exit"}
    for pid in pids:
        until(lambda pid=pid: ended(pid))


@apart
def test_what_cannot_travel_is_named_and_the_runner_lives(backend: Any) -> None:
    runner = backend.start(Echo, (), "runner 4")
    error = failure(backend, runner.nothing_that_travels.remote())
    assert error.kind == "exception" and "runner 4" in str(error) and "lock" in str(error)
    with pytest.raises(ConfigError, match=r"runner 4.*cannot be sent to another process.*lock"):
        backend.call(runner, "echo", threading.Lock())
    with pytest.raises(ConfigError, match=r"runner 5.*cannot be sent to another process.*lock"):
        backend.start(Echo, (threading.Lock(),), "runner 5")
    assert backend.result(runner.echo.remote(1), PATIENCE_S) == 1


@apart
def test_runners_are_processes_of_one_thread_that_ctrl_c_does_not_reach(backend: Any) -> None:
    runners = [backend.start(Echo, (), f"runner {i}") for i in range(2)]
    found = [backend.result(r.where.remote(), PATIENCE_S) for r in runners]
    assert len({os.getpid(), *(f["pid"] for f in found)}) == 3
    assert [f["threads"] for f in found] == ["1", "1"]
    assert [f["nice"] for f in found] == [os.nice(0)] * 2
    assert all(backend.result(r.deaf.remote(), PATIENCE_S) for r in runners)


@apart
def test_close_leaves_no_runner_behind(backend: Any) -> None:
    runners = [backend.start(Echo, (), f"runner {i}") for i in range(2)]
    pids = [backend.result(r.where.remote(), PATIENCE_S)["pid"] for r in runners]
    runners[0].sleep.remote(500.0)
    backend.start(Echo, (), "runner 2")  # still beginning
    backend.close()
    backend.close()
    for pid in pids:
        until(lambda pid=pid: ended(pid))


@apart
def test_a_runner_is_looked_at_while_a_call_hangs(backend: Any) -> None:
    busy, idle = (backend.start(Echo, (i,), f"runner {i}") for i in range(2))
    backend.result(backend.call(idle, "write_and_sleep", 5, 0.0), PATIENCE_S)
    call = backend.call(busy, "write_and_sleep", 7, 600.0)
    until(lambda: list(backend.look(busy, stacks=False).words[:1]) == [7])
    assert backend.look(busy, stacks=False).stacks == ""
    assert "in write_and_sleep" in backend.look(busy).stacks
    assert backend.look(idle).words[0] == 5, "each has a note of its own"
    assert not backend.wait([call], 0.0), "it goes on"
    backend.kill(busy)
    assert "in write_and_sleep" not in backend.look(busy).stacks


def test_a_descriptor_can_be_lent_to_several() -> None:
    backend = Processes()
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        runners = [backend.start(Echo, (), f"runner {i}") for i in range(2)]
        for runner in runners:
            backend.result(backend.call(runner, "lent", LentDescriptor(fd), b"ab"), PATIENCE_S)
        assert os.pread(fd, 10, 0) == b"abab", "all write into one open file"
    finally:
        backend.close()
        os.close(fd)


def test_in_process_the_note_is_that_of_this_process() -> None:
    backend = InProcess()
    runner = backend.start(Echo, (), "runner 0")
    backend.call(runner, "write_and_sleep", 9, 0.0)
    assert backend.look(runner).words[0] == 9 and backend.look(runner).stacks == ""
    backend.close()
