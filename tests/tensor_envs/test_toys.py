from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from penstock.envs.builtin import is_builtin_env
from penstock.envs.check import check_vector_env
from penstock.envs.spaces import env_spec
from penstock.envs.toy import PixelCatch as OnePixelCatch
from penstock.tensor_envs import CartPole, Pendulum, PixelCatch

B = 32


def test_cartpole_moves_as_gymnasiums_from_equal_states() -> None:
    ours, theirs, one = CartPole(B), CartPoleVectorEnv(B), gym.make("CartPole-v1")
    assert env_spec(ours) == env_spec(one)
    ours.reset(seed=3)
    theirs.reset(seed=3)
    random, ends = np.random.default_rng(0), 0
    # Anywhere within and a little beyond the limits, so that ends by place and by angle on both sides are among them.
    for scale in (0.05, 1.0, 1.0, 1.0):
        state = random.uniform(-1, 1, (B, 4)).astype(np.float32) * np.float32([2.5, 3, 0.22, 3]) * np.float32(scale)
        ours.state, theirs.state = torch.from_numpy(state), state.T.astype(np.float64)
        for _ in range(8):
            action = random.integers(2, size=B)
            ours._ended.zero_()
            theirs.prev_done[:] = False
            got, expected = ours.step(torch.from_numpy(action)), theirs.step(action)
            np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
            for x, y in zip(got[1:4], expected[1:4]):
                assert np.array_equal(x, y)
            ends += int(expected[2].sum())
    assert 0 < ends < 4 * 8 * B


def test_cartpole_resets_and_is_cut_as_gymnasiums() -> None:
    ours, theirs = CartPole(B, max_episode_steps=17), CartPoleVectorEnv(B, max_episode_steps=17)
    obs, _ = ours.reset(seed=1)
    theirs.reset(seed=1)
    assert (obs.abs() <= 0.05).all()
    theirs.state = ours.state.numpy().T.astype(np.float64)
    random, cut = np.random.default_rng(1), 0
    for _ in range(60):
        action = random.integers(2, size=B)
        again = ours._ended.numpy().copy()
        got, expected = ours.step(torch.from_numpy(action)), theirs.step(action)
        for x, y in zip(got[1:4], expected[1:4]):
            assert np.array_equal(x, y)
        np.testing.assert_allclose(got[0][~again], expected[0][~again], rtol=1e-4, atol=1e-5)
        assert (got[0][again].abs() <= 0.05).all()
        theirs.state[:, again] = ours.state.numpy().T[:, again]  # which the two draw differently
        cut += int(expected[3].sum())
    assert cut > 10


def test_pendulum_moves_as_gymnasiums_from_equal_states() -> None:
    ours, parts, one = Pendulum(B), Pendulum(B, privileged=True), gym.make("Pendulum-v1")
    assert env_spec(ours) == env_spec(one)
    random = np.random.default_rng(0)
    one.reset(seed=1)
    for env in (ours, parts):
        obs, _ = env.reset(seed=3)
    assert obs["policy"].shape == (B, 2) and bool((ours.state[:, 1].abs() <= 1).all())
    state = random.uniform(-1, 1, (B, 2)) * [9.0, 8.0]
    ours.state = parts.state = torch.from_numpy(state).float()
    action = random.uniform(-3, 3, (B, 1)).astype(np.float32)
    got, split = (env.step(torch.from_numpy(action)) for env in (ours, parts))
    assert torch.equal(torch.cat([split[0]["policy"], split[0]["critic"]], 1), got[0])
    for b in range(B):
        one.unwrapped.state = state[b]  # pyright: ignore[reportAttributeAccessIssue]
        expected = one.step(action[b])
        np.testing.assert_allclose(got[0][b], expected[0], rtol=1e-4, atol=1e-5)
        assert float(got[1][b]) == pytest.approx(float(expected[1]), rel=1e-4)
    assert not got[2].any() and not got[3].any()
    for _ in range(199):
        got = ours.step(torch.zeros(B, 1))
    assert got[3].all()


def test_pixel_catch_shows_and_pays_what_the_one_environment_does() -> None:
    ours, others = PixelCatch(B), [OnePixelCatch() for _ in range(B)]
    assert env_spec(ours) == env_spec(others[0])
    obs, _ = ours.reset(seed=2)
    assert len(ours.state["ball"].unique()) == 8
    for b, env in enumerate(others):
        env.reset(seed=b)
        env._ball = int(ours.state["ball"][b])
        assert np.array_equal(obs[b], env.observe())
    random, caught = np.random.default_rng(1), 0
    for t in range(7):
        action = random.integers(3, size=B)
        got = ours.step(torch.from_numpy(action))
        for b, env in enumerate(others):
            expected = env.step(action[b])
            assert np.array_equal(got[0][b], expected[0])
            assert [x[b].item() for x in got[1:4]] == list(expected[1:4])
            caught += expected[1] == 1.0
        assert got[2].all() == (t == 6)
    assert 0 < caught < B
    obs, reward, terminated, *_ = ours.step(torch.zeros(B, dtype=torch.int64))
    assert not reward.any() and not terminated.any()
    assert (obs[:, 1, -1, 9:12] == 255).all()


def test_a_stored_run_on_a_toy_needs_no_trust() -> None:
    assert is_builtin_env("penstock.tensor_envs:CartPole")
    assert not is_builtin_env("penstock.tensor_envs:NextStep.step")


def test_one_seed_gives_one_stream() -> None:
    for toy in (CartPole, PixelCatch):
        one, two, other = toy(B), toy(B), toy(B)
        first = [env.reset(seed=seed)[0] for env, seed in ((one, 4), (two, 4), (other, 5))]
        for _ in range(30):
            assert torch.equal(first[0], first[1])
            assert not torch.equal(first[0], first[2])
            action = torch.ones(B, dtype=torch.int64)
            first = [env.step(action)[0] for env in (one, two, other)]
        assert check_vector_env(one).spec == env_spec(one)
