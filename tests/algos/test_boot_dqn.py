"""Bootstrapped DQN: the papers' equations by hand and by separate networks, one head for an episode, masks, and deep_sea."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.algos.boot_dqn import BootAgent, loss_fn, postprocess_fn
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves
from penstock.envs.toy import Bandit, Chain, DeepSea, TwoStep
from penstock.replay.settings import ReplaySettings
from penstock.testing.agents import check_agent
from penstock.testing.samplers import bits
from tests.params import slow_but

SPEC = EnvSpec(LeafSpec("box", (1,), "float32", -9.0, 9.0), LeafSpec("discrete", (), "int64", sizes=(2,)))
LINEAR = ps.Net(hidden=(), activation="relu")
SMALL: dict[str, Any] = {
    "heads": 3,
    "batch_size": 8,
    "learning_starts": 16,
    "replay_ratio": 4.0,
    "net": ps.Net(hidden=(8,)),
}


def linear_agent(cfg: ps.BootDQN) -> BootAgent:
    """Q_1(s) = (s + 2, 2 s), Q_2(s) = (-s, 1 + 2 s) with priors (1, 0), (0, s) of weight 2; targets at half f."""
    agent: Any = cfg.build(SPEC).agent
    network = agent.q.online.network
    f = torch.tensor([[[1.0, 2.0]], [[-1.0, 0.0]]]), torch.tensor([[[0.0, 0.0]], [[0.0, 1.0]]])
    p = torch.tensor([[[0.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])
    for stack, values in ((network.heads, f), (network.priors, p)):
        for own, value in zip((stack.weight_0, stack.bias_0), values):
            own.data.copy_(value)
    agent.q.target = copy.deepcopy(agent.q.online).requires_grad_(False)
    for own in agent.q.target.network.heads.parameters():
        own.data.mul_(0.5)
    return agent


def inputs(*obs: float) -> Inputs:
    none: Any = None
    return Inputs(torch.tensor(obs).unsqueeze(1), none, none, none)


def rows(**more: Any) -> TrainBatch:
    """Two transitions: 3 -> 1 by action 0 for 5, and -4 -> 6 by action 1 for 7 and the end."""
    data = {
        "action": torch.tensor([0, 1]), "return": torch.tensor([5.0, 7.0]), "discount": torch.tensor([0.5, 0.0]),
        "next": inputs(1.0, 6.0), "mask": torch.tensor([[True, False], [True, True]]),
    }  # fmt: skip
    return TrainBatch(inputs(3.0, -4.0), data | more)


CFG = ps.BootDQN(heads=2, prior_scale=2.0, net=LINEAR, double=False)


def test_heads_have_priors_that_are_added_and_do_not_learn() -> None:
    agent = linear_agent(CFG)
    assert agent(inputs(3.0))[0].T.tolist() == [[5.0, 6.0], [-3.0, 7.0]]
    learned = {name for name, x in agent.named_parameters() if x.requires_grad}
    assert learned == {f"q.online.network.heads.{name}_0" for name in ("weight", "bias")}


def test_targets_by_hand() -> None:
    """Q^-_1(1) = (0.5 + 2, 1), Q^-_2(1) = (-0.5, 0.5 + 2); double: Q_1(1) = (3, 2) chooses 0, Q_2(1) = (-1, 3) 1."""
    x = postprocess_fn(linear_agent(CFG), rows(), CFG)
    assert x["target"].tolist() == [[5.0 + 0.5 * 2.5, 5.0 + 0.5 * 2.5], [7.0, 7.0]]
    far = rows(
        next=inputs(-3.0, 6.0)
    )  # Q_1 = (-1, -6) by 0 as Q^-_1 = (0.5, -3); Q_2 = (3, -5) by 0, Q^-_2 = (1.5, -5.5)
    double = ps.BootDQN(heads=2, prior_scale=2.0, net=LINEAR)
    assert postprocess_fn(linear_agent(double), far, double)["target"][0].tolist() == [5.25, 5.75]
    near = rows(next=inputs(2.5, 6.0))  # Q_1 = (4.5, 5) chooses 1; Q^-_1 = (3.25, 2.5) would choose 0
    assert postprocess_fn(linear_agent(double), near, double)["target"][0, 0].item() == 5.0 + 0.5 * 2.5
    assert postprocess_fn(linear_agent(CFG), near, CFG)["target"][0, 0].item() == 5.0 + 0.5 * 3.25


def test_the_loss_by_hand() -> None:
    """Errors 5 - 4 and (-3 - 4, masked) of action 0 at 3; -8 - 1 and -7 - 1 of action 1 at -4; half squares below 10."""
    cfg = ps.BootDQN(heads=2, prior_scale=2.0, net=LINEAR, huber_delta=10.0)
    loss = loss_fn(linear_agent(cfg), rows(target=torch.tensor([[4.0, 4.0], [1.0, 1.0]])), cfg)
    assert loss.total.item() == pytest.approx((0.5 + 0.0 + 40.5 + 32.0) / 4)  # pyright: ignore
    assert loss.priorities is not None and loss.priorities.tolist() == [4.0, 8.5]
    assert loss.metrics["q_std"].item() == pytest.approx((4.0 + 0.5) / 2)
    weighed = rows(target=torch.tensor([[4.0, 4.0], [1.0, 1.0]]), weight=torch.tensor([2.0, 0.0]))
    assert loss_fn(linear_agent(cfg), weighed, cfg).total.item() == pytest.approx(2 * 0.5 / 4)  # pyright: ignore


class Separate(nn.Module):
    """Head k of an ensemble as a network of its own: f(s) + scale * p(s)."""

    def __init__(self, agent: BootAgent, k: int) -> None:
        super().__init__()
        network: Any = agent.q.online.network
        self.f, self.p = (self._copied(stack, k) for stack in (network.heads, network.priors))
        self.scale = network.prior_scale

    @staticmethod
    def _copied(stack: Any, k: int) -> nn.Sequential:
        layers = [nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)]
        for i, layer in enumerate((layers[0], layers[2])):
            layer.weight.data.copy_(getattr(stack, f"weight_{i}")[k].T)  # pyright: ignore
            layer.bias.data.copy_(getattr(stack, f"bias_{i}")[k, 0])  # pyright: ignore
        return nn.Sequential(*layers)

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        return self.f(s) + self.scale * self.p(s).detach()


def test_updates_are_those_of_separate_networks() -> None:
    """Six steps of algorithm 3 of Osband et al. 2018 with masks, Adam, and a target copied every other step."""
    spec = EnvSpec(LeafSpec("box", (2,), "float32"), LeafSpec("discrete", (), "int64", sizes=(3,)))
    cfg = ps.BootDQN(heads=3, double=False, target_interval=2, max_grad_norm=1e9, huber_delta=1e9,
                     net=ps.Net(hidden=(8,), activation="relu", init="orthogonal"))  # fmt: skip
    policy = cfg.build(spec, seed=4)
    agent: Any = policy.agent
    nets = [Separate(agent, k) for k in range(3)]
    targets = copy.deepcopy(nets)
    adams = [torch.optim.Adam(net.f.parameters(), lr=1e-3, eps=1e-8) for net in nets]
    rng = torch.Generator().manual_seed(0)
    schedule = policy.replay_schedule
    assert schedule is not None and schedule.after_update is not None
    none: Any = None
    for step in range(6):
        s, s2 = torch.randn(5, 2, generator=rng), torch.randn(5, 2, generator=rng)
        a, r = torch.randint(3, (5,), generator=rng), torch.randn(5, generator=rng)
        discount, mask = torch.full((5,), 0.9), torch.rand(5, 3, generator=rng) < 0.5
        losses = []
        for k in range(3):
            with torch.no_grad():
                y = r + discount * targets[k](s2).amax(1)
            losses.append((mask[:, k] * 0.5 * (nets[k](s)[range(5), a] - y) ** 2).mean())
        for adam in adams:
            adam.zero_grad()
        (sum(losses) / 3).backward()  # pyright: ignore
        for adam in adams:
            adam.step()
        if step % 2:
            for target, net in zip(targets, nets):
                target.load_state_dict(net.state_dict())
        following = Inputs(s2, none, none, none)
        sample = {"action": a, "return": r, "discount": discount, "next": following, "mask": mask}
        with torch.no_grad():
            x = policy.postprocess(TrainBatch(Inputs(s, none, none, none), sample))
        policy.learn_on_batch(x)
        schedule.after_update(agent, policy.settings, policy.updates)
    s = torch.randn(4, 2, generator=rng)
    heads = agent(Inputs(s, none, none, none))
    for k in range(3):
        assert torch.allclose(heads[..., k], nets[k](s), atol=1e-5)
        assert torch.allclose(agent.q.bootstrap(Inputs(s, none, none, none))[..., k], targets[k](s), atol=1e-5)


def test_the_agent_keeps_its_promises() -> None:
    spec = EnvSpec(LeafSpec("box", (2,), "float32"), LeafSpec("discrete", (), "int64", sizes=(3,), start=4))
    check_agent(ps.BootDQN(heads=3, net=ps.Net(hidden=(8,), normalize_obs=True)).build(spec).agent, spec)


def test_a_head_is_followed_for_an_episode_and_drawn_anew_at_its_start() -> None:
    agent = linear_agent(CFG)
    agent.set_exploration(CFG, 1_000)
    first = torch.tensor([True, True, False, False])
    none: Any = None
    shown = Inputs(torch.full((4, 1), 0.5), none, none, first)  # Q_1 = (2.5, 1), Q_2 = (-0.5, 2)
    noise = torch.full((4, 5), 0.5)
    noise[:, 3] = 0.4  # below mask_prob, which 0.5 is not
    noise[:, 2] = torch.tensor([0.2, 0.7, 0.2, 0.7])
    action, info, state = agent.act(shown, torch.tensor([1, 0, 1, 0]), noise)
    assert state.tolist() == [0, 1, 1, 0] and action.tolist() == [0, 1, 1, 0]
    assert info["mask"].tolist() == [[True, False]] * 4
    mean, info, kept = agent.act(shown, state, None)  # (1, 1.5)
    assert mean.tolist() == [1] * 4 and kept.tolist() == state.tolist() and info["mask"].all()


def test_random_actions_are_legal_ones() -> None:
    spec = EnvSpec({"obs": SPEC.obs, "action_mask": LeafSpec("multi_binary", (3,), "int8")},
                   LeafSpec("discrete", (), "int64", sizes=(3,), start=1))  # fmt: skip
    agent: Any = ps.BootDQN(**SMALL).build(spec).agent  # before learning_starts every action is random
    none: Any = None
    mask = torch.tensor([[1, 0, 1]]).repeat(400, 1)
    noise = torch.rand(400, 6, generator=torch.Generator().manual_seed(0))
    shown = Inputs({"obs": torch.zeros(400, 1), "action_mask": mask}, none, none, torch.ones(400).bool())
    action = agent.act(shown, agent.initial_state(400), noise)[0]
    assert np.bincount(action.numpy(), minlength=4)[[0, 2]].tolist() == [0, 0]
    assert 150 < int((action == 1).sum()) < 250


def test_an_illegal_action_is_never_the_best() -> None:
    """Action 2 is, by 100 in every head, where it is legal: in acting, evaluations and targets."""
    cfg = ps.BootDQN(**SMALL)
    spec = EnvSpec(
        {"obs": SPEC.obs, "action_mask": LeafSpec("multi_binary", (3,), "int8")},
        LeafSpec("discrete", (), "int64", sizes=(3,)),
    )
    agent: Any = cfg.build(spec).agent
    for network in (agent.q.online, agent.q.target):
        network.network.heads.bias_1.data[..., 2] += 100.0
    agent.set_exploration(cfg, 1_000)
    none: Any = None
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    shown = Inputs({"obs": torch.zeros(2, 1), "action_mask": mask}, none, none, torch.ones(2).bool())
    for noise in (None, torch.full((2, 6), 0.5)):
        assert [a == 2 for a in agent.act(shown, agent.initial_state(2), noise)[0].tolist()] == [True, False]
    data = {
        "action": torch.zeros(2).long(),
        "return": torch.zeros(2),
        "discount": torch.ones(2),
        "next": shown,
        "mask": none,
    }
    for double in (True, False):
        target = postprocess_fn(agent, TrainBatch(shown, data), ps.BootDQN(**SMALL, double=double))["target"]
        assert (target > 50.0).tolist() == [[True] * 3, [False] * 3]


T, B = 4, 6
PLACES: dict[str, Any] = {
    "cpu": ps.CpuSampler(T, B, workers=2),
    "gpu": ps.GpuSampler(T, B, workers=2),
    "alternating": ps.AlternatingSampler(T, B, workers=2),
    "async": ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=0),
}


def run(settings: Any) -> tuple[list[Any], list[bytes]]:
    """Bits of every batch with the heads before it, and of all parameters in the end."""
    sampler = settings.build(Chain, 5)
    policy = ps.BootDQN(**SMALL).build(sampler.spec, 5)
    sampler.initialize(policy.agent)
    out: list[Any] = []
    try:
        for itr in range(8):
            batch = sampler.obtain_samples(itr)[0]
            out.append(bits(batch))
            ps.train_one_step(policy, batch)
    finally:
        sampler.shutdown()
    return out, [x.numpy().tobytes() for x in tree_leaves(dict(policy.agent.state_dict()))]


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", slow_but("cpu", PLACES))
def test_placement_changes_nothing(place: Any) -> None:
    assert run(ps.SerialSampler(T, B)) == run(place)


def test_heads_change_with_episodes_and_masks_come_back_with_their_rows() -> None:
    sampler = ps.SerialSampler(T=1, B=4).build(Chain, 1)
    rare: dict[str, Any] = SMALL | {"learning_starts": 400}
    policy = ps.BootDQN(**rare, replay=ReplaySettings(capacity=400)).build(sampler.spec, 1)
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    drawn, masks = [], []
    for itr in range(60):
        batch = sampler.obtain_samples(itr)[0]
        drawn.append((batch.first[0].copy(), np.array(batch.state)))
        masks.append(batch.info["mask"][0].copy())
        ps.train_one_step(policy, batch)
    opened, heads = (np.array(x) for x in zip(*drawn))
    assert (heads[1:] != heads[:-1]).any() and not (heads[1:] != heads[:-1])[~opened[:-1]].any()
    assert set(heads.ravel()) == {0, 1, 2}
    assert 0.4 < np.mean(masks) < 0.6
    assert policy.replay_schedule is not None
    replay = policy.replay_schedule.replay
    t, b = np.array([3, 7, 20]), np.array([0, 3, 1])
    view: Any = replay.view
    found = view.read(replay.storage, t, b)
    assert found["mask"].tolist() == np.array(masks)[t, b].tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"net": ps.Net(recurrent="lstm")}, "recurrent='lstm'"),
        ({"net": ps.Net(prev_reward=True)}, "prev_reward=True"),
        ({"replay": ReplaySettings(shards=2)}, "shards=2"),
        ({"replay": ReplaySettings(hindsight=4)}, "hindsight=4"),
        ({"heads": 1}, "heads=1"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ps.BootDQN(**settings)


def test_boxes_are_refused() -> None:
    with pytest.raises(ConfigError, match="one discrete action"):
        ps.BootDQN().build(EnvSpec(SPEC.obs, SPEC.obs))


@pytest.mark.parametrize(
    ("env", "obs", "known"), [(TwoStep, [0.0, 1.0], [[0.9, 0.9], [1.0, 1.0]]), (Bandit, [0.0], [[-1, 1]])]
)
def test_values_of_probes_are_exact_for_every_head(env: Any, obs: list[float], known: list[list[float]]) -> None:
    cfg = ps.BootDQN(lr="linear(2e-2, 0)", discount=0.9, heads=3, epsilon=1.0, batch_size=32, replay_ratio=8.0, learning_starts=32,
                     net=ps.Net(hidden=(16,), activation="relu"))  # fmt: skip
    sampler = ps.SerialSampler(T=8, B=4).build(env, seed=2)
    policy = cfg.build(sampler.spec, seed=2, total_steps=3_200)
    sampler.initialize(policy.agent)
    for itr in range(100):
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    found = policy.agent(inputs(*obs))
    assert torch.allclose(found, torch.tensor(known).unsqueeze(-1).expand_as(found).float(), atol=0.03)


@pytest.mark.slow
def test_deep_sea_is_solved_where_a_coin_would_need_a_thousand_episodes() -> None:
    sampler = ps.SerialSampler(T=1, B=8).build(ps.EnvConfig(DeepSea, {"size": 10}), seed=1)
    policy = ps.BootDQN(batch_size=64, replay_ratio=16.0).build(sampler.spec, seed=1)
    sampler.initialize(policy.agent)
    returns: list[float] = []
    for itr in range(750):
        batch, ended = sampler.obtain_samples(itr)
        returns.extend(ended.return_)
        ps.train_one_step(policy, batch)
    assert np.mean(np.array(returns[-50:]) > 0.5) > 0.8
