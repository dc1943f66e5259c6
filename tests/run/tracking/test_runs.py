from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import CheckpointError, ConfigError, MissingExtraError
from penstock.run.files.stored_experiment import read_config
from penstock.run.log import read_metrics
from penstock.run.tracking import tracker
from tests.run.cartpole import at
from tests.run.files.forging import with_config
from tests.run.tracking import made
from tests.run.tracking.made import HERE, LINE, Told

NAME = f"{HERE}:Told"
LINES = f"{HERE}:Lines"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    for part in (Told.rows, Told.files, Told.runs, Told.ended, Told.fails):
        part.clear()


def steps_of(run: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(run)]


def test_a_run_is_sent_with_its_final_policy(tmp_path: Path) -> None:
    result = ps.train(at(tmp_path / "run", trackers=(NAME,)))
    assert Told.steps() == steps_of(tmp_path / "run") and len(Told.rows) == 11
    assert Told.rows[-1][1]["eval/mean_reward"] == result.metrics["eval/mean_reward"]
    assert Told.files == [("config.json", "settings"), ("meta.json", "versions"), ("policy.safetensors", "policy")]
    assert Told.runs[0].settings["algo.lr"] == at(tmp_path).algo.lr  # pyright: ignore[reportAttributeAccessIssue]


def test_rows_are_sent_as_the_run_goes(tmp_path: Path) -> None:
    with ps.Run(at(tmp_path / "run", trackers=(NAME,))) as run:
        for it in run:
            end = time.monotonic() + 20.0
            while len(Told.rows) < it.itr - 1:  # this iteration is logged after the body
                assert time.monotonic() < end
                time.sleep(0.002)


def test_a_resumed_run_goes_on_in_the_same_tracked_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ps.Run(at(run, trackers=(NAME,), checkpoint_interval=128)) as live:
        for it in live:
            if it.itr == 5:
                live.stop()
    ps.resume(run)
    assert Told.steps() == steps_of(run) and len({told.id for told in Told.runs}) == 1 and len(Told.runs) == 2
    assert [kind for _, kind in Told.files].count("policy") == 2
    ps.resume(run, {"run.trackers": (), "run.steps": 800})
    assert len(Told.runs) == 2


def test_a_tracker_that_fails_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    Told.fails |= {"start": 10**6}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ps.Run(at(tmp_path / "run", trackers=(NAME,))) as run:
            for _ in run:
                while not run._senders[0].trouble:  # pyright: ignore[reportPrivateUsage]
                    pass
    texts = [str(warning.message) for warning in said]
    assert [text for text in texts if "training goes on" in text] == [
        f"tracker {NAME} failed: RuntimeError: no start, at {made.__file__}:{LINE}; training goes on, and it gets every "
        "row later"
    ]
    assert "11 rows not sent: penstock track" in texts[-1] and run.result.stopped_by == "steps"


def test_track_sends_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    ps.train(at(run))
    assert main(["track", str(run)]) == 2
    assert "was trained without run.trackers; name some" in capsys.readouterr().err
    assert main(["track", str(run), "--trackers", NAME]) == 0
    assert Told.steps() == steps_of(run) and ("policy.safetensors", "policy") in Told.files
    assert main(["track", str(run), "--trackers", NAME]) == 0
    assert len(Told.rows) == 11
    Told.fails |= {"start": 10}
    assert main(["track", str(run), "--trackers", NAME]) == 1
    assert "penstock: tracker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("x",), r"run\.trackers names 'x'; expected tensorboard, wandb, mlflow, trackio, or your own as module:NAME"),
        (("wandb", "wandb"), "names 'wandb' twice"),
        ("wandb", r"run\.trackers='wandb' \(str\)"),
    ],
)
def test_settings_that_name_no_tracker_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ps.RunConfig(trackers=given)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:X", "cannot import 'no_such_module'"),
        (f"{HERE}:Nothing", "has no 'Nothing'"),
        (f"{HERE}:HERE", r"run\.trackers .*:HERE='tests.run.tracking.made' cannot be called; expected .*a tracker"),
        (f"{HERE}:Lacking", "has no artifact.*docs/trackers.md"),
        (
            f"{HERE}:WithPath",
            r"=WithPath cannot be called without arguments \(missing .*'path'\); expected .*a tracker",
        ),
        (f"{HERE}:Stepless", r"Stepless.write=write cannot take self and step and row .*write\(self, step, row\)"),
    ],
)
def test_a_tracker_that_cannot_be_made_is_refused_before_the_run(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ps.train(at(tmp_path / "run", trackers=(name,)))
    assert not (tmp_path / "run").exists()


def test_a_missing_extra_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"wandb is not installed; .*'penstock\[wandb\]'"):
        ps.train(at(tmp_path / "run", trackers=("wandb",)))
    assert not (tmp_path / "run").exists()


def test_what_makes_no_tracker_is_trouble(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"ConfigError: builtins.int has no start\(run.* 11 rows not sent"):
        ps.train(at(tmp_path / "run", trackers=(f"{HERE}:not_a_tracker",)))


def test_a_stranger_s_tracker_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    ps.train(at(run))
    with_config(lambda settings: settings["run"].update(trackers=["os:system"]))(run)
    for opened in (lambda: ps.resume(run, {"run.steps": 2000}), lambda: read_config(run).trackers()):
        with pytest.raises(CheckpointError, match=r"run\.trackers\[0\]='os:system'"):
            opened()
    assert main(["track", str(run)]) == CheckpointError.exit_code


def test_a_run_that_had_tensorboard_on_or_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    ps.train(at(run))

    def older(on: bool) -> None:
        def change(settings: dict[str, Any]) -> None:
            settings["run"].pop("trackers", None)
            settings["run"]["tensorboard"] = on

        with_config(change)(run)

    older(True)
    assert read_config(run).trackers() == ("tensorboard",)
    ps.resume(run, {"run.steps": 1000})
    assert list(run.glob("events.*")) and json.loads((run / "config.json").read_text())["experiment"]["run"][
        "trackers"
    ] == ["tensorboard"]
    older(False)
    assert read_config(run).trackers() == ()
    older(True)
    monkeypatch.setattr("penstock.run.files.stored_experiment.is_installed", lambda package: False)
    assert read_config(run).trackers() == ()


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [4, 7, 10])
def test_a_killed_run_sends_what_is_missing_and_none_twice(tmp_path: Path, killed_at: int) -> None:
    code = (
        "import os, sys; from pathlib import Path; import penstock as ps; from tests.run.cartpole import at\n"
        f"with ps.Run(at(Path(sys.argv[1]), trackers=({LINES!r},), checkpoint_interval=128)) as run:\n"
        f"    for it in run: it.itr == {killed_at} and os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    run = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", code, str(run)], timeout=200, check=False, env=env)
    assert done.returncode == -9
    ps.resume(run)
    lines = (tmp_path / "lines.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("row")] == [f"row {step}" for step in steps_of(run)]
    assert len({line for line in lines if line.startswith("run")}) == 1 and lines[-2:] == ["file policy", "end"]
