from __future__ import annotations

from pathlib import Path

from penstock.run.plots.figure import plot_runs
from tests.run.plots.made import PPO_META, legend, make_run, settings, texts


def test_runs_with_other_settings_are_curves_of_their_own_named_by_what_differs(tmp_path: Path) -> None:
    given = [settings(s, lr) for lr in (1e-3, 3e-4) for s in range(3)]
    assert legend(tmp_path, given) == ["ppo, lr=0.0003 (3 seeds)", "ppo, lr=0.001 (3 seeds)"]


def test_seed_directory_display_and_length_of_a_run_are_not_settings_of_its_curve(tmp_path: Path) -> None:
    given = [settings(0, entropy_coef=0), settings(1, entropy_coef=0.0)]
    given[1]["run"]["stop"] = {"time/total_timesteps": 512}  # as a trial that a search has pruned
    assert legend(tmp_path, given) == ["ppo (2 seeds)"]


def test_names_of_schedules_lists_and_settings_that_follow_another(tmp_path: Path) -> None:
    linear = {"class": "penstock.core.schedule:Linear", "start": 1e-3, "end": 0}
    assert legend(tmp_path / "a", [settings(), settings(lr=linear)]) == ["ppo, lr=0.001", "ppo, lr=Linear(0.001, 0)"]
    both = [settings(discount=0.9, hidden=[64, 64]), settings(hidden=[8])]  # sampler.discount follows algo.discount
    assert legend(tmp_path / "b", both) == ["ppo, discount=0.9, hidden=[64, 64]", "ppo, discount=0.99, hidden=[8]"]


def test_long_numbers_have_six_digits_in_names(tmp_path: Path) -> None:
    assert legend(tmp_path, [settings(lr=1 / 3000), settings(lr=1e7)]) == ["ppo, lr=0.000333333", "ppo, lr=10000000"]


def test_a_name_holds_three_settings_and_says_that_there_are_more(tmp_path: Path) -> None:
    given = [settings(**dict.fromkeys("abcd", i)) for i in range(2)]
    assert legend(tmp_path, given) == [f"ppo, a={i}, b={i}, c={i}, ..." for i in range(2)]


def test_curves_that_settings_do_not_tell_apart_are_named_by_folder(tmp_path: Path) -> None:
    unknown = [make_run(tmp_path / name / "run", meta=PPO_META) for name in "ab"]
    for run in unknown:
        (run / "config.json").unlink()
    shown = texts(plot_runs(unknown, tmp_path / "x.svg"))
    assert {"ppo, a", "ppo, b"} <= set(shown), shown


def test_names_are_numbers_in_order_and_folders_as_short_as_they_can_be(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, meta=PPO_META) for name in ("ppo", "ppo-10/x", "ppo-2/x", "other/x", "y$1$")]
    for run in runs:
        (run / "config.json").unlink()
    shown = [text for text in texts(plot_runs(runs, tmp_path / "x.svg")) if text.startswith("ppo")]
    assert shown == ["ppo", "ppo, other/x", "ppo, y$1$", "ppo-2/x", "ppo-10/x"]


def test_the_settings_that_tell_curves_apart_are_named_before_those_that_do_not(tmp_path: Path) -> None:
    given = [settings(a=i // 2, b=i // 2, c=i // 2, d=i % 2) for i in range(4)]
    assert legend(tmp_path, given) == [f"ppo, a={a}, b={a}, d={d}, ..." for a in (0, 1) for d in (0, 1)]
