"""SAC, TD3, DDPG and discrete SAC: losses against a loop over rows, who learns from what and how fast, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves, tree_map
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import ReplaySettings
from penstock.samplers.serial import SerialSampler
from tests.algos.filled import BOX, Chance, assert_gradients_equal, drawn, filled, part, trained
from tests.algos.off_policy_slow import DDPG, DISCRETE, SAC, SHARED, TD3, Slow, losses

PRIORITIZED = ReplaySettings(capacity=600, index="prioritized", priority_beta=0.5)
EACH = {"sac": SAC, "td3": TD3, "ddpg": DDPG, "discrete-sac": DISCRETE}
each_algorithm = pytest.mark.parametrize("algo", EACH.values(), ids=EACH)
MASKED = replace(DISCRETE, env=partial(Chance, masked=True))
CHANGES: list[tuple[str, Slow, dict[str, Any]]] = [
    *((name, algo, changes) for name, algo in {**EACH, "discrete-sac-masked": MASKED}.items()
      for changes in ({}, {"n_step": 3}, {"replay": PRIORITIZED})),
    *(("sac", SAC, x) for x in ({"critics": 1}, {"critics": 3, "target_entropy": 0.7}, {"alpha": 0.3})),
    *(("td3", TD3, x) for x in ({"critics": 3}, {"target_noise": 3.0}, {"target_noise_clip": 0.01})),
    *(("discrete-sac", DISCRETE, x) for x in ({"critics": 3, "entropy_share": 0.98}, {"alpha": 0.3})),
    ("discrete-sac-masked", MASKED, {"critics": 3, "entropy_share": 0.98}),
]  # fmt: skip


@torch.no_grad()
def level(agent: Any, x: Any) -> None:
    """Makes critics equal on average, so that none is the smallest everywhere."""
    given = (x, torch.zeros(len(x.obs), 2)) if hasattr(agent, "box") else (x,)
    for name, q in (("critics", agent.q), ("target_critics", agent.target_q)):
        values = q(*given).flatten(1)
        agent.get_parameter(f"{name}.stack.bias_2").sub_(values.mean(1)[:, None, None])
        assert len(q(*given).argmin(0).unique()) >= min(len(values), 2)


@pytest.mark.parametrize(
    ("algo", "changes"), [pytest.param(a, c, id="-".join((name, *c)) or name) for name, a, c in CHANGES]
)
def test_losses_gradients_and_priorities_equal_a_slow_loop(algo: Slow, changes: dict[str, Any]) -> None:
    """Rewards are discounted within n steps; each loss has a gradient for its own networks."""
    cfg = replace(algo.cfg, **changes)
    policy, record = filled(cfg, algo.env)
    agent: Any = policy.agent
    assert policy.replay_schedule is not None
    if cfg.replay is PRIORITIZED:
        drawing, _ = drawn(policy)
        policy.replay_schedule.replay.update_priorities(drawing, np.linspace(0.1, 3.0, len(drawing.unit)))
    drawing, x = drawn(policy)
    level(agent, x["next"])
    with torch.no_grad():
        ready = policy.postprocess_fn(agent, TrainBatch(x.inputs, {**x.rows, "update": 1}, None), cfg)
    loss = policy.loss_fn(agent, ready, cfg)
    totals, priorities = losses(algo, agent, record, drawing, x.rows.get("noise"), cfg)
    assert isinstance(loss.total, dict) and set(loss.total) == set(totals)
    for name, total in loss.total.items():
        torch.testing.assert_close(total, totals[name], rtol=1e-4, atol=1e-5)
        own = {"critic": "critics.", "actor": "actor.", "alpha": "log_alpha"}[name]
        mine = [p for key, p in agent.named_parameters() if key.startswith(own)]
        others = [p for key, p in agent.named_parameters() if p.requires_grad and not key.startswith(own)]
        assert_gradients_equal(total, totals[name], mine)
        assert all(g is None for g in torch.autograd.grad(total, others, retain_graph=True, allow_unused=True))
    assert (loss.priorities is not None) == (cfg.replay is PRIORITIZED)
    if loss.priorities is not None:
        np.testing.assert_allclose(loss.priorities.numpy(), priorities, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("algo", "changes", "interval", "networks"),
    [
        pytest.param(SAC, {"target_interval": 2}, 2, ["critics"], id="sac"),
        pytest.param(DISCRETE, {"target_interval": 2}, 2, ["critics"], id="discrete-sac"),
        pytest.param(DDPG, {}, 1, ["critics", "actor"], id="ddpg"),
        *(pytest.param(TD3, {"policy_delay": n}, n, ["critics", "actor"], id=f"td3-{n}") for n in (1, 2, 3)),
        pytest.param(replace(TD3, cfg=ps.ReBRAC(**SHARED)), {"policy_delay": 3}, 3, ["critics", "actor"], id="rebrac"),
    ],
)
def test_targets_start_as_copies_and_move_by_tau_every_interval(
    algo: Slow, changes: dict[str, Any], interval: int, networks: list[str]
) -> None:
    """TD3's actor at the same updates as the targets, other actors and all critics at every one."""
    policy, states = trained(replace(algo.cfg, tau=0.25, **changes), algo.env, 4)
    assert policy.updates == len(states) - 1 > 6
    for name in networks:
        assert all(torch.equal(a, b) for a, b in zip(part(states[0], f"target_{name}"), part(states[0], name)))
    for i, (before, now) in enumerate(pairwise(states), 1):
        due = i % interval == 0
        assert not torch.equal(part(now, "critics")[0], part(before, "critics")[0])
        still = all(torch.equal(a, b) for a, b in zip(part(now, "actor"), part(before, "actor")))
        assert still == (isinstance(algo.cfg, ps.TD3) and not due)
        for name in networks:
            for a, b, c in zip(part(now, f"target_{name}"), part(before, f"target_{name}"), part(now, name)):
                torch.testing.assert_close(a, 0.75 * b + 0.25 * c if due else b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("actor_lr", [None, 2e-3])
@each_algorithm
def test_each_part_has_a_step_size_of_its_own_on_one_schedule(algo: Slow, actor_lr: float | None) -> None:
    changes = {"policy_delay": 1} if algo is TD3 else {"alpha_lr": 5e-3} if "alpha" in vars(algo.cfg) else {}
    cfg = replace(algo.cfg, lr="linear(1e-3, 0)", actor_lr=actor_lr, **changes)
    policy, states = trained(cfg, algo.env, 3)
    for name, lr in (("critics", 1e-3), ("actor", actor_lr or 1e-3)):
        steps = torch.cat([(b - a).abs().flatten() for a, b in zip(part(states[0], name), part(states[1], name))])
        assert float(steps.max()) == pytest.approx(lr, rel=2e-2)
    policy.set_progress(0.75)
    expected = {"critic": 2.5e-4, "actor": 0.25 * (actor_lr or 1e-3), "alpha": 1.25e-3}
    found = {name: optimizer.param_groups[0]["lr"] for name, optimizer in policy.optimizers.items()}
    assert found == pytest.approx({name: expected[name] for name in found})
    assert set(found) == {"critic", "actor"} | ({"alpha"} if algo in (SAC, DISCRETE) else set())


@pytest.mark.parametrize(
    ("algo", "changes", "sign"),
    [
        pytest.param(SAC, {"target_entropy": 50.0}, 1.0, id="sac-more"),
        pytest.param(SAC, {"target_entropy": -50.0}, -1.0, id="sac-less"),
        pytest.param(MASKED, {"entropy_share": 1.0}, 1.0, id="discrete-sac-more"),
        pytest.param(MASKED, {"entropy_share": 0.0}, -1.0, id="discrete-sac-less"),
    ],
)
def test_temperature_rises_where_entropy_is_too_small(algo: Slow, changes: dict[str, Any], sign: float) -> None:
    """By its own step size: Adam's first step is as long as that."""
    _, states = trained(replace(algo.cfg, alpha_lr=3e-2, **changes), algo.env, 3)
    moved = [float(b["log_alpha"] - a["log_alpha"]) for a, b in pairwise(states)]
    assert moved[0] == pytest.approx(sign * 3e-2, rel=1e-3)
    assert all(sign * step > 0 for step in moved)


RAINBOW = ps.DQN(**SHARED, distributional="c51", n_atoms=7, v_min=-3.0, v_max=4.0, noisy=True, dueling=True, n_step=3)


@pytest.mark.parametrize(
    ("cfg", "env"),
    [(SAC.cfg, SAC.env), (MASKED.cfg, MASKED.env), (TD3.cfg, TD3.env), (RAINBOW, Chance)],
    ids=["sac", "discrete-sac", "td3", "rainbow"],
)
def test_a_stored_policy_goes_on_to_the_same_bits(cfg: Any, env: Any) -> None:
    sampler = SerialSampler(T=5, B=4).build(env, 1)
    net = replace(cfg.net, normalize_obs=True, normalize_reward=True)
    cfg = replace(cfg, replay=PRIORITIZED, net=net)
    policies = [cfg.build(sampler.spec, 2) for _ in range(2)]
    sampler.initialize(policies[0].agent)
    for itr in range(6):
        batch = sampler.obtain_samples(itr)[0]
        for policy in policies if itr >= 3 else policies[:1]:
            train_one_step(policy, batch.copy())
        if itr == 2:
            policies[1].prepare(sampler.batch_spec)
            state = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, policies[0].state_dict())
            policies[1].load_state_dict(state, {k: v.copy() for k, v in policies[0].arrays().items()})
    first, second = (tree_leaves(p.state_dict()["agent"]) for p in policies)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert policies[0].updates == policies[1].updates > 40


