"""State-dependent exploration: its density by a slow reference, its noise in blocks of steps, and one bit pattern."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.continuous import ControlAgent
from penstock.agents.gsde import StateDependentHead, StateDependentOutput
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.noise import HeldNoise, Noise, Purpose, uniform
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.testing.agents import check_agent

L, A = 5, 3
BOX = EnvSpec(LeafSpec("box", (4,), "float32"), LeafSpec("box", (A,), "float32", low=-2.0, high=4.0))
NET = ps.Net(hidden=(8,), use_sde=True, sde_sample_freq=3, log_std_init=-1.0)


def head(squash: bool = False) -> StateDependentHead:
    torch.manual_seed(0)
    made = StateDependentHead(L, torch.ones(A), torch.full((A,), 3.0), (A,), squash, -0.5)
    torch.nn.init.normal_(made.linear.output.log_std, -1.5, 0.5)
    torch.nn.init.normal_(made.linear.output.mean.weight, 0.0, 0.3)
    return made


@pytest.mark.parametrize("squash", [False, True])
def test_log_probability_and_samples_by_a_slow_loop(squash: bool) -> None:
    made, h = head(squash), torch.randn(6, L)
    noise = torch.rand(6, L * A).clamp(0.01, 0.99)
    dist = made(made.linear(h))
    action = dist.sample(noise)
    got = dist.log_prob(action)
    output = made.linear.output
    W, b, log_std = output.mean.weight.detach(), output.mean.bias.detach(), output.log_std.detach()
    for n in range(6):
        total = 0.0
        for a in range(A):
            mean = float(b[a]) + sum(float(W[a, i] * h[n, i]) for i in range(L))
            std = [math.exp(float(log_std[i, a])) for i in range(L)]
            z = [math.sqrt(2.0) * float(torch.erfinv(2.0 * noise[n, i * A + a] - 1.0)) for i in range(L)]
            u = mean + sum(float(h[n, i]) * std[i] * z[i] for i in range(L))
            assert float(action[n, a]) == pytest.approx(1.0 + 3.0 * (math.tanh(u) if squash else u), abs=1e-4)
            variance = sum(float(h[n, i]) ** 2 * std[i] ** 2 for i in range(L)) + 1e-6
            total += -0.5 * (u - mean) ** 2 / variance - 0.5 * math.log(2.0 * math.pi * variance) - math.log(3.0)
            total -= math.log(1.0 - math.tanh(u) ** 2) if squash else 0.0
        assert float(got[n]) == pytest.approx(total, abs=2e-3)
    assert torch.equal(dist.mode(), made(made.linear(h)).mode())


@pytest.mark.parametrize(
    ("algo", "log_std"),
    [
        (ps.PPO(net=ps.Net(use_sde=True)), -2.0),
        (ps.SAC(net=ps.Net(use_sde=True)), -3.0),
        (ps.SAC(net=ps.Net(use_sde=True, log_std_init=0.0)), 0.0),
    ],
)
def test_noise_starts_small_since_it_sums_over_features(algo: ps.PPO | ps.SAC, log_std: float) -> None:
    agent: Any = algo.build(BOX).agent
    output: Any = agent.actor.out if isinstance(agent, ControlAgent) else agent.head.linear.output
    assert torch.equal(output.log_std, torch.full_like(output.log_std, log_std))
    assert (ps.Net().log_std(), ps.Net(log_std_init=0.5).log_std()) == (0.0, 0.5)
    for sde in (True, False):
        replace(algo, net=ps.Net(use_sde=sde, log_std_init=-1)).build(BOX)  # a whole number


def test_actions_over_matrices_have_the_deviation_that_learning_uses() -> None:
    output, h = StateDependentOutput(L, 1, -0.3), torch.randn(1, L)
    draws = torch.from_numpy(uniform(0, Purpose.ACT, 0, slice(0, 20_000), 1, L)[0])
    offsets = output.offset(h, draws)
    std = output(h).chunk(2, -1)[1].exp().item()
    assert float(offsets.detach().std()) == pytest.approx(std, rel=0.03)
    assert abs(float(offsets.detach().mean())) < 4 * std / math.sqrt(20_000)


def test_no_gradient_runs_through_the_features_into_the_noise() -> None:
    output, h = StateDependentOutput(L, A, -0.3), torch.randn(2, L, requires_grad=True)
    _, log_std = output(h).chunk(2, -1)
    (of_std,) = torch.autograd.grad(log_std.sum(), output.log_std, retain_graph=True)
    assert of_std.abs().min() > 0
    (of_h,) = torch.autograd.grad(log_std.sum(), h, allow_unused=True)
    assert of_h is None or not of_h.any()


@pytest.mark.parametrize("steps", [1, 3, None])
def test_held_noise_is_a_function_of_its_block_whatever_the_batches(steps: int | None) -> None:
    def rows(T: int, batch: int, first: int = 0, B: int = 4) -> np.ndarray[Any, Any]:
        return Noise(7, Purpose.ACT, batch, first).rows(T, B, 6, held=HeldNoise(4, steps))

    whole = rows(12, 0)
    assert np.array_equal(whole[:, 1:3], rows(12, 0, first=1, B=2))
    assert np.array_equal(whole[..., 4:], uniform(7, Purpose.ACT, 0, slice(0, 4), 12, 2))
    kept = whole[..., :4]
    changes = [t for t in range(1, 12) if not np.array_equal(kept[t], kept[t - 1])]
    assert changes == ([] if steps is None else list(range(steps, 12, steps)))
    if steps is not None:  # blocks go on over the borders of batches
        assert np.array_equal(kept, np.concatenate([rows(1, itr) for itr in range(12)])[..., :4])
    else:
        assert not np.array_equal(kept[0], rows(12, 1)[0, :, :4])
    assert len(np.unique(kept[0])) == 16


@pytest.mark.parametrize(
    "algo", [ps.PPO(net=NET), ps.PPO(net=ps.Net(hidden=(8,), use_sde=True, squash=True)), ps.SAC(net=NET)]
)
def test_it_is_a_sound_agent(algo: Any) -> None:
    agent = algo.build(BOX).agent
    check_agent(agent, BOX)
    width = 8 * A
    assert agent.held_noise == HeldNoise(width, algo.net.sde_sample_freq)
    assert agent.noise_size == width + (A if isinstance(agent, ControlAgent) else 0)


@pytest.mark.parametrize("algo", [ps.A2C(net=NET), ps.SAC(net=NET, learning_starts=0)])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(algo: Any) -> None:
    agent = algo.build(BOX, seed=1).agent
    obs, noise = torch.randn(64, 4), torch.rand(64, agent.noise_size).clamp(0.01, 0.99)
    with torch.inference_mode():

        def act(at: slice) -> torch.Tensor:
            n = len(obs[at])
            x = Inputs(obs[at], torch.zeros(n, A), torch.zeros(n), torch.zeros(n, dtype=torch.bool))
            return agent.act(x, None, noise[at])[0]

        whole = act(slice(0, 64))
        for n in (4, 8, 12, 20):
            assert torch.equal(whole[:n], act(slice(0, n)))
            assert torch.equal(whole[-n:], act(slice(64 - n, 64)))


def test_one_step_of_ppo_and_sac_moves_the_deviations() -> None:
    for algo in (ps.PPO(net=NET), ps.SAC(net=NET, learning_starts=8, batch_size=8, replay_ratio=8.0)):
        sampler = ps.SerialSampler(T=8, B=2).build("Pendulum-v1", 0)
        policy = algo.build(sampler.spec, 0)
        name = next(n for n, _ in policy.agent.named_parameters() if n.endswith("log_std"))
        before = policy.agent.get_parameter(name).detach().clone()
        sampler.initialize(policy.agent)
        for itr in range(2):
            ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
        sampler.shutdown()
        assert not torch.equal(before, policy.agent.get_parameter(name))


def test_what_has_no_box_is_refused() -> None:
    choice = EnvSpec(LeafSpec("box", (4,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
    for algo, spec, match in (
        (ps.PPO(net=NET), choice, "net.use_sde=True with an action of discrete; expected one box"),
        (ps.DQN(net=NET), choice, "one choice"),
        (ps.DiscreteSAC(net=NET), choice, "one choice"),
        (ps.TD3(net=NET), BOX, "whose actor is a point"),
    ):
        with pytest.raises(ConfigError, match=match):
            algo.build(spec)
