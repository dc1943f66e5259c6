"""What holds of runners in local processes alone; the rest is in test_conformance.py."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.actors import link, local_process
from penstock.actors.backend import RunnerError
from penstock.actors.processes import Processes
from penstock.core.errors import ConfigError
from penstock.processes import death
from tests.actors.echo import Echo

pytestmark = pytest.mark.timeout(200)
PATIENCE_S = 60.0


@pytest.fixture
def backend() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


class Told(Echo):
    """Echo that says more of its process."""

    def shared(self, data: Any) -> int:
        with open("/proc/self/maps") as lines:
            return sum("penstock-put" in line for line in lines)

    def wait_for(self, path: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.01)

    def say(self, n: int) -> None:
        sys.stdout.write("x" * n)
        sys.stdout.flush()

    def say_and_wait(self, n: int, path: str) -> None:
        self.say(n)
        self.wait_for(path)

    def signal_itself(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def exit_at_once(self, code: int) -> None:
        os._exit(code)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_call_never_waits_for_a_busy_runner(backend: Processes, tmp_path: Path) -> None:
    """More than the socket holds, short ones and long ones in turns."""
    runner = backend.start(Told, (), "runner 0")
    busy = runner.wait_for.remote(str(tmp_path / "sent"))
    said = ["s" * (100_000 if i % 2 else 20_000) + str(i) for i in range(60)]
    calls = [runner.echo.remote(x) for x in said]
    assert not backend.wait([busy], 0.0)
    (tmp_path / "sent").touch()
    assert [backend.result(call, PATIENCE_S) for call in calls] == said


def test_putting_again_and_again_leaves_no_memory_and_no_descriptor(backend: Processes) -> None:
    runner = backend.start(Told, (), "runner 0")
    data = np.ones(200_000, np.uint8)
    counts = []
    for _ in range(30):
        there = backend.put([data])
        assert os.stat(f"/proc/self/fd/{there.fd}").st_size == len(data)
        maps = backend.result(backend.call(runner, "shared", there), PATIENCE_S)
        del there
        counts.append((maps, open_fds()))
    assert {maps for maps, _ in counts} == {1}
    assert len({fds for _, fds in counts}) == 1


def test_what_was_put_cannot_be_changed(backend: Processes) -> None:
    there = backend.put([np.zeros(100_000, np.uint8)])
    with pytest.raises(PermissionError):
        os.pwrite(there.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(there.fd, 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGABRT, signal.SIGRTMIN + 3])
def test_the_signal_is_named(backend: Processes, number: int) -> None:
    runner = backend.start(Told, (), "runner 2")
    with pytest.raises(RunnerError, match=r"runner 2 was killed by (SIGTERM|SIGABRT|signal \d+)") as found:
        backend.result(runner.signal_itself.remote(number), PATIENCE_S)
    assert found.value.kind == "signal"
    if number == signal.SIGABRT:
        assert "Fatal Python error: Aborted" in found.value.trace and "signal_itself" in found.value.trace


def test_an_exit_behind_pythons_back_is_an_exit(backend: Processes) -> None:
    runner = backend.start(Told, (), "runner 0")
    with pytest.raises(RunnerError, match="ended with exit code 9") as found:
        backend.result(runner.exit_at_once.remote(9), PATIENCE_S)
    assert found.value.kind == "exit"


@pytest.mark.slow
def test_a_kill_that_the_kernel_counts_as_want_of_memory(backend: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = backend.start(Told, (), "runner 0")
    backend.result(runner.echo.remote(0), PATIENCE_S)
    monkeypatch.setattr(death, "oom_kills", lambda: 1_000_000)
    with pytest.raises(RunnerError, match=r"want of memory.*use fewer runners") as found:
        backend.result(runner.signal_itself.remote(signal.SIGKILL), PATIENCE_S)
    assert found.value.kind == "oom"


def test_output_is_kept_from_the_terminal_and_does_not_grow(
    backend: Processes, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = backend.start(Told, (), "runner 0")
    process = backend._processes[runner]
    for _ in range(5):
        backend.result(runner.say.remote(600_000), PATIENCE_S)
    backend.result(runner.say.remote(3), PATIENCE_S)
    assert os.fstat(process._child._output).st_size <= 2_000_000
    assert capfd.readouterr() == ("", "")


def test_output_does_not_grow_during_a_long_call(backend: Processes, tmp_path: Path) -> None:
    runner = backend.start(Told, (), "runner 0")
    process = backend._processes[runner]
    call = runner.say_and_wait.remote(5_000_000, str(tmp_path / "enough"))
    sizes: list[int] = []
    deadline = time.monotonic() + PATIENCE_S

    def look() -> None:
        while (not sizes or max(sizes) < 5_000_000 or sizes[-1]) and time.monotonic() < deadline:
            sizes.append(os.fstat(process._child._output).st_size)
            time.sleep(0.01)
        (tmp_path / "enough").touch()

    thread = threading.Thread(target=look)
    thread.start()
    backend.result(call, 2 * PATIENCE_S)
    thread.join(PATIENCE_S)
    assert max(sizes) == 5_000_000 and sizes[-1] == 0


def test_the_name_stands_in_the_list_of_processes(backend: Processes) -> None:
    runner = backend.start(Told, (), "runner 17")
    pid = backend.result(runner.where.remote(), PATIENCE_S)["pid"]
    assert psutil.Process(pid).cmdline()[-1] == "runner 17"


def test_closing_closes_every_descriptor_and_may_be_done_twice() -> None:
    before = open_fds()
    backend = Processes()
    runner = backend.start(Told, (), "runner 0")
    backend.start(Told, (), "runner 1")
    backend.result(runner.echo.remote(1), PATIENCE_S)
    backend.kill(runner)
    backend.close()
    backend.close()
    assert open_fds() == before
    with pytest.raises(RunnerError, match="killed by its owner"):
        backend.result(runner.echo.remote(1), 0.0)


def test_a_process_that_cannot_be_started_is_a_matter_of_settings(
    backend: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(*args: Any, **options: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    before = open_fds()
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(ConfigError, match=r"runner 0 cannot be started: .*unavailable.*ulimit -u.*; use fewer"):
        backend.start(Told, (), "runner 0")
    assert open_fds() == before


def test_answers_are_never_unpickled() -> None:
    """The owner's side reads answers by `penstock.core.wire`; cloudpickle only writes there."""
    for module in (local_process, link):
        assert not re.search(r"pickle\.loads?|unship", Path(module.__file__).read_text())


