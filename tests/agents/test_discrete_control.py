"""The agent of discrete SAC: how it explores, what it never does, what its networks are given, and its targets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.agents.discrete_control import DiscreteControlAgent
from penstock.agents.networks import Net
from penstock.core.batch import Inputs, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_map

VECTOR = LeafSpec("box", (3,), "float32")
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=2)
MASK = LeafSpec("multi_binary", (4,), "int8")
SPEC, MASKED = EnvSpec(VECTOR, CHOICE), EnvSpec({"action_mask": MASK, "obs": VECTOR}, CHOICE)
NET = Net(hidden=(8, 8), activation="relu")
START = SimpleNamespace(learning_starts=100)


def made(spec: EnvSpec = SPEC, net: Net = NET, critics: int = 2) -> DiscreteControlAgent:
    agent = DiscreteControlAgent(spec, net, 0.9, critics)
    for p in agent.parameters():
        p.data *= 3.0  # chances far from uniform
    agent.target_critics.load_state_dict(agent.critics.state_dict())
    return agent


def inputs(n: int, mask: Tensor | None = None) -> Inputs:
    rng = torch.Generator().manual_seed(0)
    obs: Any = torch.randn(n, 3, generator=rng)
    obs = obs if mask is None else {"action_mask": mask, "obs": obs}
    return Inputs(obs, torch.full((n,), 2), torch.randn(n, generator=rng), torch.arange(n) % 3 == 0)


def act(agent: DiscreteControlAgent, x: Inputs, noise: Tensor | None) -> Tensor:
    with torch.inference_mode():
        action: Any = agent.act(x, None, noise)[0]
    return action


def some_mask(n: int) -> Tensor:
    mask = torch.rand(n, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[:, 1] = True
    return mask.to(torch.int8)


@pytest.mark.parametrize("masked", [False, True])
def test_actions_are_uniform_over_the_legal_until_learning_starts(masked: bool) -> None:
    n = 20_000
    mask = some_mask(1).expand(n, 4) if masked else None
    agent, x, noise = made(MASKED if masked else SPEC), inputs(n, mask), torch.rand(n, 1)
    legal = [a for a in range(4) if mask is None or mask[0, a]]
    asked: list[int] = []
    agent.actor.register_forward_hook(lambda *_: asked.append(1))
    for steps in (0, 99):
        agent.set_exploration(START, steps)
        counts = torch.bincount(act(agent, x, noise) - 2, minlength=4)
        for a in range(4):
            assert float(counts[a]) / n == pytest.approx(1 / len(legal) if a in legal else 0.0, abs=0.015)
    assert not asked  # nothing depends on it yet
    agent.set_exploration(START, 100)
    assert not torch.equal(torch.bincount(act(agent, x, noise) - 2, minlength=4), counts)  # pyright: ignore
    assert asked


@pytest.mark.parametrize("masked", [False, True])
def test_actions_are_drawn_by_their_chances(masked: bool) -> None:
    """The action is where the uniform falls in the cumulative sum; without noise the likeliest."""
    n = 200
    agent, x = made(MASKED if masked else SPEC), inputs(n, some_mask(n) if masked else None)
    agent.set_exploration(START, 100)
    noise = torch.rand(n, 1)
    p = agent(x).exp().detach()
    torch.testing.assert_close(p.sum(-1), torch.ones(n))
    chosen, best = act(agent, x, noise) - 2, act(agent, x, None) - 2
    assert torch.equal(best, p.argmax(-1))
    for i in range(n):
        below = float(p[i, : int(chosen[i])].sum())
        assert below - 1e-5 <= float(noise[i]) <= below + float(p[i, int(chosen[i])]) + 1e-5
    if masked:
        mask = some_mask(n).bool()
        assert not p[~mask].any() and mask.gather(1, chosen[:, None]).all() and mask.gather(1, best[:, None]).all()
        assert agent.legal_count(x).tolist() == mask.sum(-1).tolist()
    else:
        assert agent.legal_count(x).tolist() == [4.0]


def test_a_mask_of_one_leaves_no_choice() -> None:
    mask = torch.eye(4, dtype=torch.int8)
    agent, x = made(MASKED), inputs(4, mask)
    for u in (1e-7, 0.5, 1 - 1e-7):
        assert act(agent, x, torch.full((4, 1), u)).tolist() == [2, 3, 4, 5]
    logp = agent(x)
    assert torch.isfinite(logp).all() and (logp.exp() * logp).sum().item() == 0.0


def test_masks_are_no_input_of_the_networks() -> None:
    agent = made(MASKED)
    q = [agent.q(inputs(5, torch.full((5, 4), value, dtype=torch.int8))) for value in (0, 1)]
    assert torch.equal(*q) and q[0].shape == (2, 5, 4)


def test_critics_are_networks_of_their_own() -> None:
    agent, x = made(critics=3), inputs(9)
    q = agent.q(x)
    assert q.shape == (3, 9, 4) and not torch.allclose(q[0], q[1])
    gradients = torch.autograd.grad(q[1].sum(), list(agent.critics.parameters()))
    assert all(not g[0].any() and not g[2].any() and g[1].any() for g in gradients)


def test_targets_start_as_copies_and_move_by_tau() -> None:
    agent, x = DiscreteControlAgent(SPEC, NET, 0.9, 2), inputs(9)
    assert torch.equal(agent.target_q(x), agent.q(x))
    before = [p.clone() for p in agent.target_critics.parameters()]
    for p in agent.critics.parameters():
        p.data += 1.0
    for _ in range(2):
        agent.update_targets(0.25)
    for now, old in zip(agent.target_critics.parameters(), before):
        torch.testing.assert_close(now, old + 0.4375)
        assert not now.requires_grad
    agent.update_targets(1.0)
    assert torch.equal(agent.target_q(x), agent.q(x))


def test_networks_are_fed_what_is_asked() -> None:
    net = Net(hidden=(8,), prev_action=True, prev_reward=True)
    agent, x = made(net=net), inputs(9)
    assert agent.fed == {"prev_action", "prev_reward", "first"} and made().fed == frozenset()
    changed = Inputs(x.obs, x.prev_action + 1, x.prev_reward + 1.0, x.first)  # pyright: ignore
    for fn in (agent, lambda y: agent.q(y)[0]):
        assert torch.equal((fn(x) == fn(changed)).all(-1), x.first)


def test_observations_are_normalised_and_masks_are_not() -> None:
    agent = made(MASKED, Net(hidden=(8,), normalize_obs=True, normalize_reward=True))
    batch = allocate_batch(MASKED, BatchSpec(4, 2))
    batch.obs["obs"][...] = np.arange(5)[:, None, None] * 10.0
    batch.valid[...] = True
    batch.prev_reward[1:] = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]
    agent.observe(tree_map(torch.from_numpy, batch))
    shown: Any = agent.prepared({"obs": torch.tensor([[15.0, 15.0, 15.0]]), "action_mask": torch.ones(1, 4)})
    assert shown["obs"].abs().max() < 1e-6 and set(shown) == {"obs"}
    assert float(agent.scaled_reward(torch.tensor(1.0))) == pytest.approx(1 / np.std([1.0, 2.9, 5.61, 9.049]), rel=1e-4)


def test_an_info_may_stand_for_a_terminal_state() -> None:
    agent = made(net=Net(hidden=(8,), terminal_info="fell"))
    batch = allocate_batch(SPEC, BatchSpec(3, 1), env_info=["fell"])
    batch.info["env"]["fell"][1] = 1.0
    assert agent.terminal(tree_map(torch.from_numpy, batch))[:, 0].tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("spec", "net", "words"),
    [
        (SPEC, Net(recurrent="lstm"), ["DiscreteSAC", "net.recurrent='lstm'", "R2D1"]),
        (EnvSpec(VECTOR, VECTOR), NET, ["one discrete action", "box[3]", "SAC"]),
        (EnvSpec(VECTOR, (CHOICE, CHOICE)), NET, ["one discrete action", "PPO"]),
        (
            EnvSpec({"action_mask": LeafSpec("multi_binary", (5,), "int8"), "obs": VECTOR}, CHOICE),
            NET,
            ["5 elements", "4 discrete choices"],
        ),
    ],
    ids=["memory", "box", "two choices", "mask"],
)
def test_what_does_not_fit_is_refused(spec: EnvSpec, net: Net, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        DiscreteControlAgent(spec, net, 0.9, 2)
    assert all(word in str(error.value) for word in words), str(error.value)
