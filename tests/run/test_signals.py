from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.run.signals import UnfailingStream, ending_signals, handling
from tests.cli.short import SHORT, metrics
from tests.run.cartpole import at


def test_signals_are_noted_inside_the_block_and_handlers_restored_after_it() -> None:
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in ending_signals()}
    with handling(ending_signals(), noted.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert noted == [signal.SIGTERM, signal.SIGINT]
    assert {number: signal.getsignal(number) for number in before} == before


def test_outside_the_main_thread_nothing_is_installed() -> None:
    found: list[object] = []

    def look() -> None:
        with handling(ending_signals(), lambda number: None):
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(timeout=100)
    assert found == [before]


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in ending_signals()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in ending_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_process_dies_of_the_signal_itself() -> None:
    code = (
        "import signal\nfrom penstock.run.signals import die_of, handling\n"
        "with handling([signal.SIGTERM], die_of): signal.raise_signal(signal.SIGTERM)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], timeout=100, check=False, env=env)
    assert done.returncode == -signal.SIGTERM


# Output that nobody takes

COMMAND = """
import os, signal, sys
from penstock.cli.main import main
{broken}
sys.path.insert(0, {folder!r})
sys.argv = ["penstock", "train", "a2c", "--env", "CartPole-v1", *{options!r}]
raise SystemExit(main())
"""
BROKEN = {
    "full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "pipe": "reads, writes = os.pipe(); os.close(reads); os.dup2(writes, 1); os.dup2(writes, 2)",
    "closed": "os.close(0); os.close(1)",
}


def trained(zygote: Any, folder: Path, broken: str, *options: str) -> Any:
    """A short run of the command line whose output is broken; its process has ended."""
    (folder / "hit.py").write_text("import signal\n\n\ndef hit(it):\n    signal.raise_signal(signal.SIGINT)\n")
    given = [*SHORT, "--run.dir", str(folder / "run"), "--run.progress", "plain", *options]
    (folder / "script.py").write_text(COMMAND.format(broken=BROKEN[broken], folder=str(folder), options=given))
    child = zygote.script(folder / "script.py")
    child.wait()
    return child


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("broken", BROKEN)
def test_a_run_goes_on_without_a_display(broken: str, zygote: Any, tmp_path: Path) -> None:
    child = trained(zygote, tmp_path, broken)
    assert child.code == 0, child.output
    assert "Traceback" not in child.output
    assert "Exception ignored" not in child.output
    run = tmp_path / "run"
    assert (run / "plots" / "learning-curve.png").exists()
    assert metrics(run)[-1]["eval/mean_reward"] > 0
    assert ps.load(run)


@pytest.mark.slow
def test_a_ctrl_c_that_ends_the_reader_too_exits_as_promised(zygote: Any, tmp_path: Path) -> None:
    child = trained(zygote, tmp_path, "pipe", "--run.each", "hit:hit")
    assert child.code == 130, child.output
    assert len(metrics(tmp_path / "run")) == 1
    assert ps.load(tmp_path / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_display_that_nobody_takes_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert ps.train(at(tmp_path / "run", steps=64, progress="plain")).stopped_by == "steps"


def test_a_stream_that_fails_is_passed_over(tmp_path: Path) -> None:
    with (tmp_path / "text").open("w") as good:
        stream = UnfailingStream(good)
        assert stream.write("abc") == 3
        assert stream.fileno() == good.fileno()
        assert not stream.isatty()
    assert stream.write("of a closed file") == 16
    stream.flush()
    assert (tmp_path / "text").read_text() == "abc"
    reads, writes = os.pipe()
    os.close(reads)
    broken = os.fdopen(writes, "w")
    stream = UnfailingStream(broken)
    for _ in range(3):
        assert stream.write("x" * 9_000) == 9_000
    stream.flush()
    broken.close()  # nothing was left in its buffer to fail again
