"""`penstock view`: what it says, how it ends, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from penstock.cli import view
from tests.cli.short import Cli
from tests.view.served import three_runs

COMMAND = [sys.executable, "-m", "penstock", "view", "--no-browser"]


def started(*words: str, cwd: Path) -> subprocess.Popen[str]:
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **path},
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_it_serves_until_ctrl_c_and_ends_without_a_trace(tmp_path: Path) -> None:
    three_runs(tmp_path / "runs")
    process = started(cwd=tmp_path)
    try:
        said = re.fullmatch(
            r"3 runs in runs; the page, until Ctrl-C: (http://127\.0\.0\.1:\d+/\S{20,}/)\n", first_line(process)
        )
        assert said is not None
        with urllib.request.urlopen(f"{said[1]}api/runs", timeout=10) as answer:
            assert b"a-s0" in answer.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(said[1], timeout=5)


def test_a_folder_without_runs_is_served_and_said(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    process = started("mine", cwd=tmp_path)
    try:
        assert first_line(process).startswith("0 runs in mine; the page, until Ctrl-C: http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (
        err == "penstock: no run in mine yet, no metrics.jsonl: they appear as they begin\n"
        and process.returncode == 143
    )


def test_what_cannot_be_served_is_refused(cli: Cli, tmp_path: Path) -> None:
    said = cli("view", "--no-browser")
    assert said.code == 2 and said.err.startswith(
        "penstock: ConfigError: no run in runs: there is no such folder; expected the directory of a run, which holds"
    )
    Path("file").touch()
    assert "no run in file: it is a file; expected the directory of a run" in cli("view", "file").err
    (tmp_path / "runs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = cli("view", "--no-browser", "--port", str(port))
        assert (
            said.code == 2
            and f"cannot listen on 127.0.0.1, port {port}: " in said.err
            and "choose another --port" in said.err
        )
    for words, message in (
        (["--port", "99999"], "expected 0 for a free one, or up to 65535"),
        (["--port", "x"], "invalid int value"),
        (["--host", "192.0.2.1"], "choose another --host"),
        (["--prot", "1"], "did you mean --port?"),
        (["runs", "more"], "more"),
    ):
        said = cli("view", "--no-browser", *words)
        assert said.code == 2 and message in said.err and not said.out, words


def test_a_browser_is_opened_only_where_there_is_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not view.has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert view.has_display()


def test_an_address_that_others_reach_is_warned_of_and_the_browser_opens(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_runs(tmp_path / "runs")
    opened: list[str] = []
    monkeypatch.setattr(view, "has_display", lambda: True)
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or os.kill(os.getpid(), signal.SIGINT))
    said = cli("view", "--host", "0.0.0.0")
    assert said.code == 130 and opened and opened[0] in said.out
    assert "on 0.0.0.0 whoever has this address can read these runs" in said.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