def built(cfg: Any, env: Any) -> Any:
    return cfg.build(SerialSampler(T=1, B=1).build(env, 0).spec)


@pytest.mark.parametrize(
    ("algo", "env", "words"),
    [(SAC, Chance, ["SAC", "discrete(4)", "DiscreteSAC"]), (TD3, Chance, ["TD3", "discrete(4)", "DQN"]),
     (DDPG, Chance, ["DDPG", "discrete(4)", "DQN"]), (DISCRETE, partial(Chance, BOX), ["DiscreteSAC", "box[2]", "SAC for"])],
    ids=EACH,
)  # fmt: skip
def test_other_actions_and_memory_are_refused(algo: Slow, env: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        built(algo.cfg, env)
    assert all(word in str(error.value) for word in words), str(error.value)
    with pytest.raises(ConfigError, match=rf"{type(algo.cfg).__name__}(.|\n)*R2D1"):
        built(replace(algo.cfg, net=ps.Net(recurrent="gru")), algo.env)


@pytest.mark.parametrize(
    ("algo", "refused"),
    [
        (ps.SAC, {"alpha": 0.0, "critics": 0, "tau": 1.5, "actor_lr": -1.0, "target_interval": 0}),
        (ps.SAC, {"alpha": "often"}),
        (ps.TD3, {"policy_delay": 0, "target_noise": -0.1, "exploration_noise": "linear(0.1, -1)", "critics": 0, "tau": 0.0,
                  "lr": 0.0}),
        (ps.DDPG, {"exploration_noise": -0.1, "discount": -0.1, "actor_lr": 0.0, "max_grad_norm": 0.0}),
        (ps.DiscreteSAC, {"alpha": 0.0, "entropy_share": 1.1, "critics": 0, "tau": 0.0}),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(algo: Any, refused: dict[str, Any]) -> None:
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=name) as error:
            algo(**{name: value})
        assert str(value) in str(error.value)


def test_a_batch_of_no_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        built(ps.DDPG(batch_size=0), DDPG.env)
