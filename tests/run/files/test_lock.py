from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.files.lock import RunLock


def test_a_second_learner_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunLock(run):
        with pytest.raises(ConfigError, match=f"pid {os.getpid()} on "), RunLock(run):
            pass
    with RunLock(run):
        pass
    lock = RunLock(run)
    with lock, pytest.raises(ConfigError), RunLock(run):
        pass


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import sys, time; from penstock.run.files.lock import RunLock\n"
        "with RunLock(sys.argv[1]): print(1, flush=True); time.sleep(1000)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=env) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ConfigError, match=f"pid {holder.pid} on "), RunLock(tmp_path):
            pass
        holder.kill()
        holder.wait(timeout=100)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            with RunLock(tmp_path):
                return
        except ConfigError:
            time.sleep(0.01)
    pytest.fail("the lock outlived its holder")


def test_a_lock_in_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot lock the run directory"), RunLock(tmp_path / "file"):
        pass


def test_a_hard_link_in_its_place_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("{ mine")
    (tmp_path / "run").mkdir()
    os.link(tmp_path / "mine", tmp_path / "run" / ".lock")
    with pytest.raises(CheckpointError, match=r"run/\.lock is a file that has 2 names"), RunLock(tmp_path / "run"):
        pass
    assert (tmp_path / "mine").read_text() == "{ mine"


def test_a_link_or_another_file_in_its_place_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / ".lock"
    for make in (
        lambda: lock.symlink_to("../mine"),
        lambda: lock.hardlink_to(tmp_path / "mine"),
        lambda: os.mkfifo(lock),
    ):
        make()
        with pytest.raises(CheckpointError, match=str(lock)), RunLock(tmp_path / "run"):
            pass
        assert (tmp_path / "mine").read_text() == "mine"
        lock.unlink()
