"""FastTD3 and FastSAC: C51 targets, losses and gradients by hand, noise by slot, the same bits wherever work is done."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock import ops
from penstock.algos import sac, td3
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.schedule import at_progress
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.testing.samplers import bits
from tests.params import slow_but
from tests.samplers.placed import PLACES, digest

SPEC = EnvSpec(LeafSpec("box", (1,), "float32", -9.0, 9.0), LeafSpec("box", (1,), "float32", -2.0, 2.0))
ATOMS: dict[str, Any] = {"distributional": "c51", "n_atoms": 3, "v_min": -1.0, "v_max": 1.0}
NET = ps.Net(hidden=(4,), activation="relu")
FAST: dict[str, Any] = {
    "td3": ps.TD3(**ATOMS, net=NET, target_noise=0.0, target_actor=False, target_interval=1),
    "sac": ps.SAC(**ATOMS, net=NET, alpha=0.5),
}
PROB = torch.tensor([[[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]], [[0.1, 0.6, 0.3], [0.5, 0.0, 0.5]]])  # [k, N, K]
# r = 0.5 and 0.5 z are 0, 0.5 and 1: the middle atom gets half of 0.5's, the last one the rest. -0.25 in a terminal row.
OWN = [[[0.0, 0.35, 0.65], [0.25, 0.75, 0.0]], [[0.0, 0.4, 0.6], [0.25, 0.75, 0.0]]]  # means 0.65, -0.25; 0.6, -0.25
LOGITS = torch.tensor([[[1.0, 2.0, 1.0], [1.0, 1.0, 2.0]], [[3.0, 1.0, 4.0], [2.0, 2.0, 4.0]]]).log()
SHARES = [[[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]], [[0.375, 0.125, 0.5], [0.25, 0.25, 0.5]]]  # softmax of LOGITS


def inputs(*obs: float) -> Inputs:
    return Inputs(torch.tensor(obs).unsqueeze(1), None, None, None)  # pyright: ignore[reportArgumentType]


def agent_of(cfg: Any) -> Any:
    agent: Any = cfg.build(SPEC).agent
    agent.set_exploration(cfg, 10**6)
    return agent


def postprocessed(name: str, clipped: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """[N, 1 or k, K] targets of `PROB`; SAC's reward is larger by what the temperature takes: 0.5 x 0.5 x 0.8."""
    cfg = replace(FAST[name], clipped_double=clipped)
    agent = agent_of(cfg)
    monkeypatch.setattr(agent, "target_q", lambda *_: PROB.log())
    monkeypatch.setattr(agent, "sample", lambda *_: (torch.zeros(2, 1), torch.tensor([0.8, 0.8])))
    reward = torch.tensor([0.5 + (0.2 if name == "sac" else 0.0), -0.25])
    rows = {"next": inputs(2.0, 3.0), "noise": torch.rand(2, 2 if name == "sac" else 1), "return": reward,
            "discount": torch.tensor([0.5, 0.0])}  # fmt: skip
    module: Any = {"td3": td3, "sac": sac}[name]
    return module.postprocess_fn(agent, TrainBatch(inputs(0.0, 1.0), rows, None), cfg)["target"]


