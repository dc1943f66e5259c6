"""Children: how they are started, watched, asked where they are, and ended; and what of them the parent says."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.processes import child as child_module, death, limits
from penstock.processes.child import OUTPUT_BYTES, Child, descriptors_of
from penstock.processes.death import death_of
from penstock.processes.stacks import stacks_of
from penstock.processes.tether import Tether

pytestmark = pytest.mark.timeout(100)
MODULE = """
import json, os, signal, subprocess, sys, time

def main():
    spawn_args = json.loads(sys.argv[1])
    do = spawn_args["do"]
    if do == "exit":
        print("out"); print("err", file=sys.stderr, flush=True)
        os._exit(3)
    if do == "leave":
        other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.write(spawn_args["pipe"], str(other.pid).encode())
        os._exit(0)
    if do == "chat":
        for _ in range(3000):
            print("x" * 1000)
        sys.stdout.flush()
    if do == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    hang()

def hang():
    while True:
        time.sleep(60)
"""


class Owner:
    """Holds a tether, as samplers and backends do."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "child_of_a_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    owner, children = Owner(), list[Child]()
    tether = Tether(owner, lambda: None)

    def started(do: str, **options: Any) -> Child:
        named = options.pop("descriptors", {})
        children.append(Child("child_of_a_test", "the test", tether, named, {"do": do}, **options))
        return children[-1]

    yield started
    for child in children:
        child.kill()
        child.close()
    tether.close()


def test_the_end_and_the_output_of_a_child_are_known(start: Any) -> None:
    child = start("exit", output="kept")
    assert child.wait(60) and child.exited
    assert child.death() == ("exit", "ended with exit code 3", "The end of its output:\nout\nerr")
    assert child.kill() == 3 and child.exited, "it was reaped, and is not killed again"


