from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.affinity import Gpu, Machine, read_machine
from penstock.run.launch import sweep as sweep_module
from penstock.run.launch.display import LaunchDisplay, clock, last_row, log_end, reason_of, report
from penstock.run.launch.launcher import Launcher
from penstock.run.launch.sweep import (
    Queue,
    Run,
    Sweep,
    choose,
    has_checkpoint,
    new_queue,
    read_queue,
    require_same,
    shown,
    split_values,
)  # fmt: skip

ROOT = Path(__file__).parent.parent.parent.parent
LIMIT_S = 200.0
FAKE = """
import json, os, pathlib, signal, sys, time
command, *rest = sys.argv[1:]
run = pathlib.Path(rest[0] if command == "resume" else rest[rest.index("--run.dir") + 1])
print("cpus", sorted(os.sched_getaffinity(0)), "cuda", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
assert command == "resume" or not run.exists() or not any(run.iterdir()), "not empty"
run.mkdir(parents=True, exist_ok=True)
(run / "pid").write_text(str(os.getpid()))
what = run.name.split("=")[1].split("_")[0] if "=" in run.name else "ok"
def save(*_):
    (run / "checkpoints" / "000000000007").mkdir(parents=True)
    raise SystemExit(143)
if what != "deaf":
    signal.signal(signal.SIGTERM, save)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run / "metrics.jsonl").write_text(json.dumps({"step": 5, "rollout/ep_rew_mean": 2.5}) + "\\n")
if what == "bad" or (what == "once" and not (run.parent / "again").exists()):
    if what == "once":
        (run.parent / "again").touch()
    print("the licence has expired", file=sys.stderr)
    raise SystemExit(3)
if what == "dead":
    os.kill(os.getpid(), signal.SIGKILL)
if what in ("slow", "deaf") and command == "train":
    time.sleep(1000)
"""
"""Stands for `penstock train` and `resume`, since the working folder comes first: what it does is the value in its name."""


class Seen:
    """A display that remembers."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.most = 0

    def started(self, run: Run, slot: int) -> None:
        self.events.append(f"{run.name} in {slot}")

    def ended(self, run: Run) -> None:
        self.events.append(f"{run.name} {run.status}")

    def note(self, text: str) -> None:
        self.events.append(text)

    def refresh(self, running: Mapping[str, float]) -> None:
        self.most = max(self.most, len(running))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which `python -m penstock` is the fake; gives the directory of a sweep."""
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "__init__.py").touch()
    (tmp_path / "penstock" / "__main__.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    return Path("sweep")


def queue_of(folder: Path, *values: str, seeds: tuple[int, ...] = (0,)) -> Queue:
    return new_queue(folder, Sweep("ppo", ("--env", "X"), {"algo.what": values} if values else {}, seeds))


def machines(n: int) -> list[Machine]:
    cpus = read_machine().cpus
    return [Machine(((cpus[k % len(cpus)],),), (0,)) for k in range(n)]


def statuses(queue: Queue) -> dict[str, str]:
    return {run.name: run.status for run in queue.runs}


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


# Sweeps


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,3e-4", ("1e-3", "3e-4")),
        ("1", ("1",)),
        ("linear(1e-3, 0), 3e-4", ("linear(1e-3, 0)", "3e-4")),
        ("[64,64],[128,128]", ("[64,64]", "[128,128]")),
        ("a,,b", ("a", "", "b")),
    ],
)
def test_values_between_commas_outside_brackets(text: str, values: tuple[str, ...]) -> None:
    assert split_values(text) == values


def test_every_combination_with_every_seed(tmp_path: Path) -> None:
    grid = {
        "algo.lr": ("1e-3", "linear(1e-3, 0)"),
        "sampler.B": ("8",),
        "algo.net.hidden": ("[64,64]",),
        "algo.x": ("-1",),
    }
    queue = new_queue(tmp_path, Sweep("ppo", ("--env", "X"), grid, (1, 2)))
    assert [run.name for run in queue.runs] == [
        "lr=1e-3_B=8_hidden=64-64_x=-1_s1", "lr=1e-3_B=8_hidden=64-64_x=-1_s2",
        "lr=linear-1e-3-0_B=8_hidden=64-64_x=-1_s1", "lr=linear-1e-3-0_B=8_hidden=64-64_x=-1_s2",
    ]  # fmt: skip
    first = queue.runs[2]
    assert queue.command(first) == [
        "train", "ppo", "--env", "X", "--algo.lr", "linear(1e-3, 0)", "--sampler.B", "8", "--algo.net.hidden", "64", "64",
        "--algo.x=-1", "--run.seed", "1", "--run.dir", str(tmp_path / first.name),
    ]  # fmt: skip
    assert "'linear(1e-3, 0)'" in shown(queue.command(first))


