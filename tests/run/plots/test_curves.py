"""Curves of runs: a run that learns from a dataset is its evaluations, and its data a line beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.run.log import MetricsLog
from penstock.run.plots.curves import Curve, read_curves
from penstock.run.plots.figure import plot_runs
from penstock.run.recording import record

OFFLINE = {"sampler": {"class": "penstock.samplers.offline:OfflineSampler", "dataset": "d"}, "algo": {"class": "x:BC"}}
ONLINE = {"sampler": {"class": "penstock.samplers.serial:SerialSampler"}, "algo": {"class": "x:PPO"}}


def make_run(run_dir: Path, experiment: dict[str, Any], rows: list[dict[str, float]], algo: str = "bc") -> Path:
    log = MetricsLog(run_dir)
    for i, row in enumerate(rows, 1):
        log.write(10 * i, {"time/time_elapsed": float(i), **row})
    log.close()
    (run_dir / "meta.json").write_text(json.dumps({"env": "E-v0", "algo": algo}))
    (run_dir / "config.json").write_text(json.dumps({"experiment": experiment}))
    return run_dir


def rows(*returns: float) -> list[dict[str, float]]:
    """Returns of recent episodes, and an evaluation of a tenth in each second row."""
    return [
        {"rollout/ep_rew_mean": r, **({"eval/mean_reward": r / 10} if i % 2 else {})} for i, r in enumerate(returns)
    ]


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def read_curve(run_dir: Path, metric: str) -> Curve | None:
    """The only one."""
    curves = read_curves(run_dir, metric)
    assert len(curves) <= 1
    return curves[0] if curves else None


def test_of_a_run_that_samples_the_rollouts_are_its_own(tmp_path: Path) -> None:
    curve = read_curve(make_run(tmp_path, ONLINE, rows(1, 2, 3, 4)), "rollout/ep_rew_mean")
    assert curve is not None
    assert curve.own.values.tolist() == [1, 2, 3, 4]
    assert curve.evals.values.tolist() == [0.2, 0.4]
    assert curve.evals.seconds.tolist() == [2, 4]
    assert len(curve.data) == 0


def test_evaluations_that_were_logged_after_later_rows_stand_at_their_own_steps(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step, name, value in (
        (10, "rollout/ep_rew_mean", 1.0),
        (30, "eval/mean_reward", 3.0),
        (20, "eval/mean_reward", 2.0),
    ):
        log.write(step, {name: value})
    log.close()
    (tmp_path / "meta.json").write_text(json.dumps({"env": "E-v0", "algo": "ppo"}))
    (tmp_path / "config.json").write_text(json.dumps({"experiment": ONLINE}))
    (curve,) = read_curves(tmp_path, "rollout/ep_rew_mean")
    assert curve.evals.steps.tolist() == [20, 30]
    assert curve.evals.values.tolist() == [2.0, 3.0]


def test_of_a_run_on_a_dataset_the_evaluations_are_its_own_and_the_rollouts_those_of_the_data(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, OFFLINE, [{"eval/mean_ep_length": 7, "rollout/ep_len_mean": 9, "train/loss": 5}, *rows(1, 2)]
    )
    returns, lengths, losses = (
        read_curve(run, m) for m in ("rollout/ep_rew_mean", "rollout/ep_len_mean", "train/loss")
    )
    assert returns is not None
    assert lengths is not None
    assert losses is not None
    assert (returns.own.steps.tolist(), returns.own.values.tolist()) == ([30], [0.2])
    assert (returns.data.steps.tolist(), returns.data.values.tolist()) == ([20, 30], [1, 2])
    assert (lengths.own.values.tolist(), lengths.data.values.tolist()) == ([7], [9])
    assert (losses.own.values.tolist(), losses.data.values.tolist()) == ([5], [])


def duel(share: float) -> list[dict[str, float]]:
    """Two policies that win from each other, so that the return of all agents says nothing."""
    return [
        {
            "rollout/ep_rew_mean": 0.0,
            "rollout/a/ep_rew_mean": share * i,
            "rollout/b/ep_rew_mean": -share * i,
            "rollout/agent/x/ep_rew_mean": 5.0,
            "train/a/loss": 2.0 * i,
            "eval/a/mean_reward": 9.0,
        }
        for i in range(4)
    ]


def test_a_run_of_several_policies_has_a_curve_of_each(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", ONLINE, duel(0.5), "policies")
    team, a, b = read_curves(run, "rollout/ep_rew_mean")
    assert [curve.policy for curve in (team, a, b)] == ["", "a", "b"]
    assert [curve.own.values[-1] for curve in (team, a, b)] == [0.0, 1.5, -1.5]
    assert [curve.evals.values.tolist() for curve in (team, a, b)] == [[], [9.0] * 4, []]
    assert [curve.policy for curve in read_curves(run, "train/loss")] == ["a"]
    (only,) = read_curves(run, "rollout/a/ep_rew_mean")
    assert only.policy is None and only.own.values[-1] == 1.5


def test_curves_of_policies_are_named_and_summed_up_over_seeds(tmp_path: Path) -> None:
    many = [make_run(tmp_path / f"r{i}", ONLINE, duel(0.5 + i), "policies") for i in range(2)]
    shown = texts(plot_runs(many, tmp_path / "x.svg"))
    assert [text for text in shown if text.startswith("policies")] == [
        "policies, all agents (2 seeds)",
        "policies, a (2 seeds)",
        "policies, b (2 seeds)",
    ]
    alone = make_run(tmp_path / "alone", ONLINE, rows(1, 2), "ppo")
    with pytest.warns(UserWarning, match="left out"):
        shown = texts(plot_runs([*many, alone], tmp_path / "y.svg", "rollout/a/ep_rew_mean"))
    assert [text for text in shown if text.startswith("policies")] == ["policies (2 seeds)"]


def test_nothing_to_read_is_no_curve(tmp_path: Path) -> None:
    assert read_curve(make_run(tmp_path, OFFLINE, [{"train/loss": 1}]), "rollout/ep_rew_mean") is None


def test_pictures_say_what_was_evaluated_and_what_are_data(tmp_path: Path) -> None:
    bc = make_run(tmp_path / "bc", OFFLINE, rows(1, 2, 3, 4))
    shown = texts(plot_runs([bc], tmp_path / "x.svg"))
    assert {"bc", "data", "evaluation", "Steps played back", "Return in evaluation (mean)"} <= set(shown), shown
    ppo = make_run(tmp_path / "ppo", ONLINE, rows(1, 2), "ppo")
    assert {"ppo", "evaluation", "Environment steps"} <= set(texts(plot_runs([ppo], tmp_path / "x.svg"))) - {"data"}
    shown = texts(plot_runs([bc, ppo], tmp_path / "x.svg"))
    assert {"bc", "ppo", "data", "Steps", "Return (learned from data: in evaluation)"} <= set(shown), shown


def test_the_thick_line_is_the_evaluations_and_the_thin_one_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_runs([make_run(tmp_path / "bc", OFFLINE, rows(1, 2, 3, 4))], tmp_path / "x.png")
    lines = {
        line.get_linewidth(): line.get_ydata() for line in drawn[0].axes[0].lines if line.get_linestyle() != "None"
    }
    np.testing.assert_array_equal(lines[max(lines)], [0.2, 0.4])
    np.testing.assert_array_equal(lines[min(lines)], [1, 2, 3, 4])


def test_without_an_episode_the_evaluations_are_drawn(tmp_path: Path) -> None:
    evaluated: list[dict[str, float]] = [{"eval/mean_reward": 1.0}]
    shown = texts(plot_runs([make_run(tmp_path / "cql", OFFLINE, evaluated, "cql")], tmp_path / "x.svg"))
    assert {"cql", "evaluation"} <= set(shown)
    assert "data" not in shown
    with pytest.raises(ConfigError, match="nothing to plot"):
        plot_runs([make_run(tmp_path / "ppo", ONLINE, evaluated, "ppo")], tmp_path / "x.svg")


def test_runs_of_the_offline_algorithms_are_known_by_their_files(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"progress": "off", "eval_episodes": 1}
    run = ps.RunConfig(steps=64, dir=str(tmp_path / "t"), **quiet)
    teacher = ps.train(ps.Experiment("CartPole-v1", ps.PPO(epochs=1), ps.SerialSampler(T=16, B=4), run))
    record(teacher.run_dir, tmp_path / "d", 4)
    for algo in (ps.BC(), ps.MARWIL(), ps.CQL(batch_size=32)):
        sampler = ps.OfflineSampler(str(tmp_path / "d"), T=8, B=2)
        run = ps.RunConfig(steps=16, dir=str(tmp_path / type(algo).__name__), **quiet)
        curve = read_curve(ps.train(ps.Experiment("CartPole-v1", algo, sampler, run)).run_dir, "rollout/ep_rew_mean")
        assert curve is not None
        assert curve.of.offline
        assert len(curve.own) == 1
    own = read_curve(teacher.run_dir, "eval/mean_reward")
    assert own is not None
    assert not own.of.offline