def test_output_can_go_to_a_file(start: Any, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        child = start("exit", output=file.fileno())
        assert child.wait(60)
    assert (tmp_path / "log").read_text() == "out\nerr\n" and child.tail() == ""


def test_what_a_child_leaves_behind_ends_with_it(start: Any) -> None:
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    child = start("leave", descriptors={"pipe": theirs})
    os.close(theirs)
    assert child.wait(60)
    left = int(os.read(ours, 100))
    os.close(ours)
    assert psutil.pid_exists(left)
    child.kill()
    until = time.monotonic() + 20
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_kept_output_is_bounded(start: Any) -> None:
    child = start("chat", output="kept")
    until = time.monotonic() + 60
    while os.fstat(child._output).st_size < OUTPUT_BYTES and time.monotonic() < until:
        time.sleep(0.01)
    most = 0
    while time.monotonic() < until and (size := os.fstat(child._output).st_size) != most:
        child.trim()
        most = size
        time.sleep(0.2)
    assert os.fstat(child._output).st_size <= OUTPUT_BYTES and len(child.tail()) <= 2000


def test_a_child_that_hangs_says_where(start: Any) -> None:
    child = start("hang")
    until = time.monotonic() + 60
    while "in hang" not in child.stacks() and time.monotonic() < until:  # asked from its first moment on
        assert not child.exited
    assert "child_of_a_test.py" in child.stacks()
    os.kill(child.pid, signal.SIGSTOP)
    began = time.monotonic()
    child.stacks(0.3)
    assert time.monotonic() - began < 5
    child.kill()


def test_a_process_that_another_has_reaped_meanwhile_has_no_stacks(start: Any) -> None:
    child = start("hang")
    child.kill()  # a forked one ends with its fork server, which may be at any time
    assert stacks_of(child.pid, f"/proc/self/fd/{child._crash}") == ""


def test_a_crash_has_its_stack(start: Any) -> None:
    child = start("crash")
    assert child.wait(60)
    found = child.death()
    assert found[:2] == ("signal", "was killed by signal 11 (SIGSEGV)") and "in main" in found.said


def test_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def popen(args: list[str], **options: Any) -> Any:
        asked.update(options, args=args)
        return SimpleNamespace(pid=os.getpid(), returncode=0)

    monkeypatch.setattr(child_module, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=-3))
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("PENSTOCK_WORKER", "above.")
    owner = Owner()
    tether = Tether(owner, lambda: None)
    child = Child("some.module", "worker 3", tether, {"event": 904, "memory_fds": [910, 911]}, {"index": 3})
    assert asked["args"][1:] == ["-P", "-m", "penstock.processes.tie", "some.module", asked["args"][5], "worker 3"]
    spawn_args = json.loads(asked["args"][5])
    assert (spawn_args["event"], spawn_args["memory_fds"], spawn_args["index"], spawn_args["parent"]) == (
        904,
        [910, 911],
        3,
        os.getpid(),
    )
    assert spawn_args["alive"] == tether.fd
    assert (
        sorted(asked["pass_fds"])
        == sorted([904, 910, 911, spawn_args["crash"], tether.fd])
        == sorted(descriptors_of(spawn_args))
    )
    assert (asked["process_group"], asked["stdin"], asked["stdout"]) == (0, -3, None)
    assert {asked["env"][name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"1"}
    assert asked["env"]["PYTHONPATH"] == os.pathsep.join([str(Path(ps.__file__).parent.parent), "/theirs"])
    assert asked["env"]["PENSTOCK_WORKER"] == f"above.{child.mark}"
    child.close()
    tether.close()


@pytest.mark.parametrize(
    ("number", "text"),
    [(errno.EAGAIN, r"ulimit -u"), (errno.EMFILE, r"ulimit -n"), (errno.ENOMEM, "too little memory")],
)
def test_a_limit_of_the_system_is_named_and_nothing_leaks(
    number: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(child_module, "subprocess", SimpleNamespace(Popen=refuse, DEVNULL=subprocess.DEVNULL))
    owner = Owner()
    tether = Tether(owner, lambda: None)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=rf"runner 1 cannot be started: .*{text}.*; use fewer runners"):
        Child("some.module", "runner 1", tether, {}, {}, output="kept", cure="use fewer runners")
    assert len(os.listdir("/proc/self/fd")) == before
    tether.close()


def test_deaths_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(death, "oom_kills", lambda: 5)
    assert death_of(7, 5) == ("exit", "ended with exit code 7", "")
    assert death_of(-signal.SIGSEGV, 4, "in f") == ("signal", "was killed by signal 11 (SIGSEGV)", "in f")
    assert death_of(-signal.SIGKILL, 5) == ("signal", "was killed by signal 9 (SIGKILL)", "")
    assert death_of(-50, 5)[1] == "was killed by signal 50 (?)"
    kind, text, _ = death_of(-signal.SIGKILL, 4)
    assert kind == "oom" and "likely for want of memory" in text


FORKS = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
os.environ["PYTHONPATH"] = {folder!r}
from penstock.processes.child import Child
from penstock.processes.tether import Tether

class Owner:
    pass

owner = Owner()
ended = []
tether = Tether(owner, ended.append, 1)
child = Child("child_of_a_test", "the test", tether, {{}}, {{"do": "hang"}})
while "in hang" not in child.stacks():  # it is tied by then
    assert not child.exited
if {forks} and os.fork() == 0:
    assert not tether.holds
    tether.close()
    del owner
    assert not ended, "a fork ends nothing that is its parent's"
    time.sleep(60)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("forks", [False, True])
def test_a_child_dies_with_its_parent_also_with_one_that_has_forked(forks: bool, tmp_path: Path) -> None:
    (tmp_path / "child_of_a_test.py").write_text(textwrap.dedent(MODULE))
    code = FORKS.format(folder=str(tmp_path), forks=forks)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0) as done:
        try:
            assert done.stdout is not None
            pid, until = int(done.stdout.readline()), time.monotonic() + 20
            while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until, "it outlives its parent"
                time.sleep(0.02)
        finally:
            os.killpg(done.pid, signal.SIGKILL)


def test_a_child_whose_end_cannot_be_watched_is_not_left(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = set(psutil.Process().children())
    with monkeypatch.context() as full:
        full.setattr(os, "pidfd_open", refused)
        with pytest.raises(ConfigError, match=r"the test cannot be started: Too many open files.*ulimit -n"):
            start("hang")
    assert set(psutil.Process().children()) <= before


def test_a_child_that_has_ended_with_its_fork_server_is_not_killed_by_its_number(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(pid: int) -> int:
        raise ProcessLookupError

    killed: list[int] = []
    with monkeypatch.context() as full:
        full.setattr(os, "pidfd_open", gone)
        full.setattr(child_module, "kill_group", lambda pid, *_: killed.append(pid))
        with pytest.raises(ChildProcessError, match="the test has ended with the process that it was forked of"):
            start("exit")
    assert killed == []


def test_an_owner_that_is_forgotten_ends_its_children(start: Any) -> None:
    owner, ended = Owner(), list[int]()
    tether = Tether(owner, ended.append, 1)
    assert tether.holds and not ended
    del owner
    gc.collect()
    assert ended == [1] and not tether.holds
    tether.close()
    assert ended == [1]


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open", "eventfd"])
def test_a_system_without_the_calls_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.require_linux()
    monkeypatch.delattr(os, name)
    with pytest.raises(ConfigError, match=r"need Linux 5\.3 or newer; this is linux: use SerialSampler"):
        limits.require_linux()