def test_names_are_unique_and_say_which_setting_is_meant(tmp_path: Path) -> None:
    grid = {"algo.T": ("a/b", "a-b"), "sampler.T": ("1",)}
    names = [run.name for run in new_queue(tmp_path, Sweep("ppo", (), grid)).runs]
    assert names == ["algo.T=a-b_sampler.T=1_s0", "algo.T=a-b_sampler.T=1_s0-2"]
    assert [run.name for run in queue_of(tmp_path, seeds=(1, 2)).runs] == ["s1", "s2"]


def test_the_file_brings_the_queue_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_of(tmp_path / "s", "a", "b", "c", "d", "e")
    for run, status in zip(queue.runs, ("waiting", "running", "failed", "stopped", "finished")):
        run.status = status  # pyright: ignore
        run.attempts, run.seconds = 2, 1.5
    queue.runs[2].code = 3
    queue.save()
    back = read_queue(tmp_path / "s")
    assert list(statuses(back).values()) == ["waiting", "stopped", "failed", "stopped", "finished"]
    assert [run.name for run in choose(back, None)] == ["what=a_s0", "what=b_s0", "what=d_s0"]
    assert [run.name for run in choose(back, [])] == [run.name for run in choose(back, ["what=c_s0"])] == ["what=c_s0"]
    assert (back.runs[2].code, back.runs[2].attempts, back.runs[2].seconds) == (3, 2, 1.5)
    monkeypatch.setattr(
        sweep_module, "_is_finished", lambda run_dir: run_dir.name in ("what=a_s0", "what=b_s0", "what=c_s0")
    )  # pyright: ignore
    assert list(statuses(read_queue(tmp_path / "s")).values()) == [
        "waiting",
        "finished",
        "finished",
        "stopped",
        "finished",
    ]
    for names, message in ((["what=f_s0"], "did you mean"), (["what=a_s0"], "it is waiting")):
        with pytest.raises(ConfigError, match=message):
            choose(back, names)


def test_another_sweep_is_refused(tmp_path: Path) -> None:
    queue = queue_of(tmp_path, "a", seeds=(1,))
    require_same(queue, Sweep("ppo", ("--env", "X"), {"algo.what": ("a",)}, (1,)))
    for sweep, what in (
        (Sweep("a2c", ("--env", "X"), {"algo.what": ("a",)}, (1,)), "ALGO was ppo and is a2c"),
        (Sweep("ppo", ("--env", "Y"), {"algo.what": ("a",)}, (1,)), "options of train was --env X and is --env Y"),
        (Sweep("ppo", ("--env", "X"), {"algo.what": ("a", "b")}, (1,)), "--grid was .* and is .*a,b"),
        (Sweep("ppo", ("--env", "X"), {"algo.what": ("a",)}, (1, 2)), r"--seeds was \[1\] and is \[1, 2\]"),
    ):
        with pytest.raises(ConfigError, match=what):
            require_same(queue, sweep)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no launch\.json"):
        read_queue(tmp_path)
    queue_of(tmp_path, "a").save()
    file = tmp_path / "launch.json"
    good = json.loads(file.read_text())
    for text in ("", "[]", "{}", json.dumps({**good, "format": 9}), json.dumps({**good, "runs": {}})):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"launch\.json"):
            read_queue(tmp_path)


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*file/s/launch\.json"):
        queue_of(tmp_path / "file" / "s", "a").save()


def test_resumes_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    queue = queue_of(tmp_path, "a")
    run_dir = queue.run_dir(queue.runs[0])
    assert queue.command(queue.runs[0])[0] == "train"
    (run_dir / "checkpoints" / ".tmp-7-1-ab").mkdir(parents=True)
    assert not has_checkpoint(run_dir)
    (run_dir / "checkpoints" / "000000000007").mkdir()
    assert queue.command(queue.runs[0]) == ["resume", str(run_dir)]


# Work


