"""Tasks whose exact answer is known: if one of these fails, the part that its environment's docstring names is broken.

What an algorithm gets wrong in a slow task of one or two states, to find the fault by, it gets wrong in a harder one, too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from penstock.agents.networks import Net
from penstock.algos.a2c import A2C
from penstock.algos.appo import APPO
from penstock.algos.impala import IMPALA
from penstock.algos.ppo import PPO
from penstock.envs import toy
from penstock.learn.policy import Policy
from penstock.learn.rows.postprocess import as_tensors
from penstock.learn.train_ops import train_one_step
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler
from tests.params import slow_but

SEED = 0
FAST = PPO(lr="linear(1e-2, 0)", discount=0.9, epochs=4, minibatch=64, max_grad_norm=10.0, net=Net(hidden=(32,)))
FAST_A2C = A2C(lr="linear(1e-2, 0)", discount=0.9, max_grad_norm=10.0, net=Net(hidden=(32,)))
FAST_IMPALA = IMPALA(lr="linear(1e-2, 0)", discount=0.9, entropy_coef=0.0, max_grad_norm=10.0, net=Net(hidden=(32,)))
FAST_APPO = APPO(lr="linear(1e-2, 0)", discount=0.9, epochs=4, minibatch=64, max_grad_norm=10.0, net=Net(hidden=(32,)))
EACH = {"ppo": FAST, "a2c": FAST_A2C, "impala": FAST_IMPALA, "appo": FAST_APPO}
each_algorithm = pytest.mark.parametrize("algo", EACH.values(), ids=EACH)
ppo_first = pytest.mark.parametrize("algo", slow_but("ppo", EACH))


def trained(
    env: Callable[..., Any], algo: Any, batches: int, T: int = 16, B: int = 16, reset: Any = "next_step"
) -> tuple[Policy, LiveSampler]:
    """`batches` are PPO's; A2C and IMPALA, which update once a batch, get ten times as many of half the length."""
    if isinstance(algo, A2C | IMPALA):
        batches, T = 10 * batches, T // 2
    sampler = SerialSampler(T=T, B=B, reset=reset).build(env, SEED)
    policy = algo.build(sampler.spec, SEED)
    sampler.initialize(policy.agent)
    for itr in range(batches):
        policy.set_progress(itr / batches)
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    return policy, sampler


def values(policy: Policy, sampler: LiveSampler) -> tuple[Any, np.ndarray]:
    """Observations [N, *O] of a further batch's valid rows, and their values [N]."""
    batch = as_tensors(sampler.obtain_samples(10_000)[0], torch.device("cpu"))
    value = policy.agent.values(batch)[:-1][batch.valid].numpy()
    obs = batch.obs["obs"] if isinstance(batch.obs, dict) else batch.obs
    return obs[:-1][batch.valid].numpy(), value


def assert_values(
    policy: Policy, sampler: LiveSampler, expected: Callable[[Any], Any], tolerance: float = 0.05
) -> None:
    obs, value = values(policy, sampler)
    assert np.abs(value - expected(obs)).max() < tolerance


@pytest.mark.slow
@each_algorithm
def test_one_reward_is_worth_one(algo: Any):
    assert_values(*trained(toy.Constant, algo, 20), lambda obs: 1)


@pytest.mark.slow
@each_algorithm
def test_the_value_depends_on_what_is_seen(algo: Any):
    assert_values(*trained(toy.Sign, algo, 20), lambda obs: obs[:, 0])


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
@pytest.mark.slow
@each_algorithm
def test_a_step_of_delay_costs_the_discount(algo: Any, reset: str):
    policy, sampler = trained(toy.TwoStep, algo, 30, reset=reset)
    assert_values(policy, sampler, lambda obs: np.where(obs[:, 0] == 0, 0.9, 1.0))


@pytest.mark.slow
@each_algorithm
def test_the_better_arm_is_pulled(algo: Any):
    policy, sampler = trained(toy.Bandit, algo, 20)
    assert_values(policy, sampler, lambda obs: 1)
    actions = policy.predict(np.zeros((1000, 1), np.float32), deterministic=False)
    assert actions.mean() > 0.95


@pytest.mark.slow
@each_algorithm
def test_a_coin_is_worth_nothing(algo: Any):
    assert_values(*trained(toy.Coin, algo, 15), lambda obs: 0, tolerance=0.2)


@pytest.mark.parametrize("scale", slow_but("large", {"large": 1000.0, "small": 0.001}))
def test_the_better_arm_is_pulled_at_any_scale_of_rewards(scale: float):
    algo = replace(FAST, net=Net(hidden=(32,), normalize_reward=True))
    policy, _ = trained(partial(toy.ScaledBandit, scale), algo, 20)
    assert policy.predict(np.zeros((1000, 1), np.float32), deterministic=False).mean() > 0.95


@pytest.mark.parametrize("algo", slow_but("ppo", EACH))
def test_the_action_depends_on_what_is_seen(algo: Any):
    policy, sampler = trained(toy.Match, algo, 25)
    assert_values(policy, sampler, lambda obs: 1)
    seen = np.repeat(np.array([[-1], [1]], np.float32), 500, 0)
    actions = policy.predict(seen, deterministic=False)
    assert ((actions == 1) == (seen[:, 0] > 0)).mean() > 0.95


