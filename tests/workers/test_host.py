"""A child process names faults by kind, reads messages, writes reports and sets events. No process is started."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, NativeEnvError
from penstock.processes.tether import Tether
from penstock.workers import control
from penstock.workers.control import Control, Event, Spin
from penstock.workers.host import Host, _read_mailbox, describe
from penstock.workers.messages import SpawnArgs, WorkerSettings
from penstock.workers.process import StartArguments, WorkerProcess


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NativeEnvError("batched"), "native"),
        (ConfigError("batched"), "config"),
        (EnvContractError("batched"), "contract"),
        (EnvWorkerError("batched"), "exception"),
    ],
)
def test_errors_of_ours_keep_their_text(error: Exception, kind: str) -> None:
    assert describe(error) == {"kind": kind, "text": "batched"}


@pytest.mark.parametrize("error", [ValueError("the arm fell off"), SystemExit(7), KeyboardInterrupt()])
def test_other_errors_bring_type_text_and_traceback(error: BaseException) -> None:
    try:
        raise error
    except BaseException as caught:
        found = describe(caught)
    assert found["kind"] == "exception"
    assert found["text"].startswith(f"{type(error).__name__}: {error}\nTraceback (most recent call last)")
    assert "test_host.py" in found["text"]


class Owner:
    """An owner of a tether."""


@pytest.fixture
def child() -> Iterator[WorkerProcess]:
    child = WorkerProcess(1, StartArguments("none", 2, Tether(Owner(), lambda: None), "m.", {}, None))
    yield child
    child.close()


@pytest.fixture
def learner_event() -> Iterator[Event]:
    event = Event()
    yield event
    event.close()


@pytest.fixture
def host(child: WorkerProcess, learner_event: Event) -> Iterator[Host]:
    """The other side of `child`, in this process, which looks once before it sleeps."""
    fd = os.memfd_create("penstock-test")
    spawn_args = SpawnArgs(1, 2, os.getpid(), fd, child.event.fd, learner_event.fd, child.mailbox, child.report, [])
    host = Host(spawn_args, WorkerSettings((), 0, []))
    host.spin = Spin(0.0)
    yield host
    os.close(fd)


def is_set(event: Event) -> bool:
    poll = select.poll()
    poll.register(event.fd, select.POLLIN)
    return bool(poll.poll(0))


def test_mail_is_read_as_it_was_written_the_last_one_only(child: WorkerProcess, host: Host) -> None:
    child.write(["a" * 10_000])
    child.write([{"pool": 1}, ("b", None)])
    path = list(sys.path)
    assert host.mailbox() == [{"pool": 1}, ("b", None)]
    assert sys.path == path


def test_the_first_message_brings_the_import_path(
    child: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpickling may import by it, so that path is set before anything is unpickled."""
    (tmp_path / "only_on_the_path_of_the_learner.py").write_text("class Env: pass\n")
    with monkeypatch.context() as there:
        there.syspath_prepend(str(tmp_path))
        from only_on_the_path_of_the_learner import Env  # type: ignore

        child.write(WorkerSettings((0, 1), 3, [Env], True), path=True)
        full = list(sys.path)
    monkeypatch.delitem(sys.modules, "only_on_the_path_of_the_learner")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    start = _read_mailbox(child.mailbox)
    assert sys.path == full
    assert (start.cpus, start.seed, start.yields) == ((0, 1), 3, True)
    assert start.messages[0].__name__ == "Env"
    assert start.messages[0] is not Env
    sys.modules.pop("only_on_the_path_of_the_learner", None)


def test_an_answer_is_there_before_the_command_is_done(
    child: WorkerProcess, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    done = host.done
    monkeypatch.setattr(host, "done", lambda: (seen.append(child.read_report()), done()))
    host.block[control.COMMAND] = 3
    host.taken()
    host.answer(["x" * 100])
    host.answer([1, None])  # shorter than the one before
    assert [report["answer"] for report in seen] == [["x" * 100], [1, None]]
    assert host.block[control.DONE_COMMAND] == 3
    assert Control(host.spawn_args.control, 2).blocks[1][control.DONE_COMMAND] == 3, (
        "its own block is the one of its index"
    )
    assert Control(host.spawn_args.control, 2).blocks[0].tolist() == [0] * control.WORDS


def test_a_command_that_comes_while_another_is_obeyed_is_not_done_with_it(host: Host) -> None:
    """As where Ctrl-C ends the learner's wait for a batch: workers are told to quit before they have filled it."""
    host.block[control.CODE], host.block[control.COMMAND] = control.COLLECT, 2
    assert host.taken() == control.COLLECT
    host.block[control.CODE], host.block[control.COMMAND] = control.QUIT, 3
    host.done()
    assert host.block[control.DONE_COMMAND] == 2
    assert host.taken() == control.QUIT
    host.done()
    assert host.block[control.DONE_COMMAND] == 3


def test_only_a_learner_that_sleeps_is_woken(host: Host, learner_event: Event) -> None:
    host.block[control.COMMAND] = 5
    host.done()
    assert not is_set(learner_event)
    host.learner[0] = 1
    host.done()
    assert is_set(learner_event)


def test_a_process_sleeps_until_it_is_called(host: Host, child: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: host.spawn_args.parent)
    looks: list[int] = []

    def called() -> bool:
        looks.append(host.block[control.SLEEPS])
        return len(looks) > 3

    child.event.set()
    host.sleep_until(called)
    assert looks == [0, 0, 1, 0], "looked once, found no call, said that it sleeps, and was woken by the event"


def test_a_process_whose_parent_is_gone_ends_its_group(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.workers import host as module

    monkeypatch.setattr(module, "_LOOK_AROUND_S", 0.001)
    monkeypatch.setattr(os, "getppid", lambda: host.spawn_args.parent + 1)
    killed: list[Any] = []

    def killpg(*args: int) -> None:
        killed.append(args)
        raise InterruptedError

    monkeypatch.setattr(module.os, "killpg", killpg)
    with pytest.raises(InterruptedError):
        host.sleep_until(lambda: False)
    assert killed == [(0, 9)]


def test_obeying_and_reading_are_left_to_each_kind_of_process(host: Host) -> None:
    with pytest.raises(NotImplementedError):
        host.serve()
    with pytest.raises(NotImplementedError):
        host.read("message")
