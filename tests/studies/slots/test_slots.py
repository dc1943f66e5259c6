"""Slots by each backend, with a fake in the place of `penstock train`: how runs end, what is lost, what goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.core.errors import ConfigError
from penstock.core.machine import Machine
from penstock.run.files.lock import RunLock
from penstock.studies.slots import slots as slots_module
from penstock.studies.slots.launcher import Launcher
from penstock.studies.slots.slot_actor import SlotActor
from penstock.studies.slots.slots import Execution, Slots, check_backend, local_slots, make_slots
from penstock.studies.study import Study, open_study
from penstock.studies.trial import to_plain
from tests.slow import slow
from tests.studies import test_study
from tests.studies.slots.fakes import ROOT, Seen, machines, stand_in
from tests.studies.slots.test_launcher import is_gone, wait_for
from tests.studies.test_study import queue_of, slots

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("ray")]
LIMIT_S = 60.0
BACKENDS = ["processes", *slow("ray")]
trials = test_study.fake
"""The directory of a search."""


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """A cluster that is held for the test, if it is one of Ray."""
    if request.node.callspec.params["backend"] != "ray":
        yield
        return
    pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")
    from penstock.actors.cluster import start_ray

    found = start_ray(num_cpus=4)
    yield
    found.close()


def processes(name: str) -> list[psutil.Process]:
    """The descendants of this process whose command line has a word in it."""
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def until(seen: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def code_of(run: Execution) -> int:
    until(lambda: run.code() is not None)
    code = run.code()
    assert code is not None
    return code


@pytest.fixture
def slot() -> Iterator[Slots]:
    """One slot of this machine."""
    made = local_slots(machines(1))
    yield made
    made.close()


def executed(where: Slots, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Execution:
    """A run of these lines."""
    stand_in(text, tmp_path, monkeypatch)
    return where.start(0, ["train", "--x", "1"], tmp_path / "log", {"EXTRA": "1"})


# How a run begins and ends


def test_a_run_has_the_environment_of_the_launcher(
    slot: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its libraries use as many threads as they like, unlike those of the slot; and Ctrl-C is not for it."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    text = (
        "import os, signal, sys\n"
        "print(sys.argv[1:], [os.environ.get(name) for name in\n"
        "    ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'RAY_ADDRESS', 'EXTRA', 'PYTHONUNBUFFERED')])\n"
        "print(os.getcwd(), os.getpgid(0) == os.getpid(), signal.getsignal(2) is signal.default_int_handler, __name__)\n"
        "raise SystemExit(7)\n"
    )
    assert code_of(executed(slot, text, tmp_path, monkeypatch)) == 7
    assert (tmp_path / "log").read_text().splitlines() == [
        "['train', '--x', '1'] [None, '3', '10.0.0.1:6379', '1', '1']",
        f"{tmp_path} True True __main__",
    ]


def test_processes_say_in_their_command_line_which_slot_they_are_of(
    slot: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = executed(slot, "import time; time.sleep(1000)", tmp_path, monkeypatch)
    until(lambda: processes("slot_process"))
    actor, process = (processes(name)[0].cmdline() for name in ("runner_process", "slot_process"))
    assert actor[-1] == process[-1] == "slot 1"
    assert '"command": ["train", "--x", "1"]' in process[-2]
    run.kill()
    assert code_of(run) == -signal.SIGKILL


def test_a_run_that_crashes_leaves_its_stack_in_the_log(
    slot: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import faulthandler\nprint('before')\ndef crashing():\n    faulthandler._sigsegv()\ncrashing()\n"
    assert code_of(executed(slot, text, tmp_path, monkeypatch)) == -signal.SIGSEGV
    said = (tmp_path / "log").read_text()
    assert said.startswith("before\nFatal Python error: Segmentation fault")
    assert " in crashing\n" in said


def test_what_a_run_has_left_behind_ends_with_it(slot: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "import subprocess\n"
        "for session in (False, True):\n"
        "    print(subprocess.Popen(['sleep', '1000'], start_new_session=session).pid)\n"
    )
    assert code_of(executed(slot, text, tmp_path, monkeypatch)) == 0
    left = [int(pid) for pid in (tmp_path / "log").read_text().split()]
    assert len(left) == 2
    wait_for(lambda: all(is_gone(pid) for pid in left), "end of what was left")


def test_a_run_that_is_ended_is_gone(slot: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = executed(slot, "import os, time\nprint(os.getpid())\ntime.sleep(1000)\n", tmp_path, monkeypatch)
    until(lambda: (tmp_path / "log").read_text() if (tmp_path / "log").exists() else "")
    pid = int((tmp_path / "log").read_text())
    run.end()
    assert is_gone(pid)


def test_a_directory_that_a_node_does_not_see_is_named(tmp_path: Path) -> None:
    actor = SlotActor("slot 1")
    with pytest.raises(ConfigError, match=r"absent of the launcher is not there on node .*file system that all of"):
        actor.start(["train"], str(tmp_path / "absent"), str(tmp_path / "log"), {}, ())
    actor.close()


def test_a_run_that_cannot_be_started_is_an_error_here(slot: Slots, tmp_path: Path) -> None:
    run = slot.start(0, ["train"], tmp_path / "absent" / "log", {})
    with pytest.raises(ConfigError, match=r"slot 1.*raised ConfigError: .*absent of the launcher is not there"):
        until(run.code)


def test_a_run_waits_until_what_was_left_of_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = list[float]()
    with RunLock(tmp_path):
        thread = threading.Thread(target=lambda: (Slots.settle(tmp_path), free.append(time.monotonic())))
        thread.start()
        time.sleep(0.1)
        held = time.monotonic()
    thread.join(LIMIT_S)
    assert free[0] >= held
    with RunLock(tmp_path):  # held by one that goes on: the run itself will say so
        monkeypatch.setattr(slots_module, "_SETTLE_S", 0.2)
        Slots.settle(tmp_path)


# Trials


def worked(queue: Study, where: Any) -> Seen:
    seen = Seen()
    queue.begin()
    Launcher(queue, where, seen).work()
    return seen


def record(queue: Study) -> list[dict[str, Any]]:
    return [{**to_plain(t), "run": t.run.name} for t in queue.search.trials]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("backend", ["ray"])
def test_trials_on_a_cluster_are_those_of_this_machine(trials: Path, backend: str) -> None:
    here, there = queue_of(trials), queue_of(Path("there"))
    worked(here, slots())
    on_ray = make_slots(backend, 1)
    worked(there, on_ray)
    on_ray.close()
    assert record(there) == record(here)
    said = (Path("there") / "logs" / "trial-000.log").read_text()
    assert said.splitlines()[0].endswith("--run.dir there/trial-000")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_that_dies_takes_its_trial_along_which_is_tried_again_in_another(
    trials: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "ray::SlotActor" if backend == "ray" else "runner_process"
    where, queue = make_slots(backend, 2), queue_of(trials)
    if backend == "ray":
        until(lambda: len(processes(name)) == 2)
    before = processes(name)
    assert len(before) == 2

    def strike() -> None:
        until(lambda: list(trials.glob("trial-*/legs")))
        before[0].kill()

    thread = threading.Thread(target=strike)
    thread.start()
    worked(queue, where)
    thread.join(LIMIT_S)
    where.close()
    assert [t.state for t in queue.search.trials].count("failed") == 0
    assert open_study(trials).search.over
    assert re.search(r"penstock: slot (\d) is lost and started anew: slot \1 .*(died|killed)", capsys.readouterr().err)
    until(lambda: not processes(name))


# What is refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("rey", "local", 1.0), "--backend rey: .*'ray'"),
        (("processes", "auto", 1.0), "--address and --cpus are of --backend ray"),
        (("processes", "local", 2.0), "--address and --cpus are of --backend ray"),
        (("ray", "local", -1.0), r"--cpus -1\.0; expected"),
    ],
)
def test_settings_of_another_backend(given: tuple[str, str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_backend(*given)


@pytest.mark.parametrize("backend", ["processes", "ray"])
def test_more_slots_than_there_are_cpus(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"9,?999 slots on \d+ CPUs?; expected 1 to"):
        make_slots(backend, 9_999)


def test_more_slots_than_there_are_descriptors() -> None:
    with pytest.raises(ConfigError, match=r"--slots=\d+ need \d+ file descriptors .*ulimit -n"):
        local_slots([Machine(((0,),), (0,))] * 1_000_000)


# A launcher that dies

RUN = """
import fractions, os, pathlib, subprocess, sys, time
import psutil
from penstock.actors.processes import Processes
backend = Processes()
backend.result(backend.call(backend.start(fractions.Fraction, (1, 2), "runner 1"), "as_integer_ratio"), 60)
subprocess.Popen(["sleep", "1000"])
run = pathlib.Path(sys.argv[sys.argv.index("--run.dir") + 1])
run.mkdir(parents=True)
(run / "tmp").write_text(" ".join(str(p.pid) for p in (psutil.Process(), *psutil.Process().children(recursive=True))))
os.rename(run / "tmp", run / "pids")
time.sleep(1000)
"""
"""A run with a runner, which has a process group of its own, and a process in its group."""
LAUNCHER = """
import os, sys, time
from pathlib import Path
from penstock.studies.slots.launcher import Launcher
from penstock.studies.slots.slots import make_slots
from tests.studies.slots.fakes import Seen, queue_of
backend, forks = sys.argv[1:]
where = make_slots(backend, 1)
class Forking(Seen):
    def started(self, run, slot):
        if forks == "forks" and not os.fork():
            Path("fork").write_text(str(os.getpid()))
            time.sleep(1000)
