"""Searches that were forged, damaged, killed while they began, or whose runs do odd things."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.run import plan
from penstock.studies.schedulers import Decision
from penstock.studies.slots.launcher import Launcher
from penstock.studies.study import open_study
from penstock.studies.study_file import BASE, SETTINGS, STATE
from penstock.studies.tune import execute, locked_study, prepared, search_settings
from tests.studies.slots.fakes import Seen
from tests.studies.test_study import EXP, FAKE, begun, legs, queue_of, settings, slots, stand_in, work

ODD = (
    FAKE
    + """
if what == "silent" and run.name == "trial-002":
    del row["eval/mean_reward"]
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
if what == "full" and run.name in ("trial-001", "best-s1"):
    print("penstock: CheckpointError: cannot write /d/x: No space left on device; free some space")
    sys.exit(5)
if what == "lost" and not (run / "again").exists():
    (run / "again").touch()
    sys.exit(6)
if what == "interrupted":
    sys.exit(130)
if what == "study" and run.name == "best-s1":
    print("the licence has expired")
    sys.exit(3)
"""
)
IMPALA = ps.override(
    ps.Experiment("CartPole-v1", ps.IMPALA(c_bar=0.5), EXP.sampler, EXP.run), {"run.seed": 2, "run.steps": 900}
)
CONTRADICTING = {"algo.c_bar": "uniform(0.5, 1)", "algo.rho_bar": "uniform(0.5, 1)"}
"""Half of the trials have c_bar > rho_bar, which IMPALA refuses."""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return stand_in(ODD, tmp_path, monkeypatch)


def change(folder: Path, harm: Callable[[dict[str, Any]], object]) -> None:
    plain = json.loads((folder / STATE).read_text())
    harm(plain)
    (folder / STATE).write_text(json.dumps(plain))


def confirmation(name: str, seed: Any = 1) -> dict[str, Any]:
    return {"seed": seed, "run": {"name": name, "attempts": 1}, "score": None}


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p["trials"][0]["run"].update(name=".."),
        lambda p: p["trials"][0]["run"].update(name="trial-001"),
        lambda p: p["trials"][0]["run"].update(name="logs"),
        lambda p: p.update(confirm=[confirmation("../thesis")]),
        lambda p: p.update(confirm=[confirmation("settings")]),
        lambda p: p.update(confirm=[confirmation("best-s1", "1")]),
        lambda p: p["trials"][0]["run"].update(attempts="x"),
        lambda p: p["trials"][0]["run"].update(seconds=None),
        lambda p: p["trials"][0].update(copies=[{}]),
        lambda p: p["trials"][0].update(goal=7),
        lambda p: p["trials"][0].update(scores={"7": 1.0}),
        lambda p: p["trials"][0].update(state="finished"),
        lambda p: p["trials"][0].update(state="pruned", scores={}),
        lambda p: p.pop("trials"),
        lambda p: p.pop("settings"),
    ],
)
def test_damage_is_named_by_both_commands_and_no_other_folder_is_touched(
    odd: Path, harm: Callable[[dict[str, Any]], object]
) -> None:
    begun(odd)
    Path("thesis").mkdir()
    change(odd, harm)
    with pytest.raises(CheckpointError, match=r"study\.json is damaged.*begin anew with another --dir"):
        Launcher(open_study(odd, confirm=1), slots(), Seen()).work()
    with (
        pytest.raises(CheckpointError, match=r"study\.json is damaged"),
        locked_study([prepared(EXP)], settings(), odd),
    ):
        pass
    assert Path("thesis").is_dir()


def test_a_search_killed_while_it_began_begins_again_by_the_same_command(odd: Path) -> None:
    queue_of(odd, trials=1, scheduler="none", interval=None).save()
    alone = settings(trials=1, scheduler="none", interval=None)
    with pytest.raises(ConfigError, match="suggest was 'random' and is 'tpe'"):
        with locked_study([prepared(EXP)], settings(trials=1, scheduler="none", interval=None, suggest="tpe"), odd):
            pass
    with locked_study([prepared(EXP)], alone, odd) as queue:
        assert execute(queue, 1, Seen()).best is not None
    begun(odd / "other")
    shutil.rmtree(odd / "other" / SETTINGS / BASE)
    with (
        pytest.raises(CheckpointError, match=r"config\.json"),
        locked_study([prepared(EXP)], settings(), odd / "other"),
    ):
        pass


def test_another_metric_leaves_the_search_ones_own(odd: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with locked_study([prepared(EXP)], settings(metric="eval/mean_rewrad"), odd) as queue:
        with pytest.raises(ConfigError, match="did you mean"):
            Launcher(queue, slots(), Seen()).work()
    with locked_study([prepared(EXP)], settings(), odd):
        pass
    assert open_study(odd).search.settings.metric == "eval/mean_reward"


def test_two_that_begin_in_one_folder_do_not_overwrite_each_other(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = plan.check_apart

    def slow(*given: Any) -> Any:
        begun(odd)
        return checked(*given)

    monkeypatch.setattr(plan, "check_apart", slow)
    with pytest.raises(ConfigError, match="another study has begun in it"):
        with locked_study([prepared(EXP)], settings(suggest="tpe"), odd):
            pass
    assert json.loads((odd / STATE).read_text())["settings"]["suggest"] == "random"


def contradicting(scheduler: str, interval: int) -> Any:
    return search_settings(
        prepared(IMPALA), CONTRADICTING, scheduler, 4, None, "max", "random", interval, 3, synchronous=True
    )  # fmt: skip


def test_trials_go_on_where_the_last_proposals_contradict(odd: Path) -> None:
    with locked_study([prepared(IMPALA)], contradicting("asha", 100), odd) as queue:
        execute(queue, 1, Seen())
        assert queue.search.trials[-1].state == "failed"
        assert queue.search.over
        assert queue.search.best is not None
        assert sorted(queue.search.best.scores) == [100, 300, 900]


def test_members_are_copied_where_the_last_proposals_contradict(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked_study([prepared(IMPALA)], contradicting("pbt", 300), odd) as queue:
        first = queue.ask()
        assert first is not None
        queue.search.tell(queue.search.trials[0], 1.0)  # what `ended` does, without a process
        followed = list[Decision]()
        monkeypatch.setattr(queue, "follow", followed.extend)
        while (trial := len(queue.search.trials)) < 4 and queue.ask() is not None:
            queue.search.tell(queue.search.trials[trial], 1.0)
        assert [d.trial.number for d in followed if d.copy_of is not None]
        assert {d.trial.number for d in followed} == {0, 1, 2, 3}


def test_a_metric_that_some_trials_do_not_have_counts_as_the_worst(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "silent")
    queue = queue_of(odd, scheduler="none", interval=None, trials=4)
    work(queue)
    assert [t.score is None for t in queue.search.trials] == [False, False, True, False]
    assert queue.search.over


def test_a_run_that_is_interrupted_again_and_again_fails(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "interrupted")
    queue = queue_of(odd, scheduler="none", interval=None, trials=2)
    work(queue)
    assert [t.state for t in queue.search.trials] == ["failed", "failed"]
    assert "130" in queue.search.trials[0].reason
    assert len(legs(odd, "trial-000")) == 2


def test_a_full_disk_ends_the_search_and_no_trial(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "full")
    queue = queue_of(odd, scheduler="none", interval=None, trials=3)
    with pytest.raises(CheckpointError, match=r"search is full: exit code 5 .*No space left"):
        work(queue)
    again = open_study(odd, confirm=1)
    assert [t.state for t in again.search.trials] == ["finished", "waiting"]
    monkeypatch.setenv("FAKE", "")
    work(again)
    assert [t.state for t in again.search.trials] == ["finished"] * 3
    monkeypatch.setenv("FAKE", "full")
    again.confirm, again.confirmations = 1, []
    shutil.rmtree(odd / "best-s1", ignore_errors=True)
    with pytest.raises(CheckpointError, match="is full"):
        work(again)
    last = open_study(odd, confirm=1)
    assert [c.run.status for c in last.confirming] == ["stopped"]


def test_a_trial_that_lost_a_rank_is_tried_again(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "lost")
    queue = queue_of(odd, scheduler="none", interval=None, trials=2)
    work(queue)
    assert [(t.state, t.failures) for t in queue.search.trials] == [("finished", 1)] * 2


def test_a_study_is_tried_again_where_it_failed(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "study")
    queue = queue_of(odd, scheduler="none", interval=None, trials=2)
    queue.confirm = 2
    work(queue)
    assert [(c.run.status, c.score is None) for c in queue.confirming] == [("failed", True), ("finished", False)]
    assert "the licence has expired" in queue.confirming[0].reason
    assert len(legs(odd, "best-s1")) == 2
    monkeypatch.setenv("FAKE", "")
    again = open_study(odd, confirm=2)
    again.retry([])
    Launcher(again, slots(), Seen()).work()
    assert [c.run.status for c in again.confirming] == ["finished", "finished"]


def test_a_study_is_of_the_best_also_where_a_later_trial_is_better(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "bad")
    queue = queue_of(odd, scheduler="none", interval=None, trials=2)
    queue.confirm = 1
    work(queue)
    assert queue.search.trials[1].state == "failed"
    monkeypatch.setenv("FAKE", "")
    again = open_study(odd, confirm=1)
    again.retry([])
    again.search.settings = ps.core.config.override(again.search.settings, {"mode": "min"})  # so that it is better
    result = execute(again, 1, Seen())
    best = again.search.best
    assert best is not None
    assert best.number == 1
    assert [c.run.name for c in again.confirming] == ["trial-001-s1"]
    assert result.confirmed == {1: pytest.approx(900 * best.values["algo.lr"])}
    stored = json.loads((odd / SETTINGS / "trial-001-s1" / "config.json").read_text())["experiment"]
    assert stored["algo"]["lr"] == best.values["algo.lr"]
    assert [c["of"] for c in json.loads((odd / STATE).read_text())["confirm"]] == ["trial-000", "trial-001"]


def test_a_search_of_another_optuna_is_told_while_it_proposes(odd: Path, recwarn: pytest.WarningsRecorder) -> None:
    begun(odd)
    open_study(odd)
    assert not recwarn.list
    change(odd, lambda plain: plain.update(optuna="1.2.3"))
    with pytest.warns(
        UserWarning, match=r"study\.json is of Optuna 1\.2\.3, and this is .*pip install optuna==1\.2\.3$"
    ):
        open_study(odd)
    work(open_study(odd))  # pyright: ignore
    change(odd, lambda plain: plain.update(optuna="1.2.3"))
    recwarn.clear()
    open_study(odd)
    assert not recwarn.list  # every trial has its settings
