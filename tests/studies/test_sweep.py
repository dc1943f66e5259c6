from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import specs_to_plain
from penstock.run.files.lock import RunLock
from penstock.studies import tune
from penstock.studies.space import grid_names, grid_values, read_space, split_values
from penstock.studies.study import open_study
from penstock.studies.study_file import STATE, stored_modules
from penstock.studies.trial import has_checkpoint
from penstock.studies.tune import locked_study, prepared, sweep_settings
from tests.studies.slots import fakes
from tests.studies.slots.fakes import FAKE, queue_of, runs_of, statuses
from tests.studies.test_study import EXP, spec as spec_of_cartpole

# Grids


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


def test_every_combination_with_every_seed() -> None:
    grid = {
        "algo.lr": ("1e-3", "linear(1e-3, 0)"),
        "sampler.B": ("8",),
        "algo.net.hidden": ("[64,64]",),
        "algo.x": ("-1",),
        "run.seed": (1, 2),
    }
    names = grid_names(grid)
    assert list(names) == [
        "lr=1e-3_B=8_hidden=64-64_x=-1_s1", "lr=1e-3_B=8_hidden=64-64_x=-1_s2",
        "lr=linear-1e-3-0_B=8_hidden=64-64_x=-1_s1", "lr=linear-1e-3-0_B=8_hidden=64-64_x=-1_s2",
    ]  # fmt: skip
    assert list(names.values())[3] == {
        "algo.lr": "linear(1e-3, 0)", "sampler.B": "8", "algo.net.hidden": "[64,64]", "algo.x": "-1", "run.seed": 2,
    }  # fmt: skip


def test_names_are_unique_and_say_which_setting_is_meant() -> None:
    assert list(grid_names({"algo.T": ("a/b", "a-b"), "sampler.T": ("1",), "run.seed": (0,)})) == [
        "algo.T=a-b_sampler.T=1_s0", "algo.T=a-b_sampler.T=1_s0-2",
    ]  # fmt: skip
    assert list(grid_names({"run.seed": (1, 2)})) == ["s1", "s2"]
    with pytest.raises(ConfigError, match=r"a run would be named '/x=1_s1'"):
        grid_names({"../../x": ("1",), "run.seed": (1,)})


