from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from typing import Any

import pytest

from penstock.run import progress as module
from penstock.run.progress import Progress, print_summary

METRICS = {
    "rollout/ep_rew_mean": 123.45,
    "rollout/ep_len_mean": 22.0,
    "train/value_loss": 0.0123,
    "eval/mean_reward": 480.0,
}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_off_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(100, "off", "PPO") as progress:
        progress.update(10, METRICS)
        progress.note("text")
    assert capsys.readouterr() == ("", "")


def test_auto_is_plain_without_a_terminal_and_says_a_line_every_five_seconds(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    progress = Progress(10_000, "auto", "PPO on CartPole-v1")
    for i in range(121):
        progress.update(i * 50, METRICS if i == 0 else {})
        clock.now += 0.1
    progress.note("checkpoint [bold]")
    progress.close()
    progress.close()
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "PPO on CartPole-v1"
    assert [line.split("/")[0] for line in lines[1:4]] == ["0", "2,500", "5,000"]
    assert lines[4] == "checkpoint [bold]"
    assert lines[5].startswith("6,000/10,000 steps (60%)")
    assert len(lines) == 6
    assert "500 steps/s" in lines[3].replace("500.0", "500")
    assert "0:10 elapsed" in lines[3]
    assert "0:10 left" in lines[3]
    assert "return 123.5  episode length 22  last evaluation 480.0" in lines[3]
    assert "\x1b" not in out


def test_a_resumed_run_counts_its_own_steps_only(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    progress = Progress(2_000_000, "plain", "resumed")
    for i in range(11):
        progress.update(1_000_000 + i * 1000, {})
        clock.now += 1.0
    progress.close()
    assert "1,000 steps/s" in capsys.readouterr().out.splitlines()[-2]


def on_a_terminal(code: str) -> str:
    """What a child process writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        env.pop(name, None)
    child = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    killer = threading.Timer(200, child.kill)
    killer.start()
    out = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's answer once the last writer has closed
            break
        if not piece:
            break
        out += piece
    child.wait(timeout=200)
    killer.cancel()
    os.close(ours)
    return out.decode()


HEAD = f"""
import time
from penstock.run.progress import Progress
metrics = {METRICS!r}
"""
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def test_a_terminal_gets_a_display_four_times_a_second_and_its_cursor_back() -> None:
    out = on_a_terminal(
        HEAD
        + """
now = time.monotonic()
time.monotonic = lambda: now
p = Progress(1000, "auto", "PPO on CartPole-v1")
for step in range(500):  # 1 s
    p.update(step, metrics)
    now += 0.002
p.note("a checkpoint")
p.update(1000, {})
p.close()
"""
    )
    assert 4 <= out.count("PPO on CartPole-v1") <= 9, out
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    last = plain[plain.rindex("PPO on CartPole-v1") :]
    assert "1,000 of 1,000 steps  100%" in last
    for text in ("123.5", "480.0", "0.0123", "value loss", "steps/s", "elapsed", "left"):
        assert text in last
    assert "a checkpoint" in plain
    assert out.count(HIDE) == 1
    assert out.rindex(SHOW) > out.rindex(HIDE)


@pytest.mark.parametrize(
    "body",
    [
        'p = Progress(10, "auto", "t"); p.update(1, metrics); raise RuntimeError("boom")',
        'with Progress(10, "auto", "t") as p: p.update(1, metrics); raise KeyboardInterrupt',
        'p = Progress(10, "auto", "t"); p.update(1, metrics); del p; time.sleep(0.1)',
    ],
)
def test_the_cursor_comes_back_whatever_happens(body: str) -> None:
    out = on_a_terminal(HEAD + body)
    assert out.count(HIDE) == 1
    assert out.rindex(SHOW) > out.rindex(HIDE)


def test_drawing_slows_down_where_it_is_dear(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(10_000, "live", "slow terminal")
    draws = []

    def slow(*_: object, **__: object) -> None:
        draws.append(clock.now)
        clock.now += 0.02

    assert progress._live is not None
    monkeypatch.setattr(progress._live, "update", slow)
    for i in range(1000):
        progress.update(i, {})
        clock.now += 0.01
    monkeypatch.undo()
    progress.close()
    assert len(draws) == 3


def test_summary_shows_names_and_values_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary("Finished", {"return": "480.2 ± 3.1", "folder": "runs/[x]"})
    out = capsys.readouterr().out
    assert "Finished" in out
    assert re.search(r"return +480\.2 ± 3\.1", out)
    assert re.search(r"folder +runs/\[x\]", out)


def test_a_summary_never_wraps_what_is_to_be_copied(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path, command = f"/runs/{'x' * 90}", f"penstock resume /runs/{'x' * 90} --run.steps 400000"
    print_summary("Finished", {"return": "1", "run directory": path, "next": f"penstock eval a\n{command}"})
    assert capsys.readouterr().out.splitlines() == [
        "Finished",
        "  return         1",
        f"  run directory  {path}",
        "  next           penstock eval a",
        f"                 {command}",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (61.9, "1:01"), (3600, "1:00:00"), (90061, "25:01:01"), (float("nan"), "-:--")]
)
def test_clock(seconds: float, text: str) -> None:
    assert module.clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-7, "1e-07"),
        (0.01234, "0.0123"),
        (123.45, "123.5"),
        (-20000.0, "-20,000"),
        (float("nan"), "-"),
        (float("inf"), "inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert module.number(value) in (text, "123.4" if value == 123.45 else text)


def test_numbers_of_policies_and_agents_stand_beside_those_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(100, "plain", "PPO and DQN") as progress:
        progress.update(
            100,
            {
                "rollout/ep_rew_mean": 3.0,
                "rollout/red/ep_rew_mean": 1.0,
                "rollout/agent/x/ep_rew_mean": 2.0,
                "train/red/loss": 4.0,
            },
        )
    said = capsys.readouterr().out
    assert "return 3  return of red 1  return of agent x 2" in said
    assert "loss" not in said


@pytest.mark.parametrize(("agents", "policies"), [("xy", ["red", "blue"]), ("wxyz", [])])
def test_a_line_shows_all_of_a_kind_or_none(
    agents: str, policies: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {f"rollout/{name}/ep_rew_mean": 1.0 for name in [*policies, *(f"agent/{each}" for each in agents)]}
    with Progress(100, "plain", "PPO and DQN") as progress:
        progress.update(100, {"rollout/ep_rew_mean": 3.0, **parts})
    said = capsys.readouterr().out
    assert [name for name in policies if f"return of {name} 1" in said] == policies
    assert "return of agent" not in said


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_the_rating_of_self_play_is_shown(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(100, mode, "SelfPlay") as progress:
        progress.update(100, {"rollout/ep_rew_mean": 0.0, "self_play/elo": 1123.4, "self_play/win_rate": 0.75})
    said = " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out).split())
    assert "Elo 1,123" in said
    assert "win rate against past selves 0.75" in said
