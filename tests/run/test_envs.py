"""Calls of environments in a run: between iterations, kept by its checkpoints, and the curriculum that makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.make import EnvConfig
from tests.run.test_loop import rows
from tests.samplers.levels import Levels
from tests.slow import slow

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forked")]
curriculum = ps.Curriculum({1.0: 3, 150.0: 5, 250.0: 8}, evaluation=True, episodes=5)
NET = ps.Net(hidden=(8,))
SAMPLERS: dict[str, Any] = {
    "serial": ps.SerialSampler(8, 4),
    "cpu": ps.CpuSampler(8, 4, workers=2),
    "async": ps.AsyncSerialSampler(ps.SerialSampler(8, 4), depth=1),
    "runners": ps.RunnerSampler(inner=ps.SerialSampler(8, 2), runners=2, backend="in-process", depth=1),
}


def experiment(path: Path, sampler: str, **run: Any) -> ps.Experiment:
    return ps.Experiment(
        env=EnvConfig(Levels),
        algo=ps.PPO(net=NET, minibatch=16, epochs=1),
        sampler=SAMPLERS[sampler],
        run=ps.RunConfig(
            steps=512, dir=str(path), seed=3, progress="off", log_interval=1, checkpoint_interval=256, eval_interval=320,
            eval_episodes=4, **run,
        ),
    )  # fmt: skip


def first_call(it: ps.Iteration) -> None:
    """Something to reach the curriculum's first threshold with: an environment of level 0 pays nothing."""
    if it.itr == 2:
        assert it.run.envs.call("set_level", 1) == [0, 1, 2, 3]
    curriculum(it)


def without_times(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items()
         if key.split("/")[0] in ("rollout", "train", "eval", "step", "curriculum")
         and not key.endswith(("_s", "_ms"))}
        for row in rows(run)
    ]  # fmt: skip


@pytest.mark.parametrize("sampler", ["serial", *slow("cpu", "async", "runners")])
def test_a_curriculum_raises_the_level_and_goes_on_exactly_from_any_checkpoint(sampler: str, tmp_path: Path) -> None:
    whole, levels = tmp_path / "whole", list[list[Any]]()
    with ps.Run(experiment(whole, sampler)) as run:
        for it in run:
            first_call(it)
            levels.append(it.run.envs.get("level"))
        evaluated = run.envs.get("level", evaluation=True)
    seen = [level[0] for level in levels]
    assert all(level == [level[0]] * 4 for level in levels)
    assert seen == sorted(seen)
    assert {*seen} > {0, 3, 5}
    assert {*evaluated} == {seen[-1]}
    expected = without_times(whole)
    indices = {0: 0, 1: 0, 3: 1, 5: 2, 8: 3}  # by level; 1 is set by hand
    assert [row["curriculum/level"] for row in expected] == [indices[level] for level in seen]
    for row, before in zip(expected[1:], expected):
        raised = row["curriculum/level"] - before["curriculum/level"]
        ended = row["rollout/episodes"] if raised else before["curriculum/since"]
        assert raised in (0, 1) and row["curriculum/since"] == ended
        assert not raised or ended >= before["curriculum/since"] + 5
    for stop in (3, 9):
        cut = tmp_path / f"cut-{stop}"
        with ps.Run(experiment(cut, sampler)) as run:
            for it in run:
                first_call(it)
                if it.itr == stop:
                    run.stop()
        with ps.Run.resume(cut) as run:
            for it in run:
                first_call(it)
                assert it.run.envs.get("level") == levels[it.itr - 1]
            assert run.envs.get("level", evaluation=True) == evaluated
        found = without_times(cut)
        assert [row for row in found if row["step"] > 32 * stop] == [row for row in expected if row["step"] > 32 * stop]


def test_a_curriculum_finds_where_its_level_began_behind_rows_of_evaluations(tmp_path: Path) -> None:
    """With `run.eval_workers` the last row before a resumed run's first iteration may be of an evaluation alone."""
    beside: dict[str, Any] = {"eval_workers": 1}
    for name, stop in (("whole", None), ("cut", 10)):
        exp = experiment(tmp_path / name, "serial", **beside)
        exp = replace(exp, run=replace(exp.run, eval_interval=32))
        with ps.Run(exp) as run:
            for it in run:
                first_call(it)
                if it.itr == stop:
                    run.stop()
    with ps.Run.resume(tmp_path / "cut") as run:
        for it in run:
            first_call(it)
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")


def test_a_run_passes_its_curriculum_by_name_and_says_what_cannot_be_reached(tmp_path: Path) -> None:
    run = ps.Run(experiment(tmp_path / "named", "serial", each="tests.run.test_envs:first_call"))
    with pytest.raises(ConfigError, match="used in a with"):
        _ = run.envs
    with run:
        for _ in run:
            pass
    with pytest.raises(ConfigError, match="is over"):
        run.envs.get("level")
    for levels, why in (({1.0: 2, 3.0: 2}, "names a level twice"), ({1.0: object()}, "object")):
        with pytest.raises(ConfigError, match=why):
            ps.Curriculum(levels)
    for levels in ({}, {"a": 1}, 3, {float("nan"): 1}):
        with pytest.raises(ConfigError, match="expected levels by threshold"):
            ps.Curriculum(levels)  # pyright: ignore[reportArgumentType]