def test_works_a_queue_off_with_each_run_on_the_cpus_of_its_slot(fake: Path) -> None:
    queue, seen = queue_of(fake, "a", "b", "c"), Seen()
    slots = machines(2)
    assert Launcher(queue, queue.runs, slots, seen).work() is None
    assert set(statuses(queue).values()) == {"finished"}
    assert seen.most <= 2
    started = dict(event.split(" in ") for event in seen.events if " in " in event)
    for run in queue.runs:
        log = queue.log(run).read_text()
        assert log.startswith(
            f"$ python -m penstock train ppo --env X --algo.what {run.name[5]} --run.seed 0 --run.dir"
        )
        assert f"cpus {list(slots[int(started[run.name])].cpus)} cuda None" in log
        assert run.attempts == 1
    assert statuses(read_queue(fake)) == statuses(queue)


def test_failures_are_kept_and_only_they_are_retried(fake: Path) -> None:
    queue = queue_of(fake, "ok", "once", "bad", "dead")
    assert Launcher(queue, queue.runs, machines(2), Seen()).work() is None
    assert list(statuses(queue).values()) == ["finished", "failed", "failed", "failed"]
    assert [run.code for run in queue.runs] == [0, 3, 3, -9]
    assert [reason_of(run) for run in queue.runs[2:]] == [
        "exit code 3 (environment)",
        "killed by SIGKILL (out of memory?)",
    ]
    again = read_queue(fake)
    assert choose(again, None) == []
    assert Launcher(again, choose(again, []), machines(2), Seen()).work() is None
    assert list(statuses(again).values()) == ["finished", "finished", "failed", "failed"]
    assert [run.attempts for run in again.runs] == [1, 2, 2, 2]
    assert again.log(again.runs[1]).read_text().count("$ python -m penstock") == 2


def test_a_run_directory_that_is_not_ours_is_left_alone(fake: Path) -> None:
    queue = queue_of(fake, "a")
    queue.run_dir(queue.runs[0]).mkdir(parents=True)
    (queue.run_dir(queue.runs[0]) / "thesis.tex").touch()
    Launcher(queue, queue.runs, machines(1), Seen()).work()
    assert (queue.run_dir(queue.runs[0]) / "thesis.tex").exists()
    assert queue.runs[0].status == "failed"


def test_several_gpus_are_shared_out(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    queue, seen = queue_of(fake, "a", "b"), Seen()
    cpu = read_machine().cpus[:1]
    slots = [Machine((cpu,), (0,), gpus=(Gpu("x", f"GPU-{k}"),)) for k in range(2)]
    Launcher(queue, queue.runs, slots, seen).work()
    started = dict(event.split(" in ") for event in seen.events if " in " in event)
    for run in queue.runs:
        assert f"cuda GPU-{started[run.name]}" in queue.log(run).read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    one = queue_of(fake / "again", "a")
    Launcher(one, one.runs, slots, Seen()).work()
    assert "cuda 5" in one.log(one.runs[0]).read_text()


def test_the_first_signal_saves_the_second_kills(fake: Path) -> None:
    queue, seen = queue_of(fake, "slow", "deaf", "ok"), Seen()

    def interrupt() -> None:
        for name in ("slow", "deaf"):
            wait_for((fake / f"what={name}_s0" / "metrics.jsonl").exists, f"{name} run")
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: queue.runs[0].status == "stopped", "checkpoint")
        assert queue.runs[1].status == "running"
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    assert Launcher(queue, queue.runs, machines(2), seen).work() == signal.SIGINT
    thread.join(timeout=LIMIT_S)
    assert signal.getsignal(signal.SIGINT) is before
    assert statuses(queue) == {"what=slow_s0": "stopped", "what=deaf_s0": "stopped", "what=ok_s0": "waiting"}
    assert any("SIGINT: 2 runs save and end" in event for event in seen.events)
    again = read_queue(fake)
    assert again.command(again.runs[0])[0] == "resume"
    assert again.command(again.runs[1])[0] == "train"


