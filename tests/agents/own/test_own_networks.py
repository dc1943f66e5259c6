"""Whole networks of a user's own in the agents of the Q, continuous and discrete soft families."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.agents.example_step import examples
from penstock.core.batch import allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves
from penstock.testing import check_agent

VECTOR = LeafSpec("box", (4,), "float32", -1.0, 1.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(3,), start=1)
BOX = LeafSpec("box", (2,), "float32", -3.0, 1.0)
CHOICES, BOXES = EnvSpec(VECTOR, CHOICE), EnvSpec(VECTOR, BOX)
MASKED = EnvSpec({"x": VECTOR, "action_mask": LeafSpec("multi_binary", (3,), "int8")}, CHOICE)
SMALL: dict[str, Any] = {"batch_size": 8, "replay_ratio": 2, "learning_starts": 16}


class Net(nn.Module):
    def __init__(self, outputs: int, *shape: int, key: str | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, outputs))
        self.shape, self.key = shape, key

    def forward(self, obs: Any) -> Tensor:
        out = self.layers(obs if self.key is None else obs[self.key])
        return out.unflatten(-1, self.shape) if self.shape else out


class Critics(nn.Module):
    """k critics of an action, or without one of every action."""

    def __init__(self, k: int, actions: int = 2, outputs: int = 0) -> None:
        super().__init__()
        inputs = 4 if outputs else 4 + actions
        self.critics = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, 16), nn.Mish(), nn.Linear(16, outputs or 1)) for _ in range(k)
        )
        self.outputs = outputs

    def forward(self, obs: Tensor, action: Tensor | None = None) -> Tensor:
        x = obs if action is None else torch.cat([obs, action], -1)
        found = torch.stack([critic(x) for critic in self.critics])
        return found if self.outputs else found.squeeze(-1)


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 3)

    def initial_state(self, B: int) -> Any:
        return {"h": torch.zeros(B, 8)}

    def forward(self, inputs: ps.Inputs, state: Any) -> tuple[Tensor, Any]:
        h, outputs = state["h"], list[Tensor]()
        for x, first in zip(inputs.obs, inputs.first):
            h = self.cell(x, h * ~first.unsqueeze(-1))
            outputs.append(self.out(h))
        return torch.stack(outputs), {"h": h}


def q(network: Any) -> Any:
    return lambda spec, settings: ps.q_agent(spec, settings, network)


def control(actor: Any = None, critics: Any = None) -> Any:
    return lambda spec, settings: ps.control_agent(spec, settings, actor, critics)


def discrete(actor: Any = None, critics: Any = None) -> Any:
    return lambda spec, settings: ps.discrete_control_agent(spec, settings, actor, critics)


CASES: dict[str, tuple[Any, EnvSpec, str]] = {
    "dqn": (ps.DQN(**SMALL, agent=q(Net(3))), CHOICES, "target"),
    "masked": (ps.DQN(**SMALL, agent=q(Net(3, key="x"))), MASKED, "target"),
    "normalised": (ps.DQN(**SMALL, agent=q(Net(3)), net=ps.Net(normalize_obs=True)), CHOICES, "target"),
    "c51": (ps.DQN(**SMALL, agent=q(Net(33, 3, 11)), distributional="c51", n_atoms=11), CHOICES, "target"),
    "cql-choices": (ps.CQL(**SMALL, agent=lambda s, c: ps.QAgent(s, c.net, network=Net(3))), CHOICES, "target"),
    "sac": (ps.SAC(**SMALL, agent=control(Net(4), Critics(3))), BOXES, "target_critics"),
    "sac-actor": (ps.SAC(**SMALL, agent=control(Net(4))), BOXES, "target_critics"),
    "sac-critics": (ps.SAC(**SMALL, alpha=0.3, agent=control(None, Critics(2))), BOXES, "target_critics"),
    "td3": (ps.TD3(**SMALL, agent=control(Net(2), Critics(2))), BOXES, "target_actor"),
    "ddpg": (ps.DDPG(**SMALL, agent=control(Net(2), Critics(1))), BOXES, "target_actor"),
    "cql": (ps.CQL(**SMALL, agent=control(Net(4), Critics(2))), BOXES, "target_critics"),
    "discrete-sac": (ps.DiscreteSAC(**SMALL, agent=discrete(Net(3), Critics(3, outputs=3))), CHOICES, "target_critics"),
    "r2d1": (
        ps.R2D1(
            agent=q(Memory()), batch_size=2, replay_ratio=2, learning_starts=16, burn_in=2, train_length=4,
            state_interval=4,
        ),
        CHOICES,
        "target",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_own_networks_learn_and_their_targets_follow(case: str) -> None:
    algo, spec, target = CASES[case]
    policy = algo.build(spec, seed=3)
    agent: Any = policy.agent
    if case not in ("td3", "ddpg", "cql", "cql-choices"):  # these explore in ways that are no matter of networks
        check_agent(agent, spec)
    followed = getattr(agent, {"target": "online", "target_critics": "critics", "target_actor": "actor"}[target])
    assert not any(p.requires_grad for p in getattr(agent, target).parameters())
    before = {name: x.clone() for name, x in agent.named_parameters()}
    policy.prepare(BatchSpec(4, 4), *[learned(policy, None)])
    for seed in range(12):
        ps.train_one_step(policy, learned(policy, seed))
    assert policy.updates >= 8
    trained = [
        n for n, p in followed.named_parameters() if not torch.equal(p, before[f"{name_of(agent, followed)}.{n}"])
    ]
    assert len(trained) == len(list(followed.parameters()))
    moved = dict(getattr(agent, target).named_parameters())
    interval = getattr(algo, "target_interval", 1) or 1
    if interval <= policy.updates:
        assert not torch.equal(moved[trained[0]], before[f"{target}.{trained[0]}"])
    agent.update_target(1.0) if target == "target" else agent.update_targets(1.0)
    assert all(torch.equal(moved[name], p) for name, p in followed.named_parameters())


def name_of(agent: Any, module: nn.Module) -> str:
    return next(name for name, m in agent.named_children() if m is module)


def learned(policy: Any, seed: int | None) -> Any:
    """A batch [4, 4] by chance; without a seed the info of a row, as a sampler's `initialize` returns it."""
    info, state = examples(policy.agent, policy.spec)
    if seed is None:
        return info
    rng, batch = np.random.default_rng(seed), allocate_batch(policy.spec, BatchSpec(4, 4), info, state)
    for x in tree_leaves(batch.obs):
        x[...] = 1 if x.dtype == np.int8 else rng.uniform(-1, 1, x.shape)
    low, high = (1, 4) if batch.prev_action.dtype == np.int64 else (-3, 1)
    actions = rng.integers(low, high, batch.prev_action.shape)
    batch.prev_action[...] = actions
    batch.prev_reward[...], batch.valid[...] = rng.normal(size=batch.prev_reward.shape), True
    batch.first[0] = seed == 0
    return batch


