"""Curves of the page: seeds with the band of a picture, thinned lines that keep their peaks, and only what changed anew."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.run.log import MetricsLog
from penstock.run.plots.bands import bootstrap_band, common_grid, interquartile_mean
from penstock.run.plots.curves import read_curves
from penstock.view import catalog as module, charts
from penstock.view.catalog import Catalog
from penstock.view.charts import Charts, thinned
from tests.run.plots.made import PPO_META, make_run, settings
from tests.view.served import three_runs

METRIC = "rollout/ep_rew_mean"


@pytest.fixture(autouse=True)
def _looks_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)


@pytest.mark.parametrize("wall", [False, True])
def test_seeds_are_a_mean_and_a_band_and_a_single_run_a_line_with_evaluations(wall: bool, tmp_path: Path) -> None:
    first, second = Charts(Catalog(three_runs(tmp_path))).chart(METRIC, wall)
    runs = [read_curves(tmp_path / name, METRIC)[0] for name in ("a-s0", "a-s1")]
    summed = common_grid([(run.own.seconds if wall else run.own.steps, run.own.values) for run in runs], 150)
    assert summed is not None
    grid, values = summed
    low, high = bootstrap_band(values, resamples=500)
    for name, numbers in {"x": grid, "y": interquartile_mean(values), "low": low, "high": high}.items():
        np.testing.assert_allclose(first[name], numbers, rtol=1e-6)
    assert (first["seeds"], first["policy"], first["panel"], "points" in first) == (2, None, "CartPole-v1", False)
    scale = 30.0 / 1000 if wall else 1.0
    assert second["x"] == [1000.0 * i * scale for i in range(1, 11)] and second["y"] == [5.0 * i for i in range(1, 11)]
    assert (
        second["points"] == [[5000 * scale, 10_000 * scale], [26, 51]] and second["seeds"] == 1 and "low" not in second
    )


def test_groups_that_are_asked_for_and_metrics_that_are_absent(tmp_path: Path) -> None:
    catalog = Catalog(three_runs(tmp_path))
    ids = [group["id"] for group in catalog.listing()["groups"]]
    found = Charts(catalog)
    assert [curve["group"] for curve in found.chart(METRIC, groups=[ids[1], "unknown"])] == [ids[1]]
    assert found.chart("absent") == [] and found.chart("") == [] and found.chart(METRIC, groups=[]) == []
    assert found.chart("eval/mean_reward")[1]["y"] == [26, 51] and "points" not in found.chart("eval/mean_reward")[1]


def test_only_curves_whose_files_have_changed_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Charts(Catalog(three_runs(tmp_path)))
    made: list[str] = []
    real = charts._group  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(charts, "_group", lambda at, *more: made.append(at) or real(at, *more))
    first = found.chart(METRIC)
    assert len(made) == 2 and found.chart(METRIC) == first and len(made) == 2
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 11_000, METRIC: -3.0}) + "\n")
    assert found.chart(METRIC)[1]["y"][-1] == -3 and len(made) == 3 and made[-1] == first[1]["group"]
    monkeypatch.setattr(charts, "_MOST_KEPT", 1)
    found.chart(METRIC, wall=True)
    assert len(found._kept) <= 1  # pyright: ignore[reportPrivateUsage]


def test_several_policies_are_curves_of_one_run(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run")
    for step in (1, 2):
        log.write(step, {METRIC: 1.0 * step, "rollout/red/ep_rew_mean": 2.0 * step, "rollout/blue/ep_rew_mean": 3.0})
    log.close()
    found = Charts(Catalog(tmp_path)).chart(METRIC)
    assert {curve["policy"]: curve["y"] for curve in found} == {"": [1, 2], "red": [2, 4], "blue": [3, 3]}


def test_seeds_without_a_common_stretch_show_the_longest_and_copies_count_once(tmp_path: Path) -> None:
    for seed, (opens, last) in enumerate([(1, 4), (5, 11)]):
        make_run(tmp_path / f"a{seed}", 1.0, PPO_META, settings(seed), last=last, opens=opens)
    (curve,) = Charts(Catalog(tmp_path)).chart(METRIC)
    assert curve["seeds"] == 2 and "low" not in curve and curve["x"] == [1000.0 * i for i in range(5, 11)]
    for name in ("b", "c"):
        make_run(tmp_path / "twice" / name, 2.0, PPO_META, settings(7, lr=9.0))
    twice = next(one for one in Charts(Catalog(tmp_path)).chart(METRIC) if one["y"][0] == 2)
    assert twice["seeds"] == 1


def test_a_thinned_line_keeps_ends_and_peaks() -> None:
    x = np.arange(10_000.0)
    y = np.sin(x)
    y[4321], y[77] = 50, -50
    few, values = thinned(x, y, 100)
    assert len(few) <= 202 and few[0] == 0 and few[-1] == 9999 and {50, -50} <= set(values)
    assert (np.diff(few) > 0).all()
    short = np.arange(202.0)
    assert thinned(short, short, 100)[0] is short