def test_runs_die_with_a_launcher_that_is_killed_and_the_next_goes_on(fake: Path, tmp_path: Path) -> None:
    queue = queue_of(fake, "slow", "deaf", "ok")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "launcher.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom penstock.run.affinity import Machine\n"
        "from penstock.run.launch.launcher import Launcher\n"
        "from penstock.run.launch.display import LaunchDisplay\nfrom penstock.run.launch.sweep import Sweep, new_queue\n"
        f"q = new_queue(Path('{fake}'), Sweep('ppo', ('--env', 'X'), {{'algo.what': ('slow', 'deaf', 'ok')}}))\n"
        f"Launcher(q, q.runs, {machines(2)!r}, LaunchDisplay(q, {{}})).work()\n"
    )
    launcher = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        dirs = [queue.run_dir(run) for run in queue.runs[:2]]
        wait_for(lambda: all((run_dir / "metrics.jsonl").exists() for run_dir in dirs), "running runs")
        pids = [int((run_dir / "pid").read_text()) for run_dir in dirs]
        assert not any(is_gone(pid) for pid in pids)
    finally:
        launcher.kill()
        launcher.wait(timeout=LIMIT_S)
    wait_for(lambda: all(is_gone(pid) for pid in pids), "death of the runs")
    (dirs[0] / "checkpoints" / "000000000007").mkdir(parents=True)
    (dirs[1] / "half").touch()
    again = read_queue(fake)
    assert list(statuses(again).values()) == ["stopped", "stopped", "waiting"]
    (tmp_path / "penstock" / "__main__.py").write_text(FAKE.replace('"slow", "deaf"', '"slow",'))
    assert Launcher(again, choose(again, None), machines(2), Seen()).work() is None
    assert set(statuses(again).values()) == {"finished"}
    assert "penstock resume" in again.log(again.runs[0]).read_text()
    assert not (dirs[1] / "half").exists()  # begun anew
    assert "resume" not in again.log(again.runs[1]).read_text()


def test_a_run_whose_launcher_is_gone_already_does_not_begin(tmp_path: Path) -> None:
    script = ROOT / "penstock" / "run" / "launch" / "child.py"
    command = [sys.executable, "-c", f"open({str(tmp_path / 'x')!r}, 'w')"]
    done = subprocess.run([sys.executable, "-I", "-S", str(script), "1", "", *command], timeout=200, check=False)
    assert done.returncode == 137
    assert not (tmp_path / "x").exists()


# What is shown


def shown_at_the_end(queue: Queue) -> str:
    console = Console(width=200, highlight=False, record=True, file=io.StringIO())
    report(queue, console)
    return console.export_text()


def test_the_report_says_what_failed_and_how_to_go_on(fake: Path) -> None:
    queue = queue_of(fake, "ok", "bad", "slow")
    Launcher(queue, queue.runs[:2], machines(2), Seen()).work()
    text = shown_at_the_end(queue)
    for words in (
        "what=bad_s0 failed: exit code 3 (environment)", "the end of sweep/logs/what=bad_s0.log:", "  | the licence has expired",
        "penstock launch sweep --retry what=bad_s0\n", "python -m penstock train ppo --env X --algo.what bad --run.seed 0",
        "sweep: 1 of 3 runs finished, 1 failed, 1 left", "penstock launch sweep\n", "penstock plot sweep",
    ):  # fmt: skip
        assert words in text
    queue.runs = queue.runs[:1]
    assert "failed" not in shown_at_the_end(queue)


def test_lines_without_a_terminal(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue = queue_of(fake, "ok", "bad")
    with LaunchDisplay(queue, {}) as display:
        Launcher(queue, queue.runs, machines(1), display).work()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "what=ok_s0: started in slot 1   (1 running, 1 waiting)"
    assert "what=ok_s0: finished after 0:0" in lines[1]
    assert "at 5 steps, return 2.5" in lines[1]
    assert "what=bad_s0: failed, exit code 3 (environment) after 0:0" in lines[3]


def test_a_table_on_a_terminal_fits_it(fake: Path) -> None:
    queue = queue_of(fake, "ok", "bad", seeds=tuple(range(20)))
    console = Console(width=100, height=16, force_terminal=True, highlight=False, record=True, file=io.StringIO())
    with LaunchDisplay(queue, {run.name: 9_000 for run in queue.runs}, console) as display:
        Launcher(queue, [queue.runs[0], queue.runs[20]], machines(1), display).work()
    last = console.export_text().rpartition("sweep: ")[2]
    assert "1 finished, 38 waiting, 1 failed" in last
    assert last.index("exit code 3") < last.index("│ finished") < last.index("│ waiting")
    assert "5 / 9,000" in last
    assert "... and 32 more" in last


def test_log_ends_and_metrics_of_files_that_are_not_there_or_half_written(tmp_path: Path) -> None:
    assert "cannot be read" in log_end(tmp_path / "x")[0]
    assert last_row(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/mean_reward": 3}\n{"step": 2}\n[]\n{"st')
    assert last_row(tmp_path) == {"step": 2, "eval/mean_reward": 3}
    (tmp_path / "log").write_text("old\n$ python -m penstock train\n\nnew \n" + "x\n" * 2)
    assert log_end(tmp_path / "log") == ["new", "x", "x"]
    assert (clock(59.9), clock(3600)) == ("0:59", "1:00:00")
