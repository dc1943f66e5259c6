"""A search in its directory, with a fake in the place of `penstock train`: what is kept, what fails, what goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.machine import Machine, read_machine
from penstock.core.spec import EnvSpec
from penstock.envs.check import check_env
from penstock.studies import tune
from penstock.studies.schedulers import Decision
from penstock.studies.slots.launcher import Launcher
from penstock.studies.study import Study, make_study, open_study
from penstock.studies.study_file import STATE
from penstock.studies.tune import execute, locked_study, prepared, search_settings
from tests.studies.slots import fakes
from tests.studies.slots.fakes import Seen

FAKE = """
import json, os, pathlib, signal, sys, time
command, *rest = sys.argv[1:]
run = pathlib.Path(rest[0] if command == "resume" else rest[rest.index("--run.dir") + 1])
stop = int(rest[rest.index("--run.stop") + 2]) if "--run.stop" in rest else 900
config = run / "config.json" if command == "resume" else pathlib.Path(rest[rest.index("--config") + 1], "config.json")
text = config.read_text()
lr = json.loads(text)["experiment"]["algo"]["lr"]
(run / "checkpoints" / "000000000007").mkdir(parents=True, exist_ok=True)
(run / "config.json").write_text(text)
with open(run / "legs", "a") as file:
    print(command, stop, file=file)
what = os.environ.get("FAKE", "")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if what == "slow":
    (run / "slow").touch()
    time.sleep(1000)
if what == "once" and not (run / "again").exists():
    (run / "again").touch()
    print("the licence has expired")
    sys.exit(3)
if what == "bad" and run.name == "trial-001":
    print("the licence has expired")
    sys.exit(3)
row = {"step": stop, "time/total_timesteps": stop, "rollout/episodes": 1, "eval/mean_reward": lr * stop}
if what == "nan":
    row["eval/mean_reward"] = None
with open(run / "metrics.jsonl", "a") as file:
    print(json.dumps(row), file=file)
"""
"""Stands for `penstock train` and `resume`: the score is lr times the steps."""
EXP = ps.Experiment(
    "CartPole-v1", ps.A2C(), ps.SerialSampler(T=16, B=4), ps.RunConfig(steps=900, progress="off", eval_episodes=1)
)
SPACE = {"algo.lr": "loguniform(1e-4, 1e-2)"}


def stand_in(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a search whose runs are the text; it is not drawn, which saves 0.3 s."""
    fakes.stand_in(text, tmp_path, monkeypatch)
    monkeypatch.setattr(tune, "draw_search", lambda *_: ())
    return Path("search")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return stand_in(FAKE, tmp_path, monkeypatch)


def settings(exp: ps.Experiment = EXP, space: Mapping[str, Any] = SPACE, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "scheduler": "asha", "trials": 4, "metric": None, "mode": "max", "suggest": "random", "interval": 100,
        "eta": 3, "synchronous": True,
    }  # fmt: skip
    return search_settings(prepared(exp), space, **{**given, **changes})


def queue_of(folder: Path, **changes: Any) -> Study:
    return make_study(folder, [(prepared(EXP), spec().to_plain())], settings(**changes))


def spec() -> EnvSpec:
    return check_env(EXP.env_config, seed=0).spec


def slots(n: int = 1) -> list[Machine]:
    cpus = read_machine().cpus
    return [Machine(((cpus[k % len(cpus)],),), (0,)) for k in range(n)]


def work(queue: Study, n: int = 1) -> Seen:
    seen = Seen()
    queue.begin()
    Launcher(queue, slots(n), seen).work()
    return seen


def begun(folder: Path) -> Study:
    """A search whose first trial has a score, without a process."""
    queue = queue_of(folder)
    queue.begin()
    trial = queue.search.ask()
    assert trial is not None
    queue.search.tell(trial, 1.0)
    queue.save()
    return queue


def legs(folder: Path, name: str) -> list[str]:
    return (folder / name / "legs").read_text().splitlines()


def test_trials_stop_at_rungs_and_go_on_from_there(fake: Path) -> None:
    queue = queue_of(fake)
    work(queue)
    best = max(queue.search.trials, key=lambda t: t.values["algo.lr"])
    assert queue.search.best is best
    assert [t.state for t in queue.search.trials].count("pruned") == 3
    assert legs(fake, best.run.name) == ["train 100", "resume 300", "resume 900"]
    assert best.scores == {goal: pytest.approx(goal * best.values["algo.lr"]) for goal in (100, 300, 900)}
    for trial in queue.search.trials:
        assert (trial is best) or legs(fake, trial.run.name) == ["train 100"]
        stored = json.loads((fake / "settings" / trial.run.name / "config.json").read_text())["experiment"]
        assert stored["algo"]["lr"] == trial.values["algo.lr"]
        assert stored["run"]["dir"] == str(fake / trial.run.name)
    again = open_study(fake)
    assert again.search.trials == queue.search.trials
    assert again.ask() is None


