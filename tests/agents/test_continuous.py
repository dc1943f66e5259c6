"""The agent of continuous control: how it explores, what its networks are given, and where gradients go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.agents.continuous import ControlAgent
from penstock.agents.distributions import standard_normal
from penstock.agents.networks import Net
from penstock.core.batch import Inputs, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_map

VECTOR = LeafSpec("box", (3,), "float32")
LOW, HIGH = np.array([-3.0, 0.0]), np.array([5.0, 0.5])
ACTION = LeafSpec("box", (2,), "float32", tuple(LOW), tuple(HIGH))
SPEC = EnvSpec(VECTOR, ACTION)
NET = Net(hidden=(8, 8), activation="relu")
each_kind = pytest.mark.parametrize("kind", ["gaussian", "point"])


def made(kind: Any, net: Net = NET, spec: EnvSpec = SPEC, critics: int = 2) -> ControlAgent:
    return ControlAgent(spec, net, 0.9, critics, kind, "SAC", target_actor=kind == "point")


def inputs(n: int, seed: int = 0) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    return Inputs(torch.randn(n, 3, generator=rng), torch.randn(n, 2, generator=rng), torch.randn(n, generator=rng),
                  torch.arange(n) % 3 == 0)  # fmt: skip


def act(agent: ControlAgent, x: Inputs, noise: Tensor | None) -> Tensor:
    with torch.inference_mode():
        action: Any = agent.act(x, None, noise)[0]
    return action


def to_env(unit: Tensor) -> Tensor:
    return torch.from_numpy(LOW + (unit.double().numpy() + 1) / 2 * (HIGH - LOW)).float()


def settings(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(learning_starts=100, **values)


@each_kind
def test_actions_are_uniform_over_the_box_until_learning_starts(kind: str) -> None:
    agent, x, noise = made(kind), inputs(20_000), torch.rand(20_000, 2)
    for steps in (0, 99):
        agent.set_exploration(settings(exploration_noise=0.1), steps)
        torch.testing.assert_close(act(agent, x, noise), to_env(2 * noise - 1))
    seen = act(agent, x, noise)
    for j in range(2):
        counts = torch.histc(seen[:, j], 10, LOW[j], HIGH[j])
        assert float((counts / 2_000 - 1).abs().max()) < 0.1  # four standard deviations
    assert torch.equal(act(agent, x, None), act(made_like(agent, kind), x, None))
    agent.set_exploration(settings(exploration_noise=0.1), 100)
    assert not torch.allclose(act(agent, x, noise), seen)


@each_kind
def test_the_actor_is_asked_only_where_it_has_a_say(kind: str) -> None:
    agent, asked = made(kind), []
    agent.actor.register_forward_hook(lambda *_: asked.append(1))
    act(agent, inputs(3), torch.rand(3, 2))
    assert not asked
    act(agent, inputs(3), None)
    agent.set_exploration(settings(exploration_noise=0.1), 100)
    act(agent, inputs(3), torch.rand(3, 2))
    assert len(asked) == 2


def made_like(agent: ControlAgent, kind: str) -> ControlAgent:
    """The same networks, past its random actions."""
    other = made(kind)
    other.load_state_dict(agent.state_dict())
    other.set_exploration(settings(exploration_noise=0.1), 100)
    return other


def test_a_gaussian_acts_by_mean_and_deviation_in_the_box() -> None:
    agent, x, noise = made("gaussian"), inputs(64), torch.rand(64, 2)
    agent.set_exploration(settings(), 100)
    mean, log_std = agent(x).detach().chunk(2, -1)
    torch.testing.assert_close(act(agent, x, None), to_env(torch.tanh(mean)))
    expected = torch.tanh(mean + log_std.exp() * standard_normal(noise))
    torch.testing.assert_close(act(agent, x, noise), to_env(expected))
    sample = agent.sample(x, noise)
    torch.testing.assert_close(sample.action.detach(), expected)


def test_a_point_acts_with_clipped_noise() -> None:
    agent, x, noise = made("point"), inputs(64), torch.rand(64, 2)
    for spread in (0.0, 0.1, 2.0):
        agent.set_exploration(settings(exploration_noise=spread), 100)
        point = torch.tanh(agent(x).detach())
        torch.testing.assert_close(act(agent, x, None), to_env(point))
        moved = (point + spread * standard_normal(noise)).clamp(-1, 1)
        torch.testing.assert_close(act(agent, x, noise), to_env(moved))
    seen = act(agent, x, noise).double().numpy()
    assert ((seen >= LOW) & (seen <= HIGH)).all() and (seen == HIGH).any()
    torch.testing.assert_close(agent.point(x), torch.tanh(agent(x)))
    torch.testing.assert_close(agent.target_point(x), agent.point(x))


@each_kind
def test_an_actors_gradient_is_that_of_the_least_critic(kind: str) -> None:
    """Also by hand: min_k Q_k(s, a) of the k critics, whose own parameters get none."""
    agent, x = made(kind, critics=3), inputs(40)
    actor, critics = list(agent.actor.parameters()), list(agent.critics.parameters())
    for of in (None, 1):
        action = agent.point(x) if kind == "point" else agent.sample(x, torch.full((40, 2), 0.3)).action
        least = agent.smallest_q(x, action, of)
        whole = agent.q(x, action)[:of].amin(0)
        torch.testing.assert_close(least, whole)
        seen = torch.autograd.grad(least.mean(), [*actor, *critics], retain_graph=True, allow_unused=True)
        slow = torch.autograd.grad(whole.mean(), actor)
        for a, b in zip(seen, slow):
            torch.testing.assert_close(a, b)
        assert all(g is None for g in seen[len(actor) :])


@each_kind
def test_targets_start_as_copies_and_move_by_tau(kind: str) -> None:
    agent, x, action = made(kind), inputs(9), torch.rand(9, 2) * 2 - 1
    assert torch.equal(agent.target_q(x, action), agent.q(x, action))
    pairs: list[tuple[Any, Any]] = [(agent.target_critics, agent.critics)]
    if agent.target_actor is not None:
        pairs.append((agent.target_actor, agent.actor))
    assert (agent.target_actor is None) == (kind == "gaussian")
    before = [[p.clone() for p in target.parameters()] for target, _ in pairs]
    for p in (*agent.critics.parameters(), *agent.actor.parameters()):
        p.data += 1.0
    assert torch.allclose(agent.target_q(x, action), agent.target_q(x, action))
    assert not torch.allclose(agent.target_q(x, action), agent.q(x, action))
    for _ in range(2):
        agent.update_targets(0.25)
    for (target, _), old in zip(pairs, before):
        for p, q in zip(target.parameters(), old):
            torch.testing.assert_close(p, q + 0.4375)
            assert not p.requires_grad
    agent.update_targets(1.0)
    assert torch.equal(agent.target_q(x, action), agent.q(x, action))


def test_critics_see_observation_and_action() -> None:
    agent, x = made("gaussian"), inputs(9)
    low, high = (agent.q(x, torch.full((9, 2), v)) for v in (-1.0, 1.0))
    assert low.shape == (2, 9) and not torch.allclose(low, high) and not torch.allclose(low[0], low[1])
    assert not torch.allclose(agent.q(inputs(9, seed=1), torch.ones(9, 2)), high)


@each_kind
def test_networks_are_fed_what_is_asked(kind: str) -> None:
    """Previous action and reward, null where an episode begins; observations normalised for actor and critics."""
    net = Net(hidden=(8,), prev_action=True, prev_reward=True)
    agent, x, action = made(kind, net), inputs(9), torch.zeros(9, 2)
    assert agent.fed == {"prev_action", "prev_reward", "first"} and made(kind).fed == frozenset()
    changed = Inputs(x.obs, x.prev_action + 1.0, x.prev_reward + 1.0, x.first)  # pyright: ignore
    for fn in (agent, lambda y: agent.q(y, action).t()):
        same = (fn(x) == fn(changed)).all(-1)
        assert torch.equal(same, x.first)
    agent = made(kind, Net(hidden=(8,), normalize_obs=True, normalize_reward=True))
    batch = allocate_batch(SPEC, BatchSpec(4, 1))
    batch.obs[...] = np.arange(5)[:, None, None] * 100.0
    batch.prev_reward[1:, 0] = [1.0, 2.0, 3.0, 4.0]
    batch.valid[...] = True
    agent.observe(tree_map(torch.from_numpy, batch))
    shifted = Inputs((x.obs * np.sqrt(12_500) + 150.0).float(), *x[1:])  # pyright: ignore
    other = made(kind, Net(hidden=(8,)))
    other.load_state_dict(agent.state_dict(), strict=False)
    torch.testing.assert_close(agent(shifted), other(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(agent.q(shifted, action), other.q(x, action), rtol=1e-4, atol=1e-4)
    returns = np.array([1.0, 2.9, 5.61, 9.049])
    assert float(agent.scaled_reward(torch.tensor(2.0))) == pytest.approx(2.0 / returns.std(), rel=1e-4)


def test_an_info_may_stand_for_a_terminal_state() -> None:
    agent = made("point", Net(hidden=(8,), terminal_info="fell"))
    batch = allocate_batch(SPEC, BatchSpec(3, 1), env_info=["fell"])
    batch.info["env"]["fell"][1] = 1.0
    assert agent.terminal(tree_map(torch.from_numpy, batch))[:, 0].tolist() == [False, True, False]


@each_kind
def test_a_stored_agent_acts_the_same(kind: str) -> None:
    agent, other, x, noise = made(kind), made(kind), inputs(9), torch.rand(9, 2)
    agent.set_exploration(settings(exploration_noise=0.3), 100)
    other.load_state_dict(agent.state_dict())
    assert torch.equal(act(agent, x, noise), act(other, x, noise))
    assert torch.equal(agent.target_q(x, noise), other.target_q(x, noise))


@pytest.mark.parametrize(
    ("spec", "net", "words"),
    [
        (SPEC, Net(recurrent="lstm"), ["TD3", "net.recurrent='lstm'", "R2D1"]),
        (EnvSpec(VECTOR, LeafSpec("discrete", (), "int64", sizes=(3,))), NET, ["TD3", "discrete(3)", "DQN"]),
        (EnvSpec(VECTOR, LeafSpec("box", (2,), "float32")), NET, ["TD3", "finite action bounds"]),
    ],
    ids=["memory", "choice", "unbounded"],
)
def test_what_does_not_fit_is_refused(spec: EnvSpec, net: Net, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        ControlAgent(spec, net, 0.9, 2, "point", "TD3", target_actor=True)
    assert all(word in str(error.value) for word in words), str(error.value)
