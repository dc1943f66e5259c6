"""QMIX and VDN: numbers by hand, the loss against a loop over teams and agents, and what absent agents must not do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.algos.qmix import QMIX, MonotonicMixer, SumMixer, TeamQAgent, loss_fn, postprocess_fn
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_map
from penstock.learn.policy import Policy
from penstock.testing import check_agent
from tests.replay.test_lockstep import SPEC as SHOWN, drawn_batches

K, E, T = 3, 2, 6
SPEC = EnvSpec(SHOWN.obs, SHOWN.action, K)
CFG = QMIX(discount=0.9, batch_size=8, learning_starts=0, mixing_hidden=4, epsilon=1.0, net=ps.Net(hidden=(5,)),
           replay=ps.ReplaySettings(capacity=400, index="prioritized"))  # fmt: skip


def filled(
    cfg: QMIX, poison: float = 0.0, seed: int = 0, count: int = 6
) -> tuple[Policy, Any, TrainBatch, list[SampleBatch]]:
    """A policy whose target networks differ from the online ones, a drawn sample of its replay, and what it is of."""
    policy = cfg.build(SPEC, seed)
    agent: Any = policy.agent
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for p in agent.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator)
    batches = drawn_batches(np.random.default_rng(seed), E, K, count, T)
    assert policy.replay_schedule is not None
    for batch in batches:
        kept = batch.copy()
        for t, b in np.argwhere(~kept.valid[:-1]):  # what row T brings stands in row 0 of the next batch as well
            kept.reward[t, b] += poison
            if t and not kept.first[t, b] and not kept.valid[t - 1, b] and not kept.first[t + 1, b]:
                kept.obs["own"][t, b] += poison
        policy.replay_schedule.replay.append(kept)
    _, x = policy.replay_schedule.replay.sample(8, np.random.default_rng(1))
    drawing = policy.replay_schedule.replay.draw(8, np.random.default_rng(1))
    x = tree_map(lambda a: torch.from_numpy(a), replace(x, rows={**x.rows, "weight": drawing.weight}))
    return policy, drawing, x, batches


def mixed(mixer: Any, q: list[Tensor], state: Tensor) -> Tensor:
    """Q_tot of one team, agent by agent and unit by unit."""
    if isinstance(mixer, SumMixer):
        return torch.stack(q).sum()
    weights, total = mixer.first_weight(state).abs(), mixer.last_bias(state)[0]
    for h in range(mixer.hidden):
        inner = mixer.first_bias(state)[h]
        for k, each in enumerate(q):
            inner = inner + each * weights[k * mixer.hidden + h]
        total = total + torch.where(inner > 0, inner, inner.exp() - 1) * mixer.last_weight(state).abs()[h]
    return total


@pytest.mark.parametrize("mixer", ["qmix", "vdn"])
@pytest.mark.parametrize(("double", "n"), [(True, 1), (False, 1), (True, 2)])
def test_the_loss_equals_a_loop_over_teams_and_agents(mixer: Any, double: bool, n: int) -> None:
    cfg = replace(CFG, mixer=mixer, double=double, n_step=n)
    policy, drawing, x, batches = filled(cfg, count=15)  # 90 rows, of which about the last 66 are kept
    agent: Any = policy.agent
    errors: list[Tensor] = []
    for t, e in zip(drawing.unit.tolist(), drawing.slot.tolist()):
        own = slice(e * K, e * K + K)
        (batch, row), rewards = (batches[t // T], t % T), list[float]()
        later = batch.valid[row, own]
        while len(rewards) < n and later.any():  # the team's rewards as far as somebody acts
            (end, last), acting = (batches[(t + len(rewards)) // T], (t + len(rewards)) % T), later
            rewards.append(float(end.reward[last, own][acting].mean()))
            later = batches[(t + len(rewards)) // T].valid[(t + len(rewards)) % T, own]
        left = later if later.any() else acting & ~end.terminated[last, own]
        state = [torch.from_numpy(part.obs["state"][i, e * K]) for part, i in ((batch, row), (end, last + 1))]
        q: list[Tensor] = []
        best: list[Tensor] = []
        for k, b in enumerate(range(e * K, e * K + K)):
            now, after = (torch.from_numpy(x)[None] for x in (batch.obs["own"][row, b], end.obs["own"][last + 1, b]))
            online = agent.q.online(None, {"own": now})[0][0]
            q.append(online[int(batch.action[row, b])] if batch.valid[row, b] else torch.zeros(()))
            target = agent.q.target(None, {"own": after})[0][0]
            chooser = agent.q.online(None, {"own": after})[0][0] if double else target
            best.append(target[int(chooser.argmax())].detach() if left[k] else torch.full((), torch.nan))
        there = [not v.isnan().item() for v in best]
        joint = mixed(agent.target_mixer, [v if on else torch.zeros(()) for v, on in zip(best, there)], state[1])
        reward = sum(0.9**i * r for i, r in enumerate(rewards))
        target = reward + (0.9 ** len(rewards) * joint.detach() if any(there) else 0.0)
        errors.append(mixed(agent.mixer, q, state[0]) - target)
    expected = torch.stack([0.5 * w * d.square() for w, d in zip(x["weight"], errors)]).mean()
    loss = loss_fn(agent, postprocess_fn(agent, x, cfg), cfg)
    assert isinstance(loss.total, Tensor)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.priorities is not None
    np.testing.assert_allclose(loss.priorities, [abs(d.item()) for d in errors], rtol=1e-4, atol=1e-5)
    parameters = [p for p in (*agent.q.online.parameters(), *agent.mixer.parameters())]
    for a, b in zip(torch.autograd.grad(loss.total, parameters), torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert float(loss.rows) == 8  # pyright: ignore[reportArgumentType]


def test_what_stands_where_no_agent_is_changes_nothing() -> None:
    agents = [filled(CFG, poison, count=15) for poison in (0.0, 1e6)]
    losses = [loss_fn(policy.agent, postprocess_fn(policy.agent, x, CFG), CFG) for policy, _, x, _ in agents]  # pyright: ignore
    assert losses[0].total.item() == losses[1].total.item()  # pyright: ignore[reportAttributeAccessIssue]
    (_, _, clean, _), (_, _, poisoned, _) = agents
    assert not torch.equal(clean.inputs.obs["own"], poisoned.inputs.obs["own"])  # it was there to be seen


def test_the_mixer_by_hand_rises_with_every_agent() -> None:
    mixer = MonotonicMixer(2, 1, 1)
    for layer, weight, bias in ((mixer.first_weight, [[-2.0], [3.0]], [0.0, 1.0]), (mixer.first_bias, [[1.0]], [0.5]),
                                (mixer.last_weight, [[-1.0]], [0.0]), (mixer.last_bias[0], [[1.0]], [0.0]),
                                (mixer.last_bias[2], [[4.0]], [-1.0])):  # fmt: skip
        layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)  # pyright: ignore
    q, state = torch.tensor([[0.5, -2.0], [1.0, 1.0]]), torch.tensor([[2.0], [2.0]])
    # Weights |-4| and |7|, bias 2.5: 4 * 0.5 - 14 + 2.5 = -9.5 and 13.5; then elu, times |-2|, plus 4 * 2 - 1.
    expected = [2 * (np.exp(-9.5) - 1) + 7, 2 * 13.5 + 7]
    np.testing.assert_allclose(mixer(q, state).detach(), expected, rtol=1e-5)
    torch.manual_seed(0)
    mixer, q = MonotonicMixer(3, 4, 8), torch.randn(50, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(mixer(q, torch.randn(50, 4)).sum(), q)
    assert (slope >= 0).all()
    assert (slope > 0).any()


def test_agents_act_without_the_state_and_the_mixer_needs_it() -> None:
    check_agent(TeamQAgent(SPEC, CFG), SPEC)
    policy = CFG.build(SPEC, 0)
    obs = {"own": np.ones((4, 1), np.float32), "state": np.zeros((4, 2), np.float32)}
    actions = policy.predict(obs)
    np.testing.assert_array_equal(policy.predict({**obs, "state": np.full((4, 2), 9.0, np.float32)}), actions)
    np.testing.assert_array_equal(policy.predict({"own": obs["own"]}), actions)
    np.testing.assert_array_equal(policy.predict(obs["own"]), actions)
    plain = EnvSpec(LeafSpec("box", (2,), "float32"), SPEC.action, 2)
    assert isinstance(replace(CFG, mixer="vdn").build(plain, 0).agent, TeamQAgent)
    assert CFG.observes_state
    assert not replace(CFG, mixer="vdn").observes_state
    with pytest.raises(ConfigError, match=r"observation of box\[2\] float32; expected a Dict with the key 'state'"):
        CFG.build(plain, 0)
    with pytest.raises(ConfigError, match="recurrent='lstm'"):
        replace(CFG, net=ps.Net(recurrent="lstm")).build(SPEC, 0)


def test_it_trains_on_batches_of_teams_with_normalisers_and_follows() -> None:
    cfg = replace(CFG, net=ps.Net(hidden=(5,), normalize_obs=True, normalize_reward=True), target_interval=1, tau=0.5)
    policy = cfg.build(SPEC, 0)
    agent: Any = policy.agent
    before = agent.target_mixer.first_weight.weight.clone()
    metrics: dict[str, float] = {}
    for batch in drawn_batches(np.random.default_rng(0), E, K, 4, T):
        metrics = ps.train_one_step(policy, batch)
    assert metrics["replay/ratio"] == pytest.approx(cfg.replay_ratio, rel=0.5)
    assert float(agent.state_normalizer.moments[0].count) > 0
    assert not torch.equal(agent.target_mixer.first_weight.weight, before)
    assert not torch.equal(agent.target_mixer.first_weight.weight, agent.mixer.first_weight.weight)
    other = cfg.build(SPEC, 1)
    assert other.replay_schedule is not None
    other.prepare(ps.BatchSpec(T, E * K), {})
    other.load_state_dict(policy.state_dict(), policy.arrays())
    for name, x in policy.agent.state_dict().items():
        assert not isinstance(x, Tensor) or torch.equal(x, other.agent.state_dict()[name]), name
