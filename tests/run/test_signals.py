from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from penstock.run.signals import ending_signals, handling


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
