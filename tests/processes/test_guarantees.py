"""What is promised of every process that penstock starts, whichever part starts it: the table of docs/processes.md.

A cell of the table is a test of this file, `test_GUARANTEE[KIND-BACKEND]`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = str(Path(__file__).with_name("kinds.py"))
ROOT = Path(__file__).parent.parent.parent
HERE = [(kind, "processes") for kind in ("worker", "async", "check", "runner", "learner", "shard", "slot")]
RAY = [(kind, "ray") for kind in ("runner", "learner", "shard", "slot")]


def kinds(places: list[tuple[str, str]], *left_out: str) -> Any:
    """Cells of a row; of what is left out a comment beside it says why."""
    found = [place for place in places if place[0] not in left_out]
    return pytest.mark.parametrize(("kind", "backend"), found, ids=["-".join(place) for place in found])


@pytest.fixture
def played(tmp_path: Path) -> Any:
    def play(kind: str, backend: str, do: str) -> dict[str, Any]:
        path = os.pathsep.join([str(ROOT), *sys.path])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with (tmp_path / "err").open("wb") as err:
            done = subprocess.run(
                [sys.executable, SCRIPT, kind, backend, do], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=err,
                timeout=250, text=True,
            )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, (tmp_path / "err").read_text()[-3000:]
        return json.loads(lines[-1])

    return play


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.Error:
            pass
    return found


@kinds([*HERE, *RAY])
@pytest.mark.parametrize("do", ["dies", "dies_forked"])
def test_it_dies_with_its_parent_also_with_one_that_has_forked(kind: str, backend: str, do: str, played: Any) -> None:
    said = played(kind, backend, do)
    assert said["pids"]
    if backend == "ray":  # which sees by the connection that its driver is gone, and a fork keeps that open
        while said["forks"]:
            os.kill(said["forks"].pop(), signal.SIGKILL)
    until = time.monotonic() + 30
    while (left := alive(said["pids"])) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
    for fork in said["forks"]:
        assert alive([fork])
        os.kill(fork, signal.SIGKILL)


@kinds(HERE, "slot")  # whose output is a log file of the run
def test_what_it_prints_is_bounded(kind: str, backend: str, played: Any) -> None:
    assert played(kind, backend, "output")["most"] < 4 << 20


@kinds([*HERE, *RAY], "slot")  # a run in a slot has deadlines of its own
def test_a_hang_says_where(kind: str, backend: str, played: Any) -> None:
    said = played(kind, backend, "hang")
    text = said.get("text", "") + "".join(said["warnings"])
    if kind == "shard":  # it runs nothing of the user's that could hang, and is stopped here
        assert said["error"] == "LearnerError" and "replay shard 0" in text and "4 s" in text
    else:
        assert "kinds.py" in text and "in misbehave" in text and " s" in text, text


@kinds([*HERE, *RAY])
def test_a_signal_is_named(kind: str, backend: str, played: Any) -> None:
    said = played(kind, backend, "signal")
    text = said.get("text", "") + "".join(said["warnings"])
    if backend == "ray" and kind != "slot":  # which does not say which one
        assert "signal" in text or "died" in text, text
    else:
        assert "signal 9 (SIGKILL)" in text or "ended with -9" in text, text


@kinds(HERE, "slot")  # a run in a slot reports its exit code
def test_a_kill_for_want_of_memory_is_named(kind: str, backend: str, played: Any) -> None:
    said = played(kind, backend, "oom")
    assert "want of memory" in said.get("text", "") + "".join(said["warnings"])


@kinds(HERE)
def test_a_limit_of_the_system_is_hinted_at(kind: str, backend: str, played: Any) -> None:
    said = played(kind, backend, "limits")
    assert said["error"] == "ConfigError" and "ulimit -n" in said["text"], said


@kinds(HERE, "check", "shard", "slot")  # a check and a shard that die are an error; launch and tune count attempts
def test_restarts_have_a_budget(kind: str, backend: str, played: Any) -> None:
    said = played(kind, backend, "budget")
    assert "5 times" in said["text"], said


@kinds([*HERE, *RAY])
def test_nothing_is_left_behind(kind: str, backend: str, played: Any) -> None:
    first, second = played(kind, backend, "close")["held"]
    assert first[2] == second[2] == 0, "a process is left"
    if backend != "ray":  # whose library keeps descriptors and threads of its own in this process
        assert first[:2] == second[:2], "descriptors or threads are left"
