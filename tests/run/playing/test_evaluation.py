from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.envs.toy import Constant, RepeatPrevious
from penstock.run import plan
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.playing import evaluator, show
from penstock.run.playing.evaluation import evaluate_run, record_video
from penstock.run.playing.exploiter import exploit_run
from penstock.run.recording import record
from penstock.workers.env_check import check_apart

RUN = ps.RunConfig(steps=256, checkpoint_interval=64, keep=10, eval_episodes=0, progress="off", seed=5)
EXP = ps.Experiment("CartPole-v1", ps.PPO(epochs=1, minibatch=32), ps.SerialSampler(T=16, B=4), RUN)


class Pictures(Constant):
    """Renders."""

    metadata: Any = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.full((32, 48, 3), 7 * self.t, np.uint8) if self.render_mode else None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ps.train(replace(EXP, run=replace(RUN, dir=str(tmp_path_factory.mktemp("runs") / "run")))).run_dir


def trained(path: Path, exp: ps.Experiment) -> Path:
    return ps.train(replace(exp, run=replace(RUN, steps=64, dir=str(path)))).run_dir


@pytest.mark.parametrize("episodes", [1, 3, 40])
def test_exactly_as_many_episodes_as_asked(run: Path, episodes: int) -> None:
    found, step = evaluate_run(run, None, episodes)
    assert len(found) == episodes
    assert step == int(find_checkpoint(run).name)
    assert (found.return_ == found.length).all()  # CartPole pays 1 a step


