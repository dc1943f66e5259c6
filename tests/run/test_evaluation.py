from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.envs.toy import Constant
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.evaluation import evaluate, record_video

RUN = ps.RunConfig(
    steps=256, checkpoint_interval=64, keep=10, eval_episodes=0, tensorboard=False, progress="off", seed=5
)
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
    found, step = evaluate(run, episodes)
    assert len(found) == episodes
    assert step == int(find_checkpoint(run).name)
    assert (found.return_ == found.length).all()  # CartPole pays 1 a step


def test_the_same_every_time_and_nothing_of_the_run_is_touched(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    a, b = evaluate(run, 5)[0], evaluate(run, 5)[0]
    assert a.return_.tolist() == b.return_.tolist()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_seed_and_sampled_actions(run: Path) -> None:
    plain = evaluate(run, 8)[0].return_.tolist()
    assert evaluate(run, 8, seed=5)[0].return_.tolist() == plain
    assert evaluate(run, 8, seed=6)[0].return_.tolist() != plain
    assert evaluate(run, 8, deterministic=False)[0].return_.tolist() != plain


def test_which_checkpoint(run: Path) -> None:
    steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    assert len(steps) > 2
    assert evaluate(run, 1, which=str(steps[0]))[1] == steps[0]
    assert evaluate(run, 1, which="best")[1] == steps[-1]
    with pytest.raises(CheckpointError, match=str(steps[0])):
        evaluate(run, 1, which="1")
    with pytest.raises(ConfigError, match="'last', 'best'"):
        evaluate(run, 1, which="beste")


@pytest.mark.parametrize("episodes", [0, -1])
def test_too_few(run: Path, episodes: int) -> None:
    with pytest.raises(ConfigError, match=f"episodes={episodes}"):
        evaluate(run, episodes)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run directory"):
        evaluate(tmp_path)


def test_env_kwargs_are_added(tmp_path: Path) -> None:
    exp = replace(EXP, env="penstock.envs.toy:RepeatPrevious", env_kwargs={"length": 6, "symbols": 3})
    run = trained(tmp_path / "run", exp)
    assert evaluate(run, 3)[0].length.tolist() == [6, 6, 6]
    assert evaluate(run, 3, env_kwargs={"length": 9})[0].length.tolist() == [9, 9, 9]


def test_env_that_could_not_be_stored(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", replace(EXP, env=lambda: Constant()))
    with pytest.raises(ConfigError, match="env="):
        evaluate(run, 2)
    assert len(evaluate(run, 2, env=Constant)[0]) == 2


def test_recurrent_policy(tmp_path: Path) -> None:
    net = ps.Net(hidden=(8,), recurrent="gru", recurrent_size=4, prev_action=True, prev_reward=True)
    run = trained(
        tmp_path / "run",
        replace(EXP, env="penstock.envs.toy:RepeatPrevious", algo=ps.PPO(epochs=4, minibatch=32, net=net)),
    )
    assert len(evaluate(run, 3)[0]) == 3


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