def test_the_last_leg_has_no_stop_rule(fake: Path) -> None:
    queue = queue_of(fake)
    work(queue)
    log = (fake / "logs" / f"{queue.search.best.run.name}.log").read_text()  # pyright: ignore
    commands = [line for line in log.splitlines() if line.startswith("$")]
    assert "--run.stop time/total_timesteps 100 --run.dir" in commands[0]
    assert commands[1].endswith("--run.stop time/total_timesteps 300")
    assert commands[2].endswith("'--run.stop={}'")


def test_an_environment_that_dies_once_is_tried_again(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "once")
    queue = queue_of(fake, scheduler="none", interval=None, trials=2)
    work(queue)
    assert [t.state for t in queue.search.trials] == ["finished", "finished"]
    assert [t.failures for t in queue.search.trials] == [1, 1]


def test_one_that_dies_for_good_is_named_and_the_others_finish(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "bad")
    queue = queue_of(fake, scheduler="none", interval=None, trials=3)
    seen = work(queue, 2)
    assert [t.state for t in queue.search.trials] == ["finished", "failed", "finished"]
    failed = queue.search.trials[1]
    assert failed.reason == "exit code 3 (environment): the licence has expired"
    assert len(legs(fake, "trial-001")) == 2
    assert "trial-001 failed" in seen.events
    monkeypatch.setenv("FAKE", "")
    again = open_study(fake)
    with pytest.raises(ConfigError, match="did you mean 'trial-001'"):
        again.retry(["trial-002"])
    again.retry([])
    Launcher(again, slots(), Seen()).work()
    assert [t.state for t in again.search.trials] == ["finished"] * 3
    assert again.search.trials[0] == queue.search.trials[0]


def test_a_score_that_is_no_number_is_the_worst(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "nan")
    queue = queue_of(fake, scheduler="none", interval=None, trials=2)
    work(queue)
    assert [t.score for t in queue.search.trials] == [None, None]
    assert queue.search.best is None
    result = execute(queue, 1, Seen())
    assert result.best is None
    assert result.preset is None


def test_a_metric_that_no_run_has_is_named_and_may_be_changed_then(fake: Path) -> None:
    with locked_study([prepared(EXP)], settings(metric="eval/mean_rewrad"), fake) as queue:
        with pytest.raises(ConfigError, match="did you mean 'eval/mean_reward'"):
            Launcher(queue, slots(), Seen()).work()
    with locked_study([prepared(EXP)], settings(), fake) as queue:
        assert [t.state for t in queue.search.trials] == ["waiting"]
        Launcher(queue, slots(), Seen()).work()
        assert queue.search.over
    with pytest.raises(ConfigError, match="metric was 'eval/mean_reward' and is 'rollout/ep_rew_mean'"):
        with locked_study([prepared(EXP)], settings(metric="rollout/ep_rew_mean"), fake):
            pass


def test_a_signal_stops_the_trials_and_the_search_goes_on(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "slow")
    queue = queue_of(fake, scheduler="none", interval=None, trials=3)
    queue.begin()

    def interrupt() -> None:
        deadline = time.monotonic() + 100
        while not all((fake / f"trial-00{n}" / "slow").exists() for n in (0, 1)) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert Launcher(queue, slots(2), Seen()).work() == signal.SIGINT
    thread.join(timeout=100)
    assert [t.state for t in queue.search.trials] == ["waiting", "waiting"]
    values = [t.values for t in queue.search.trials]
    monkeypatch.setenv("FAKE", "")
    again = open_study(fake)
    Launcher(again, slots(2), Seen()).work()
    assert [t.state for t in again.search.trials] == ["finished"] * 3
    assert [t.values for t in again.search.trials][:2] == values
    assert legs(fake, "trial-000") == ["train 900", "resume 900"]


def test_the_seed_study_trains_the_best_with_other_seeds(fake: Path) -> None:
    queue = queue_of(fake)
    queue.confirm = 2
    work(queue, 2)
    best = queue.search.best
    assert best is not None
    assert [(c.seed, c.run.name, c.run.status) for c in queue.confirmations] == [
        (1, "best-s1", "finished"),
        (2, "best-s2", "finished"),
    ]
    assert [c.score for c in queue.confirmations] == [pytest.approx(900 * best.values["algo.lr"])] * 2
    stored = json.loads((fake / "settings" / "best-s2" / "config.json").read_text())["experiment"]
    assert (stored["algo"]["lr"], stored["run"]["seed"]) == (best.values["algo.lr"], 2)
    more = open_study(fake, confirm=3)
    Launcher(more, slots(), Seen()).work()
    assert [c.seed for c in more.confirmations] == [1, 2, 3]
    assert legs(fake, "best-s1") == ["train 900"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trials": 5}, "trials was 4 and is 5"),
        ({"space": {"algo.lr": "loguniform(1e-4, 1e-3)"}}, "space was"),
        ({"scheduler": "median"}, "scheduler was 'asha' and is 'median'"),
        ({"exp": ps.override(EXP, {"algo.discount": 0.9})}, "algo.discount was 0.99 and is 0.9"),
    ],
)
def test_the_folder_of_another_search_is_left_alone(fake: Path, change: dict[str, Any], message: str) -> None:
    begun(fake)
    before = (fake / STATE).read_bytes()
    exp = prepared(change.pop("exp", EXP))
    with pytest.raises(ConfigError, match=message), locked_study([exp], settings(exp, **change), fake):
        pass
    assert (fake / STATE).read_bytes() == before


