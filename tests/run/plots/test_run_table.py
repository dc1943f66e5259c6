"""The one reader of runs: what it finds in folders, and its rows as text, as HTML, filtered and as a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.run.plots.figure import plot_runs
from penstock.run.plots.run_table import run_dirs
from tests.run.plots.made import make_run


def made(folder: Path) -> Path:
    for seed, lr in ((0, 1e-3), (1, 1e-3), (2, 3e-4)):
        settings = {"algo": {"class": "penstock.algos.ppo:PPO", "lr": lr}, "run": {"seed": seed, "steps": 9}}
        meta = {"env": "CartPole-v1", "algo": "ppo", "seed": seed}
        make_run(folder / f"a{seed}", 1.0 + seed, meta, settings, evals=True)
    make_run(
        folder / "deep" / "d",
        7.0,
        {"env": "<b>", "algo": "dqn", "seed": 0},
        {"algo": {"class": "D"}, "run": {"seed": 0}},
    )
    return folder


def test_rows_have_the_last_numbers(tmp_path: Path) -> None:
    runs = ps.runs(made(tmp_path))
    assert [run.path.name for run in runs] == ["a0", "a1", "a2", "d"]
    first = runs[0]
    assert first.values == {
        "run": str(tmp_path / "a0"), "env": "CartPole-v1", "algo": "ppo", "seed": 0, "steps": 10_000, "return": 10.0,
        "evaluation": 11.0, "hours": 300.0 / 3600,
    }  # fmt: skip
    assert first.setting("algo.lr") == 1e-3 and first.metrics()[0] == {
        "step": 1000,
        "rollout/ep_rew_mean": 1.0,
        "time/time_elapsed": 30.0,
    }
    assert runs[3].evaluation != runs[3].evaluation
    assert isinstance(runs[1:], ps.Runs) and len(runs[1:]) == 3


def test_filters_by_columns_settings_and_a_function(tmp_path: Path) -> None:
    runs = ps.runs(made(tmp_path))
    assert [r.identity.seed for r in runs.filter(None, algo="ppo", **{"algo.lr": 1e-3})] == [0, 1]
    assert [r.path.name for r in runs.filter(lambda run: run.return_ > 25)] == ["a2", "d"]
    assert len(runs.filter(seed=0)) == 2
    with pytest.raises(ConfigError, match="no run has 'sead'; did you mean 'seed'"):
        runs.filter(sead=0)
    assert repr(runs.filter(env="none")) == "no runs"


def test_printed_it_is_a_table_with_the_settings_that_differ(tmp_path: Path) -> None:
    lines = repr(ps.runs(made(tmp_path)).filter(algo="ppo")).splitlines()
    assert lines[0].split() == ["run", "env", "algo", "seed", "steps", "return", "evaluation", "hours", "lr"]
    assert lines[3].split()[1:] == ["CartPole-v1", "ppo", "2", "10,000", "30", "31", "0.083", "0.0003"]
    assert len(lines) == 4
    html = ps.runs(tmp_path)._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert html.count("<tr>") == 5 and "&lt;b&gt;" in html and "<b>" not in html


def wide(folder: Path, others: int = 3) -> Path:
    """Four runs of two algorithms, and one whose settings are not known."""
    many = {f"x{i}": 0.0 for i in range(others)}
    for name, algo, settings in (
        ("a", "ppo", {"lr": 1e-3, "clip": 0.2, **many}),
        ("b", "ppo", {"lr": 3e-4, "clip": 0.2, **dict.fromkeys(many, 1.0)}),
        ("c", "dqn", {"lr": 1e-3, "epsilon": "linear(1, 0)"}),
        ("d", "dqn", {"lr": 1e-3, "epsilon": 0.1}),
    ):
        plain = {"algo": {"class": algo, **settings}, "sampler": {"B": 4.0 if name == "a" else 8.0}, "run": {"seed": 0}}
        make_run(folder / name, ord(name), {"env": "E", "algo": algo, "seed": 0}, plain)
    make_run(folder / "e", 1.0)
    return folder


def test_settings_that_differ_among_runs_of_one_algorithm_are_shown_beside_another_ones(tmp_path: Path) -> None:
    runs = ps.runs(wide(tmp_path))
    head, *lines = [[cell for cell in line.split("  ") if cell] for line in repr(runs).splitlines()]
    assert len(head) == 8 + 6 and {"B", "lr", "epsilon"} <= {cell.strip() for cell in head[8:]}
    assert "clip" not in repr(runs)
    more = repr(ps.runs(wide(tmp_path / "more", 8))).splitlines()[-1]
    assert more.startswith("these differ too: x") and more.count(",") == 4
    cells = {line[0].strip()[-1]: dict(zip([c.strip() for c in head], [c.strip() for c in line])) for line in lines}
    assert [cells[name]["lr"] for name in "abcd"] == ["0.001", "0.0003", "0.001", "0.001"]
    assert [cells[name]["epsilon"] for name in "abcd"] == ["?", "?", "linear(1, 0)", "0.1"]
    assert [cells[name]["B"] for name in "abcd"] == ["4", "8", "8", "8"]
    assert [cell.strip() for cell in lines[4][-6:]] == ["?"] * 6


def test_runs_are_sorted_by_columns_and_settings_those_without_last(tmp_path: Path) -> None:
    runs = ps.runs(wide(tmp_path))

    def names(by: str, reverse: bool = False) -> str:
        return "".join(run.path.name for run in runs.sort(by, reverse))

    assert names("return") == "eabcd" and names("return", reverse=True) == "dcbae"
    assert names("lr") == "bacde" and names("sampler.B", reverse=True) == "bcdae"
    assert names("epsilon") == "dcabe" and names("evaluation") == "abcde"
    with pytest.raises(ConfigError, match="no run has 'retrn'; did you mean 'return'"):
        runs.sort("retrn")


def test_hours_have_two_digits(tmp_path: Path) -> None:
    for minutes, text in ((0.2, "0.0033"), (95, "1.6"), (1000, "17"), (90_000, "1,500")):
        folder = tmp_path / text
        make_run(folder, time=False)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 20000, "time/time_elapsed": %f}\n' % (60 * minutes))
        assert repr(ps.runs(folder)).split()[-1] == text


def test_a_frame_has_every_run_and_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        ps.runs(made(tmp_path)).frame()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    frame: dict[str, Any] = ps.runs(tmp_path).filter(algo="ppo").frame()
    assert frame["seed"] == [0, 1, 2] and frame["lr"] == ["0.001", "0.001", "0.0003"]


def test_folders_without_a_run_and_runs_of_seeds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run in .*nowhere: there is no such folder; expected"):
        ps.runs(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl there or below; expected the directory of a run, which"):
        ps.runs(tmp_path)
    for seed in (1, 2):
        make_run(tmp_path / f"x-s{seed}")
    make_run(tmp_path / "x-sand")
    assert [path.name for path in run_dirs(tmp_path / "x")] == ["x-s1", "x-s2"]
    assert len(ps.runs(tmp_path / "x", tmp_path / "x-s1")) == 2


def test_a_run_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "metrics.jsonl").symlink_to(tmp_path / "good" / "metrics.jsonl")
    with pytest.warns(UserWarning, match="left out, .*linked cannot be read"):
        assert [run.path.name for run in ps.runs(tmp_path)] == ["good"]


def test_figures_show_themselves_and_are_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = ps.runs(made(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    for figure in (
        runs.plot(),
        plot_runs([tmp_path / "a0"]),
        plot_runs(tmp_path),
        plot_runs([str(tmp_path / "a0")], metric="eval/mean_reward"),
    ):
        assert figure._repr_png_().startswith(b"\x89PNG")
    assert sorted(tmp_path.rglob("*")) == before
