"""PPO in the simulators themselves, each where its package is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.tree import tree_map
from penstock.envs.make import EnvConfig

CARTPOLE, MJLAB, BRAX = "playground:CartpoleBalance", "mjlab:Mjlab-Cartpole-Balance", "brax:inverted_pendulum"
SHORT = {CARTPOLE: {"episode_length": 5}, MJLAB: {"episode_length_s": 0.25}, BRAX: {"episode_length": 5}}
PACKAGES = {CARTPOLE: "mujoco_playground", MJLAB: "mjlab", BRAX: "brax"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def require(id_: str) -> None:
    """Skips the test where the simulator is not installed."""
    if importlib.util.find_spec(PACKAGES[id_]) is None:
        pytest.skip(f"{PACKAGES[id_]} is not installed")


@pytest.mark.parametrize("id_", SHORT)
def test_episodes_end_at_their_limit_in_observations_that_are_not_the_next_ones(id_: str):
    require(id_)
    env: Any = EnvConfig(id_, {"num_envs": 4, **SHORT[id_]}).make()
    noise = torch.rand(12, 4, *env.single_action_space.shape) * 0.1 - 0.05  # too weak for anything to fall
    seen: list[Any] = []
    for _ in range(2):
        first = tree_map(torch.clone, env.reset(seed=3)[0])
        for t in range(12):
            obs, _, terminated, truncated, info = env.step(noise[t])
            assert truncated.all() == (t % 5 == 4)
            assert not terminated.any()
            if truncated.all():
                assert (info["final_obs"] != obs).any(-1).all()
                assert not torch.equal(obs, first)
            seen.append(obs.clone())
    assert all(map(torch.equal, seen[:12], seen[12:])), "a seed repeats its episodes"
    env.reset(seed=3)
    env.set_ages(torch.tensor([0, 1, 4, 99]))
    assert env.step(noise[0])[3].tolist() == [False, False, True, True]
    env.close()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_balances_in_playground(seed: int):
    require(CARTPOLE)
    assert trained(CARTPOLE, 600_000, seed, discount=0.99) >= 950


def test_cartpole_balances_in_mjlab():
    require(MJLAB)
    assert trained(MJLAB, 500_000, 0, entropy_coef=0.005) >= 45


def trained(id_: str, steps: int, seed: int, **settings: Any) -> float:
    """The best mean return of the last episodes of a run, in which no action is greedy."""
    algo = ps.PPO(minibatch=512, epochs=4, lr=1e-3, net=ps.Net(hidden=(64, 64)), **settings)
    run = ps.RunConfig(steps=steps, seed=seed, progress="off", eval_episodes=0)
    best = 0.0
    with ps.Run(ps.Experiment(id_, algo, ps.SerialSampler(T=32, B=64), run)) as steps_:
        for it in steps_:
            best = max(best, float(it.metrics.get("rollout/ep_rew_mean", 0.0)))
    return best