queue = queue_of(Path("sweep"), "a")
queue.begin()
Launcher(queue, where, Forking()).work()
"""


@pytest.mark.slow
@pytest.mark.parametrize("forks", ["alone", "forks"])
@pytest.mark.parametrize("backend", ["processes", "ray"])
def test_runs_and_what_they_started_die_with_a_launcher_that_is_killed(
    backend: str, forks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has forked, and the copy of it lives on."""
    if backend == "ray":
        pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")
    stand_in(RUN, tmp_path, monkeypatch)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    command = [sys.executable, "launcher.py", backend, forks]
    launcher = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        told = tmp_path / "sweep" / "what=a_s0" / "pids"
        wait_for(lambda: told.exists() or launcher.poll() is not None, "run")
        pids = [int(pid) for pid in told.read_text().split()]
        assert len(pids) == 3
        assert not any(is_gone(pid) for pid in pids)
        slot = psutil.Process(pids[0]).ppid()
    finally:
        launcher.kill()
        launcher.wait(timeout=LIMIT_S)
    began = time.monotonic()
    try:
        wait_for(lambda: all(is_gone(pid) for pid in (*pids, slot)), "end of the runs")
        assert time.monotonic() - began < 15.0, "seconds, not Ray's minute"
    finally:
        if (tmp_path / "fork").exists():
            with contextlib.suppress(ProcessLookupError):  # Ray's guard ends it as well
                os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)
