"""Settings of networks: activations and starts by name, widths of actor and critic, the critic's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.agents.critics import StackedMLP, least
from penstock.agents.mlp import MLP, InitName
from penstock.agents.noisy import NoisyMLP
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.ops.activations import ActivationName, activate, activations
from penstock.testing import check_agent

VECTOR = LeafSpec("box", (3,), "float32", -1.0, 1.0)
IMAGE = LeafSpec("box", (12, 12, 1), "uint8", 0.0, 255.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=2)
BOX = LeafSpec("box", (2,), "float32", -1.0, 1.0)
CHOICES, BOXES = EnvSpec(VECTOR, CHOICE), EnvSpec(VECTOR, BOX)
FUNCTIONS: dict[str, Any] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
    "elu": nn.functional.elu,
    "leaky_relu": nn.functional.leaky_relu,
    "mish": nn.functional.mish,
    "selu": nn.functional.selu,
    "softplus": nn.functional.softplus,
    "sigmoid": torch.sigmoid,
}


class Twice(nn.Module):
    """An activation with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.slope)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_family_computes_with_the_activation(name: Any) -> None:
    assert set(FUNCTIONS) == set(get_args(ActivationName))
    function, x = FUNCTIONS[name], torch.randn(6, 3)
    mlp, out = MLP(3, (8, 5), name), nn.Linear(5, 2)
    by_hand = out(function(mlp.layers[1](function(mlp.layers[0](x)))))
    torch.testing.assert_close(mlp(x, out), by_hand)
    noisy = NoisyMLP(3, (8, 5), activation=name)
    by_hand = function(noisy.layers[1](function(noisy.layers[0](x))))
    torch.testing.assert_close(noisy(x), by_hand)
    stack = StackedMLP(2, 3, (8, 5), 2, activation=name)
    w = stack.weights()
    by_hand = function(function(x @ w[0] + w[1]) @ w[2] + w[3]) @ w[4] + w[5]
    torch.testing.assert_close(stack(x), by_hand)
    gradients = torch.autograd.grad(stack(x).square().sum(), w)
    for a, b in zip(gradients, torch.autograd.grad(by_hand.square().sum(), w)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu", Twice])
def test_the_least_critic_passes_its_slope_to_the_action_alone(name: Any) -> None:
    stack = StackedMLP(3, 5, (8,), activation=name)
    features, action = torch.randn(7, 3, requires_grad=True), torch.randn(7, 2, requires_grad=True)
    found = least(stack, features, action)
    by_hand = stack(torch.cat([features, action], -1)).squeeze(-1).amin(0)
    torch.testing.assert_close(found, by_hand)
    (a,) = torch.autograd.grad(found.sum(), action, retain_graph=True)
    torch.testing.assert_close(a, torch.autograd.grad(by_hand.sum(), action)[0])
    assert torch.autograd.grad(found.sum(), features, allow_unused=True) == (None,)


@pytest.mark.parametrize("algo", [ps.PPO(), ps.DQN(noisy=True), ps.DQN(dueling=True), ps.DiscreteSAC(), ps.R2D1()])
@pytest.mark.parametrize("activation", ["gelu", Twice, "tests.agents.test_net_settings:Twice", nn.PReLU])
def test_an_activation_may_be_a_class_and_have_parameters(algo: Any, activation: Any) -> None:
    algo = replace(algo, net=replace(algo.net, activation=activation))
    agent = algo.build(CHOICES, 0).agent
    kind = {"gelu": "GELU", nn.PReLU: "PReLU"}.get(activation, "Twice")
    named = [m for m in agent.modules() if type(m).__name__ == kind]
    assert len(named) >= 2
    check_agent(agent, CHOICES, explores=not getattr(algo, "noisy", False))


@pytest.mark.parametrize("name", ["tanh", "relu", "leaky_relu", "elu", "selu", "silu", "sigmoid"])
def test_bits_of_activations_do_not_depend_on_the_numbers_beside_them(name: Any) -> None:
    modules = activations(name, 1)
    function: Any = modules[0] if modules is not None else lambda x: activate(x, name)
    x = torch.randn(4001) * 8
    for whole in (x, x.double()):
        for size in (1, 3, 13, 50):
            parts = [function(whole[i : i + size]) for i in range(0, len(whole), size)]
            assert torch.equal(torch.cat(parts), function(whole))


@pytest.mark.parametrize("name", ["elu", "selu", "silu", "sigmoid"])
def test_activations_made_of_exp_are_torchs_everywhere(name: Any) -> None:
    """Also gradients, at numbers where e^x overflows or is 1, and beside torch's own, which graphs contain."""
    modules = activations(name, 1)
    function: Any = modules[0] if modules is not None else lambda x: activate(x, name)
    x = torch.cat([torch.randn(999) * 20, torch.tensor([0.0, -0.0, 1e-30, -1e-30, -104.5, 88.9, -3e38, 3e38])])
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    expected = FUNCTIONS[name](theirs)
    torch.testing.assert_close(function(mine).double(), expected, rtol=1e-6, atol=2e-7)
    for tensor, y in ((mine, function(mine)), (theirs, expected)):
        (tensor.grad,) = torch.autograd.grad(y.sum(), tensor)
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)  # pyright: ignore
    assert torch.isnan(function(torch.tensor([torch.nan]))).all()
    torch.testing.assert_close(torch.jit.trace(function, x)(x), FUNCTIONS[name](x), rtol=0, atol=0)  # pyright: ignore


