"""Every member of an agent is there before anything is built on it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from penstock.agents.actor_critic import ActorCritic
from penstock.agents.agent import Agent, check_agent_members, follow
from penstock.agents.networks import Net
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import Tree

SPEC = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
PAGE = "docs/writing-an-algorithm.md"


class Whole(Agent):
    def __init__(self, without: str = "") -> None:
        super().__init__()
        for name, value in {"spec": SPEC, "noise_size": 1}.items():
            if name != without:
                setattr(self, name, value)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        return torch.zeros(len(inputs.first)), {}, None

    def forward(self, inputs: Inputs, state: Tree = None) -> Any:
        return torch.zeros(len(inputs.obs))


class Idle(Whole):
    act = Agent.act


class Mute(Whole):
    forward = Agent.forward


def test_a_whole_agent_passes() -> None:
    check_agent_members(Whole())
    check_agent_members(ActorCritic(SPEC, Net()))


@pytest.mark.parametrize(
    ("agent", "member"),
    [
        (Whole(without="spec"), "spec: EnvSpec"),
        (Whole(without="noise_size"), "noise_size: int"),
        (
            Idle(),
            "act(inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]",
        ),
        (Mute(), "forward(inputs: Inputs, state: Tree = None) -> Any"),
    ],
    ids=["spec", "noise_size", "act", "forward"],
)
def test_a_missing_member_is_named_with_its_signature_and_a_page(agent: Agent, member: str) -> None:
    name = f"{type(agent).__module__}.{type(agent).__qualname__}"
    with pytest.raises(ConfigError, match=re.escape(f"{name} has no {member}, which Agent asks for; see {PAGE}")):
        check_agent_members(agent)


def test_what_is_no_agent_is_refused() -> None:
    for value in (nn.Linear(2, 2), None, Agent):
        with pytest.raises(ConfigError, match=rf"agent_fn returned \w+; expected a penstock.Agent; see {PAGE}"):
            check_agent_members(value)


def test_a_layer_that_a_member_of_the_class_hides_is_named() -> None:
    agent: Any = Whole()
    agent.parts = layer = nn.Linear(2, 2)  # no member has this name
    check_agent_members(agent)
    assert agent.parts is layer
    agent.central = nn.Linear(2, 2)
    assert agent.central is None
    with pytest.raises(ConfigError, match=r"^Whole has a layer 'central' and .* self\.central returns instead"):
        check_agent_members(agent)


def test_an_act_given_to_one_object_counts() -> None:
    agent: Any = Idle()
    agent.act = lambda inputs, state, noise: None
    check_agent_members(agent)


def test_a_target_follows_parameters_by_their_names() -> None:
    online, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    bias = target.bias
    del target.bias
    for layer in (online, target):
        prune.identity(layer, "weight")
    target.bias = bias  # behind the weight, and before it in the other
    assert [name for name, _ in target.named_parameters()] == ["weight_orig", "bias"]
    before = target.get_parameter("weight_orig").clone()
    follow(target, online, 0.25)
    torch.testing.assert_close(
        target.get_parameter("weight_orig"), 0.75 * before + 0.25 * online.get_parameter("weight_orig")
    )


def test_a_target_that_was_not_changed_alike_is_refused_by_the_names() -> None:
    online, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    prune.identity(online, "weight")
    with pytest.raises(ConfigError, match=r"\['weight'\].* lacks \['weight_orig'\].*agent_fn"):
        follow(target, online, 1.0)
