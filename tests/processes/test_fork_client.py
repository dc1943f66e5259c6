"""Workers that are forked of one process: as those that are started by themselves, and as safe."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock as ps
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.envs.make import EnvConfig
from penstock.processes import fork_client
from penstock.processes.fork_client import ForkedProcess
from penstock.processes.python import one_thread_environment
from penstock.processes.termination import MARK, new_mark
from penstock.samplers import cpu
from penstock.testing.samplers import EchoAgent
from tests.children import CHILDREN, said_by
from tests.workers.first_batches import no_process_is_left
from tests.workers.whereabouts import VARIABLE, Where

__all__ = ["no_process_is_left"]
pytestmark = pytest.mark.timeout(300)
_PR_SET_CHILD_SUBREAPER = 36


def live(env: Any, workers: int = 2, **settings: Any) -> Any:
    """A sampler whose workers do not act, and so need no torch, but are forked all the same; one alone is not."""
    return initialized(Forked(T=4, B=4, workers=workers, **settings), env)


class Forked(ps.GpuSampler):
    def start_workers(self, *args: Any, acting: bool = False) -> Any:  # pyright: ignore
        return super().start_workers(*args, acting=True)


def initialized(settings: Any, env: Any) -> Any:
    sampler = settings.build(env, 4)
    sampler.initialize(EchoAgent(sampler.spec))
    return sampler


def where(folder: Path, **kwargs: Any) -> EnvConfig:
    folder.mkdir(exist_ok=True)
    return EnvConfig(Where, {"folder": str(folder), **kwargs})


def found_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in folder.iterdir()]


def two_batches(sampler: Any) -> Any:
    """The second of two; a worker that is dead is replaced between them."""
    return [sampler.obtain_samples(itr)[0] for itr in (1, 2)][-1]


def pids_of(sampler: Any) -> list[int]:
    return [worker.child.pid for worker in sampler.pool._workers.workers]


def server_of(sampler: Any) -> int:
    return sampler.pool._workers.workers[0]._arguments.forks.process.pid


def wait_for_end(pid: int) -> None:
    """Waits for a process that is not a child of this one; what is dead and not reaped has ended."""
    until = time.monotonic() + 20.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, f"{pid} lives"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_forked_worker_is_as_one_that_was_started_by_itself(tmp_path: Path) -> None:
    for name, workers in (("alone", 1), ("forked", 2)):
        sampler = initialized(ps.CpuSampler(T=4, B=4, workers=workers), where(tmp_path / name))
        assert {type(w.child.process) is ForkedProcess for w in sampler.pool._workers.workers} == {name == "forked"}
        sampler.shutdown()
    (alone,), forked = found_in(tmp_path / "alone"), found_in(tmp_path / "forked")
    assert len(forked) == 2
    assert alone["leads its group"] and alone["ignores Ctrl-C"] and alone["shows its mark"]
    for each in forked:
        assert each == alone


@pytest.mark.slow
def test_a_replacement_sees_the_present_directory_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "before")
    sampler = live(where(tmp_path / "found"))
    try:
        monkeypatch.setenv(VARIABLE, "after")
        monkeypatch.setenv(f"{VARIABLE}_2", "new")
        monkeypatch.chdir(tmp_path)
        first = pids_of(sampler)
        os.kill(first[0], signal.SIGKILL)
        with pytest.warns(UserWarning, match=r"worker 0, pid \d+: .*killed by signal 9"):
            two_batches(sampler)
        assert pids_of(sampler)[1] == first[1]
        new = json.loads((tmp_path / "found" / f"{pids_of(sampler)[0]}.json").read_text())
        assert (new["variable"], new["directory"]) == ("after", str(tmp_path))
        old = json.loads((tmp_path / "found" / f"{first[0]}.json").read_text())
        assert old["variable"] == "before"
        assert set(new["descriptors"]) == set(old["descriptors"])
    finally:
        sampler.shutdown()


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["", "where children are ignored"])
def test_the_exit_code_of_a_forked_worker_is_known(handler: Any, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        sampler = live(where(tmp_path, dies=True), fault_policy="raise")
        with pytest.raises(ps.EnvWorkerError, match="ended with exit code 7"):
            sampler.obtain_samples(0)
        sampler.shutdown()
    finally:
        signal.signal(signal.SIGCHLD, before)


@contextmanager
def orphans_adopted() -> Generator[None]:
    """This process becomes the parent of those whose own has died, and reaps none, as many a container's first does."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mine = psutil.Process()
    before = mine.children()
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for child in set(mine.children()) - set(before):
            child.wait(20)


