"""Tasks whose exact answer is known, for algorithms that learn values of choices; each docstring of a toy says what breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.agents.networks import Net
from penstock.agents.q_agent import QAgent
from penstock.algos.discrete_sac import DiscreteSAC
from penstock.algos.dqn import DQN
from penstock.core.batch import Inputs
from penstock.envs import toy
from penstock.envs.toy.base import Toy, box, vector
from penstock.learn.policy import Policy
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import ReplaySettings
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler
from tests.params import slow_but

T, B, BATCHES = 32, 8, 5
NET = Net(hidden=(32,), activation="relu")
PLAIN = DQN(lr="linear(5e-2, 0)", discount=0.9, batch_size=32, replay_ratio=6.0, learning_starts=0, epsilon=1.0,
            target_interval=1, tau=0.2, replay=ReplaySettings(capacity=4_000), net=NET)  # fmt: skip
C51 = replace(PLAIN, lr="linear(1e-1, 0)", distributional="c51", n_atoms=11, v_min=-2.0, v_max=3.0)
QUANTILE = replace(PLAIN, distributional="quantile", n_atoms=8)
PRIORITIZED = ReplaySettings(capacity=4_000, index="prioritized")
RAINBOW = replace(C51, lr="linear(2e-2, 0)", double=True, dueling=True, noisy=True, n_step=3, replay=PRIORITIZED)
SOFT = DiscreteSAC(lr="linear(3e-2, 0)", discount=0.9, batch_size=32, replay_ratio=6.0, learning_starts=0, alpha=0.01,
                   tau=0.2, replay=ReplaySettings(capacity=4_000), net=NET)  # fmt: skip
ALGOS = {"dqn": PLAIN, "c51": C51, "quantile": QUANTILE, "rainbow": RAINBOW, "discrete-sac": SOFT}
each_algorithm = pytest.mark.parametrize("algo", ALGOS.values(), ids=ALGOS)
two_first = pytest.mark.parametrize("algo", slow_but("dqn", ALGOS))
"""Losses of distributions equal a slow loop in test_dqn.py."""
two_first_of_four = pytest.mark.parametrize(
    "algo", slow_but("dqn discrete-sac", {name: algo for name, algo in ALGOS.items() if name != "rainbow"})
)


def trained(env: Callable[..., Any], algo: Any, batches: int = BATCHES, **changes: Any) -> tuple[Policy, LiveSampler]:
    sampler = SerialSampler(T=T, B=B, **changes).build(env, 0)
    policy = algo.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    for itr in range(batches):
        policy.set_progress(itr / batches)
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    return policy, sampler


def inputs(*obs: Any) -> Inputs:
    return Inputs(torch.tensor(np.array(obs, np.float32)), None, None, None)  # pyright: ignore[reportArgumentType]


def q(policy: Policy, *obs: Any) -> np.ndarray:
    """[N, A] of observations."""
    agent: Any = policy.agent
    with torch.no_grad():
        if isinstance(agent, QAgent):
            return agent.expected(agent(inputs(*obs))).numpy()
        return agent.q(inputs(*obs)).mean(0).numpy()


def chances(policy: Policy, *obs: Any) -> np.ndarray:
    agent: Any = policy.agent
    with torch.no_grad():
        return agent(inputs(*obs)).exp().numpy()


def value(policy: Policy, *obs: Any) -> np.ndarray:
    """[N] of the policy."""
    found = q(policy, *obs)
    return found.max(-1) if isinstance(policy.agent, QAgent) else (found * chances(policy, *obs)).sum(-1)


def assert_q(policy: Policy, obs: Any, expected: Any, tolerance: float = 0.05) -> None:
    """Of every action; where noise explores, which soon leaves the worse ones alone, of the best."""
    if isinstance(policy.agent, QAgent) and policy.settings.noisy:
        assert value(policy, *obs) == near(np.max(expected, -1), 2 * tolerance)
    else:
        assert q(policy, *obs) == near(expected, tolerance)


def near(expected: Any, tolerance: float = 0.05) -> Any:
    return pytest.approx(np.array(expected, np.float32), abs=tolerance)


@pytest.mark.slow
@two_first_of_four
def test_one_reward_is_worth_one(algo: Any) -> None:
    policy, _ = trained(toy.Constant, algo)
    assert q(policy, [0.0]) == near([[1.0]])


@pytest.mark.slow
@two_first_of_four
def test_the_value_depends_on_what_is_seen(algo: Any) -> None:
    policy, _ = trained(toy.Sign, algo)
    assert_q(policy, ([-1.0], [1.0]), [[-1, -1], [1, 1]])


@two_first
def test_a_step_of_delay_costs_the_discount(algo: Any) -> None:
    policy, _ = trained(toy.TwoStep, algo)
    assert value(policy, [0.0], [1.0]) == near([0.9, 1.0], 0.07)


@pytest.mark.parametrize("algo", slow_but("dqn", {"dqn": PLAIN, "discrete-sac": SOFT}))
def test_it_does_where_slots_idle(algo: Any) -> None:
    """To the end of a batch, after the two steps of their episode."""
    policy, _ = trained(toy.TwoStep, replace(algo, replay_ratio=24.0), 20, reset="batch_end")
    assert value(policy, [0.0], [1.0]) == near([0.9, 1.0], 0.07)


@two_first
def test_the_better_arm_is_pulled(algo: Any) -> None:
    policy, sampler = trained(toy.Bandit, algo)
    assert_q(policy, [[0.0]], [[-1, 1]])
    assert sampler.evaluate_agent(0, 16).mean_return == 1.0


def test_a_soft_policy_is_as_random_as_its_temperature() -> None:
    """pi(1) = 1 / (1 + e^(-2 / alpha)) = 0.98201 at 0.5, and soft V = 1.00907."""
    policy, _ = trained(toy.Bandit, replace(SOFT, alpha=0.5, lr="linear(1e-1, 0)"), 8)
    p, found = chances(policy, [0.0])[0], q(policy, [0.0])[0]
    assert p[1] == pytest.approx(0.98201, abs=0.003)
    assert (p * (found - 0.5 * np.log(p))).sum() == pytest.approx(1.00907, abs=0.02)


def test_a_temperature_finds_the_entropy_asked_for() -> None:
    """Of two arms with half the largest entropy: 0.3466 nats, pi(1) = 0.88997."""
    cfg = replace(SOFT, alpha="auto", entropy_share=0.5, lr="linear(1e-1, 0)", alpha_lr=5e-2)
    policy, _ = trained(toy.Bandit, cfg, 10)
    assert chances(policy, [0.0])[0][1] == pytest.approx(0.88997, abs=0.04)


@each_algorithm
def test_the_action_depends_on_what_is_seen(algo: Any) -> None:
    policy, sampler = trained(toy.Match, replace(algo, learning_starts=100), 7)
    assert_q(policy, ([-1.0], [1.0]), [[1, -1], [-1, 1]])
    assert sampler.evaluate_agent(0, 32).mean_return == 1.0


@two_first
def test_a_time_limit_is_not_an_end(algo: Any) -> None:
    """Taken for one, it would show as 1.333 in place of 2."""
    policy, _ = trained(partial(toy.Endless, 2), replace(algo, discount=0.5), 6)
    assert value(policy, [0.0]) == near([2.0], 0.1)


@pytest.mark.parametrize("reset", ["next_step", pytest.param("batch_end", marks=pytest.mark.slow)])
def test_a_far_time_limit_is_not_an_end(reset: str) -> None:
    """Taken for one, it would show as 5.263 in place of 10."""
    algo = replace(PLAIN, lr="linear(0.5, 0)", replay_ratio=4.0 if reset == "next_step" else 12.0)
    policy, _ = trained(toy.Endless, algo, 8, reset=reset)
    assert value(policy, [0.0]) == near([10.0], 0.1)


@two_first_of_four
def test_an_end_is_an_end(algo: Any) -> None:
    policy, _ = trained(toy.ThreeStep, algo, 7)
    assert value(policy, [0.0], [1.0], [2.0]) == near([2.71, 1.9, 1.0], 0.1)


@pytest.mark.parametrize(
    ("algo", "n"),
    slow_but(
        "dqn-3 discrete-sac-5",
        {"dqn-1": (PLAIN, 1), "dqn-3": (PLAIN, 3), "dqn-5": (PLAIN, 5), "c51-3": (C51, 3), "quantile-2": (QUANTILE, 2),
         "rainbow-3": (RAINBOW, 3), "discrete-sac-1": (SOFT, 1), "discrete-sac-5": (SOFT, 5)},
    ),
)  # fmt: skip
def test_a_reward_reaches_every_state_before_it(algo: Any, n: int) -> None:
    policy, _ = trained(toy.Chain, replace(algo, n_step=n), 6)
    assert value(policy, *np.eye(5)) == near([0.9**4, 0.9**3, 0.9**2, 0.9, 1.0], 0.15 if algo is RAINBOW else 0.07)


class Fork(Toy):
    """A: action 0 pays 1 and ends, action 1 leads to B; B: action 0 pays 0, action 1 pays 4. Q*(A) = (1, 4 g)."""

    def __init__(self) -> None:
        super().__init__(box(0, 1), spaces.Discrete(2))

    def observe(self) -> Any:
        return vector(min(self.t, 1))

    def act(self, action: Any) -> tuple[float, bool, bool]:
        if self.t:
            return 4.0 * float(action), True, False
        return 1.0 - float(action), action == 0, False


@pytest.mark.parametrize(
    "algo",
    slow_but("dqn c51", {"dqn": PLAIN, "single": replace(PLAIN, double=False), "c51": C51, "quantile": QUANTILE}),
)
def test_values_are_of_the_best_policy_and_not_of_the_random_one_that_acts(algo: DQN) -> None:
    """Discount 0.5: (1, 2); under the uniform policy that collects it would be (1, 1)."""
    policy, _ = trained(Fork, replace(algo, discount=0.5, v_max=5.0), 8)
    assert q(policy, [0.0], [1.0]) == near([[1, 2], [0, 4]], 0.1)


def test_a_coin_has_two_sides() -> None:
    """Half the mass at each of ±1; Huber quantiles t / (1 - t) - 1 for levels t below a half, the negative above.

    There the slopes of both sides meet: t for the far side, where Huber's loss is linear, (1 - t)(1 + q) for the near.
    """
    policy, _ = trained(toy.Coin, replace(C51, v_min=-2.5, v_max=2.5), 6)
    agent: Any = policy.agent
    with torch.no_grad():
        mass = agent(inputs([0.0]))[0].softmax(-1)
    expected = np.zeros((2, 11))
    expected[:, [3, 7]] = 0.5
    assert mass.numpy() == near(expected, 0.1)
    policy, _ = trained(toy.Coin, replace(QUANTILE, n_atoms=4, lr="linear(1e-1, 0)"), 8)
    agent = policy.agent
    with torch.no_grad():
        quantiles = agent(inputs([0.0]))[0]
    below = [t / (1 - t) - 1 for t in (0.125, 0.375)]
    assert quantiles.numpy() == near([[*below, -below[1], -below[0]]] * 2, 0.15)


@pytest.mark.parametrize(
    ("algo", "scale"),
    slow_but(
        "dqn-large discrete-sac-small",
        {"dqn-large": (PLAIN, 1000.0), "dqn-small": (PLAIN, 0.001), "c51-large": (C51, 1000.0), "rainbow-small": (RAINBOW, 0.001),
         "discrete-sac-large": (SOFT, 1000.0), "discrete-sac-small": (SOFT, 0.001)},
    ),
)  # fmt: skip
def test_the_better_arm_is_pulled_at_any_scale_of_rewards(algo: Any, scale: float) -> None:
    policy, sampler = trained(partial(toy.ScaledBandit, scale), replace(algo, net=replace(NET, normalize_reward=True)))
    assert sampler.evaluate_agent(0, 16).mean_return == pytest.approx(scale)
    if algo in (PLAIN, C51):  # the others soon pull one arm alone, whose rewards have another deviation
        assert_q(policy, [[0.0]], [[-1, 1]], 0.1)


@two_first_of_four
def test_a_huge_and_a_constant_observation_are_normalised(algo: Any) -> None:
    policy, _ = trained(toy.HugeScale, replace(algo, net=replace(NET, normalize_obs=True)))
    assert value(policy, [-1e6, 7.0], [1e6, 7.0]) == near([-1.0, 1.0], 0.1)


class OneForbidden(Toy):
    """A bit by coin and t, two steps; action 2 * bit is illegal and pays 10, action 1 pays 1, the third 0. V = 1 + g, 1."""

    def __init__(self) -> None:
        shown = spaces.Dict({"obs": box(0, 2, 2), "action_mask": spaces.MultiBinary(3)})
        super().__init__(shown, spaces.Discrete(3))

    def observe(self) -> Any:
        self._bit = int(self.np_random.random() < 0.5)
        mask = np.ones(3, np.int8)
        mask[2 * self._bit] = 0
        return {"obs": vector(self._bit, self.t), "action_mask": mask}

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return {2 * self._bit: 10.0, 1: 1.0}.get(int(action), 0.0), self.t == 1, False


@two_first
def test_what_is_masked_is_never_done_though_it_would_pay(algo: Any) -> None:
    """Neither at random nor greedily, and no target hopes for it."""
    policy, sampler = trained(OneForbidden, replace(algo, n_step=1, lr="linear(3e-2, 0)"), 6)
    for itr in range(2):
        assert sampler.obtain_samples(itr)[0].reward.max() == 1.0
    assert sampler.evaluate_agent(0, 32).mean_return == 2.0
    agent: Any = policy.agent
    obs = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]]).repeat(2, 1)
    x = Inputs({"obs": obs, "action_mask": mask}, None, None, None)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        found = agent.expected(agent(x)) if isinstance(agent, QAgent) else agent.q(x).mean(0)
    assert found[:, 1].numpy() == near([1.9, 1.9, 1.0, 1.0], 0.6 if algo in (C51, RAINBOW) else 0.2)
