import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env as gymnasium_check

from penstock.core.errors import ConfigError
from penstock.envs import toy
from penstock.envs.check import check_env

MAKERS: dict[str, Callable[[], gym.Env]] = {
    name: getattr(toy, name)
    for name in toy.__all__
    if name not in ("FAULTS", "HideVelocity", "Toy")
    and getattr(toy, name).__module__.rpartition(".")[2] not in ("agents", "connect", "teams")
}
MAKERS |= {
    "PixelCatch hwc": lambda: toy.PixelCatch("hwc"),
    "Counter truncated": lambda: toy.Counter(None, 6),
    "FaultEnv dict": lambda: toy.FaultEnv(dict_obs=True),
    "SeedEcho nested": lambda: toy.SeedEcho(nested=True),
}


def play(env: gym.Env, policy: Callable[[Any], Any], episodes: int, seed: int = 0) -> list[list[float]]:
    """Rewards of each episode under a policy."""
    out: list[list[float]] = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        rewards: list[float] = []
        ended = False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            rewards.append(float(reward))
            ended = terminated or truncated
        out.append(rewards)
    return out


@pytest.mark.parametrize("name", MAKERS)
def test_gymnasiums_own_check_passes(name: str):
    env = MAKERS[name]()
    if name == "Echo":  # counts its episodes, which no seed resets
        env.spec = EnvSpec("Echo-v0", entry_point=toy.Echo, nondeterministic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gymnasium_check(env, skip_render_check=True)


@pytest.mark.parametrize("name", MAKERS)
def test_our_check_passes(name: str):
    assert check_env(MAKERS[name]).reproducible == (name != "Echo")


def test_hide_velocity_passes_both_checks():
    env = toy.HideVelocity(gym.make("CartPole-v1", disable_env_checker=True))
    whole, _ = env.env.reset(seed=3)
    seen, _ = env.reset(seed=3)
    assert seen.tolist() == whole[[0, 2]].tolist()
    assert env.observation_space.shape == (2,)
    assert check_env(lambda: toy.HideVelocity(gym.make("CartPole-v1"))).reproducible


def test_p1_p3_p7_p8_rewards():
    assert play(toy.Constant(), lambda _: 0, 1) == [[1.0]]
    assert play(toy.TwoStep(), lambda _: 1, 1) == [[0.0, 1.0]]
    assert play(toy.ThreeStep(), lambda _: 0, 1) == [[1.0, 1.0, 1.0]]
    assert play(toy.Chain(5), lambda _: 0, 1) == [[0.0, 0.0, 0.0, 0.0, 1.0]]
    env = toy.Chain(3)
    shown = [env.reset()[0].tolist(), *(env.step(0)[0].tolist() for _ in range(3))]
    assert shown == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_p2_p5_p16_depend_on_a_fair_coin():
    signs = []
    for seed in range(400):
        env = toy.Sign()
        obs, _ = env.reset(seed=seed)
        signs.append(float(obs[0]))
        assert env.step(0)[1] == obs[0]
    assert set(signs) == {-1.0, 1.0}
    assert abs(np.mean(signs)) < 0.15
    assert play(toy.Match(), lambda obs: int(obs[0] > 0), 20) == [[1.0]] * 20
    assert play(toy.Match(), lambda obs: int(obs[0] < 0), 20) == [[-1.0]] * 20
    obs, _ = toy.HugeScale().reset(seed=1)
    assert abs(obs[0]) == 1e6
    assert obs[1] == 7
    assert play(toy.HugeScale(), lambda _: 0, 1, seed=1) == [[float(np.sign(obs[0]))]]


def test_p4_p12_p13_p14_p15_bandits():
    assert play(toy.Bandit(), lambda _: 1, 1) == [[1.0]]
    assert play(toy.Bandit(), lambda _: 0, 1) == [[-1.0]]
    assert play(toy.ScaledBandit(), lambda _: 1, 1) == [[1000.0]]
    assert play(toy.ScaledBandit(0.001), lambda _: 0, 1) == [[-0.001]]
    assert play(toy.ContinuousBandit(), lambda _: np.array([0.3]), 1) == [[0.0]]
    assert play(toy.ContinuousBandit(), lambda _: np.array([-0.7]), 1)[0][0] == pytest.approx(-1.0)
    assert play(toy.BoundedBandit(), lambda _: np.array([4.0]), 1) == [[0.0]]
    assert play(toy.BoundedBandit(), lambda _: np.array([-3.0]), 1) == [[-49.0]]
    coin = np.array(play(toy.Coin(), lambda _: 0, 400))
    assert set(coin.ravel()) == {-1.0, 1.0}
    assert abs(coin.mean()) < 0.15


def test_p6_is_truncated_and_never_terminated():
    env = toy.Endless(10)
    env.reset()
    ends = [env.step(0)[2:4] for _ in range(10)]
    assert ends == [(False, False)] * 9 + [(False, True)]


def test_p10_needs_the_cue():
    cue = 0.0

    def remember(obs: Any) -> int:
        nonlocal cue
        cue = float(obs[0]) or cue
        return int(cue > 0)

    solved = play(toy.TMaze(8), remember, 40)
    assert solved == [[0.0] * 8 + [1.0]] * 40
    assert 0.3 < np.mean([sum(r) for r in play(toy.TMaze(8), lambda _: 1, 200)]) < 0.7


def test_p11_pays_for_the_symbol_two_steps_ago():
    past: list[int] = []

    def remember(obs: Any) -> int:
        past.append(int(obs.argmax()))
        return past[-3] if len(past) > 2 else 0

    assert play(toy.RepeatPrevious(length=12), remember, 1) == [[0.0, 0.0] + [1.0] * 10]
    blind = play(toy.RepeatPrevious(length=400), lambda obs: int(obs.argmax()), 1)
    assert np.mean(blind) == pytest.approx(0.25, abs=0.07)


def test_p18_masks_exactly_the_choice_that_pays_ten():
    for seed in range(20):
        env = toy.Masked()
        obs, _ = env.reset(seed=seed)
        bit = int(obs["obs"][0])
        illegal = int(np.flatnonzero(obs["action_mask"] == 0)[0])
        assert illegal == 2 * bit
        assert env.step(np.array([illegal, 0]))[1] == 10.0
        pays = {
            (a, b): play(env, lambda _, a=a, b=b: np.array([a, b]), 1, seed)[0][0] for a in (0, 1, 2) for b in (0, 1)
        }
        legal = {k: v for k, v in pays.items() if k[0] != illegal}
        assert max(legal.values()) == 1.0 == legal[1, bit]


def test_echo_says_where_a_row_came_from():
    env = toy.Echo(slot=3, length=2, truncate=True)
    env.reset()
    env.step(0)
    obs, _ = env.reset()
    assert obs.tolist() == [3, 1, 0]
    obs, reward, terminated, truncated, _ = env.step(2)
    assert reward == 3 * 64 + 8 + 0 + 0.25
    assert (terminated, truncated) == (False, False)
    obs, reward, terminated, truncated, _ = env.step(3)
    assert reward == 3 * 64 + 8 + 1 + 0.375 == toy.Echo.reward_of(np.array([3, 1, 1]), 3)
    assert (terminated, truncated) == (False, True)
    batch = toy.Echo.reward_of(np.array([[0, 0, 1], [1, 9, 0]]), np.array([1, 2]))
    assert batch.tolist() == [1.125, 72.25]


def test_echo_continues_from_its_state():
    env, other = toy.Echo(), toy.Echo()
    env.reset()
    env.reset()
    env.step(1)
    other.reset()
    other.set_state(env.get_state())
    assert env.step(2)[0].tolist() == other.step(2)[0].tolist() == [0, 1, 2]


def test_counter_ends_as_it_is_told():
    env = toy.Counter(terminate_at=3, truncate_at=3)
    assert env.reset()[0].tolist() == [0]
    assert [env.step(0)[:4] for _ in range(3)] == [(1, 0.0, False, False), (2, 1.0, False, False), (3, 2.0, True, True)]
    assert play(toy.Counter(None, 4), lambda _: 0, 2) == [[0.0, 1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_pixel_catch_is_solvable_from_its_pixels(layout: Any):
    def follow(obs: Any) -> int:
        chw = obs if layout == "chw" else obs.transpose(2, 0, 1)
        ball, paddle = (int(chw[c].any(axis=0).argmax()) for c in (0, 1))
        return 1 + (ball > paddle) - (ball < paddle)

    env = toy.PixelCatch(layout)
    obs, _ = env.reset(seed=0)
    assert obs.shape == ((3, 24, 24) if layout == "chw" else (24, 24, 3))
    assert (obs == 255).sum() == 2 * 9
    assert play(env, follow, 30) == [[0.0] * 6 + [1.0]] * 30
    assert np.mean([sum(r) for r in play(env, lambda _: 1, 400)]) == pytest.approx(-0.75, abs=0.12)


def test_observations_are_new_arrays():
    for make in MAKERS.values():
        env = make()
        first, _ = env.reset(seed=0)
        second = env.step(env.action_space.sample())[0]
        pairs = [(first[k], second[k]) for k in first] if isinstance(first, dict) else [(first, second)]
        assert not any(isinstance(a, np.ndarray) and np.shares_memory(a, b) for a, b in pairs)


def test_fault_env_faults_once_at_its_step_and_slot():
    env = toy.FaultEnv("nan_obs", at=2, length=2)
    rows = []
    for _ in range(2):
        rows.append(env.reset(seed=0)[0])
        rows += [env.step(0)[0] for _ in range(2)]
    assert [bool(np.isnan(row).any()) for row in rows] == [False, False, False, False, True, False]
    assert toy.FaultEnv("nan_obs", slot=1, only_slot=0).fault == "none"
    assert toy.FaultEnv("nan_obs", slot=1, only_slot=1).fault == "nan_obs"
    with pytest.raises(ConfigError, match="'nan_obs'"):
        toy.FaultEnv("nan_ops")
    with pytest.raises(ConfigError, match="dict_obs=True"):
        toy.FaultEnv("extra_key")


def test_deep_sea_pays_for_the_one_path_to_the_right_and_maps_actions_as_bsuite_does() -> None:
    env = toy.DeepSea(size=4)
    assert env.right.tolist() == np.random.RandomState(42).binomial(1, 0.5, (4, 4)).tolist()

    def right(obs: Any) -> int:
        return int(env.right.ravel()[obs.argmax()])

    assert play(env, right, 1) == [[-0.0025, -0.0025, -0.0025, pytest.approx(1 - 0.0025)]]
    assert play(env, lambda obs: 1 - right(obs), 1) == [[0.0] * 4]
    slips = iter([True, False, True, True])  # back at the left edge after the first step
    assert play(env, lambda obs: right(obs) if next(slips) else 1 - right(obs), 1) == [[-0.0025, 0.0, -0.0025, -0.0025]]
    env.reset(seed=0)
    shown = [env.step(env.right[t, t])[0] for t in range(4)]
    assert [x.nonzero()[0].tolist() for x in shown] == [[5], [10], [15], []]
