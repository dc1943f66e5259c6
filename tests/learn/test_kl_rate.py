"""lr="kl(start, desired=...)": divergences of Gaussians, the rule by hand, learners, checkpoints and resumed runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Normal, kl_divergence

import penstock as ps
from penstock.agents.actor_critic import ActorCritic
from penstock.agents.distributions import kl_from, moments
from penstock.core.errors import ConfigError
from penstock.core.schedule import curve
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.learn.clock import ROUNDING, KlRate
from penstock.learn.rows.minibatch import minibatches
from penstock.learn.rows.postprocess import as_tensors
from tests.learn.ranks import batches_of, trained

NET = ps.Net(hidden=(16,))
FAST: Any = "kl(3e-3, desired=0.002)"
ALGO = ps.PPO(lr=FAST, epochs=4, minibatch=64, net=NET)
CPU = torch.device("cpu")


def by_rule(rate: float, kl: float, desired: float) -> float:
    """rsl_rl's, written out; there any KL above 0 counts."""
    if kl > 2 * desired:
        return max(1e-5, rate / 1.5)
    return min(1e-2, rate * 1.5) if ROUNDING < kl < desired / 2 else rate


@pytest.mark.parametrize("net", [ps.Net(), ps.Net(squash=True), ps.Net(use_sde=True)])
def test_the_divergence_of_gaussians_is_exact(net: ps.Net) -> None:
    box = LeafSpec("box", (3,), "float32", -2.0, 5.0)
    spec = EnvSpec(LeafSpec("box", (4,), "float32"), box)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        agent = ActorCritic(spec, net)
        with torch.no_grad():
            for p in agent.head.parameters():
                p.add_(torch.randn_like(p) * 0.3)
            inputs = ps.Inputs(torch.linspace(-1, 1, 20).reshape(5, 4), *[None] * 3)  # pyright: ignore
            found.append(agent(inputs).dist)
    old, new = ((lambda m, s: Normal(m, s.exp()))(*moments(dist).chunk(2, -1)) for dist in found)  # pyright: ignore
    torch.testing.assert_close(kl_from(moments(found[0]), found[1]), kl_divergence(old, new).sum(-1))  # pyright: ignore
    assert moments(ActorCritic(EnvSpec(spec.obs, LeafSpec("discrete", (), "int64", sizes=(2,))), ps.Net())) is None


def test_the_rule_by_hand() -> None:
    rate = KlRate(1e-3, 0.01, 1e-5, 1e-2, CPU)
    for kl, expected in ((0.03, 1e-3 / 1.5), (0.02, 1e-3 / 1.5), (0.005, 1e-3 / 1.5), (0.0049, 1e-3), (0.0, 1e-3)):
        rate.follow(torch.tensor(kl))
        assert rate.value.item() == pytest.approx(expected, rel=1e-12)
    rate.follow(torch.tensor(9.0), torch.tensor(True))
    assert rate.value.item() == pytest.approx(1e-3, rel=1e-12)
    for kl, end in ((9.0, 1e-5), (1e-8, 1e-5), (1e-5, 1e-2), (math.nan, 1e-2), (math.inf, 1e-2)):
        for _ in range(30):
            rate.follow(torch.tensor(kl))
        assert rate.value.item() == end


def test_the_step_size_of_each_update_follows_the_divergence_of_its_minibatch() -> None:
    spec, batches = batches_of("Pendulum-v1", ALGO, 32, 8, 2)
    policy = ALGO.build(spec, seed=5)
    assert isinstance(policy.agent, ActorCritic)
    rate, rates = 3e-3, []
    for batch in batches:
        data = policy.postprocess(as_tensors(batch, CPU))
        with torch.no_grad():
            first = policy.agent(data.inputs.flat()).dist
        rows = {**data.rows, "mean": first.mean.reshape(32, 8, 1), "std": first.log_std.exp().detach().expand(32, 8)}
        for x in minibatches(type(data)(data.inputs, rows, data.valid), 64, policy.shuffler(), 4):
            with torch.no_grad():
                dist = policy.agent(x.inputs).dist
            now, old = Normal(dist.mean, dist.log_std.exp()), Normal(x["mean"], x["std"].unsqueeze(-1))
            rate = by_rule(rate, kl_divergence(old, now).sum(-1).mean().item(), 0.002)
            loss = policy.learn_on_batch(x)
            assert loss is not None
            rates.append(policy.optimizers["all"].param_groups[0]["lr"])
            assert rates[-1] == pytest.approx(rate, rel=1e-12)
        policy.version += 1
    assert len(rates) == 32 and len(set(rates)) > 3


