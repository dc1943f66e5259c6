"""Tasks whose exact answer is known, for SAC, TD3 and DDPG; choices are made by the sign of a number in [-1, 1]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.agents.networks import Net
from penstock.algos.ddpg import DDPG
from penstock.algos.sac import SAC
from penstock.algos.td3 import TD3
from penstock.core.batch import Inputs
from penstock.envs import toy
from penstock.learn.policy import Policy
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import ReplaySettings
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler
from tests.params import slow_but

T, B, BATCHES = 32, 8, 5
NET = Net(hidden=(32,), activation="relu")
WIDER = Net(hidden=(32, 32), activation="relu")
REPLAY = ReplaySettings(capacity=4_000)
SOFT = SAC(lr="linear(3e-2, 0)", discount=0.9, batch_size=32, replay_ratio=6.0, learning_starts=100, alpha=0.005, tau=0.2,
           replay=REPLAY, net=NET)  # fmt: skip
DELAYED = TD3(lr="linear(3e-2, 0)", discount=0.9, batch_size=32, replay_ratio=6.0, learning_starts=100, tau=0.2,
              exploration_noise=0.3, replay=REPLAY, net=NET)  # fmt: skip
PLAIN = DDPG(lr="linear(3e-2, 0)", discount=0.9, batch_size=32, replay_ratio=6.0, learning_starts=100, tau=0.2,
             exploration_noise=0.3, replay=REPLAY, net=NET)  # fmt: skip
ATOMS: dict[str, Any] = {"distributional": "c51", "v_min": -2.0, "v_max": 3.0}
ALGOS = {
    "sac": SOFT,
    "td3": DELAYED,
    "ddpg": PLAIN,
    "fast-td3": replace(DELAYED, **ATOMS, exploration_noise_low=0.1, target_actor=False, target_interval=1),
    "fast-sac": replace(SOFT, **ATOMS, clipped_double=False, policy_delay=2),
}
each_algorithm = pytest.mark.parametrize("algo", ALGOS.values(), ids=ALGOS)
sac_first = pytest.mark.parametrize("algo", slow_but("sac", ALGOS))


class Lever(gym.ActionWrapper[Any, Any, Any]):
    """Choice 1 where a number in [-1, 1] is positive, else 0."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make())
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def action(self, action: Any) -> int:
        return int(action[0] > 0)


def trained(env: Callable[..., Any], algo: Any, batches: int = BATCHES) -> tuple[Policy, LiveSampler]:
    sampler = SerialSampler(T=T, B=B).build(env, 0)
    policy = algo.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    for itr in range(batches):
        policy.set_progress(itr / batches)
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    return policy, sampler


def q(policy: Policy, obs: Any, unit: Any = None) -> np.ndarray:
    """[N] of observations, and of actions in [-1, 1]; None: of the policy's."""
    agent: Any = policy.agent
    x = Inputs(torch.tensor(np.array(obs, np.float32)), None, None, None)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        action = (
            agent.box.to_unit(agent.act(x, None, None)[0]) if unit is None else torch.tensor(unit, dtype=torch.float32)
        )
        found = agent.q(x, action)
        return (found if found.ndim == 2 else agent.expected(found)).mean(0).numpy()


def near(expected: Any, tolerance: float = 0.05) -> Any:
    return pytest.approx(np.array(expected, np.float32), abs=tolerance)


@pytest.mark.slow
@each_algorithm
def test_one_reward_is_worth_one(algo: Any) -> None:
    policy, _ = trained(partial(Lever, toy.Constant), algo)
    assert q(policy, [[0.0], [0.0]], [[-0.5], [0.5]]) == near([1, 1])


@pytest.mark.slow
@each_algorithm
def test_the_value_depends_on_what_is_seen(algo: Any) -> None:
    policy, _ = trained(partial(Lever, toy.Sign), algo)
    assert q(policy, [[-1.0], [1.0]]) == near([-1, 1])


@pytest.mark.slow
@each_algorithm
def test_a_step_of_delay_costs_the_discount(algo: Any) -> None:
    policy, _ = trained(partial(Lever, toy.TwoStep), algo)
    assert q(policy, [[0.0], [1.0]]) == near([0.9, 1.0], 0.07)


@pytest.mark.slow
@each_algorithm
def test_the_better_arm_is_pulled(algo: Any) -> None:
    policy, sampler = trained(partial(Lever, toy.Bandit), algo)
    assert sampler.evaluate_agent(0, 16).mean_return == 1.0
    assert q(policy, [[0.0]]) == near([1.0], 0.25)


@each_algorithm
def test_the_action_depends_on_what_is_seen(algo: Any) -> None:
    policy, sampler = trained(partial(Lever, toy.Match), algo, 7)
    assert sampler.evaluate_agent(0, 32).mean_return == 1.0
    assert q(policy, [[-1.0], [1.0]]) == near([1.0, 1.0], 0.15)