def climbed(path: Path, curriculum: ps.Curriculum, **run: Any) -> list[dict[str, Any]]:
    """The rows of a run with environments of level 2, which pay from the start."""
    with ps.Run(experiment(path, "serial", **run)) as run_:
        run_.envs.call("set_level", 2)
        for it in run_:
            curriculum(it)
    return rows(path)


def test_a_curriculum_waits_for_episodes_of_each_level_and_goes_up_one_at_a_time(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"step \d+: set_level\(5\), as rollout/ep_rew_mean [\d.]+ >= 1"):
        found = climbed(tmp_path / "a", ps.Curriculum({1: 5, 2: 6}, episodes=12))
    levels = [row["curriculum/level"] for row in found]
    assert levels[0] == 0 and {*levels} == {0, 1, 2}
    first, second = levels.index(1), levels.index(2)
    assert found[first - 1]["rollout/episodes"] < 12 <= found[first]["rollout/episodes"]
    assert found[second]["rollout/episodes"] >= found[first]["rollout/episodes"] + 12
    waiting = climbed(tmp_path / "b", ps.Curriculum({1: 5}))  # the default window of 100 is never full here
    assert {row["curriculum/level"] for row in waiting} == {0}
    assert waiting[-1]["rollout/episodes"] < 100


def test_two_curricula_of_a_run_climb_each_by_itself(tmp_path: Path) -> None:
    both = ps.Curriculum({1: 5, 2: 6}, episodes=5), ps.Curriculum({2: "a"}, call="spawn", episodes=20)
    with ps.Run(experiment(tmp_path, "serial")) as run:
        run.envs.call("set_level", 2)
        for it in run:
            for one in both:
                one(it)
    last = rows(tmp_path)[-1]
    assert (last["curriculum/level"], last["curriculum/spawn/level"]) == (2, 1)
    assert last["curriculum/since"] < 20 <= last["curriculum/spawn/since"]


def test_a_level_that_stands_adds_no_rows(tmp_path: Path) -> None:
    exp = ps.override(experiment(tmp_path, "serial"), {"run.log_interval": 128, "run.eval_interval": 0})
    with ps.Run(exp) as run:
        for it in run:
            ps.Curriculum({1e9: 1})(it)
    assert [row["step"] // 128 for row in rows(tmp_path)] == [1, 2, 3, 4]  # of 16 iterations
    assert all(row["curriculum/level"] == 0 for row in rows(tmp_path))


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("rollout/ep_rew_men", r"Curriculum\(metric='rollout/ep_rew_men'\), which .* 'rollout/ep_rew_mean'"),
        ("rolout/ep_rew_mean", "did you mean 'rollout/ep_rew_mean'"),
        ("rollout/score", "this run does not report; "),
        ("eval/mean_rewards", "did you mean 'eval/mean_reward'"),
    ],
)
def test_a_misspelt_metric_of_a_curriculum_is_named(metric: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        climbed(tmp_path, ps.Curriculum({1: 5}, metric=metric))


def test_a_curriculum_waits_for_the_first_episode(tmp_path: Path) -> None:
    exp = ps.override(experiment(tmp_path, "serial"), {"sampler.T": 1, "algo.minibatch": 4, "run.steps": 80})
    with ps.Run(exp) as run:
        for it in run:
            ps.Curriculum({1e9: 5})(it)
    assert "rollout/ep_rew_mean" not in rows(tmp_path)[0] and "rollout/ep_rew_mean" in rows(tmp_path)[-1]


def test_a_metric_of_ones_own_may_be_absent_and_one_of_evaluations_needs_them(tmp_path: Path) -> None:
    assert {row["curriculum/level"] for row in climbed(tmp_path / "a", ps.Curriculum({1: 5}, metric="mine/x"))} == {0}
    exp = ps.override(experiment(tmp_path / "b", "serial"), {"run.eval_interval": 0})
    with (
        pytest.raises(ConfigError, match=r"without evaluations during the run; set run\.eval_interval"),
        ps.Run(exp) as run,
    ):
        ps.Curriculum({1: 5}, metric="eval/mean_reward")(next(run))


def test_evaluation_environments_that_the_run_itself_plays_are_refused_by_name(tmp_path: Path) -> None:
    exp = replace(
        experiment(tmp_path, "serial"),
        env=EnvConfig("CartPole-v1"),
        eval_env=EnvConfig("CartPole-v1", {"vectorized": True}),
    )
    with ps.Run(exp) as run:
        next(iter(run))
        run.envs.set("gravity", 1.62)
        with pytest.raises(ConfigError, match=r"evaluation=True: the run itself plays CartPole-v1"):
            run.envs.set("gravity", 1.62, evaluation=True)
        run.stop()


@pytest.mark.slow
def test_environments_of_several_learners_are_refused_by_name(tmp_path: Path) -> None:
    with ps.Run(experiment(tmp_path, "serial", learners=2)) as run:
        next(iter(run))
        with pytest.raises(ConfigError, match=r"run.learners=1"):
            run.envs.call("set_level", 3)
