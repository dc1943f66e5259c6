"""What the first lines of a run say of its environment: masks that are taken unasked, statistics that are forgotten."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TransformReward
from gymnasium.wrappers.vector import NormalizeObservation as NormalizeObservations

import penstock as ps
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.datasets.episode import check_spec
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig
from penstock.envs.toy import Echo
from penstock.workers.env_check import check_apart


class Choosy(gym.Env[Any, Any]):
    """Only choice t mod 3 is legal at step t, which sb3-contrib's method says; another one raises."""

    observation_space, action_space = spaces.Box(-9, 9, (1,), np.float32), spaces.Discrete(3)

    def action_masks(self) -> Any:
        return np.arange(3) == self.t % 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        assert action == self.t % 3, "an illegal choice"
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 7, False, {}


class Continuous(Choosy):
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Odd(Choosy):
    def action_masks(self) -> Any:
        return [*super().action_masks(), *[False] * (self.t == 2)]


class Blocked(Choosy):
    def action_masks(self) -> Any:
        return np.zeros(3, bool)


class Shown(Choosy):
    """Has its mask in the observation already."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(o=Choosy.observation_space, action_mask=spaces.MultiBinary(3))


class WrapsMasks(gym.Wrapper[Any, Any, Any, Any]):
    """The mask is a wrapper's, as sb3-contrib's ActionMasker is."""

    def action_masks(self) -> Any:
        return self.unwrapped.action_masks()  # pyright: ignore[reportAttributeAccessIssue]


def normalized() -> Any:
    batch = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    return NormalizeObservations(batch)


def normalized_inside() -> Any:
    each = [lambda: NormalizeReward(gym.make("CartPole-v1"))] * 2
    return SyncVectorEnv(each, autoreset_mode=AutoresetMode.NEXT_STEP)


SAMPLERS = [
    ps.SerialSampler(T=16, B=2, max_decorrelation_steps=5),
    pytest.param(ps.CpuSampler(T=16, B=2, workers=2), marks=pytest.mark.slow),
    pytest.param(ps.GpuSampler(T=16, B=2, workers=1), marks=pytest.mark.slow),
    pytest.param(ps.AsyncSampler(ps.SerialSampler(T=16, B=2)), marks=pytest.mark.slow),
    pytest.param(
        ps.RunnerSampler(inner=ps.SerialSampler(T=16, B=1), runners=2, backend="processes"), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    "wrappers", [(), (lambda env: gym.wrappers.TimeLimit(env, 5), WrapsMasks)], ids=["", "wrapped"]
)
def test_action_masks_are_asked_wherever_it_plays(sampler: Any, wrappers: Any) -> None:
    live = sampler.build(EnvConfig(Choosy, wrappers=wrappers), seed=0)
    try:
        live.initialize(ps.PPO().build(live.spec).agent)
        for itr in range(3):
            batch = live.obtain_samples(itr)[0]
            assert batch.valid.sum() > 20
            assert (batch.obs["action_mask"].sum(-1) == 1).all()
        assert (live.evaluate_agent(0, 3, deterministic=False).return_ == (5 if wrappers else 7)).all()
    finally:
        live.shutdown()


def test_masks_are_told_and_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ps.RunConfig(steps=32, dir=tmp_path / "a", progress="plain", eval_episodes=2)
    ps.train(ps.Experiment(Choosy, ps.PPO(), ps.SerialSampler(T=8, B=2), run))
    assert "masks its actions by action_masks(), shown as obs['action_mask']; --env-mask ''" in capsys.readouterr().out
    assert ps.evaluate(tmp_path / "a", episodes=2).return_.tolist() == [7, 7]
    with pytest.raises(EnvWorkerError, match="an illegal choice"):
        check_env(EnvConfig(Choosy, mask_key=""))


def test_masks_that_cannot_be_taken_say_why() -> None:
    assert "Continuous is not asked: masks are not known of the action space Box" in check_env(Continuous).note
    assert check_env(EnvConfig("CartPole-v1")).note == ""
    with pytest.raises(EnvWorkerError, match=r"gave action_masks\(\) of 4 elements; expected 3"):
        check_env(Odd)
    with pytest.raises(EnvContractError, match="got only zeros, expected a legal choice"):
        check_env(Blocked)
    shown = EnvConfig(Shown).make()
    assert shown.observation_space.spaces.keys() == {"o", "action_mask"}  # pyright: ignore


@pytest.mark.parametrize(
    ("env", "wrappers", "named", "cures"),
    [
        ("CartPole-v1", (NormalizeObservation,), "in NormalizeObservation,", "net.normalize_obs=True (--algo.net.normali"),
        ("CartPole-v1", ("gymnasium.wrappers:NormalizeReward",), "in NormalizeReward,", "use net.normalize_reward=True"),
        ("CartPole-v1", (NormalizeReward, NormalizeObservation), "NormalizeObservation and NormalizeReward",
         "net.normalize_obs=True and net.normalize_reward=True"),
        (normalized, (), "in NormalizeObservation,", "net.normalize_obs=True"),
        (normalized_inside, (), "in NormalizeReward,", "net.normalize_reward=True"),
        (Echo, (lambda env: TransformReward(NormalizeReward(env), float),), "in NormalizeReward,", "net.normalize_reward"),
    ],
)  # fmt: skip
def test_statistics_that_outlive_episodes_are_told(env: Any, wrappers: Any, named: str, cures: str) -> None:
    said = check_env(EnvConfig(env, wrappers=wrappers, checks="off")).warning
    assert named in said and cures in said


class Own(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps its statistics itself, and a table whose methods are called alike."""

    def __init__(self, env: Any, keeps: bool = True) -> None:
        super().__init__(env)
        self.table = Table()
        if keeps:
            self.mean, self.std, self.count = np.zeros(4), np.ones(4), 1


class Table:
    def mean(self) -> float:
        return 0.0

    var = count = update = mean


def test_statistics_of_ones_own_wrappers_are_told_and_tables_are_none() -> None:
    assert "is wrapped in Own," in check_env(EnvConfig("CartPole-v1", wrappers=(Own,))).warning
    assert check_env(EnvConfig("CartPole-v1", wrappers=(lambda env: Own(env, keeps=False),))).warning == ""


def test_they_are_a_warning_of_the_check_and_none_is_for_frozen_ones() -> None:
    with pytest.warns(UserWarning, match="CartPole-v1 is wrapped in NormalizeObservation, whose statistics outlive"):
        check_apart(EnvConfig("CartPole-v1", wrappers=("gymnasium.wrappers:NormalizeObservation",), checks="off"))

    def frozen(env: Any) -> Any:
        wrapped = NormalizeObservation(env)
        wrapped.update_running_mean = False
        return wrapped

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_env(EnvConfig("CartPole-v1", wrappers=(frozen,), checks="off")).warning == ""


def test_a_dataset_without_masks_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="by env_mask=''"):
        check_spec(check_env("CartPole-v1").spec, check_env(Choosy).spec, "dataset d", "Choosy")
