"""The four trackers: TensorBoard as it is, the others by stand-ins, and by themselves where they are installed."""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import penstock as ps
from penstock.run.log import read_metrics
from penstock.run.tracking.answer import require_answer
from penstock.run.tracking.sender import Sender
from tests.run.cartpole import at
from tests.run.tracking.made import ended, run_dir, write

STANDINS = Path(__file__).parent / "standins"
OTHERS = ("wandb", "mlflow", "trackio")


def taken_out() -> dict[str, ModuleType]:
    """Takes the libraries, and what of ours imports them, out of the loaded modules."""
    ours = tuple(f"penstock.run.tracking.on_{name}" for name in OTHERS)
    return {x: sys.modules.pop(x) for x in list(sys.modules) if x.partition(".")[0] in OTHERS or x in ours}


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = taken_out()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(STANDINS)
        patch.setenv("WANDB_MODE", "offline")
        for name in ("MLFLOW_TRACKING_URI", "TRACKIO_SERVER_URL"):
            patch.delenv(name, raising=False)
        yield
    taken_out()
    sys.modules.update(real)


def events(run: Path, tag: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(run))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def twice(tmp_path: Path, name: str) -> Path:
    """A run with odd names and a video, sent, and gone on with: rows 1 and 2, then 3 and 4."""
    run = run_dir(tmp_path / "run", rows=2)
    (run / "videos").mkdir()
    (run / "videos" / "v-1.mp4").write_bytes(b"x")
    for steps in (range(3, 5), range(0)):
        said = ended(Sender(run, name), most_s=90.0, start_s=60.0)
        assert not [text for text in said if not text.startswith("waiting")]
        if steps:
            write(run, steps)
    return run