def test_wrong_activations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"net.activation='gelo'.*gelu"):
        ps.Net(activation="gelo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"has no 'Twise'.*Twice"):
        ps.Net(activation="tests.agents.test_net_settings:Twise")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"raised TypeError: .*'input'; expected a class of torch.nn.Module"):
        MLP(2, (3,), nn.functional.elu)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"made Tensor; expected a class of torch.nn.Module"):
        ps.PPO(net=ps.Net(activation=lambda: torch.zeros(1))).build(CHOICES)  # pyright: ignore[reportArgumentType]


def deviation(weight: Tensor) -> float:
    return float(weight.detach().std())


@pytest.mark.parametrize("init", get_args(InitName))
def test_layers_start_as_their_name_says(init: Any) -> None:
    torch.manual_seed(0)
    mlp, stack = MLP(64, (64, 64), init=init), StackedMLP(2, 64, (64, 64), init=init)
    n = 64
    expected = {
        "orthogonal": (2 / n) ** 0.5,
        "xavier_uniform": (1 / n) ** 0.5,
        "xavier_normal": (1 / n) ** 0.5,
        "kaiming_uniform": (2 / n) ** 0.5,
        "kaiming_normal": (2 / n) ** 0.5,
        "torch": (1 / 3 / n) ** 0.5,
    }
    layers: Any = mlp.layers
    for layer in layers:
        assert deviation(layer.weight) == pytest.approx(expected.get(init, (2 / n) ** 0.5), rel=0.1)
        assert bool((layer.bias == 0).all()) == (init != "torch")
    weights = stack.weights()
    for i in (0, 2):
        for network in range(2):
            assert deviation(weights[i][network]) == pytest.approx(expected.get(init, (1 / 3 / n) ** 0.5), rel=0.1)
            assert bool((weights[i + 1] == 0).all()) == (init not in ("torch", "auto"))
        assert not torch.equal(weights[i][0], weights[i][1])
    assert deviation(weights[4]) == pytest.approx((1 / 3 / n) ** 0.5, rel=0.2)  # the outputs
    square = weights[0][0].detach() @ weights[0][0].detach().t()
    assert torch.allclose(square, 2 * torch.eye(n), atol=1e-4) == (init == "orthogonal")


def test_images_start_by_name_too_and_outputs_stay_as_they_are() -> None:
    spec = EnvSpec(IMAGE, CHOICE)
    torch.manual_seed(0)
    agents: dict[str, Any] = {x: ps.PPO(net=ps.Net(init=x)).build(spec, 0).agent for x in ("auto", "torch")}
    first, second = (agents[x].actor.encoder.images["0"].convs[0] for x in agents)
    assert bool((first.bias == 0).all()) and not bool((second.bias == 0).all())
    assert deviation(agents["torch"].head.linear.weight) < 0.01


