from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from penstock.actors.backend import RunnerError
from penstock.actors.in_process import InProcess


class Echo:
    def __init__(self, refuse: bool = False) -> None:
        if refuse:
            raise ValueError("refused")
        self.seen: list[Any] = []
        self.closed = 0

    def echo(self, x: Any) -> Any:
        self.seen.append(x)
        return x

    def fail(self) -> None:
        raise ZeroDivisionError("by nothing")

    def leave(self) -> None:
        sys.exit(3)

    def close(self) -> None:
        self.closed += 1
        if self.closed > 1:
            raise RuntimeError("closed twice")


def test_a_call_is_carried_out_when_it_is_sent() -> None:
    backend = InProcess()
    runner = backend.start(Echo, (), "runner 0")
    call = runner.echo.remote(1)
    assert runner.local.seen == [1]
    thing = object()
    assert backend.result(backend.call(runner, "echo", thing), 0.0) is thing
    assert backend.result(call, 0.0) == 1 and backend.wait([call, call], 0.0) == [call, call]


def test_an_error_waits_until_it_is_asked_for_and_keeps_its_cause() -> None:
    backend = InProcess()
    runner = backend.start(Echo, (), "runner 0")
    call = runner.fail.remote()
    with pytest.raises(RunnerError, match=r"<runner 0>.fail\(\) raised ZeroDivisionError: by nothing") as found:
        backend.result(call, 0.0)
    assert found.value.kind == "exception"
    assert isinstance(found.value.__cause__, ZeroDivisionError)
    assert "in fail" in found.value.trace
    assert backend.result(runner.echo.remote(2), 0.0) == 2


def test_an_interrupt_is_the_callers() -> None:
    class Interrupted:
        def hold(self) -> None:
            raise KeyboardInterrupt

    runner = InProcess().start(Interrupted, (), "runner 0")
    with pytest.raises(KeyboardInterrupt):
        runner.hold.remote()


def test_the_error_of_the_constructor_is_that_of_every_call() -> None:
    backend = InProcess()
    runner = backend.start(Echo, (True,), "runner 7")
    for _ in range(2):
        with pytest.raises(RunnerError, match=r"runner 7: Echo\(\) raised ValueError: refused"):
            backend.result(runner.echo.remote(1), 0.0)


@pytest.mark.parametrize("how", ["kill", "close", "exit"])
def test_a_runner_that_is_gone_was_closed_once_and_says_so(how: str) -> None:
    backend = InProcess()
    runner = backend.start(Echo, (), "runner 0")
    local = runner.local
    {"kill": lambda: backend.kill(runner), "close": backend.close, "exit": runner.leave.remote}[how]()
    backend.kill(runner)
    backend.close()
    assert local.closed == 1 and runner.local is None
    with pytest.raises(RunnerError, match="SystemExit: 3" if how == "exit" else "killed by its owner") as found:
        backend.result(runner.echo.remote(1), 0.0)
    assert found.value.kind == "exit"


def test_a_close_that_fails_is_a_warning() -> None:
    backend = InProcess()
    runner = backend.start(Echo, (), "runner 0")
    runner.local.closed = 1
    with pytest.warns(UserWarning, match="closed twice"):
        backend.kill(runner)


def test_what_was_put_is_a_copy_that_cannot_be_written() -> None:
    backend, data = InProcess(), np.arange(5, dtype=np.uint8)
    there = backend.put([data[:2], data[2:]])
    data[:] = 9
    assert there == bytes([0, 1, 2, 3, 4])