def test_the_same_every_time_and_nothing_of_the_run_is_touched(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    a, b = evaluate_run(run, None, 5)[0], evaluate_run(run, None, 5)[0]
    assert a.return_.tolist() == b.return_.tolist()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_seed_and_sampled_actions(run: Path) -> None:
    plain = evaluate_run(run, None, 8)[0].return_.tolist()
    assert evaluate_run(run, None, 8, seed=5)[0].return_.tolist() == plain
    assert evaluate_run(run, None, 8, seed=6)[0].return_.tolist() != plain
    assert evaluate_run(run, None, 8, deterministic=False)[0].return_.tolist() != plain


def test_which_checkpoint(run: Path) -> None:
    steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    assert len(steps) > 2
    assert evaluate_run(run, None, 1, which=str(steps[0]))[1] == steps[0]
    assert evaluate_run(run, None, 1, which="best")[1] == steps[-1]
    with pytest.raises(CheckpointError, match=str(steps[0])):
        evaluate_run(run, None, 1, which="1")
    with pytest.raises(ConfigError, match="'last', 'best'"):
        evaluate_run(run, None, 1, which="beste")


@pytest.mark.parametrize("episodes", [0, -1])
def test_too_few(run: Path, episodes: int) -> None:
    with pytest.raises(ConfigError, match=f"episodes={episodes}"):
        evaluate_run(run, None, episodes)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run directory"):
        ps.evaluate(tmp_path)


def test_env_kwargs_are_added(tmp_path: Path) -> None:
    exp = replace(EXP, env="penstock.envs.toy:RepeatPrevious", env_kwargs={"length": 6, "symbols": 3})
    run = trained(tmp_path / "run", exp)
    assert evaluate_run(run, None, 3)[0].length.tolist() == [6, 6, 6]
    assert evaluate_run(run, None, 3, env_kwargs={"length": 9})[0].length.tolist() == [9, 9, 9]


def test_env_that_could_not_be_stored(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", replace(EXP, env=lambda: Constant()))
    with pytest.raises(ConfigError, match="env="):
        evaluate_run(run, None, 2)
    assert len(evaluate_run(run, Constant, 2)[0]) == 2


def test_recurrent_policy(tmp_path: Path) -> None:
    net = ps.Net(hidden=(8,), recurrent="gru", recurrent_size=4, prev_action=True, prev_reward=True)
    run = trained(
        tmp_path / "run",
        replace(EXP, env="penstock.envs.toy:RepeatPrevious", algo=ps.PPO(epochs=4, minibatch=32, net=net)),
    )
    assert len(evaluate_run(run, None, 3)[0]) == 3


needs_ffmpeg = pytest.mark.skipif(importlib.util.find_spec("imageio_ffmpeg") is None, reason="needs the extra video")


@needs_ffmpeg
@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_video(recurrent: Any, tmp_path: Path) -> None:
    algo = ps.PPO(epochs=4, minibatch=32, net=ps.Net(hidden=(8,), recurrent=recurrent, recurrent_size=4))
    run = trained(tmp_path / "run", replace(EXP, env=Pictures, algo=algo))
    path = record_video(run, 2, env=Pictures)
    assert path == run / "videos" / f"{int(find_checkpoint(run).name):012d}.mp4"
    assert path.stat().st_size > 500


def test_video_of_what_cannot_render(tmp_path: Path) -> None:
    class Blind(Pictures):
        def render(self) -> Any:
            return None

    run = trained(tmp_path / "run", replace(EXP, env=lambda: Blind()))
    with pytest.raises(ConfigError, match=r"render\(\) gave NoneType"):
        record_video(run, 1, env=Blind)
    assert not (run / "videos").exists()


# Policies, limits and environments of the user's own


@pytest.fixture(scope="module")
def policy(run: Path) -> ps.Policy:
    return ps.load(run)


def test_a_policy_is_evaluated_where_the_user_says(run: Path, policy: ps.Policy) -> None:
    found = ps.evaluate(policy, "CartPole-v1", 6, seed=3)
    assert len(found) == 6
    assert found.mean_return == found.return_.mean() > 0
    assert found.return_.tolist() == ps.evaluate(policy, ps.EnvConfig("CartPole-v1"), 6, seed=3).return_.tolist()
    assert ps.evaluate(run, episodes=5).return_.tolist() == evaluate_run(run, None, 5)[0].return_.tolist()
    with pytest.raises(ConfigError, match="without env"):
        ps.evaluate(policy)
    with pytest.raises(ConfigError, match=r"Pendulum-v1 has observation box\[3\].*built for box\[4\]"):
        ps.evaluate(policy, "Pendulum-v1")


@pytest.mark.parametrize(
    ("env", "algo"),
    [
        ("CartPole-v1", ps.DQN(ladder="ape-x", learning_starts=0, noisy=True)),
        ("CartPole-v1", ps.PPO(minibatch=64, net=ps.Net(recurrent="lstm", recurrent_size=4))),
        ("Pendulum-v1", ps.SAC(learning_starts=8, replay_ratio=1, batch_size=16, net=ps.Net(hidden=(8,)))),
    ],
    ids=["dqn", "lstm", "sac"],
)
def test_a_policy_in_training_is_not_disturbed(env: str, algo: Any) -> None:
    exp = ps.Experiment(env, algo, ps.SerialSampler(T=16, B=4), RUN)
    results: list[Any] = []
    for evaluated in (False, True):
        with ps.Trainer(exp) as trainer:
            for _ in range(3):
                trainer.train()
                if evaluated:
                    ps.evaluate(trainer.policy, env, 2, max_steps=20)
            results.append([p.detach().clone() for p in trainer.policy.agent.state_dict().values()])
    assert all(a.equal(b) for a, b in zip(*results))


def test_the_length_of_an_episode_is_limited(run: Path, policy: ps.Policy) -> None:
    found = ps.evaluate(policy, "CartPole-v1", 9, max_steps=5, slots=2)
    assert found.length.tolist() == found.return_.tolist() == [5] * 9
    assert not found.terminated.any()
    assert set(found.slot.tolist()) == {0, 1}
    exp = replace(EXP, env="penstock.envs.toy:Counter", env_kwargs={"terminate_at": None})
    endless = replace(exp.run, eval_episodes=5, eval_max_steps=70, eval_slots=3)
    with ps.Trainer(replace(exp, run=endless)) as trainer:
        metrics, found = trainer.evaluate()
    assert metrics["eval/cut_episodes"] == 5.0
    assert found.length.tolist() == [70] * 5
    assert set(found.slot.tolist()) == {0, 1, 2}
    assert "eval/cut_episodes" not in ps.Trainer(EXP).evaluate(1)[0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slots": 0}, r"slots=0 \(int\); expected a whole number, 1 or more"),
        ({"max_steps": 0}, r"max_steps=0 "),
        ({"episodes": 2.5}, r"episodes=2.5 \(float\); expected a whole number, 1 or more"),
        ({"episodes": True}, r"episodes=True \(bool\)"),
        ({"slots": "x"}, r"slots='x' \(str\)"),
        ({"seed": 1.5}, r"seed=1.5 \(float\); expected a whole number, 0 or more"),
    ],
)
def test_numbers_that_are_no_counts_are_refused(run: Path, policy: ps.Policy, wrong: Any, said: str) -> None:
    given: dict[str, Any] = {"episodes": 1, **wrong}
    for which in (run, policy):
        with pytest.raises(ConfigError, match=said):
            ps.evaluate(which, "CartPole-v1", **given)


def test_episodes_are_counted_in_whole_numbers_by_all_that_plays(run: Path, tmp_path: Path) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: record(run, tmp_path / "data", 2.5),  # pyright: ignore[reportArgumentType]
        lambda: record_video(run, 2.5),  # pyright: ignore[reportArgumentType]
        lambda: exploit_run(run, 2.5),  # pyright: ignore[reportArgumentType]
        lambda: ps.Trainer(EXP).evaluate(2.5),  # pyright: ignore[reportArgumentType]
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"episodes=2.5 \(float\); expected a whole number"):
            call()