@pytest.mark.parametrize(
    ("algo", "limit", "reset"),
    slow_but(
        "ppo-10-next_step",
        {
            f"{name}-{limit}-{reset}": (algo, limit, reset)
            for name, algo in EACH.items()
            for limit, reset in ((10, "next_step"), (10, "batch_end"), (1, "next_step"))
        },
    ),
)
def test_a_time_limit_is_not_an_end(algo: Any, limit: int, reset: str):
    """Taken for one, it would show as 5.263 or 4.138 in place of 10 (limit 10)."""
    policy, sampler = trained(partial(toy.Endless, limit), algo, 40 if limit > 1 else 80, reset=reset)
    assert_values(policy, sampler, lambda obs: 10)


@ppo_first
def test_an_end_is_an_end(algo: Any):
    assert_values(*trained(toy.ThreeStep, algo, 40), lambda obs: np.array([2.71, 1.9, 1.0])[obs[:, 0].astype(int)])


@pytest.mark.parametrize("gae_lambda", slow_but("half", {"none": 0.0, "half": 0.5, "full": 1.0}))
def test_a_reward_reaches_every_state_before_it(gae_lambda: float):
    policy, sampler = trained(toy.Chain, replace(FAST, gae_lambda=gae_lambda), 40)
    assert_values(policy, sampler, lambda obs: 0.9 ** (4 - obs.argmax(-1)))


@pytest.mark.slow
@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize(
    ("env", "best", "tolerance"), [(toy.ContinuousBandit, 0.3, 0.02), (toy.BoundedBandit, 4.0, 0.1)]
)
def test_the_best_of_a_continuum_in_the_units_of_the_environment(env: Any, best: float, tolerance: float, squash: bool):
    algo = replace(FAST, lr="linear(5e-3, 0)", net=Net(hidden=(32,), squash=squash, log_std_init=-1.0))
    policy, sampler = trained(env, algo, 60)
    assert policy.predict(np.zeros(1, np.float32)) == pytest.approx(best, abs=tolerance)
    assert_values(policy, sampler, lambda obs: 0, tolerance=0.05 if best < 1 else 0.2)


@pytest.mark.slow
def test_a_huge_and_a_constant_observation_are_normalised():
    algo = replace(FAST, net=Net(hidden=(32,), normalize_obs=True))
    assert_values(*trained(toy.HugeScale, algo, 30), lambda obs: np.sign(obs[:, 0]))


def test_what_is_masked_is_never_done_though_it_would_pay():
    policy, sampler = trained(toy.Masked, FAST, 30)
    assert_values(policy, sampler, lambda obs: 1)
    batch, _ = sampler.obtain_samples(0)
    bit = batch.obs["obs"][:-1, :, 0]
    assert not (batch.action[..., 0] == 2 * bit)[batch.valid].any()
    assert batch.reward.max() == 1
    assert sampler.evaluate_agent(0, 100).mean_return == 1


@pytest.mark.slow
def test_a_cue_is_remembered_to_the_end_of_a_corridor():
    algo = PPO(lr="linear(1e-2, 0)", discount=0.95, epochs=8, minibatch=256, entropy_coef="linear(0.05, 0)",
               net=Net(hidden=(32,), recurrent="lstm", recurrent_size=32))  # fmt: skip
    policy, sampler = trained(toy.TMaze, algo, 34, T=32, B=32)
    assert sampler.evaluate_agent(0, 100).mean_return > 0.95
    batch = as_tensors(sampler.obtain_samples(10_000)[0], torch.device("cpu"))
    value = policy.agent.values(batch)
    at_start, at_junction = batch.first, batch.obs[..., 1] == 1
    at_junction[:-1] &= batch.valid  # a reset row still shows the junction
    assert (value[at_start] - 0.95**8).abs().mean() < 0.05
    assert (value[:-1][at_junction[:-1]] - 1).abs().mean() < 0.05
    _, sampler = trained(toy.TMaze, replace(algo, net=Net(hidden=(32,))), 15, T=32, B=32)
    assert sampler.evaluate_agent(0, 400).mean_return == pytest.approx(0.5, abs=0.1)  # 4 standard deviations


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "delay", "symbols"), [("lstm", 2, 4), ("gru", 1, 3)])
def test_what_was_shown_before_is_repeated(kind: Any, delay: int, symbols: int):
    env = partial(toy.RepeatPrevious, delay, symbols)
    net = Net(hidden=(32,), recurrent=kind, recurrent_size=32)
    algo = PPO(lr="linear(1e-2, 0)", discount=0.5, epochs=8, minibatch=256, net=net)
    batches = 30 if delay > 1 else 10
    _, sampler = trained(env, algo, batches, T=32, B=32)
    best = 16 - delay
    assert sampler.evaluate_agent(0, 100).mean_return > 0.95 * best
    _, sampler = trained(env, replace(algo, net=Net(hidden=(32,))), batches, T=32, B=32)
    assert sampler.evaluate_agent(0, 200).mean_return == pytest.approx(best / symbols, abs=0.5)