@pytest.mark.parametrize("name", FAST)
def test_targets_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All critics learn the distribution of the smallest mean, row by row, or each its own."""
    own = postprocessed(name, False, monkeypatch)
    assert own.shape == (2, 2, 3)
    torch.testing.assert_close(own.transpose(0, 1), torch.tensor(OWN))
    clipped = postprocessed(name, True, monkeypatch)
    torch.testing.assert_close(clipped, torch.tensor([[OWN[1][0]], [OWN[0][1]]]))


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("name", FAST)
def test_losses_by_hand(name: str, clipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-entropies, summed over critics; the actor goes up the smallest mean, or the mean over critics."""
    cfg = replace(FAST[name], clipped_double=clipped, policy_delay=2)
    agent, target = agent_of(cfg), postprocessed(name, clipped, monkeypatch)
    monkeypatch.undo()
    rows: dict[str, Any] = {"noise": torch.rand(2, 1), "action": torch.zeros(2, 1), "target": target}
    module: Any = {"td3": td3, "sac": sac}[name]
    logits = LOGITS.clone().requires_grad_()
    monkeypatch.setattr(agent, "q", lambda *_: logits)

    def loss(update: int, **more: Any) -> Any:
        return module.loss_fn(agent, TrainBatch(inputs(0.0, 1.0), {**rows, **more, "update": update}, None), cfg)

    each = [[0.0, 0.0], [0.0, 0.0]]
    for k in range(2):
        for n in range(2):
            learned = target[n][0 if clipped else k].tolist()
            each[k][n] = -sum(m * math.log(p) for m, p in zip(learned, SHARES[k][n]))
    found = loss(0)
    assert set(found.total) == {"critic"} and found.priorities is None
    assert float(found.total["critic"].detach()) == pytest.approx(sum(map(sum, each)) / 2, rel=1e-5)
    (slope,) = torch.autograd.grad(found.total["critic"], logits)
    wanted = torch.tensor(SHARES) - target.transpose(0, 1).expand(2, 2, 3)
    torch.testing.assert_close(slope, wanted / 2)  # the gradient of a cross-entropy by logits
    weighted = loss(0, weight=torch.tensor([2.0, 0.0]))
    assert float(weighted.total["critic"].detach()) == pytest.approx(each[0][0] + each[1][0], rel=1e-5)
    assert weighted.priorities.tolist() == pytest.approx([(each[0][n] + each[1][n]) / 2 for n in range(2)], rel=1e-5)
    # Means 0 and 0.25 of the first critic, 0.125 and 0.25 of the second one.
    value = (0.0 + 0.25) / 2 if clipped else (0.0625 + 0.25) / 2
    out = agent(inputs(0.0, 1.0))
    entropy = float(agent.sample(inputs(0.0, 1.0), rows["noise"]).logp.detach().mean()) if name == "sac" else 0.0
    actor = loss(1).total["actor"]
    assert float(actor.detach()) == pytest.approx(0.5 * entropy - value, rel=1e-4) and out.shape[0] == 2


def test_the_actor_gets_the_slope_of_what_it_maximises() -> None:
    for name, cfg in FAST.items():
        agent = agent_of(cfg)
        x, weights = inputs(0.5, -1.0), [*agent.actor.parameters()]
        z = torch.rand(2, 1)
        action = agent.point(x) if name == "td3" else agent.sample(x, z).action
        q = (agent.q(x, action).softmax(-1) * torch.tensor([-1.0, 0.0, 1.0])).sum(-1)
        found = torch.autograd.grad(agent.pooled_q(x, action, True).mean(), weights, retain_graph=True)
        for a, b in zip(found, torch.autograd.grad(q.amin(0).mean(), weights)):
            torch.testing.assert_close(a, b)


def test_shapes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"categorical_targets got prob \(2, 3\)"):
        ops.categorical_targets(PROB[0], torch.zeros(2), torch.zeros(2), torch.arange(3.0), True)
    with pytest.raises(ConfigError, match=r"categorical_loss.*expected logp \[k, N, K\]"):
        ops.categorical_loss(LOGITS, torch.zeros(2, 3, 3))


def test_noise_is_spread_over_the_slots() -> None:
    """From `exploration_noise_low` in slot 0 to `exploration_noise` in the last one; none without noise."""
    cfg = ps.TD3(exploration_noise=0.5, exploration_noise_low=0.1, net=NET, learning_starts=10)
    agent = agent_of(cfg)
    assert agent.by_kernel(True) is None  # whose rows have one noise
    x = inputs(*[0.3] * 6)
    u = float(torch.distributions.Normal(0.0, 1.0).cdf(torch.tensor(0.5)))
    noise = torch.tensor([[u, float(slot)] for slot in (0, 1, 2, 3, 4, 5)])
    with torch.no_grad():
        point = agent.point(x)
        for slots, spread in ((5, [0.1, 0.2, 0.3, 0.4, 0.5, 0.1]), (1, [0.5] * 6)):
            agent.set_slots(slots)
            unit = agent.act(x, None, noise)[0] / 2.0
            torch.testing.assert_close(unit - point, 0.5 * torch.tensor(spread).unsqueeze(1), rtol=1e-4, atol=1e-5)
        assert torch.equal(agent.act(x, None, None)[0], agent.box.to_env(point))
        falling = at_progress(replace(cfg, exploration_noise="linear(0.5, 0.05)"), 1.0)  # to below the low one
        agent.set_exploration(falling, 10**6)
        agent.set_slots(3)
        torch.testing.assert_close(
            agent.act(x, None, noise)[0] / 2.0 - point, torch.full((6, 1), 0.025), rtol=1e-3, atol=1e-5
        )
        agent.set_exploration(cfg, 0)
        assert torch.equal(agent.act(x, None, noise)[0], agent.box.to_env(2.0 * noise[:, :1] - 1.0))