WRONG: dict[str, tuple[Any, EnvSpec, str]] = {
    "outputs": (ps.DQN(agent=q(Net(2))), CHOICES, r"network=Net\(...\) returned shape \[6, 2\].*\[6, 3\]"),
    "atoms": (ps.DQN(agent=q(Net(3)), distributional="quantile", n_atoms=5), CHOICES, r"\[6, 3\].*\[6, 3, 5\]"),
    "class": (ps.DQN(agent=q(Net)), CHOICES, r"expected a torch.nn.Module, made already: network=MyNetwork\(spec\)"),
    "memory": (ps.DQN(agent=q(Memory())), CHOICES, "has initial_state, a memory; expected one without for DQN"),
    "no memory": (ps.R2D1(agent=q(Net(3))), CHOICES, r"has no initial_state; .*initial_state\(B\)"),
    "actor": (ps.SAC(agent=control(Net(2))), BOXES, r"actor=Net\(...\) returned shape \[6, 2\].*\[6, 4\]"),
    "point": (ps.TD3(agent=control(Net(4))), BOXES, r"\[6, 4\].*\[6, 2\]"),
    "critics": (ps.SAC(agent=control(None, Critics(2, outputs=1))), BOXES, "critics=Critics"),
    "sde": (ps.SAC(agent=control(Net(4)), net=ps.Net(use_sde=True)), BOXES, "gSDE needs the built-in one"),
    "logits": (ps.DiscreteSAC(agent=discrete(Net(2))), CHOICES, r"actor=Net\(...\).*\[6, 3\]"),
    "values": (ps.DiscreteSAC(agent=discrete(None, Critics(2, outputs=2))), CHOICES, r"\[2, 6, 2\].*\[k, 6, 3\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_networks_of_another_form_are_refused(case: str) -> None:
    algo, spec, said = WRONG[case]
    with pytest.raises(ConfigError, match=said) as error:
        algo.build(spec, 0)
    assert "\n" not in str(error.value)


def test_a_network_put_in_by_hand_is_told_the_way() -> None:
    agent: Any = ps.DQN().build(CHOICES, 0).agent
    agent.online = Net(3)
    with pytest.raises(ConfigError, match=r"networks of your own: ps.q_agent\(spec, settings, network=...\)"):
        agent.update_target(1.0)
