"""Pictures of runs: what they show and name, told apart and within the picture however many there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.run.plots.figure import plot_runs
from tests.run.plots.made import PPO_META, make_run, settings, texts


def test_seeds_are_one_curve_and_single_runs_show_evaluations(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"p{s}", 1 + s, {"env": "CartPole-v1", "algo": "ppo", "seed": s}) for s in range(3)]
    runs.append(make_run(tmp_path / "d", 2, {"env": "CartPole-v1", "algo": "dqn"}, evals=True))
    out = plot_runs(runs, tmp_path / "plots" / "curve.svg")
    shown = texts(out)
    for text in (
        "CartPole-v1",
        "ppo (3 seeds)",
        "dqn",
        "evaluation",
        "Environment steps",
        "Wall time (minutes)",
        "10k",
    ):
        assert text in shown, (text, shown)
    assert "Return (mean of recent episodes)" in shown
    assert any("95% bootstrap" in text for text in shown)


def test_several_environments_and_bare_folders_are_named(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / env, meta={"env": env, "algo": "ppo"}) for env in ("E1", "E2")]
    runs.append(make_run(tmp_path / "bare", time=False))
    (tmp_path / "bare" / "meta.json").write_text("{broken")
    shown = texts(plot_runs(runs, tmp_path / "x.svg"))
    assert {"ppo on E1", "ppo on E2", "bare"} <= set(shown)


def test_a_run_without_times_still_has_its_curve_over_steps(tmp_path: Path) -> None:
    assert "not recorded" in texts(plot_runs([make_run(tmp_path / "a", time=False)], tmp_path / "x.svg"))


def test_pictures_by_suffix(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one", last=2), make_run(tmp_path / "two")]
    for suffix, magic in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        assert plot_runs(runs, tmp_path / f"x{suffix}").read_bytes().startswith(magic)


def test_nothing_to_plot_says_what_was_looked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"no row with 'train/loss' in .*a/metrics\.jsonl"):
        plot_runs([run], tmp_path / "x.png", metric="train/loss")
    with pytest.raises(ConfigError, match="no directory at all"):
        plot_runs([], tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        plot_runs([run], tmp_path / "x.bmp")
    assert not (tmp_path / "x.png").exists()


def test_a_directory_given_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a", meta=PPO_META)
    monkeypatch.chdir(tmp_path)
    shown = texts(plot_runs([run, Path("a"), tmp_path / "a" / ".." / "a"], tmp_path / "x.svg"))
    assert "ppo" in shown
    assert not any("seeds" in text.lower() for text in shown)


def test_a_copy_of_a_run_is_that_run_and_no_further_seed(tmp_path: Path) -> None:
    of = {"seed": 3}
    runs = [make_run(tmp_path / name, 1, PPO_META, settings(**of), last=last) for name, last in zip("abc", (11, 8, 11))]
    with pytest.warns(UserWarning, match="the same run as another one, .*b, .*c$"):
        shown = texts(plot_runs(runs, tmp_path / "x.svg"))
    assert "ppo" in shown
    assert not any("seeds" in text.lower() for text in shown)
    other = make_run(tmp_path / "d", 2, PPO_META, settings(**of))  # the same seed, and not the same run
    with pytest.warns(UserWarning, match="the same run"):
        assert "ppo (2 runs of 1 seed)" in texts(plot_runs([*runs, other], tmp_path / "y.svg"))
    third = make_run(tmp_path / "e", 3, PPO_META, settings(4))
    assert "ppo (2 seeds)" in texts(plot_runs([other, third], tmp_path / "z.svg"))


def test_each_environment_has_axes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.append(self))
    names = ("E1", "E2", "E1")
    runs = [make_run(tmp_path / f"r{i}", 1 + i, {"env": env, "algo": f"a{i}"}) for i, env in enumerate(names)]
    plot_runs(runs, tmp_path / "x.png")
    rows = [drawn[0].axes[i : i + 2] for i in (0, 2)]
    assert [row[0].get_title(loc="left") for row in rows] == ["E1", "E2"]
    assert [[len(axes.lines) for axes in row] for row in rows] == [[n, n] for n in (6, 3)]  # curve, evaluations, data


def test_seeds_without_a_common_stretch_are_not_called_a_mean(tmp_path: Path) -> None:
    early, late = make_run(tmp_path / "a", meta=PPO_META, last=4), make_run(tmp_path / "b", meta=PPO_META, opens=6)
    shown = texts(plot_runs([early, late], tmp_path / "x.svg"))
    assert "ppo (2 seeds, each by itself)" in shown
    assert not any("interquartile" in text for text in shown)


def test_a_directory_that_is_no_run_is_named_and_nothing_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run in .*nope: there is no such folder; exp"):
        plot_runs([make_run(tmp_path / "a"), tmp_path / "nope"], tmp_path / "out" / "x.png")
    assert not (tmp_path / "out").exists()


def test_a_run_without_the_metric_is_left_out_with_a_warning(tmp_path: Path) -> None:
    early = make_run(tmp_path / "early", last=1)
    with pytest.warns(UserWarning, match=r"left out, .*'rollout/ep_rew_mean': .*early"):
        plot_runs([make_run(tmp_path / "a"), early], tmp_path / "x.png")


SHORT, LONG = "r{}", "a-folder-whose-name-is-as-long-as-people-make-them-{}" * 3


@pytest.mark.parametrize(
    ("count", "name"),
    [
        (1, SHORT),
        (17, LONG),
        *(pytest.param(n, x, marks=pytest.mark.slow) for n, x in ((1, LONG), (3, SHORT), (3, LONG), (17, SHORT))),
    ],
)
def test_any_number_of_runs_is_told_apart_and_named_within_the_picture(
    count: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_runs([make_run(tmp_path / name.format(i, i, i), 1 + i) for i in range(count)], tmp_path / "x.png")
    figure = drawn[0]
    figure.canvas.draw()
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(set(names)) == count
    inside, whole = legend.get_window_extent(), figure.bbox
    assert inside.x0 >= 0
    assert inside.y0 >= 0
    assert inside.x1 <= whole.x1
    for axes in figure.axes:
        assert axes.get_window_extent().height > 0.25 * 10.5 * figure.dpi, "the names leave no room for the curves"
        assert inside.y1 <= axes.get_tightbbox().y0
        lines = [line for line in axes.lines if len(line.get_xdata())]
        assert len({line.get_color() for line in lines}) == count


def test_self_play_is_drawn_by_its_rating(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, meta={"env": "tictactoe", "algo": "self-play"}) for name in "ab"]
    shown = texts(plot_runs(runs, tmp_path / "return.svg"))
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rated = [{**row, "self_play/elo": 1000.0 + row["step"]} for row in rows]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rated))
        shown.extend(texts(plot_runs(runs, tmp_path / f"{run.name}.svg")))
    said = [text for text in shown if text.startswith(("Return", "Elo"))]
    assert said == [*["Return (mean of recent episodes)"] * 2, "Elo (against past selves)"]
    assert "Return (mean of recent episodes)" in texts(plot_runs(runs, tmp_path / "x.svg", "rollout/ep_rew_mean"))
