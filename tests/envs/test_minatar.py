"""MinAtar's games: their own rules and bits, seeded, and cut after a number of steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.envs import minatar as module
from penstock.envs.check import check_env
from penstock.envs.minatar import MinAtar, asterix, breakout, freeway, seaquest, space_invaders

GAMES = (asterix, breakout, freeway, seaquest, space_invaders)
installed = pytest.mark.skipif(importlib.util.find_spec("minatar") is None, reason="MinAtar is not installed")


@installed
@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.__name__)
def test_the_same_seed_gives_the_package_s_own_game(game: Callable[[], MinAtar]) -> None:
    env, rng = game(), np.random.default_rng(3)
    obs, _ = env.reset(seed=5)
    other = module._load(game.__name__).Env(ramping=True)
    other.random = np.random.RandomState(5)
    other.reset()
    actions, last, ends = other.minimal_action_set(), 0, 0
    for action in rng.integers(len(actions), size=400):
        np.testing.assert_array_equal(obs, other.state())
        if other.random.rand() >= 0.1:  # sticky actions as `minatar.Environment.act` draws them
            last = actions[action]
        reward, over = other.act(last)
        obs, own_reward, terminated, truncated, info = env.step(int(action))
        assert (own_reward, terminated, truncated, info) == (float(reward), over, False, {})
        if over:
            other.reset()
            obs, _ = env.reset()
            last, ends = 0, ends + 1
    assert ends or game is freeway


@installed
@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.__name__)
def test_it_keeps_the_contract_and_repeats_itself(game: Callable[[], MinAtar]) -> None:
    check_env(game)
    env = game()
    assert env.observation_space.shape == (10, 10, env.observation_space.shape[2])
    assert env.observation_space.dtype == np.bool_


@installed
def test_an_episode_is_truncated_in_its_last_step_only() -> None:
    env = freeway(max_steps=7)
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(7)] == [False] * 6 + [True]
    env.reset()
    assert not env.step(0)[3]


@installed
def test_sticky_actions_repeat_the_one_before() -> None:
    still, moved = breakout(sticky=1.0), breakout(sticky=0.0)
    for env in (still, moved):
        env.reset(seed=1)
    paddles = [[int(env.step(1)[0][9, :, 0].argmax()) for _ in range(3)] for env in (still, moved)]
    assert paddles == [[4, 4, 4], [3, 2, 1]]


@installed
@pytest.mark.parametrize("settings", [{"sticky": 1.5}, {"sticky": -0.1}, {"max_steps": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected a probability and at least 1 step"):
        breakout(**settings)  # pyright: ignore[reportArgumentType]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"penstock\[minatar\]"):
        breakout()
