from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.machine import Gpu, Machine, read_machine
from penstock.studies.logs import reason_of
from penstock.studies.slots.launcher import Launcher
from penstock.studies.study import open_study
from tests.studies.slots.fakes import FAKE, ROOT, Seen, machines, queue_of, runs_of, statuses

LIMIT_S = 200.0


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in {LIMIT_S} s"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# Work


def test_works_a_queue_off_with_each_run_on_the_cpus_of_its_slot(fake: Path) -> None:
    queue, seen = queue_of(fake, "a", "b", "c"), Seen()
    slots = machines(2)
    queue.begin()
    assert Launcher(queue, slots, seen).work() is None
    assert set(statuses(queue).values()) == {"finished"}
    assert seen.most <= 2
    started = dict(event.split(" in ") for event in seen.events if " in " in event)
    for run in runs_of(queue):
        log = queue.log(run).read_text()
        assert log.startswith(
            f"$ python -m penstock train --config sweep/settings/{run.name} --run.dir sweep/{run.name}\n"
        )
        assert f"cpus {list(slots[int(started[run.name])].cpus)} cuda None" in log
        assert run.attempts == 1
    assert statuses(open_study(fake)) == statuses(queue)


@pytest.mark.parametrize("trust", [False, True])
def test_a_run_in_its_directory_is_trusted_only_if_the_user_says_so(
    fake: Path, trust: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stranger's study.json may hold the very settings of a sweep that was launched here, beside runs of his own.
    monkeypatch.delenv("PENSTOCK_TRUST", raising=False)
    queue = queue_of(fake, "a")
    queue.begin()
    Launcher(queue, machines(1), Seen(), trust).work()
    assert f"trusts {fake.resolve() if trust else None}" in queue.log(runs_of(queue)[0]).read_text()


def test_failures_are_kept_and_only_they_are_retried(fake: Path) -> None:
    queue = queue_of(fake, "ok", "once", "bad", "dead")
    queue.begin()
    assert Launcher(queue, machines(2), Seen()).work() is None
    assert list(statuses(queue).values()) == ["finished", "failed", "failed", "failed"]
    assert [run.code for run in runs_of(queue)] == [0, 3, 3, -9]
    assert [reason_of(run) for run in runs_of(queue)[2:]] == [
        "exit code 3 (environment)",
        "killed by SIGKILL (out of memory?)",
    ]
    again = open_study(fake, retries=0)
    assert again.ask() is None
    again.retry([])
    assert Launcher(again, machines(2), Seen()).work() is None
    assert list(statuses(again).values()) == ["finished", "finished", "failed", "failed"]
    assert [run.attempts for run in runs_of(again)] == [1, 2, 2, 2]
    assert again.log(runs_of(again)[1]).read_text().count("$ python -m penstock") == 2


def test_a_run_directory_that_is_not_ours_is_left_alone(fake: Path) -> None:
    queue = queue_of(fake, "a")
    queue.run_dir(runs_of(queue)[0]).mkdir(parents=True)
    (queue.run_dir(runs_of(queue)[0]) / "thesis.tex").touch()
    queue.begin()
    Launcher(queue, machines(1), Seen()).work()
    assert (queue.run_dir(runs_of(queue)[0]) / "thesis.tex").exists()
    assert runs_of(queue)[0].status == "failed"


def test_several_gpus_are_shared_out(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    queue, seen = queue_of(fake, "a", "b"), Seen()
    cpu = read_machine().cpus[:1]
    slots = [Machine((cpu,), (0,), gpus=(Gpu("x", f"GPU-{k}"),)) for k in range(2)]
    queue.begin()
    Launcher(queue, slots, seen).work()
    started = dict(event.split(" in ") for event in seen.events if " in " in event)
    for run in runs_of(queue):
        assert f"cuda GPU-{started[run.name]}" in queue.log(run).read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    one = queue_of(fake / "again", "a")
    one.begin()
    Launcher(one, slots, Seen()).work()
    assert "cuda 5" in one.log(runs_of(one)[0]).read_text()


def test_the_first_signal_saves_the_second_kills(fake: Path) -> None:
    queue, seen = queue_of(fake, "slow", "deaf", "ok"), Seen()

    def interrupt() -> None:
        for name in ("slow", "deaf"):
            wait_for((fake / f"what={name}_s0" / "metrics.jsonl").exists, f"{name} run")
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: runs_of(queue)[0].status == "stopped", "checkpoint")
        assert runs_of(queue)[1].status == "running"
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    queue.begin()
    assert Launcher(queue, machines(2), seen).work() == signal.SIGINT
    thread.join(timeout=LIMIT_S)
    assert signal.getsignal(signal.SIGINT) is before
    assert statuses(queue) == {"what=slow_s0": "stopped", "what=deaf_s0": "stopped", "what=ok_s0": "waiting"}
    assert any("SIGINT: saves and ends 2 runs, begins no other" in event for event in seen.events)
    again = open_study(fake)
    assert again.command(runs_of(again)[0])[0] == "resume"
    assert again.command(runs_of(again)[1])[0] == "train"


def test_one_run_is_said_in_the_singular(fake: Path) -> None:
    queue, seen = queue_of(fake, "slow"), Seen()

    def interrupt() -> None:
        wait_for((fake / "what=slow_s0" / "metrics.jsonl").exists, "run")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    queue.begin()
    assert Launcher(queue, machines(1), seen).work() == signal.SIGINT
    thread.join(timeout=LIMIT_S)
    assert any("SIGINT: saves and ends 1 run, begins no other" in event for event in seen.events)


@pytest.mark.slow
def test_runs_die_with_a_launcher_that_is_killed_and_the_next_goes_on(fake: Path, tmp_path: Path) -> None:
    queue = queue_of(fake, "slow", "deaf", "ok")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "launcher.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom penstock.core.machine import Machine\n"
        "from penstock.studies.slots.launcher import Launcher\nfrom penstock.studies.display import StudyDisplay\n"
        "from tests.studies.slots.fakes import queue_of\n"
        f"os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
        f"q = queue_of(Path('{fake}'), 'slow', 'deaf', 'ok')\nq.begin()\n"
        f"Launcher(q, {machines(2)!r}, StudyDisplay(q)).work()\n"
    )
    launcher = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        dirs = [queue.run_dir(run) for run in runs_of(queue)[:2]]
        wait_for(lambda: all((run_dir / "metrics.jsonl").exists() for run_dir in dirs), "running runs")
        pids = [int((run_dir / "pid").read_text()) for run_dir in dirs]
        assert not any(is_gone(pid) for pid in pids)
    finally:
        launcher.kill()
        launcher.wait(timeout=LIMIT_S)
    wait_for(lambda: all(is_gone(pid) for pid in pids), "death of the runs")
    (dirs[0] / "checkpoints" / "000000000007").mkdir(parents=True)
    (dirs[1] / "half").touch()
    again = open_study(fake)
    assert list(statuses(again).values()) == ["stopped", "stopped", "waiting"]
    (tmp_path / "stand-in" / "__main__.py").write_text(FAKE.replace('"slow", "deaf"', '"slow",'))
    assert Launcher(again, machines(2), Seen()).work() is None
    assert set(statuses(again).values()) == {"finished"}
    assert "penstock resume" in again.log(runs_of(again)[0]).read_text()
    assert not (dirs[1] / "half").exists()  # begun anew
    assert "resume" not in again.log(runs_of(again)[1]).read_text()