@sac_first
def test_a_time_limit_is_not_an_end(algo: Any) -> None:
    """Taken for one, it would show as 1.333 in place of 2."""
    policy, _ = trained(partial(Lever, partial(toy.Endless, 2)), replace(algo, discount=0.5), 6)
    assert q(policy, [[0.0]]) == near([2.0], 0.1)


@each_algorithm
def test_an_end_is_an_end(algo: Any) -> None:
    policy, _ = trained(partial(Lever, toy.ThreeStep), algo, 6)
    assert q(policy, [[0.0], [1.0], [2.0]]) == near([2.71, 1.9, 1.0], 0.15)


@pytest.mark.parametrize(
    ("algo", "n"),
    slow_but("sac-5 td3-3", {"sac-1": (SOFT, 1), "sac-5": (SOFT, 5), "td3-3": (DELAYED, 3), "ddpg-3": (PLAIN, 3)}),
)
def test_a_reward_reaches_every_state_before_it(algo: Any, n: int) -> None:
    policy, _ = trained(partial(Lever, toy.Chain), replace(algo, n_step=n))
    assert q(policy, np.eye(5)) == near([0.9**4, 0.9**3, 0.9**2, 0.9, 1.0], 0.1)


BANDITS: dict[str, Any] = {"in-bounds": (toy.BoundedBandit, 4.0, 0.6), "anywhere": (toy.ContinuousBandit, 0.3, 0.06)}


@pytest.mark.parametrize(
    ("algo", "env", "best", "tolerance"),
    slow_but(
        "td3-in-bounds ddpg-anywhere",
        {f"{name}-{where}": (ALGOS[name], *env) for name in ("td3", "ddpg") for where, env in BANDITS.items()},
    ),
)
def test_the_best_of_a_continuum_in_the_units_of_the_environment(
    algo: Any, env: Any, best: float, tolerance: float
) -> None:
    """Without rescaling the second would be 1 or 5."""
    net = replace(WIDER, normalize_reward=True)
    algo = replace(algo, lr="linear(2e-2, 0)", actor_lr=3e-3, exploration_noise=0.7, net=net)
    policy, _ = trained(env, replace(algo, batch_size=64, replay_ratio=20.0), 9)
    assert float(policy.predict(np.zeros(1, np.float32))[0]) == pytest.approx(best, abs=tolerance)


@pytest.mark.parametrize(
    ("algo", "scale"),
    slow_but(
        "sac-large",
        {"sac-large": (SOFT, 1000.0), "sac-small": (SOFT, 0.001), "td3-small": (DELAYED, 0.001), "ddpg-large": (PLAIN, 1000.0)},
    ),
)  # fmt: skip
def test_the_better_arm_is_pulled_at_any_scale_of_rewards(algo: Any, scale: float) -> None:
    env = partial(Lever, partial(toy.ScaledBandit, scale))
    _, sampler = trained(env, replace(algo, net=replace(NET, normalize_reward=True)))
    assert sampler.evaluate_agent(0, 16).mean_return == pytest.approx(scale)


@sac_first
def test_a_huge_and_a_constant_observation_are_normalised(algo: Any) -> None:
    policy, _ = trained(partial(Lever, toy.HugeScale), replace(algo, net=replace(NET, normalize_obs=True)))
    assert q(policy, [[-1e6, 7.0], [1e6, 7.0]]) == near([-1.0, 1.0], 0.1)


def samples(policy: Policy, n: int = 4_000) -> np.ndarray:
    """[n] actions of a policy that sees 0."""
    return policy.predict(np.zeros((n, 1), np.float32), deterministic=False)[:, 0]


QUICK = replace(SOFT, lr="linear(2e-2, 0)", actor_lr=0.1, batch_size=64, replay_ratio=16.0, net=WIDER)


@pytest.mark.parametrize(
    ("alpha", "mean", "std"), slow_but("wide", {"narrow": (0.02, 0.3, 0.1), "wide": (0.1, 0.2993, 0.2226)})
)
def test_a_soft_policy_is_as_wide_as_its_temperature(alpha: float, mean: float, std: float) -> None:
    """The density is proportional to exp(-(a - 0.3)^2 / alpha)."""
    policy, _ = trained(toy.ContinuousBandit, replace(QUICK, alpha=alpha), 9)
    found = samples(policy)
    assert found.mean() == pytest.approx(mean, abs=0.03) and found.std() == pytest.approx(std, rel=0.15)


def test_a_soft_policy_lies_in_the_bounds_of_the_environment() -> None:
    policy, _ = trained(toy.BoundedBandit, replace(QUICK, alpha=0.32), 9)
    assert samples(policy).mean() == pytest.approx(4.0, abs=0.25)


def test_a_temperature_finds_the_entropy_asked_for() -> None:
    """Of a nearly normal density 0.5 log(2 pi e std^2): -0.5 nats at a deviation of 0.147."""
    policy, _ = trained(toy.ContinuousBandit, replace(QUICK, alpha="auto", target_entropy=-0.5, alpha_lr=3e-2), 9)
    assert samples(policy).std() == pytest.approx(0.147, rel=0.2)
