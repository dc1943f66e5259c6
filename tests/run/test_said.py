"""What a run and the command line say: results, unknown stop names, environments and renders that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.check import check_vector_env
from penstock.run.playing.show import write_frame
from penstock.run.result import in_a_line, summary
from penstock.samplers.episodes import Episodes

EXP = ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T=16, B=2))


def result(return_: float) -> Any:
    one = np.ones(1)
    episodes = Episodes(one * return_, one.astype(int), one, one.astype(int), one.astype(bool))
    metrics = {"eval/mean_reward": return_, "eval/std_reward": 0.04}
    return ps.Result(episodes, metrics, None, Path("runs/a"), 64, "steps", None, "")  # pyright: ignore


def test_returns_below_1_keep_their_digits() -> None:
    with ps.Trainer(EXP) as trainer:
        rows = summary(trainer, result(0.874), 1.0, 64, 0)
    assert rows["return, last episodes"] == "0.874 over 1"
    assert rows["return, evaluation"] == "0.874 +- 0.04"


def test_a_result_in_a_line() -> None:
    line = "runs/a: 64 steps, return 21.5 over the last 1 episodes, 21.5 +- 0.04 in evaluation"
    assert in_a_line(result(21.5)) == line


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ({"eval/mean_rewards": 1}, "'eval/mean_rewards', which evaluations do not report; did you mean 'eval/mean_rew"),
        ({"eval/mean_lives": 1}, "'eval/mean_lives', which evaluations do not report"),
    ],
)
def test_an_unknown_metric_of_evaluations_is_refused_before_the_first_step(stop: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ps.Trainer(replace(EXP, run=ps.RunConfig(stop=stop)))


@pytest.mark.parametrize("name", ["eval/mean_reward", "eval/success_rate", "eval/mean_lives", "eval/cut_episodes"])
def test_a_metric_that_evaluations_may_report_is_taken(name: str) -> None:
    ps.Trainer(replace(EXP, info_keys=("lives",), run=ps.RunConfig(stop={name: 1}))).stop()


def test_an_unknown_metric_of_evaluations_of_many_agents_is_refused_at_the_first() -> None:
    run = ps.RunConfig(stop={"eval/a/mean_rewards": 1}, eval_episodes=1)
    exp = ps.Experiment("penstock.envs.toy:TeamBits", ps.PPO(), ps.SerialSampler(T=8, B=2), run)
    with (
        ps.Trainer(exp) as trainer,
        pytest.raises(ConfigError, match="'eval/a/mean_rewards', which evaluations do not"),
    ):
        trainer.evaluate(1)


@pytest.mark.parametrize("take", [lambda env: ps.Experiment(env, ps.PPO()), ps.EnvConfig])
def test_a_made_environment_is_answered_with_its_id(take: Any) -> None:
    with pytest.raises(ConfigError, match=r"env is TimeLimit, an environment made already; .* 'CartPole-v1'"):
        take(gym.make("CartPole-v1"))


def test_settings_of_an_algorithm_take_no_policy_by_position() -> None:
    with pytest.raises(ConfigError, match=r"PPO\('MlpPolicy', ...\): settings of an algorithm go by keyword"):
        ps.PPO("MlpPolicy", "CartPole-v1")  # pyright: ignore
    assert ps.PPO("linear(1e-3, 0)").lr == "linear(1e-3, 0)"


def test_device_auto_is_the_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, device in ((0, "cpu"), (2, "cuda")):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert ps.RunConfig(device="auto").device == device


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (AutoresetMode.SAME_STEP, "SAME_STEP returns the first observation"),
        (AutoresetMode.DISABLED, "DISABLED resets only"),
    ],
)
def test_what_other_autoreset_modes_do_is_said_as_it_is(mode: AutoresetMode, said: str) -> None:
    env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    with pytest.raises(ConfigError, match=f"resets by .*; expected NEXT_STEP: {said}"):
        check_vector_env(env)
    env.close()


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (None, "render.. gave NoneType; expected an array, uint8 .*: the environment must know render_mode"),
        (np.zeros((4, 4), np.uint8), r"gave uint8 \[4, 4\]; expected uint8 \[H, W, 3\]; in a wrapper, repeat grey"),
        (
            np.zeros((4, 4, 3), np.float32),
            r"gave float32 \[4, 4, 3\]; .* in a wrapper, floats from 0 to 1 times 255",
        ),
        (np.zeros((4, 4, 1), np.uint8), r"gave uint8 \[4, 4, 1\]; expected uint8 \[H, W, 3\]; .* repeat grey"),
    ],
)
def test_a_render_that_does_not_fit_is_described(frame: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        write_frame(SimpleNamespace(render=lambda: frame), None, Path("x.mp4"))
