"""Pictures of runs: what they show and name, told apart and within the picture however many there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.run.log import MetricsLog
from penstock.run.plots.bands import bootstrap_band, common_grid, interquartile_mean
from penstock.run.plots.figure import plot_runs


def make_run(
    run_dir: Path,
    slope: float = 1.0,
    meta: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    evals: bool = False,
    time: bool = True,
    last: int = 11,
    opens: int = 1,
) -> Path:
    log = MetricsLog(run_dir, tensorboard=False)
    for i in range(opens, last):
        row = {"rollout/ep_rew_mean": slope * i}
        if time:
            row["time/time_elapsed"] = 30.0 * i
        log.write(1000 * i, row)
        if evals and i % 5 == 0:
            log.write(1000 * i, {"eval/mean_reward": slope * i + 1})
    log.close()
    if meta is not None:
        (run_dir / "meta.json").write_text(json.dumps(meta))
        (run_dir / "config.json").write_text(json.dumps({"experiment": settings or {}, "spec": None}))
    return run_dir


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, -50.0])) == 1.5
    assert interquartile_mean(np.array([3.0, 1.0, 9.0, 2.0, -7.0])) == 2.0
    assert interquartile_mean(np.array([1.0, 2.0, 9.0])) == 4.0
    x = np.array([[0.0, 1.0, 2.0, 99.0], [4.0, 4.0, 6.0, 6.0]])
    np.testing.assert_array_equal(interquartile_mean(x, axis=1), [1.5, 5.0])
    np.testing.assert_array_equal(interquartile_mean(x, axis=0), [2.0, 2.5, 4.0, 52.5])
    with pytest.raises(ConfigError, match="at least one value"):
        interquartile_mean(np.zeros((0, 3)))


def test_bootstrap_band_matches_a_slow_loop_and_covers_the_mean() -> None:
    from penstock.core.noise import Purpose, generator

    x = np.random.default_rng(0).normal(size=(6, 3))
    low, high = bootstrap_band(x, level=0.9, resamples=400, seed=3)
    picks = generator(3, Purpose.BOOTSTRAP).integers(0, 6, size=(400, 6))
    means = np.stack([interquartile_mean(x[pick]) for pick in picks])
    np.testing.assert_allclose(low, np.percentile(means, 5, axis=0))
    np.testing.assert_allclose(high, np.percentile(means, 95, axis=0))
    assert (low < interquartile_mean(x)).all()
    assert (interquartile_mean(x) < high).all()


def test_bootstrap_band_is_the_same_in_chunks_and_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.run.plots import bands

    x = np.random.default_rng(0).normal(size=(5, 7))
    whole = bootstrap_band(x)
    monkeypatch.setattr(bands, "_CHUNK", 1)
    np.testing.assert_array_equal(bootstrap_band(x), whole)
    assert not np.array_equal(bootstrap_band(x, seed=1), whole)


def test_bootstrap_coverage_of_a_known_mean() -> None:
    rng = np.random.default_rng(1)
    low, high = bootstrap_band(rng.normal(size=(20, 300)), resamples=500)
    covered = ((low < 0) & (high > 0)).mean()
    assert 0.85 < covered < 0.99


def test_bootstrap_of_senseless_input() -> None:
    for x, level in ((np.zeros(3), 0.95), (np.zeros((0, 3)), 0.95), (np.zeros((2, 3)), 1.0)):
        with pytest.raises(ConfigError, match="expected"):
            bootstrap_band(x, level=level)


def test_common_grid_spans_what_all_curves_reach() -> None:
    grid, values = common_grid(
        [(np.array([0.0, 10.0]), np.array([0.0, 10.0])), (np.array([2.0, 6.0, 20.0]), np.array([1.0, 1.0, 8.0]))], 3
    ) or (np.zeros(0), np.zeros(0))
    np.testing.assert_array_equal(grid, [2.0, 6.0, 10.0])
    np.testing.assert_array_equal(values, [[2.0, 6.0, 10.0], [1.0, 1.0, 3.0]])
    apart = [(np.array([0.0, 1.0]), np.zeros(2)), (np.array([2.0, 3.0]), np.zeros(2))]
    assert common_grid(apart) is None


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


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_pictures_by_suffix(tmp_path: Path, suffix: str, magic: bytes) -> None:
    runs = [make_run(tmp_path / "one", last=2), make_run(tmp_path / "two")]
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


PPO_META = {"env": "CartPole-v1", "algo": "ppo"}


def settings(seed: int = 0, lr: Any = 1e-3, discount: float = 0.99, **algo: Any) -> dict[str, Any]:
    return {
        "class": "penstock.run.experiment:Experiment",
        "algo": {"class": "penstock.algos.ppo:PPO", "lr": lr, "discount": discount, **algo},
        "sampler": {"class": "penstock.samplers.serial:SerialSampler", "B": 16, "discount": discount},
        "run": {"seed": seed, "dir": f"runs/{seed}", "progress": "off" if seed else "auto",
                "tensorboard": seed > 0, "steps": 1000 + seed, "keep": 3},
    }  # fmt: skip


def legend(tmp_path: Path, given: list[dict[str, Any]]) -> list[str]:
    runs = [make_run(tmp_path / f"r{i}", meta=PPO_META, settings=each) for i, each in enumerate(given)]
    return [text for text in texts(plot_runs(runs, tmp_path / "x.svg")) if text.startswith("ppo")]


def test_runs_with_other_settings_are_curves_of_their_own_named_by_what_differs(tmp_path: Path) -> None:
    given = [settings(s, lr) for lr in (1e-3, 3e-4) for s in range(3)]
    assert legend(tmp_path, given) == ["ppo, lr=0.0003 (3 seeds)", "ppo, lr=0.001 (3 seeds)"]


def test_seed_directory_display_and_length_of_a_run_are_not_settings_of_its_curve(tmp_path: Path) -> None:
    assert legend(tmp_path, [settings(0, entropy_coef=0), settings(1, entropy_coef=0.0)]) == ["ppo (2 seeds)"]


def test_names_of_schedules_lists_and_settings_that_follow_another(tmp_path: Path) -> None:
    linear = {"class": "penstock.core.schedule:Linear", "start": 1e-3, "end": 0}
    assert legend(tmp_path / "a", [settings(), settings(lr=linear)]) == ["ppo, lr=0.001", "ppo, lr=Linear(0.001, 0)"]
    both = [settings(discount=0.9, hidden=[64, 64]), settings(hidden=[8])]  # sampler.discount follows algo.discount
    assert legend(tmp_path / "b", both) == ["ppo, discount=0.9, hidden=[64, 64]", "ppo, discount=0.99, hidden=[8]"]


def test_a_name_holds_three_settings_and_says_that_there_are_more(tmp_path: Path) -> None:
    given = [settings(**dict.fromkeys("abcd", i)) for i in range(2)]
    assert legend(tmp_path, given) == [f"ppo, a={i}, b={i}, c={i}, ..." for i in range(2)]


def test_curves_that_settings_do_not_tell_apart_are_named_by_folder(tmp_path: Path) -> None:
    unknown = [make_run(tmp_path / name / "run", meta=PPO_META) for name in "ab"]
    for run in unknown:
        (run / "config.json").unlink()
    shown = texts(plot_runs(unknown, tmp_path / "x.svg"))
    assert {"ppo, a", "ppo, b"} <= set(shown), shown


def test_a_directory_given_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a", meta=PPO_META)
    monkeypatch.chdir(tmp_path)
    shown = texts(plot_runs([run, Path("a"), tmp_path / "a" / ".." / "a"], tmp_path / "x.svg"))
    assert "ppo" in shown
    assert not any("seeds" in text.lower() for text in shown)


def test_seeds_without_a_common_stretch_are_not_called_a_mean(tmp_path: Path) -> None:
    early, late = make_run(tmp_path / "a", meta=PPO_META, last=4), make_run(tmp_path / "b", meta=PPO_META, opens=6)
    shown = texts(plot_runs([early, late], tmp_path / "x.svg"))
    assert "ppo (2 seeds, each by itself)" in shown
    assert not any("interquartile" in text for text in shown)


def test_names_are_numbers_in_order_and_folders_as_short_as_they_can_be(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, meta=PPO_META) for name in ("ppo", "ppo-10/x", "ppo-2/x", "other/x", "y$1$")]
    for run in runs:
        (run / "config.json").unlink()
    shown = [text for text in texts(plot_runs(runs, tmp_path / "x.svg")) if text.startswith("ppo")]
    assert shown == ["ppo", "ppo, other/x", "ppo, y$1$", "ppo-2/x", "ppo-10/x"]


def test_the_settings_that_tell_curves_apart_are_named_before_those_that_do_not(tmp_path: Path) -> None:
    given = [settings(a=i // 2, b=i // 2, c=i // 2, d=i % 2) for i in range(4)]
    assert legend(tmp_path, given) == [f"ppo, a={a}, b={a}, d={d}, ..." for a in (0, 1) for d in (0, 1)]


def test_a_directory_that_is_no_run_is_named_and_nothing_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing to plot in .*nope: no metrics\.jsonl"):
        plot_runs([make_run(tmp_path / "a"), tmp_path / "nope"], tmp_path / "out" / "x.png")
    assert not (tmp_path / "out").exists()


def test_a_run_without_the_metric_is_left_out_with_a_warning(tmp_path: Path) -> None:
    early = make_run(tmp_path / "early", last=1)
    with pytest.warns(UserWarning, match=r"left out, .*'rollout/ep_rew_mean': .*early"):
        plot_runs([make_run(tmp_path / "a"), early], tmp_path / "x.png")


@pytest.mark.parametrize("name", ["r{}", "a-folder-whose-name-is-as-long-as-people-make-them-{}" * 3])
@pytest.mark.parametrize("count", [1, 3, 17])
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