def test_a_run_is_evaluated_within_its_own_limits(tmp_path: Path) -> None:
    limits = replace(RUN, steps=64, eval_max_steps=3, eval_slots=2, dir=tmp_path / "run")
    found = ps.evaluate(ps.train(replace(EXP, run=limits)).run_dir, episodes=5)
    assert found.length.tolist() == [3] * 5
    assert set(found.slot.tolist()) == {0, 1}


def test_every_environment_is_checked_before_it_is_made_here(
    run: Path, policy: ps.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def noted(config: Any, *args: Any) -> Any:
        checked.append(config.kwargs["max_episode_steps"])
        return check_apart(config, *args)

    for module in (plan, evaluator):
        monkeypatch.setattr(module, "check_apart", noted)
    ps.Trainer(replace(EXP, env_kwargs={"max_episode_steps": 7}, eval_env_kwargs={"max_episode_steps": 8})).stop()
    for which, steps in ((run, 9), (policy, 10)):
        ps.evaluate(which, "CartPole-v1", 1, env_kwargs={"max_episode_steps": steps})
    assert checked == [7, 8, 9, 10]


def test_a_video_of_an_episode_without_an_end_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forever(Pictures):
        def step(self, action: Any) -> Any:
            obs, reward, _, _, info = super().step(action)
            return obs, reward, False, False, info

    frames: list[Any] = []
    monkeypatch.setattr(show, "write_frame", lambda env, writer, path: frames.append(env.render()))
    limited = replace(RUN, steps=64, eval_max_steps=12, dir=tmp_path / "run")
    record_video(ps.train(replace(EXP, env=Forever, run=limited)).run_dir, 2, env=Forever)
    assert len(frames) == 2 * (12 + 1)


def test_a_run_says_once_that_episodes_are_cut(tmp_path: Path) -> None:
    settings = replace(RUN, steps=128, eval_interval=64, eval_episodes=2, eval_max_steps=66, dir=tmp_path)
    exp = replace(EXP, env="penstock.envs.toy:Counter", env_kwargs={"terminate_at": None}, run=settings)
    with pytest.warns(UserWarning, match=r"2 of 2 evaluation episodes had no end in run\.eval_max_steps=66") as said:
        result = ps.train(exp)
    assert result.metrics["eval/cut_episodes"] == 2.0
    assert len([w for w in said if "had no end" in str(w.message)]) == 1


HELD_OUT = replace(
    EXP, env="penstock.envs.toy:RepeatPrevious", env_kwargs={"length": 6, "symbols": 3}, eval_env_kwargs={"length": 9}
)


def test_a_held_out_environment_chooses_the_best(tmp_path: Path) -> None:
    lengths = replace(RUN, steps=64, eval_episodes=3, dir=str(tmp_path / "run"))
    result = ps.train(replace(HELD_OUT, run=lengths))
    assert result.metrics["eval/mean_ep_length"] == 9.0
    assert result.metrics["rollout/ep_len_mean"] == 6.0
    assert ps.evaluate(result.run_dir, episodes=2).length.tolist() == [9, 9]
    assert ps.evaluate(result.run_dir, episodes=2, env_kwargs={"length": 4}).length.tolist() == [4, 4]
    ps.resume(result.run_dir, {"run.steps": 128})


def test_a_held_out_environment_of_its_own(tmp_path: Path) -> None:
    lone = replace(HELD_OUT, env_kwargs={"symbols": 3}, eval_env_kwargs={})
    for eval_env in (
        lambda: RepeatPrevious(length=5, symbols=3),
        ps.EnvConfig(RepeatPrevious, {"length": 5, "symbols": 3}),
    ):
        with ps.Trainer(replace(lone, eval_env=eval_env)) as trainer:
            assert trainer.evaluate(2)[1].length.tolist() == [5, 5]
    with pytest.raises(ConfigError, match=r"CartPole-v1 has observation.*built for"):
        ps.Trainer(replace(lone, eval_env="CartPole-v1"))
    with pytest.raises(ConfigError, match="put them into it"):
        replace(lone, eval_env=ps.EnvConfig(RepeatPrevious), eval_env_kwargs={"length": 3})
    exp = replace(
        lone,
        eval_env=lambda: RepeatPrevious(length=5, symbols=3),
        run=replace(RUN, steps=64, dir=str(tmp_path / "run")),
    )
    run = ps.train(exp).run_dir
    with pytest.raises(ConfigError, match="eval_env="):
        ps.resume(run, {"run.steps": 128})
    ps.resume(run, {"run.steps": 128}, eval_env=ps.EnvConfig(RepeatPrevious, {"symbols": 3}))
    assert ps.evaluate(run, RepeatPrevious, 1, env_kwargs={"length": 4, "symbols": 3}).length.tolist() == [4]


def test_a_trainer_evaluates_once_it_is_stopped() -> None:
    trainer = ps.Trainer(replace(EXP, run=replace(RUN, steps=64)))
    trainer.train()
    inside = trainer.evaluate(3)[1].return_.tolist()
    trainer.stop()
    assert trainer.evaluate(3)[1].return_.tolist() == inside