def test_actor_and_critic_have_widths_of_their_own() -> None:
    net = ps.Net(actor_hidden=(8,), critic_hidden=(16, 16))
    agent: Any = ps.PPO(net=net).build(CHOICES, 0).agent
    assert [x.out_features for x in agent.actor.mlp.layers] == [8]
    assert [x.out_features for x in agent.critic.mlp.layers] == [16, 16]
    assert agent.value_head.in_features == 16 and agent.head.linear.in_features == 8
    check_agent(agent, CHOICES)
    net = replace(net, activation="relu")
    for algo in (ps.SAC(net=net), ps.TD3(net=net), ps.CQL(net=net)):
        control: Any = algo.build(BOXES, 0).agent
        assert [x.out_features for x in control.actor.mlp.layers] == [8]
        assert [w.shape[2] for w in control.critics.stack.weights()[::2]] == [16, 16, 1]
    choice: Any = ps.DiscreteSAC(net=replace(net, actor_hidden=None)).build(CHOICES, 0).agent
    assert [x.out_features for x in choice.actor.mlp.layers] == [64, 64]
    assert [w.shape[2] for w in choice.critics.stack.weights()[::2]] == [16, 16, 4]
    team = EnvSpec({"obs": VECTOR, "state": BOX}, CHOICE, 2)
    central: Any = ps.MAPPO(net=net).build(team, 0).agent
    assert (central.actor.size, central.critic.size) == (8, 16)


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_behind_a_shared_body_actor_and_critic_have_layers_of_their_own(recurrent: Any) -> None:
    net = ps.Net(
        hidden=(12,), shared=True, actor_hidden=(8,), critic_hidden=(16, 16), recurrent=recurrent, recurrent_size=6
    )
    agent: Any = ps.PPO(net=net, normalize_value=False).build(CHOICES, 0).agent
    width = 6 if recurrent == "gru" else 12
    assert agent.actor.size == 12 and agent.critic is None
    assert [x.in_features for x in agent.actor_tail.layers] == [width]
    assert [x.in_features for x in agent.critic_tail.layers] == [width, 16]
    assert agent.head.linear.in_features == 8 and agent.value_head.in_features == 16
    check_agent(agent, CHOICES)
    obs = torch.randn(5, 3)
    if recurrent == "none":
        inputs = Inputs(obs, None, torch.zeros(5), torch.zeros(5, dtype=torch.bool))
        found, features = agent(inputs), agent.actor(inputs, obs)
        torch.testing.assert_close(found.value, agent.value_head(agent.critic_tail(features)).squeeze(-1))
        torch.testing.assert_close(found.dist.logp, agent.head.linear(agent.actor_tail(features)).log_softmax(-1))


@pytest.mark.parametrize("algo", [ps.DQN(), ps.R2D1()])
@pytest.mark.parametrize("given", [{"actor_hidden": (8,)}, {"critic_hidden": (8,)}, {"critic_recurrent": "own"}])
def test_agents_with_one_network_refuse_parts_of_two(algo: Any, given: Any) -> None:
    if isinstance(algo, ps.DQN) and "critic_recurrent" in given:
        return
    with pytest.raises(ConfigError, match=f"net.{next(iter(given))}=.* with Q-learning, which has one network"):
        replace(algo, net=replace(algo.net, **given)).build(CHOICES, 0)


@pytest.mark.parametrize("shared", [None, True, False])
@pytest.mark.parametrize("kind", ["own", "none"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_critic_has_a_memory_of_its_own_or_none(shared: Any, kind: Any, cell: Any) -> None:
    net = ps.Net(hidden=(8,), recurrent=cell, recurrent_size=6, critic_recurrent=kind, shared=shared, prev_reward=True)
    agent: Any = ps.PPO(net=net, normalize_value=False).build(CHOICES, 0).agent
    check_agent(agent, CHOICES)
    assert (agent.critic is None) == (shared is True) and (agent.critic_memory is not None) == (kind == "own")
    T, B = 5, 4
    obs, first = torch.randn(T, B, 3), torch.rand(T, B) < 0.3
    inputs = Inputs(obs, None, torch.randn(T, B), first)
    state = tree_map(torch.randn_like, agent.initial_state(B))
    found = agent(inputs, state)
    flat = inputs.flat()
    features, seen = agent.actor(flat, flat.obs), (agent.actor if shared else agent.critic)(flat, flat.obs)
    own = kind == "own"
    out, after = agent.memory(features.reshape(T, B, -1), first, state["actor"] if own else state)
    torch.testing.assert_close(found.dist.logp, agent.head.linear(out).log_softmax(-1))
    seen = seen.reshape(T, B, -1)
    if own:
        seen, valued = agent.critic_memory(seen, first, state["critic"])
        after = {"actor": after, "critic": valued}
    with torch.no_grad():
        for t in range(T):
            step = Inputs(obs[t], None, inputs.prev_reward[t], first[t])
            _, _, state = agent.act(step, state, torch.rand(B, 1))
    for a, b in zip(tree_leaves(state), tree_leaves(after), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(found.value, agent.value_head(seen).squeeze(-1))
    own = torch.autograd.grad(found.value.sum(), list(agent.memory.parameters()), allow_unused=True)
    assert all(g is None for g in own)  # the actor's memory is no part of the value


def test_settings_of_a_memory_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"net.critic_recurrent='own' with net.recurrent='none'"):
        ps.Net(critic_recurrent="own")
    with pytest.raises(ConfigError, match=r"net.shared=False.*net.critic_recurrent='own'"):
        ps.PPO(net=ps.Net(recurrent="gru", shared=False)).build(CHOICES, 0)