def test_a_folder_of_something_else_and_one_that_cannot_be_written_are_named(fake: Path) -> None:
    fake.mkdir()
    (fake / "thesis.tex").touch()
    with (
        pytest.raises(ConfigError, match=r"is not empty and holds no study\.json"),
        locked_study([EXP], settings(), fake),
    ):
        pass
    Path("file").touch()
    with pytest.raises((ConfigError, CheckpointError), match=r"Choose another --dir|can be written"):
        with locked_study([EXP], settings(), Path("file")):
            pass
    with (
        pytest.raises((ConfigError, CheckpointError), match="file"),
        locked_study([EXP], settings(), Path("file/below")),
    ):
        pass
    with pytest.raises(CheckpointError, match=r"holds no study\.json"):
        open_study(Path("nowhere"))


def test_a_search_of_a_stranger_is_refused(fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun(fake)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match=r"no study that you began here[^?]*--trust"):
        open_study(fake)
    assert open_study(fake, trust=True).search.trials
    assert open_study(fake).search.trials


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("values", {"algo.lr": 7.0}),
        ("values", {"algo.agent": "os:system"}),
        ("state", "done"),
        ("number", 3),
        ("run", {"name": "../../x", "arguments": []}),
        ("scores", {"1": "high"}),
    ],
)
def test_a_damaged_file_is_named(fake: Path, what: str, value: object) -> None:
    begun(fake)
    plain = json.loads((fake / STATE).read_text())
    plain["trials"][0][what] = value
    (fake / STATE).write_text(json.dumps(plain))
    with pytest.raises(CheckpointError, match=r"study\.json is damaged"):
        open_study(fake)


@pytest.mark.parametrize(
    ("exp", "message"),
    [
        (ps.override(EXP, {"run.stop": {"eval/mean_reward": 9.0}}), "compared after equal steps"),
        (ps.Experiment(lambda: None, ps.A2C()), "cannot be stored.*module:qualname"),
        ("ppo", "expected an Experiment"),
    ],
)
def test_experiments_that_no_trial_can_have_are_refused(exp: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(exp)


def test_a_scheduler_without_a_metric_is_refused() -> None:
    silent = ps.override(EXP, {"run.eval_episodes": 0})
    assert settings(silent).metric == "rollout/ep_rew_mean"
    assert settings().metric == "eval/mean_reward"
    with pytest.raises(ConfigError, match="eval_episodes=0: no trial would have it"):
        settings(silent, metric="eval/mean_reward")


@pytest.mark.parametrize("path", ["sampler.T", "algo.net.hidden", "algo.optimizer", "env_kwargs.x"])
def test_pbt_refuses_what_a_run_that_has_begun_cannot_change(fake: Path, path: str) -> None:
    forms = {"algo.net.hidden": "choice([8], [16])", "algo.optimizer": "choice(adam, rmsprop)"}
    found = settings(space={path: forms.get(path, "choice(16, 32)")}, scheduler="pbt", interval=200)
    with pytest.raises(ConfigError, match=f"--search {path} with --scheduler pbt"), locked_study([EXP], found, fake):
        pass
    assert not fake.exists()


def test_a_copy_whose_settings_contradict_counts_as_failed(fake: Path) -> None:
    queue = queue_of(fake, scheduler="pbt", interval=200)
    trials = [queue.search.ask() for _ in range(2)]
    assert trials[0] is not None
    assert trials[1] is not None
    trials[1].values = {"algo.lr": -1.0}
    queue.follow([Decision(trials[1], 400, trials[0], trials[1].values)])
    assert trials[1].state == "failed"
    assert trials[1].reason.startswith("settings: ")
    assert not fake.exists()


def test_batches_are_no_larger_than_rungs_are_apart() -> None:
    space = {"sampler.T": "choice(16, 64)", "sampler.B": "choice(2, 8)"}
    assert (
        settings(space=space, interval=512, scheduler="median", exp=ps.override(EXP, {"run.steps": 4096})).batch == 512
    )
    with pytest.raises(ConfigError, match="batches of 512"):
        settings(space=space, interval=300)
        queue_of(Path("x"), space=space, interval=300)