def test_a_worker_is_reaped_by_the_process_that_it_was_forked_of_and_no_later_one(tmp_path: Path) -> None:
    """The new server was asked for a child of the dead one's, died of it, and took the new workers along."""
    with orphans_adopted():
        sampler = live(where(tmp_path), workers=3)
        try:
            sampler.obtain_samples(0)
            first = pids_of(sampler)
            os.kill(server_of(sampler), signal.SIGKILL)
            for pid in first:
                wait_for_end(pid)
            with pytest.warns(UserWarning, match="the worker is replaced"):
                two_batches(sampler)
            server = server_of(sampler)
            two_batches(sampler)
            assert sampler.metrics()["faults/restarts"] == 3
            assert server_of(sampler) == server
        finally:
            sampler.shutdown()


def test_a_learner_that_hangs_up_without_reading_an_answer_has_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    server = fork_client.Importing(["json"], one_thread_environment() | {MARK: ""}, new_mark())
    assert select.select([server.link], [], [], 60.0)[0]
    server.link.close()
    assert server.child.wait(60.0)
    assert server.child.death().text == "ended with exit code 0"
    server.tether.close()
    assert capfd.readouterr().err == ""


def test_an_answer_after_ctrl_c_is_not_taken_for_that_of_the_next_request() -> None:
    server = fork_client.Importing(["json"], one_thread_environment() | {MARK: ""}, new_mark())
    assert server.answer(60.0) == {"threads": 1}
    os.kill(server.child.pid, signal.SIGSTOP)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            server.ask({"reap": 1}, [], 60.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert server.child.process.returncode == -signal.SIGKILL
    with pytest.raises(ChildProcessError, match="forked of has ended"):
        server.ask({"reap": 1}, [], 60.0)


@pytest.mark.slow
def test_workers_end_with_the_process_that_forked_them_and_are_replaced_by_another(tmp_path: Path) -> None:
    sampler = live(where(tmp_path))
    try:
        sampler.obtain_samples(0)
        first, server = pids_of(sampler), server_of(sampler)
        os.kill(server, signal.SIGKILL)
        for pid in first:
            wait_for_end(pid)
        with pytest.warns(UserWarning, match="the worker is replaced"):
            batch = two_batches(sampler)
        assert server_of(sampler) != server
        assert not set(pids_of(sampler)) & set(first)
        assert np.asarray(batch.valid)[1::2].all()
    finally:
        sampler.shutdown()


@pytest.mark.slow
def test_a_server_that_dies_while_it_is_asked_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It and a worker were killed at the same time, and the run ended with the advice to use fewer workers."""
    sampler = live(where(tmp_path))
    ask, kills = fork_client.Importing.ask, [1]

    def dying(server: Any, request: dict[str, int], *rest: Any) -> dict[str, Any]:
        if not request["reap"] and kills:
            kills.pop()
            os.kill(server.child.pid, signal.SIGSTOP)  # it takes no request any more
            threading.Timer(0.1, os.kill, (server.child.pid, signal.SIGKILL)).start()
        return ask(server, request, *rest)

    try:
        sampler.obtain_samples(0)
        monkeypatch.setattr(fork_client.Importing, "ask", dying)
        os.kill(pids_of(sampler)[0], signal.SIGKILL)
        with pytest.warns(UserWarning, match="is replaced"):
            assert two_batches(sampler).valid.any(0).all()
        assert not kills
    finally:
        sampler.shutdown()


@pytest.mark.slow
def test_the_server_ends_with_a_learner_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
import penstock as ps
from penstock.samplers import cpu
from tests.processes.test_fork_client import live, pids_of, server_of, where
cpu.ACTING = ("penstock.workers.env_worker",)
sampler = live(where(__import__("pathlib").Path({str(tmp_path)!r})))
print(server_of(sampler), *pids_of(sampler), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    pids = [int(word) for word in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 3
    for pid in pids:
        wait_for_end(pid)


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "ACTING", ("penstock.workers.env_worker",))


def forks_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Callable[..., Any]:
    """Has the workers be forked of a process that imports a module of this text."""
    (tmp_path / "imported_before_forks.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(cpu, "ACTING", ("imported_before_forks",))
    return lambda **settings: live(where(tmp_path / "found"), **settings)


def test_where_threads_run_each_worker_is_a_fresh_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    make = forks_with(tmp_path, monkeypatch, start)
    with pytest.warns(UserWarning, match=r"2 threads run in a process that has only imported imported_before_forks"):
        sampler = make()
    assert not any(type(w.child.process) is ForkedProcess for w in sampler.pool._workers.workers)
    sampler.obtain_samples(0)
    sampler.shutdown()


def test_a_server_that_cannot_import_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = forks_with(tmp_path, monkeypatch, "raise SystemExit(3)")
    with pytest.raises(EnvWorkerError, match=r"worker 0 cannot be started: .*forked of ended with exit code 3"):
        make(fault_policy="raise")


def test_a_server_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = forks_with(tmp_path, monkeypatch, "import time\ntime.sleep(600)")
    with pytest.raises(EnvWorkerError, match=r"worker 0 cannot be started: .*has not answered for 0\.2 s"):
        make(start_timeout_s=0.2, fault_policy="raise")


def test_a_fork_that_the_system_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = "import errno, os\ndef fork(): raise OSError(errno.EAGAIN, 'no')\nos.fork = fork\n"
    make = forks_with(tmp_path, monkeypatch, refuse)
    with pytest.raises(ConfigError, match=r"worker 0 of 2 cannot be started: .*ulimit -u"):
        make()


@pytest.mark.slow
def test_the_process_that_was_started_ahead_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_client.start_ahead(cpu.ACTING, one_thread_environment())
    (ahead,) = fork_client.waiting
    fork_client.start_ahead(cpu.ACTING, one_thread_environment())
    assert fork_client.waiting == [ahead]  # one is enough
    sampler = live(where(tmp_path))
    try:
        assert server_of(sampler) == ahead.child.pid and fork_client.waiting == []
        os.kill(pids_of(sampler)[0], signal.SIGKILL)
        with pytest.warns(UserWarning, match="replaced"):
            two_batches(sampler)
        workers = pids_of(sampler)
        os.kill(ahead.child.pid, signal.SIGKILL)
        for pid in workers:  # they end a moment after it, in which a batch may be done
            wait_for_end(pid)
        with pytest.warns(UserWarning, match="replaced"):
            two_batches(sampler)
        assert server_of(sampler) != ahead.child.pid
    finally:
        sampler.shutdown()
    assert {found["shows its mark"] for found in found_in(tmp_path)} == {True}


def test_one_that_was_started_ahead_with_other_variables_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_client.start_ahead(cpu.ACTING, one_thread_environment())
    (ahead,) = fork_client.waiting
    monkeypatch.setenv(VARIABLE, "set since")
    sampler = live(where(tmp_path))
    assert server_of(sampler) != ahead.child.pid
    assert (fork_client.waiting, ahead.child.process.returncode) == ([], -signal.SIGKILL)
    sampler.shutdown()
    assert {found["variable"] for found in found_in(tmp_path)} == {"set since"}


def test_a_trainer_leaves_none_that_was_started_ahead_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    begin = fork_client.Importing.__init__
    monkeypatch.setattr(fork_client.Importing, "__init__", lambda self, *args: begun.append(self) or begin(self, *args))
    with pytest.raises(ConfigError, match="CartPole-v7"):
        ps.Trainer(ps.Experiment("CartPole-v7", ps.PPO(), ps.CpuSampler(T=4, B=4)))
    (ahead,) = begun
    assert (fork_client.waiting, ahead.child.process.returncode) == ([], -signal.SIGKILL)


def test_one_that_was_started_ahead_ends_with_the_learner() -> None:
    script = """
import os, sys, time
from penstock.processes import fork_client
from penstock.processes.python import one_thread_environment
fork_client.start_ahead(("penstock.workers.env_worker",), one_thread_environment())
if os.fork() == 0:
    time.sleep(100)
print(fork_client.waiting[0].child.pid, flush=True)
os._exit(0)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, process_group=0) as done:
        try:
            assert done.stdout is not None
            wait_for_end(int(done.stdout.readline()))
        finally:
            os.killpg(done.pid, signal.SIGKILL)


