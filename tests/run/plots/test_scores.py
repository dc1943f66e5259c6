"""Scores of runs as tables and pictures, by numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.run.plots.figure import plot_runs
from penstock.run.plots.scores import score_table
from tests.run.plots.made import make_run, settings, texts


def made(tmp_path: Path, *envs: str) -> Path:
    """Four runs of ppo with last values 10, 20, 30, 100 and two of dqn with 20 and 10, in each environment."""
    for env in envs:
        for algo, slopes in (("ppo", (1, 2, 3, 10)), ("dqn", (2, 1))):
            for seed, slope in enumerate(slopes):
                meta: dict[str, Any] = {"env": env, "algo": algo}
                make_run(tmp_path / "runs" / f"{env}{algo}{seed}", slope, meta, settings(seed))
    return tmp_path / "runs"


def test_table_by_hand(tmp_path: Path) -> None:
    lines = score_table(made(tmp_path, "E_1"), form="md").splitlines()
    assert lines[0] == "rollout/ep_rew_mean, last values:"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[2][:5] + cells[2][6:] == ["E_1", "dqn", "2", "10,000", "15", "15", "7.07"]
    assert cells[3][:5] + cells[3][6:] == ["E_1", "ppo", "4", "10,000", "25", "40", "40.8"]  # IQM: (20 + 30) / 2
    # Pairs of ppo and dqn: 10 loses to 20 and ties 10, 20 ties 20 and wins once, 30 and 100 win twice: 6 of 8.
    assert cells[6][:4] == ["ppo", "dqn", "1", "0.75"]
    low, high = map(float, cells[6][4].split(" to "))
    assert 0 <= low < 0.75 < high == 1
    lines = score_table([tmp_path / "runs" / "E_1dqn0"]).splitlines()
    assert lines[-1] == "| E_1 | dqn | 1 | 10,000 | 20 | - | 20 | - |"
    lines = score_table([tmp_path / "runs" / "E_1dqn0", tmp_path / "runs" / "E_1ppo0"]).splitlines()
    assert lines[-1] == "| dqn | ppo | 1 | 1.00 | - |"  # of one run each nothing is known about others


def test_smoothed_scores_are_means_of_the_last_rows(tmp_path: Path) -> None:
    run = made(tmp_path, "E") / "Edqn1"  # 1, 2, ..., 10
    assert "| 8 |" in score_table(run, smooth=5).splitlines()[-1]  # (6 + 7 + 8 + 9 + 10) / 5
    assert "| 5.5 |" in score_table(run, smooth=50).splitlines()[-1]
    values = plot_runs(run, x="steps", smooth=3).axes[0].lines[-1].get_ydata()
    assert values.tolist() == pytest.approx([1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9])
    with pytest.raises(ConfigError, match="smooth=0; expected"):
        plot_runs(run, smooth=0)


def test_latex_is_escaped(tmp_path: Path) -> None:
    text = score_table(made(tmp_path, "E_1&$"), form="latex")
    assert r"E\_1\&\$ & ppo & 4 & 10,000 & 25 &" in text and r"95\% interval" in text and "P(X $>$ Y)" in text
    assert text.count(r"\begin{tabular}{llrrrrrr}") == 1 and text.count(r"\end{tabular}") == 2
    assert text.splitlines()[1] == r"\begin{tabular}{llrrrrrr}"


def test_environments_are_kept_apart_and_pairs_joined(tmp_path: Path) -> None:
    runs = made(tmp_path, "A", "B")
    assert "| ppo | dqn | 2 | 0.75 |" in score_table(runs)
    shown = texts(plot_runs(runs, tmp_path / "x.svg", kind="profiles"))
    assert {"A", "B", "ppo (4 runs)", "dqn (2 runs)", "Share of runs"} <= set(shown)
    shown = texts(plot_runs(runs, tmp_path / "y.svg", kind="improvement"))
    assert {"ppo  >  dqn", "P(X > Y), with its 95% bootstrap interval"} <= set(shown)


def test_curves_without_one_to_compare_with(tmp_path: Path) -> None:
    runs = made(tmp_path, "A")
    with pytest.raises(ConfigError, match="expected two"):
        plot_runs(runs / "Appo0", kind="improvement")
    for lr in range(13):
        make_run(tmp_path / "many" / str(lr), 1, {"env": "A", "algo": "ppo"}, settings(lr=lr))
    with pytest.raises(ConfigError, match="13 curves have 78 pairs"):
        plot_runs(tmp_path / "many", kind="improvement")
    with pytest.raises(ConfigError, match="kind='bars'; expected 'curves', 'profiles', 'improvement'"):
        plot_runs(runs, kind="bars")  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(ConfigError, match="x='wall' is of curves"):
        plot_runs(runs, x="wall", kind="profiles")


def test_one_picture_over_updates(tmp_path: Path) -> None:
    from penstock.run.log import MetricsLog

    log = MetricsLog(tmp_path / "a")
    for step, count in ((100, 5.0), (200, 9.0), (300, 20.0)):
        log.write(step, {"rollout/ep_rew_mean": step, "train/n_updates": count})
    log.close()
    figure = plot_runs(tmp_path / "a", x="updates")
    assert [axes.get_xlabel() for axes in figure.axes] == ["Updates"]
    assert figure.axes[0].lines[-1].get_xdata().tolist() == [5.0, 9.0, 20.0]
    (wall,) = plot_runs(tmp_path / "a", x="wall").axes
    assert [text.get_text() for text in wall.texts] == ["not recorded"]