SMALL: dict[str, Any] = {
    "distributional": "c51", "v_min": -400.0, "v_max": 0.0, "batch_size": 64, "replay_ratio": 16, "learning_starts": 24,
    "n_step": 3, "optimizer": "adamw", "weight_decay": 0.1,
    "net": ps.Net(hidden=(8, 8), activation="relu", norm="layer", normalize_obs=True),
}  # fmt: skip
RUNS: dict[str, Any] = {
    "td3": ps.TD3(**SMALL, exploration_noise=0.4, exploration_noise_low=0.001, target_interval=1, target_actor=False),
    "sac": ps.SAC(**SMALL, policy_delay=2, alpha_init=0.001, clipped_double=False),
}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", slow_but("td3", [*RUNS]))
def test_samplers_train_the_same_bits(name: str) -> None:
    found = []
    for place in ("serial", "cpu-2", *(("alternating-2",) if name == "sac" else ())):
        sampler = PLACES[place](4, 6).build("Pendulum-v1", 5)
        policy = RUNS[name].build(sampler.spec, seed=5)
        sampler.initialize(policy.agent)
        seen = []
        try:
            for itr in range(5):
                batch, _ = sampler.obtain_samples(itr)
                seen.append(bits(batch))
                ps.train_one_step(policy, batch)
        finally:
            sampler.shutdown()
        found.append((seen, digest(policy), policy.updates))
    assert found[0][2] > 5
    assert all(other == found[0] for other in found)


def test_the_first_temperature_is_the_one_asked_for() -> None:
    assert float(ps.SAC(alpha_init=0.001).build(SPEC).agent.log_alpha) == pytest.approx(math.log(0.001))  # pyright: ignore


@pytest.mark.parametrize("algo", [ps.PPO(), ps.A2C(), ps.IMPALA(), ps.APPO(), ps.SAC(learning_starts=4)])
def test_the_deviation_of_actions_is_logged(algo: Any) -> None:
    sampler = ps.SerialSampler(T=8, B=2).build("Pendulum-v1", 0)
    policy = replace(algo, net=ps.Net(hidden=(4,), log_std_init=-0.5)).build(sampler.spec)
    sampler.initialize(policy.agent)
    found: Any = ps.train_one_step(policy, sampler.obtain_samples(0)[0])
    sampler.shutdown()
    wanted = math.exp(-0.5) if not isinstance(algo, ps.SAC) else 1.0  # SAC's is an output of its network
    assert found["train/action_std"] == pytest.approx(wanted, rel=0.5 if isinstance(algo, ps.SAC) else 1e-5)


def test_targets_move_as_often_as_asked() -> None:
    for interval, moved in ((None, [False, True, False, True]), (1, [True] * 4)):
        cfg = ps.TD3(target_interval=interval, net=NET)
        agent: Any = cfg.build(SPEC).agent
        schedule: Any = td3.replay_fn(agent, cfg)
        for update, expected in enumerate(moved, 1):
            before = agent.target_critics.stack.weight_0.clone()
            with torch.no_grad():
                agent.critics.stack.weight_0.add_(1.0)
            schedule.after_update(agent, cfg, update)
            assert torch.equal(before, agent.target_critics.stack.weight_0) != expected


def test_wrong_settings_are_refused() -> None:
    for noise in (0.1, "linear(0.1, 0.05)"):
        with pytest.raises(
            ConfigError, match=r"exploration_noise_low=0.2, exploration_noise=.*0.1.*expected a low one"
        ):
            ps.TD3(exploration_noise_low=0.2, exploration_noise=noise)
    ps.TD3(exploration_noise_low=0.2, exploration_noise="linear(0.3, 0.1)")  # all slots alike from there on
    for algo in (ps.TD3, ps.SAC):
        with pytest.raises(ConfigError, match=r"v_min=1.0, v_max=1.0; expected v_min < v_max"):
            algo(v_min=1.0, v_max=1.0)
        with pytest.raises(ConfigError, match=r"clipped_double=False with distributional='none'"):
            algo(clipped_double=False)
        with pytest.raises(ConfigError, match=r"critics of your own.*3 quantiles or atoms"):
            own = algo(**ATOMS, agent=lambda spec, cfg: ps.control_agent(spec, cfg, critics=torch.nn.Identity()))
            own.build(SPEC)
    for algo in (ps.TQC, ps.CrossQ, ps.ReBRAC, ps.TD3BC):
        with pytest.raises(
            ConfigError, match=r"distributional='c51' with (TQC|CrossQ|ReBRAC|TD3BC), whose critics learn otherwise"
        ):
            algo(distributional="c51")


def test_values_stay_within_the_atoms() -> None:
    agent = agent_of(FAST["td3"])
    with torch.no_grad():
        q = agent.pooled_q(inputs(*range(-3, 4)), torch.zeros(7, 1), True)
    assert q.shape == (7,) and float(q.abs().max()) < 1.0