def test_learners_adapt_alike_and_as_one() -> None:
    spec, batches = batches_of("Pendulum-v1", ALGO, 32, 8, 3)
    ((one, results),) = trained(ALGO, spec, batches, [8])
    many = trained(ALGO, spec, batches, (3, 5))
    found = [policy.rate.value.item() for policy, _ in many if policy.rate is not None]
    assert found[0] == found[1] == pytest.approx(results[-1]["train/learning_rate"])
    assert one.rate is not None and found[0] == one.rate.value.item() != 3e-3
    assert many[0][1] == many[1][1]


def test_choices_go_by_the_estimate_from_log_ratios_and_scales_of_parameters_hold() -> None:
    algo = ps.PPO(lr=FAST, epochs=2, minibatch=64, net=NET, lr_scales={"critic.*": 0.5})
    spec, (batch,) = batches_of("CartPole-v1", algo, 32, 8, 1)
    policy = algo.build(spec, seed=5)
    results = ps.train_one_step(policy, batch)
    assert "train/kl" not in results and results["train/approx_kl"] > 0
    rates = sorted(group["lr"] for group in policy.optimizers["all"].param_groups)
    assert rates[0] == pytest.approx(0.5 * rates[1]) and rates[1] != 3e-3


def test_a_checkpoint_keeps_it_and_a_plain_one_has_none() -> None:
    spec, batches = batches_of("Pendulum-v1", ALGO, 32, 8, 2)
    policy, other = ALGO.build(spec, seed=5), ALGO.build(spec, seed=5)
    ps.train_one_step(policy, batches[0])
    other.load_state_dict(policy.state_dict())
    for x in (policy, other):
        ps.train_one_step(x, batches[1])
    assert policy.rate is not None and other.rate is not None
    assert policy.rate.value.item() == other.rate.value.item() != 3e-3
    assert "rate" not in ps.PPO(net=NET).build(spec).state_dict()["counters"]


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    def play(folder: str, steps: int) -> ps.Experiment:
        run = ps.RunConfig(steps=steps, dir=str(tmp_path / folder), progress="off", eval_episodes=0)
        return ps.Experiment("Pendulum-v1", ALGO, ps.SerialSampler(T=32, B=4), run)

    ps.train(play("whole", 512))
    ps.train(play("cut", 256))
    ps.resume(tmp_path / "cut", {"run.steps": 512})
    found = [ps.load(tmp_path / name).agent.state_dict() for name in ("whole", "cut")]
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


def test_a_change_of_other_settings_leaves_it_and_one_of_lr_starts_anew() -> None:
    spec, (batch,) = batches_of("Pendulum-v1", ALGO, 32, 8, 1)
    policy = ALGO.build(spec, seed=5)
    ps.train_one_step(policy, batch)
    assert policy.rate is not None
    before = policy.rate.value.item()
    changed = ps.PPO(lr=FAST, epochs=4, minibatch=64, net=NET, clip=0.1)
    policy.taking_settings_of(changed.build(spec))()
    assert policy.optimizers["all"].param_groups[0]["lr"] == policy.rate.value.item() == before != 3e-3
    policy.taking_settings_of(ps.PPO(lr=1e-4, epochs=4, minibatch=64, net=NET).build(spec))()
    assert policy.rate is None and policy.optimizers["all"].param_groups[0]["lr"] == 1e-4


def test_what_it_cannot_be_is_refused() -> None:
    assert curve("kl(1e-3)").desired_kl == 0.01
    for text in ("kl()", "kl(1e-3, 0.01)", "kl(1e-3, wanted=1)", "kl(1.0)", "kl(1e-3, desired=0)"):
        with pytest.raises(ConfigError, match="not understood"):
            ps.PPO(lr=text)
    with pytest.raises(ConfigError, match="has no kl inside"):
        ps.PPO(lr="warmup(0.05, kl(1e-3))")
    with pytest.raises(ConfigError, match=r"clip.*expected it as lr alone"):
        ps.PPO(clip="kl(1e-3)")
    with pytest.raises(ConfigError, match="with A2C, whose loss tells no KL"):
        ps.A2C(lr="kl(1e-3)").build(EnvSpec(LeafSpec("box", (4,), "float32"), LeafSpec("box", (3,), "float32")))