def test_a_packet_that_its_sender_can_still_change_is_refused() -> None:
    """To read a file that is cut short meanwhile is a bus error, which would end the owner."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = open_fds()
        fd = os.memfd_create("open")
        os.write(fd, b"x" * 100)
        socket.send_fds(theirs, [link._HEAD.pack(1, 100, True)], [fd])
        os.close(fd)
        with pytest.raises(ConnectionError, match="can still change"):
            link.receive(ours)
        assert open_fds() == before


DRIVER = """
import os, sys, time
from penstock.actors.processes import Processes
from tests.actors.echo import Echo
backend = Processes()
runner = backend.start(Echo, (), "runner 0")
pids = [backend.result(runner.where.remote(), 60)["pid"], backend.result(runner.start_child.remote(), 60)]
runner.sleep.remote(500.0)
if not (other := os.fork()):
    time.sleep(500)
print(*pids, other, flush=True)
time.sleep(500)
"""


@pytest.mark.slow
def test_runners_die_with_a_driver_that_is_killed_though_a_fork_of_it_lives() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout
    runner, child, fork = (psutil.Process(int(pid)) for pid in driver.stdout.readline().split())
    try:
        driver.kill()
        driver.wait(timeout=PATIENCE_S)
        for process in (runner, child):
            process.wait(timeout=PATIENCE_S)
        assert fork.is_running()
    finally:
        fork.kill()
        driver.stdout.close()