def test_computed_values_have_six_digits_in_names() -> None:
    found = grid_names({"algo.lr": (1 / 3000, 1 / 3000 + 1e-12, 0.00025, 1e7), "run.seed": (0,)})
    assert list(found) == ["lr=0.000333333_s0", "lr=0.000333333_s0-2", "lr=0.00025_s0", "lr=10000000.0_s0"]
    assert found["lr=0.000333333_s0"]["algo.lr"] == 1 / 3000


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((), "--grid algo.lr=.*expected one value or more"),
        ((1.0, 1), "1.0 and 1 are equal"),
        ((len,), "is no number, text or tuple"),
    ],
)
def test_values_that_no_grid_has(values: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_space({"algo.lr": values}, grid=True)


def test_values_of_a_grid_in_python() -> None:
    assert grid_values("algo.net.hidden", [[64, 64], (8,)]) == ((64, 64), (8,))
    assert grid_values("algo.lr", "1e-3,linear(1, 0)") == ("1e-3", "linear(1, 0)")


# A sweep in its directory


def test_the_file_brings_the_sweep_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_of(tmp_path / "s", "a", "b", "c", "d")
    queue.begin()
    trials = queue.search.trials
    queue.search.ask()
    trials[0].run.attempts = 1
    for trial, status in zip(trials, ("running", "failed", "stopped", "waiting")):
        trial.run.status = status  # pyright: ignore
        trial.run.attempts, trial.run.seconds = int(status != "waiting"), 1.5
    trials[1].run.code = 3
    queue.follow(queue.search.fail(trials[1], "the licence has expired"))
    queue.save()
    back = open_study(tmp_path / "s")
    assert [t.state for t in back.search.trials] == ["waiting", "failed", "waiting", "waiting"]
    assert list(statuses(back).values()) == ["stopped", "failed", "stopped", "waiting"]
    assert back.points == queue.points
    run = back.search.trials[1].run
    assert (run.code, run.attempts, run.seconds) == (3, 1, 1.5)
    for names, message in ((["what=f_s0"], "did you mean"), (["what=a_s0"], "no such failed run")):
        with pytest.raises(ConfigError, match=message):
            back.retry(names)
    back.retry([])
    assert back.search.trials[1].state == "waiting"
    monkeypatch.setattr(type(back), "_has_ended", lambda self, run, goal: run.name == "what=a_s0")
    monkeypatch.setattr(type(back), "_score", lambda self, run_dir: (2.0, 5))
    assert [t.state for t in open_study(tmp_path / "s").search.trials] == ["finished", "failed", "waiting", "waiting"]


def test_a_run_of_its_own_stop_rule_or_steps_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_of(tmp_path, "a")
    checkpoint = type("C", (), {"state": {"trainer": {"finished": True, "env_steps": 5}}})
    monkeypatch.setattr("penstock.studies.study.find_checkpoint", lambda run_dir: run_dir)
    monkeypatch.setattr("penstock.studies.study.load_checkpoint", lambda path: checkpoint)
    assert queue._has_ended(runs_of(queue)[0], 900)  # pyright: ignore[reportPrivateUsage]


def begun(folder: Path, exps: list[ps.Experiment], space: dict[str, tuple[Any, ...]]) -> None:
    with locked_study(exps, sweep_settings(exps, space), folder):
        pass


@pytest.mark.parametrize(
    ("exp", "space", "what"),
    [
        (EXP, {"algo.lr": (1e-3, 1e-4), "run.seed": (0,)}, "space was .*0.001.* and is .*0.0001"),
        (EXP, {"algo.lr": (1e-3,), "run.seed": (0, 1)}, r"space was .*'run.seed': \(0,\)"),
        (ps.override(EXP, {"algo.gae_lambda": 0.5}), {"algo.lr": (1e-3,), "run.seed": (0,)}, "algo.gae_lambda was"),
    ],
)
def test_another_sweep_is_refused(exp: ps.Experiment, space: dict[str, Any], what: str, tmp_path: Path) -> None:
    first = {"algo.lr": (1e-3,), "run.seed": (0,)}
    begun(tmp_path / "s", [prepared(EXP, sweep=True)], first)
    begun(tmp_path / "s", [prepared(EXP, sweep=True)], first)  # the same again goes on
    exps = [prepared(ps.override(exp, point), sweep=True) for point in grid_names(space).values()]
    with pytest.raises(ConfigError, match=f"holds another sweep: {what}.*penstock launch"):
        begun(tmp_path / "s", exps if len(exps) > 1 else [prepared(exp, sweep=True)], space)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no study\.json; begin with penstock tune \(or launch\)"):
        open_study(tmp_path)
    (tmp_path / "launch.json").touch()
    with pytest.raises(CheckpointError, match=r"its launch\.json is of an earlier penstock"):
        open_study(tmp_path)
    queue_of(tmp_path, "a", "b").begin()
    file = tmp_path / STATE
    text = file.read_text()
    good = json.loads(text)
    for bad in (
        "", text[:200], "[]", "{}", json.dumps({**good, "format": 9}), json.dumps({**good, "trials": good["trials"][:1]}),
        json.dumps({**good, "trials": [{**t, "run": {**t["run"], "name": "../x"}} for t in good["trials"]]}),
    ):  # fmt: skip
        file.write_text(bad)
        with pytest.raises(CheckpointError, match=r"study\.json") as error:
            open_study(tmp_path)
        assert "\n" not in str(error.value)


def test_two_commands_on_one_study(tmp_path: Path) -> None:
    queue_of(tmp_path, "a").begin()
    with RunLock(tmp_path), pytest.raises(ConfigError, match=r"is in use by pid .*; stop that process first"):
        begun(tmp_path, [EXP], {"run.seed": (0,)})


def test_a_sweep_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_TRUST", raising=False)
    queue_of(tmp_path, "a").begin()
    file = tmp_path / STATE
    text = file.read_text().replace('"what=a_s0"', '"what=b_s0"').replace('"a"', '"b"')
    file.write_text(text)
    (tmp_path / "settings" / "what=a_s0").rename(tmp_path / "settings" / "what=b_s0")
    with pytest.raises(CheckpointError, match=r"study\.json is no study that you began here.*--trust"):
        open_study(tmp_path)
    monkeypatch.setenv("PENSTOCK_TRUST", str(tmp_path))
    open_study(tmp_path)
    monkeypatch.delenv("PENSTOCK_TRUST")
    open_study(tmp_path, trust=True)
    open_study(tmp_path)  # it is on the list by now
    config = tmp_path / "settings" / "what=b_s0" / "config.json"
    content = json.loads(config.read_text())
    content["experiment"]["env"] = "evil:make"
    config.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"config\.json is not as penstock wrote it"):
        open_study(tmp_path)
    (tmp_path / "logs").symlink_to("/tmp")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/logs: it leads out of"):
        open_study(tmp_path)


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*file/s/study\.json"):
        queue_of(tmp_path / "file" / "s", "a").save()