TWO_DEATHS = """
seen = set()

def killer():
    while len(seen) < 2:
        for child in children("processes.fork_server"):
            if child.pid not in seen:
                time.sleep(0.3)
                seen.add(child.pid)
                child.kill()
        time.sleep(0.01)

threading.Thread(target=killer, daemon=True).start()
try:
    live = ps.CpuSampler(T=16, B=4, workers=2, fault_policy="restart").build("CartPole-v1", 1)
    live.initialize(ps.PPO(minibatch=16).build(live.spec, seed=1).agent)
    live.obtain_samples(0)
    live.shutdown()
    print("healed")
except ps.EnvWorkerError as error:
    print("named", error)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_deaths_of_the_fork_server_are_healed_or_named(tmp_path: Path) -> None:
    said = said_by(CHILDREN + TWO_DEATHS, tmp_path)
    assert "healed" in said or "named" in said


STOPPED_SERVER = """
settings = ps.CpuSampler(T=16, B=4, workers=2, start_timeout_s=5.0, fault_policy="raise")
server = []

def stopper():
    while not server:
        server.extend(children("processes.fork_server"))
        time.sleep(0.01)
    time.sleep(0.2)
    server[0].suspend()

threading.Thread(target=stopper, daemon=True).start()
started = time.monotonic()
try:
    settings.build("CartPole-v1", 1).shutdown()
except ps.EnvWorkerError as error:
    print("said", error)
finally:
    for child in server:
        child.kill()
print("took", time.monotonic() - started)
assert time.monotonic() - started < 20
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_fork_server_that_hangs_is_named_within_the_limit(tmp_path: Path) -> None:
    said = said_by(CHILDREN + STOPPED_SERVER, tmp_path)
    assert "said" in said and "AssertionError" not in said, said