def test_tensorboard_shows_a_run_and_what_goes_on(tmp_path: Path) -> None:
    run = twice(tmp_path, "tensorboard")
    assert events(run, "a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    reader = EventAccumulator(str(run))
    reader.Reload()
    assert reader.Tags()["tensors"] == ["settings/text_summary", "versions/text_summary"]
    text = reader.Tensors("versions/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("    {") and '"env": "CartPole-v1"' in text


def test_tensorboard_drops_what_a_killed_process_had_written_and_not_noted(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=3)
    ended(Sender(run, "tensorboard"))
    note = run / "trackers" / "tensorboard.json"
    note.write_text(note.read_text().replace('"at": 3', '"at": 2').replace('"step": 3', '"step": 2'))
    ended(Sender(run, "tensorboard"))
    assert events(run, "a") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_wandb_gets_rows_by_their_steps_and_goes_on_by_its_id(tmp_path: Path, standins: None) -> None:
    twice(tmp_path, "wandb")
    ((id_, run),) = sys.modules["wandb"].RUNS.items()
    assert len(id_) == 12 and run.name == "ppo CartPole-v1 run" and run.config["algo.lr"] == 1e-3
    assert [row for row in run.rows if "a" in row] == [{"a": float(step), "step": step} for step in (1, 2, 3, 4)]
    assert [row for row in run.rows if "a" not in row] == [
        {"videos/v-1": sys.modules["wandb"].Video(str(tmp_path / "run" / "videos" / "v-1.mp4"))}
    ]
    assert run.artifacts == [
        ("config.json", f"{id_}-settings", "settings"),
        ("meta.json", f"{id_}-versions", "versions"),
    ]
    assert run.metrics == [("*", "step")] * 2 and run.finished == 2


def test_mlflow_gets_rows_and_settings_once(tmp_path: Path, standins: None) -> None:
    twice(tmp_path, "mlflow")
    ((key, run),) = sys.modules["mlflow"].RUNS.items()
    assert key == "run0" and run.name == "ppo CartPole-v1 run" and run.params["algo.net.hidden"] == "[8, 8]"
    assert [(metric.key, metric.value, metric.step) for metric in run.metrics] == [
        ("a", float(x), x) for x in (1, 2, 3, 4)
    ]
    assert run.artifacts == [("config.json", "settings"), ("meta.json", "versions"), ("v-1.mp4", "video")]
    assert run.states == ["FINISHED", "RUNNING", "FINISHED"]
    assert sys.modules["mlflow"].EXPERIMENTS["penstock"].location == (tmp_path / "run" / "mlartifacts").as_uri()
    assert sys.modules["penstock.run.tracking.on_mlflow"]._named("rollout/ep_a=b°_mean") == "rollout/ep_a_b__mean"


def test_trackio_gets_rows_in_one_run(tmp_path: Path, standins: None) -> None:
    twice(tmp_path, "trackio")
    ((name, run),) = sys.modules["trackio"].RUNS.items()
    assert name.startswith("ppo CartPole-v1 run ") and run.config["run.steps"] == 5
    assert run.rows == [(step, {"a": float(step)}) for step in (1, 2, 3, 4)] and run.finished == 2
    assert run.artifacts == [
        ("config.json", "abc-settings", "settings"), ("meta.json", "abc-versions", "versions"), ("v-1.mp4", "v-1", "video")
    ]  # fmt: skip


def test_all_at_once_get_the_same_names(tmp_path: Path, standins: None) -> None:
    run = tmp_path / "run"
    ps.train(at(run, trackers=("tensorboard", *OTHERS)))
    rows = read_metrics(run)
    finite = [{name: x for name, x in row.items() if x == x} for row in rows]
    (wandb,), (trackio,) = (sys.modules[name].RUNS.values() for name in ("wandb", "trackio"))
    assert wandb.rows == finite and [{**row, "step": step} for step, row in trackio.rows] == finite
    (mlflow,) = sys.modules["mlflow"].RUNS.values()
    assert {m.key for m in mlflow.metrics} == {name for row in finite for name in row} - {"step"}
    returns = [(int(row["step"]), row["rollout/ep_rew_mean"]) for row in finite if "rollout/ep_rew_mean" in row]
    assert [(step, pytest.approx(value)) for step, value in events(run, "rollout/ep_rew_mean")] == returns


@pytest.mark.parametrize("name", OTHERS)
def test_a_server_that_is_not_there_is_said_at_once(
    tmp_path: Path, standins: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("WANDB_MODE", "online")
    for variable in ("WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "TRACKIO_SERVER_URL"):
        monkeypatch.setenv(variable, url)
    (said,) = ended(Sender(run_dir(tmp_path / "run", rows=2), name), start_s=60.0)
    assert f"tracker {name} failed (ConnectionError: no answer from {url} (" in said and "2 rows not sent" in said


def test_a_server_that_says_nothing_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.run.tracking.answer._ANSWER_S", 0.05)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        with pytest.raises(ConnectionError, match="no answer from http://127"):
            require_answer(f"http://127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(ConnectionError, match="no answer from nonsense"):
        require_answer("nonsense")


# The libraries themselves


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed: pip install 'penstock[{name}]'")


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)


@needs("wandb")
@pytest.mark.slow
def test_the_real_wandb_offline(tmp_path: Path, real: None) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "penstock", "track", str(run), "--trackers", "wandb"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    ps.train(at(run, steps=320))
    subprocess.run(command, env=env, check=True, timeout=200)
    ps.resume(run, {"run.steps": 640})
    subprocess.run(command, env=env, check=True, timeout=200)
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "one id"
    assert all(b"rollout/ep_rew_mean" in file.read_bytes() for file in files)


@needs("wandb")
@pytest.mark.slow
def test_the_real_wandb_sees_events_of_tensorboard(
    tmp_path: Path, real: None, capfd: pytest.CaptureFixture[str]
) -> None:
    import wandb  # pyright: ignore

    sync = wandb.init(project="p", sync_tensorboard=True, dir=str(tmp_path))
    ps.train(at(tmp_path / "run", trackers=("tensorboard",)))
    sync.finish()
    assert "eval/mean_reward" in capfd.readouterr().err, "it lists what it has"


@needs("mlflow")
@pytest.mark.slow
def test_the_real_mlflow_in_a_file(tmp_path: Path, real: None) -> None:
    run = twice(tmp_path, "mlflow")
    with sqlite3.connect(run / "mlflow.db") as base:
        assert base.execute("select key, value, step from metrics order by step").fetchall() == [
            ("a", float(x), x) for x in (1, 2, 3, 4)
        ]
        assert base.execute("select count(*), min(status) from runs").fetchall() == [(1, "FINISHED")]
        assert ("algo.lr", "0.001") in base.execute("select key, value from params").fetchall()
    assert {path.name for path in (run / "mlartifacts").rglob("*.*")} == {"config.json", "meta.json", "v-1.mp4"}


@needs("trackio")
@pytest.mark.slow
def test_the_real_trackio_in_its_folder(tmp_path: Path, real: None) -> None:
    twice(tmp_path, "trackio")
    (file,) = (tmp_path / "trackio").rglob("penstock.db")
    with sqlite3.connect(file) as base:
        assert [step for (step,) in base.execute("select step from metrics order by step")] == [1, 2, 3, 4]
        assert len({name for (name,) in base.execute("select run_name from metrics")}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        pytest.param("wandb", ["init", "Settings", "Video"], marks=needs("wandb")),
        pytest.param("trackio", ["init", "Run.log", "Run.log_artifact"], marks=needs("trackio")),
        pytest.param("mlflow", [f"MlflowClient.{x}" for x in ("log_batch", "search_runs", "create_run", "update_run",
                     "log_artifact", "create_experiment", "set_terminated")], marks=needs("mlflow")),
    ],
)  # fmt: skip
def test_the_stand_ins_take_arguments_that_the_libraries_take(name: str, calls: list[str]) -> None:
    def arguments(module: Any, call: str) -> set[str]:
        for part in call.split("."):
            module = getattr(module, part)
        return set(inspect.signature(module).parameters)

    library = importlib.import_module(name)
    real = taken_out()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STANDINS)
        standin = importlib.import_module(name)
    taken_out()
    sys.modules.update(real)
    assert standin is not library
    for call in calls:
        lacking = arguments(standin, call) - arguments(library, call) - {"mode", "base_url"}
        assert not lacking, f"{name}.{call} does not take {lacking}"