def test_resumes_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    queue = queue_of(tmp_path, "a")
    run = runs_of(queue)[0]
    run_dir = queue.run_dir(run)
    assert queue.command(run) == ["train", "--config", f"{tmp_path}/settings/what=a_s0", "--run.dir", str(run_dir)]
    (run_dir / "checkpoints" / ".tmp-7-1-ab").mkdir(parents=True)
    assert not has_checkpoint(run_dir)
    (run_dir / "checkpoints" / "000000000007").mkdir()
    assert queue.command(run) == ["resume", str(run_dir)]


# In Python


def test_a_sweep_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.stand_in(FAKE, tmp_path, monkeypatch)
    result = ps.launch(EXP, {"algo.lr": [1e-3, 1e-4]}, seeds=[1, 2], parallel=1, dir="s")
    again = ps.launch(EXP, {"algo.lr": (1e-3, 1e-4)}, seeds=(1, 2), dir="s")  # nothing is left to do
    assert again == result
    assert [t.run_dir.name for t in result.trials] == ["lr=0.001_s1", "lr=0.001_s2", "lr=0.0001_s1", "lr=0.0001_s2"]
    assert [dict(t.values) for t in result.trials[::3]] == [
        {"algo.lr": 1e-3, "run.seed": 1}, {"algo.lr": 1e-4, "run.seed": 2},
    ]  # fmt: skip
    assert {t.state for t in result.trials} == {"finished"}
    assert result.best is not None
    assert (result.best.score, result.best.steps, result.stopped_by) == (4.5, 5, "trials")
    stored = json.loads((tmp_path / "s" / "settings" / "lr=0.0001_s2" / "config.json").read_text())["experiment"]
    assert (stored["algo"]["lr"], stored["run"]["seed"], stored["run"]["dir"]) == (1e-4, 2, "s/lr=0.0001_s2")
    assert "StudyResult(4 trials: 4 finished; best 4.5 by algo.lr=0.001, run.seed=1" in repr(result)


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"run.seed": [1]}, "use --seeds"),
        ({"run.dir": ["x"]}, "use --dir"),
        ({"algo.rl": [1e-3]}, "did you mean"),
        ({"algo.lr": []}, "expected one value or more"),
        ({"algo.lr": 1e-3}, r"--grid algo.lr=0.001; expected a list of values, of a single one too: \[0.001\]"),
        ({"algo.lr": "1e-3,0.001"}, "'1e-3' and '0.001' are equal"),
        ({"algo.lr": [1e-3, "0.001"]}, "0.001 and '0.001' are equal"),
        ([1e-3], r"--grid \[0.001\]; expected a dict by the path of a setting"),
        ({5: [1e-3]}, "expected a dict by the path of a setting"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_anything_is_made(
    grid: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        ps.launch(EXP, grid, dir="s")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seeds": 5}, r"run.seed=5; expected a list of values.*\[5\]"),
        ({"parallel": 1.5}, r"parallel=1.5 \(float\); expected a whole number, 1 or more"),
        ({"parallel": True}, r"parallel=True \(bool\)"),
        ({"dir": 5}, r"dir=5 \(int\); expected a path"),
        ({"retries": -1}, r"retries=-1 \(int\); expected a whole number, 0 or more"),
        ({"cpus": "x"}, "--cpus 'x'; expected the CPUs"),
        ({"backend": 5}, "--backend 5: there is none; known"),
        ({"metric": 5}, r"metric=5 \(int\); expected str"),
        ({"trials": 1.5}, r"trials=1.5 \(float\); expected a whole number"),
        ({"confirm": 1.5}, r"confirm=1.5 \(float\); expected a whole number, 0 or more"),
        ({"space": [1]}, r"--search \[1\]; expected a dict by the path of a setting"),
    ],
)
def test_an_argument_of_another_type_is_refused_before_anything_is_made(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    of_launch: dict[str, Any]
    of_tune: dict[str, Any]
    of_launch, of_tune = {"grid": {"algo.lr": [1e-3]}}, {"space": {"algo.lr": [1e-3, 1e-4]}, "scheduler": "none"}
    calls: list[tuple[Any, dict[str, Any]]]
    calls = [(ps.launch, of_launch)] * ("trials" not in given and "confirm" not in given and "space" not in given)
    calls += [(ps.tune, of_tune)] * ("seeds" not in given)
    for call, usual in calls:
        with pytest.raises(ConfigError, match=said):
            call(EXP, **{"dir": "s", **usual, **given})
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_cannot_be_made_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exp = ps.override(EXP, {"run.trackers": ("tests.run.tracking.made:WithPath",)})
    with pytest.raises(ConfigError, match="WithPath cannot be called without arguments"):
        ps.launch(exp, {"algo.lr": [1e-3]}, dir="s")
    assert not list(tmp_path.iterdir())


def test_scores_of_several_environments_have_no_best() -> None:
    exps = [EXP, ps.override(EXP, {"env": "Acrobot-v1"})]
    settings = sweep_settings(exps, {"env": ("CartPole-v1", "Acrobot-v1"), "run.seed": (0,)})
    search = tune.make_study(Path("x"), [(exp, {}) for exp in exps], settings).search
    while (trial := search.ask()) is not None:
        search.tell(trial, 1.0)
    assert search.over
    assert search.best is None


def test_a_run_of_a_sweep_that_does_not_report_the_metric_has_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.stand_in(FAKE, tmp_path, monkeypatch)
    with pytest.warns(UserWarning, match=r"--metric eval/mean_rewrad: .* did you mean 'eval/mean_reward'"):
        result = ps.launch(EXP, metric="eval/mean_rewrad", parallel=1, dir="s")
    assert [(t.state, t.score) for t in result.trials] == [("finished", None)]
    assert (result.best, result.experiment, result.preset) == (None, None, None)


def test_modules_that_a_sweep_names_are_looked_for(tmp_path: Path) -> None:
    exps = [replace(EXP, env=f"{name}:Env") for name in ("one", "other")]
    space = {"env": ("one:Env", "other:Env"), "run.seed": (0,)}
    spec = specs_to_plain(spec_of_cartpole())
    tune.make_study(tmp_path, [(exp, spec) for exp in exps], sweep_settings(exps, space)).begin()
    assert stored_modules(tmp_path) >= {"one", "other"}
