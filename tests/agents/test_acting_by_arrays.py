"""A plain actor of small layers acts by numpy: the same policy, row for row, unless somebody has changed a part of it."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import penstock as ps
from penstock.agents import distributions as dists
from penstock.agents.actor_critic import ActionHead, ActorCritic
from penstock.agents.mlp import SMALL, ArrayMLP
from penstock.agents.networks import Net
from penstock.core.batch import Inputs
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves

VECTOR = LeafSpec("box", (3,), "float32")
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=-1)
BOX = LeafSpec("box", (2,), "float32", low=-3.0, high=(5.0, 1.0))
BITS = LeafSpec("multi_binary", (2, 2), "int8")
CHOICES = LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3), start=(0, 5))
ACTIONS = {"choice": CHOICE, "box": BOX, "bits": BITS, "choices": CHOICES}


def agent_of(action: LeafSpec = CHOICE, obs: Any = VECTOR, **net: Any) -> ActorCritic:
    torch.manual_seed(1)
    settings: Any = {"hidden": (16, 8), **net}
    agent = ActorCritic(EnvSpec(obs, action), Net(**settings))
    if isinstance(agent.head, ActionHead):
        with torch.no_grad():
            agent.head.linear.weight.mul_(100.0)  # a policy that is far from uniform
            agent.head.linear.bias.normal_()
    return agent


def inputs_of(obs: Tensor) -> Inputs:
    rows = len(obs)
    return Inputs(obs, torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows))


def rows_of(agent: ActorCritic, rows: int) -> tuple[Inputs, Tensor]:
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(rows, agent.noise_size, generator=generator).clamp(1e-6, 1.0 - 1e-6)
    return inputs_of(torch.randn(rows, 3, generator=generator)), noise


def takes_arrays(agent: ActorCritic) -> bool:
    return agent.acting() != agent.act


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(16, 8), ()])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_the_policy_is_that_of_forward(action: str, deterministic: bool, hidden: Any, activation: Any) -> None:
    agent = agent_of(ACTIONS[action], hidden=hidden, activation=activation)
    inputs, noise = rows_of(agent, 400)
    dist = agent(inputs).dist
    expected = dist.mode() if deterministic else dist.sample(noise)
    with torch.inference_mode():
        act = agent.acting()
        assert act != agent.act
        chosen, info, state = act(inputs, None, None if deterministic else noise)
    assert chosen.dtype == expected.dtype and chosen.shape == expected.shape and state is None
    same = torch.isclose(chosen, expected, rtol=1e-5, atol=1e-5).flatten(1 if chosen.dim() > 1 else 0)
    assert same.float().mean() > 0.99  # a number at the very edge of a choice may fall on the other side
    np.testing.assert_allclose(info["logp"], dist.log_prob(chosen.clone()).detach(), rtol=1e-4, atol=2e-5)
    assert len(torch.unique(chosen.float(), dim=0)) > 1


@pytest.mark.parametrize("action", ["choice", "box"])
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(action: str) -> None:
    agent = agent_of(ACTIONS[action], hidden=(64, 64))
    inputs, noise = rows_of(agent, 48)

    def bits(rows: int) -> list[bytes]:
        found: list[list[Any]] = []
        with torch.inference_mode():
            act = agent.acting()
            for start in range(0, 48, rows):
                at = slice(start, start + rows)
                chosen, info, _ = act(inputs_of(inputs.obs[at]), None, noise[at])
                found.append([x.numpy() for x in (*tree_leaves(chosen), info["logp"])])
        return [np.concatenate(parts).tobytes() for parts in zip(*found)]

    assert bits(4) == bits(8) == bits(16) == bits(48)


def test_rows_that_are_no_multiple_of_four_act_as_well() -> None:
    agent = agent_of()
    inputs, noise = rows_of(agent, 8)
    with torch.inference_mode():
        act = agent.acting()
        whole, _, _ = act(inputs, None, noise)
        for n in (0, 1, 3, 5):
            chosen, info, _ = act(inputs_of(inputs.obs[:n]), None, noise[:n])
            assert torch.equal(chosen, whole[:n]) and info["logp"].shape == (n,)


def test_each_batch_acts_on_the_parameters_of_its_time() -> None:
    sampler = ps.SerialSampler(T=4, B=4).build("CartPole-v1", 0)
    policy = ps.PPO().build(sampler.spec, 0)
    agent: Any = policy.agent
    sampler.initialize(agent)
    for wanted in (0, 1, 0):
        with torch.no_grad():
            agent.head.linear.bias.copy_(torch.tensor([1.0 - wanted, wanted]) * 100.0)
        batch, _ = sampler.obtain_samples(wanted)
        assert (np.asarray(batch.action)[np.asarray(batch.valid)] == wanted).all()
    sampler.shutdown()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


class Chosen(ActorCritic):
    def act(self, inputs: Inputs, state: Any, noise: Tensor | None) -> Any:
        rows = len(inputs.first)
        return torch.full((rows,), 2), {"logp": torch.zeros(rows)}, None


def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook of a layer": lambda a: a.actor.mlp.layers[0].register_forward_hook(hook),
    "a hook of the MLP": lambda a: a.actor.mlp.register_forward_hook(hook),
    "a hook of the body": lambda a: a.actor.register_forward_hook(hook),
    "a hook of the output": lambda a: a.head.linear.register_forward_hook(hook),
    "a parametrisation": lambda a: parametrize.register_parametrization(a.actor.mlp.layers[0], "weight", Doubled()),
    "pruning": lambda a: prune.l1_unstructured(a.actor.mlp.layers[0], "weight", 0.5),
    "another layer": lambda a: a.actor.mlp.layers.__setitem__(0, nn.Sequential(nn.Linear(3, 16), Doubled())),
    "another forward": lambda a: setattr(a.actor.mlp, "forward", lambda x, out=None: torch.ones(len(x), 8)),
    "float64": lambda a: a.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_acts_as_its_modules_do(change: str) -> None:
    agent = agent_of(BOX)
    CHANGES[change](agent)
    assert not takes_arrays(agent)
    inputs, noise = rows_of(agent, 8)
    if change == "float64":
        inputs = inputs._replace(obs=inputs.obs.double())
    expected = agent(inputs).dist.sample(noise)
    with torch.inference_mode():
        assert torch.allclose(agent.acting()(inputs, None, noise)[0], expected.detach(), atol=1e-5)


def test_an_act_of_ones_own_is_called() -> None:
    own = Chosen(EnvSpec(VECTOR, CHOICE), Net(hidden=(8,)))
    patched: Any = agent_of()
    patched.act = lambda inputs, state, noise: (torch.ones(4), {}, None)
    inputs, noise = rows_of(own, 4)
    with torch.inference_mode():
        assert own.acting()(inputs, None, noise)[0].tolist() == [2] * 4
        assert patched.acting()(inputs, None, noise)[0].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "agent",
    [
        agent_of(hidden=(8,), recurrent="gru"),
        agent_of(normalize_obs=True),
        agent_of(BOX, use_sde=True),
        agent_of(obs={"action_mask": LeafSpec("box", (4,), "int8", 0, 1), "x": VECTOR}),
        agent_of(hidden=(SMALL // 8 + 8, 8)),
    ],
    ids=["recurrent", "normalised", "gSDE", "masked", "large"],
)
def test_other_agents_act_by_torch(agent: ActorCritic) -> None:
    assert not takes_arrays(agent)


def test_no_transform_of_torch_is_bypassed() -> None:
    agent = agent_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes_arrays(agent)
    assert takes_arrays(agent) and takes_arrays(copy.deepcopy(agent))


def test_a_network_that_has_diverged_is_not_reported_by_numpy() -> None:
    agent: Any = agent_of()
    with torch.no_grad():
        agent.actor.mlp.layers[0].weight.fill_(float("inf"))
    inputs, noise = rows_of(agent, 8)
    before = np.geterr()
    with warnings.catch_warnings(), np.errstate(all="raise"), torch.inference_mode():
        warnings.simplefilter("error")
        _, info, _ = agent.acting()(inputs, None, noise)
    assert not torch.isfinite(info["logp"]).all() and np.geterr() == before


def test_an_impossible_choice_is_never_drawn() -> None:
    logits = np.tile(np.array([-1e9, 0.0, -1e9, 0.0, -1e9], np.float32), (1000, 1))
    noise = np.linspace(0.0005, 0.9995, 1000, dtype=np.float32)[:, None]
    index, logp = dists.choices_by_arrays(logits, noise)
    assert np.bincount(index, minlength=5).tolist() == [0, 500, 0, 500, 0]
    np.testing.assert_allclose(logp, np.log(0.5), rtol=1e-6)


def test_an_array_mlp_is_the_sum_written_out() -> None:
    weights = [torch.tensor([[1.0, -2.0]]), torch.tensor([0.5]), torch.tensor([[3.0], [4.0]]), torch.tensor([0.0, 1.0])]
    x = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [-1.0, -1.0]], np.float32)
    assert ArrayMLP("relu", weights)(x).tolist() == [[4.5, 7.0], [0.0, 1.0], [1.5, 3.0], [4.5, 7.0]]
