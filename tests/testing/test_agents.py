"""The suite for agents: every built-in agent passes, and each broken one fails by the promise that it breaks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.agents.actor_critic import ActorCritic, Output
from penstock.agents.agent import Agent
from penstock.agents.continuous import ControlAgent
from penstock.agents.discrete_control import DiscreteControlAgent
from penstock.agents.distributions import Categorical
from penstock.agents.networks import Net
from penstock.agents.noisy import noisy_layers
from penstock.agents.q_agent import QAgent
from penstock.algos.r2d1 import R2D1
from penstock.core.batch import Inputs, SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import Tree, tree_map
from penstock.testing.agents import check_agent
from tests.params import slow_but

VECTOR = LeafSpec("box", (3,), "float32")
IMAGE = LeafSpec("box", (3, 36, 36), "uint8", 0.0, 255.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=-1)
CHOICES = LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3), start=(0, 5))
BITS = LeafSpec("multi_binary", (2, 2), "int8")
BOX = LeafSpec("box", (2,), "float32", low=-3.0, high=(5.0, 1.0))
NESTED = {"z": BOX, "a": (CHOICE, BITS), "m": CHOICES}
SPEC = EnvSpec(VECTOR, CHOICE)
MASKED = EnvSpec({"action_mask": LeafSpec("multi_binary", (4,), "int8"), "x": VECTOR}, CHOICE)
FED = {"prev_action": True, "prev_reward": True}


def noisy(spec: EnvSpec, net: Net) -> QAgent:
    agent = QAgent(spec, net, noisy=True, dueling=True)
    agent.renew_noise(np.random.default_rng(0))
    assert any(layer.noise_in.any() for layer in noisy_layers(agent))
    return agent


def c51(spec: EnvSpec, net: Net) -> QAgent:
    agent = QAgent(spec, net, outputs=5, records_q=True)
    agent.atoms = torch.linspace(-1.0, 1.0, 5)
    return agent


BUILT_IN: dict[str, tuple[Any, EnvSpec, Net]] = {
    "actor-critic": (ActorCritic, SPEC, Net(hidden=(8,))),
    "actor-critic, everything": (
        ActorCritic,
        EnvSpec({"a": VECTOR, "b": (CHOICE, BITS)}, NESTED),
        Net(hidden=(8,), **FED),
    ),
    "actor-critic, shared": (ActorCritic, SPEC, Net(hidden=(8,), shared=True)),
    "actor-critic, squashed": (ActorCritic, EnvSpec(VECTOR, BOX), Net(hidden=(8,), squash=True)),
    "actor-critic, double box": (ActorCritic, EnvSpec(VECTOR, LeafSpec("box", (2,), "float64")), Net(hidden=(8,))),
    "actor-critic, masked": (ActorCritic, MASKED, Net(hidden=(8,))),
    "cnn": (ActorCritic, EnvSpec(IMAGE, CHOICE), Net(hidden=(8,))),
    "impala": (ActorCritic, EnvSpec(LeafSpec("box", (16, 16, 3), "uint8", 0.0, 255.0), CHOICE), Net(cnn="impala")),
    "lstm": (ActorCritic, SPEC, Net(hidden=(8,), recurrent="lstm", recurrent_size=8, **FED)),
    "gru": (ActorCritic, MASKED, Net(hidden=(8,), recurrent="gru", recurrent_size=8, normalize_obs=True)),
    "normalized": (ActorCritic, SPEC, Net(hidden=(8,), normalize_obs=True, normalize_reward=True)),
    "q": (QAgent, MASKED, Net(hidden=(8,), **FED)),
    "dueling": (lambda spec, net: QAgent(spec, net, dueling=True), SPEC, Net(hidden=(8,))),
    "noisy": (noisy, SPEC, Net(hidden=(8,), activation="relu")),
    "c51": (c51, SPEC, Net(hidden=(8,), activation="relu")),
    "recurrent q": (
        lambda spec, net: R2D1(net=net).agent(spec, R2D1(net=net)),
        SPEC,
        Net(hidden=(8,), recurrent="lstm"),
    ),
    "gaussian": (
        lambda spec, net: ControlAgent(spec, net, 0.9, 2, "gaussian", "SAC"),
        EnvSpec(VECTOR, BOX),
        Net(hidden=(8,)),
    ),
    "point": (
        lambda spec, net: ControlAgent(spec, net, 0.9, 1, "point", "TD3", True),
        EnvSpec(VECTOR, BOX),
        Net(**FED),
    ),
    "discrete control": (lambda spec, net: DiscreteControlAgent(spec, net, 0.9, 2), MASKED, Net(hidden=(8,), **FED)),
}


@pytest.mark.parametrize(
    "name",
    slow_but("lstm gru noisy c51 gaussian point q normalized impala", [*BUILT_IN]),
)
def test_every_built_in_agent_keeps_its_promises(name: str) -> None:
    make, spec, net = BUILT_IN[name]
    check_agent(make, spec, net)
    agent = make(spec, net)
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    check_agent(agent, spec, B=8, T=9, seed=5)


def test_a_noisy_network_without_epsilon_explores_by_its_parameters() -> None:
    agent = noisy(SPEC, Net(hidden=(8,), activation="relu"))
    agent.explored.zero_()
    with pytest.raises(AssertionError, match="with noise: other noise led to the same actions"):
        check_agent(agent, SPEC)
    check_agent(agent, SPEC, explores=False)


def test_the_agent_given_is_left_as_it_was() -> None:
    agent = QAgent(SPEC, Net(hidden=(8,)))
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    check_agent(agent, SPEC, B=8)
    assert all(torch.equal(x, before[name]) for name, x in agent.state_dict().items())
    assert agent.epsilon.shape == (1,)


class Good(Agent):
    """A policy over four choices with a memory of the rewards seen; the agents below break one promise each."""

    def __init__(self) -> None:
        super().__init__()
        self.spec, self.noise_size = SPEC, 1
        self.actor, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def initial_state(self, B: int) -> Tree:
        return {"sum": torch.zeros(B)}

    def remembered(self, inputs: Inputs, state: Tree) -> Tensor:
        return state["sum"].masked_fill(inputs.first, 0.0) + inputs.prev_reward.masked_fill(inputs.first, 0.0)

    def heads(self, obs: Tensor, held: Tensor) -> Output:
        features = torch.cat([obs, held.unsqueeze(-1)], -1)
        return Output(Categorical(self.actor(features), -1), self.critic(features).squeeze(-1))

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        held = self.remembered(inputs, state)
        dist = self.heads(inputs.obs, held).dist
        action = dist.mode() if noise is None else dist.sample(noise)
        return action, {"logp": dist.log_prob(action)}, {"sum": held}

    def forward(self, inputs: Inputs, state: Tree = None) -> Output:
        held: list[Tensor] = []
        for t in range(len(inputs.first)):
            state = {"sum": self.remembered(Inputs(*(tree_map(lambda x, t=t: x[t], part) for part in inputs)), state)}
            held.append(state["sum"])
        return self.heads(inputs.obs, torch.stack(held))


class Broken(Good):
    """Breaks one promise by changing the call of the good agent's `act`."""

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        self.calls += 1
        return self.spoil(inputs, state, noise)

    def good(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        return Good.act(self, inputs, state, noise)

    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        raise NotImplementedError


class DrawsFromTorch(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        return self.good(inputs, state, torch.rand(len(inputs.first), 1))


class DrawsFromNumpy(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        np.random.rand()
        return self.good(inputs, state, noise)


class DrawsFromPython(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        random.random()
        return self.good(inputs, state, noise)


class WritesObs(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        result = self.good(inputs, state, noise)
        inputs.obs.mul_(2.0)
        return result


class WritesState(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        state["sum"].copy_(self.remembered(inputs, state))
        action, info, _ = self.good(inputs._replace(prev_reward=inputs.prev_reward * 0), state, noise)
        return action, info, state


class CountsInABuffer(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        self.seen += len(inputs.first)  # pyright: ignore
        return self.good(inputs, state, noise)


class CountsItsCalls(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        return action, {"logp": info["logp"] + (self.calls % 2) * 1e-7}, after


class LooksAtTheOtherRows(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        return self.good(inputs._replace(obs=inputs.obs - inputs.obs.mean(0)), state, noise)


class CaresWhereARowStands(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        info["place"] = torch.arange(len(inputs.first)) % 4
        return action, info, after


class IgnoresNoise(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        return self.good(inputs, state, None)


class ActsInFloats(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        return action.float(), info, after


class CountsActionsFromZero(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        return action + 1, info, after


class ActsInColumns(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        return action.unsqueeze(1), info, after


class ActsInADict(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        return {"choice": action}, info, after


class RemembersOverEnds(Broken):
    def remembered(self, inputs: Inputs, state: Tree) -> Tensor:
        return state["sum"] + inputs.prev_reward.masked_fill(inputs.first, 0.0)

    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        return self.good(inputs, state, noise)


class SeesTheRewardBeforeAnEpisode(RemembersOverEnds):
    def remembered(self, inputs: Inputs, state: Tree) -> Tensor:
        return state["sum"].masked_fill(inputs.first, 0.0) + inputs.prev_reward


class RecordsATuple(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        return action, (info["logp"],), after


class RecordsAMean(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        return action, {"logp": info["logp"].mean()}, after


class RecordsNowAndThen(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        return action, info if self.calls % 2 else {}, after


class ForgetsToReturnItsState(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        return *self.good(inputs, state, noise)[:2], None


class RecordsAnotherLogp(Broken):
    def spoil(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> Any:
        action, info, after = self.good(inputs, state, noise)
        return action, {"logp": info["logp"] - 0.01}, after


class NeedsLessThanItReads(Good):
    def needed(self, inputs: Inputs) -> Inputs:
        return inputs._replace(prev_reward=inputs.prev_reward * 0)


class ValuesOtherwise(Good):
    def values(self, batch: SampleBatch) -> Tensor:
        return super().values(batch) * 1.01


class ValuesTooFew(Good):
    def values(self, batch: SampleBatch) -> Tensor:
        return super().values(batch)[:-1]


class StateOfOneSlot(Good):
    def initial_state(self, B: int) -> Tree:
        return {"sum": torch.zeros(1)}


class StateByTheNumberOfSlots(Good):
    def initial_state(self, B: int) -> Tree:
        return {"sum": torch.full((B,), float(B))}


PROMISES: dict[type[Agent], str] = {
    DrawsFromTorch: "row 0: act drew from a global generator",
    DrawsFromNumpy: "row 0: act drew from a global generator",
    DrawsFromPython: "row 0: act drew from a global generator",
    WritesObs: "act wrote to its inputs, state or noise ([0]",
    WritesState: "act wrote to its inputs, state or noise ([1]['sum']",
    CountsInABuffer: "row 0: act changed seen: got 16.0 at [0], expected 0.0",
    CountsItsCalls: "with noise: the same call returned something else ([1]['logp'])",
    LooksAtTheOtherRows: "with noise: a row depends on the rows beside it",
    CaresWhereARowStands: "with noise: a row depends on the rows beside it ([1]['place']): got 0 at [0], expected 3",
    IgnoresNoise: "with noise: other noise led to the same actions",
    ActsInFloats: "row 0, action: torch.float32 for a discrete leaf of int64",
    CountsActionsFromZero: "action: [3] is no value of LeafSpec(kind='discrete'",
    ActsInColumns: "row 0, action: shape (16, 1); expected (16,)",
    ActsInADict: "row 0: action is PyTreeSpec({'choice': *}",
    RemembersOverEnds: "first: an opening row depends on the state before it",
    SeesTheRewardBeforeAnEpisode: "first: an opening row depends on the action or reward before it",
    RecordsATuple: "expected a dict without 'env'",
    RecordsAMean: "row 0: info['logp'] is (); expected [16, ...]",
    RecordsNowAndThen: "row 1: info {}; row 0 had {'logp':",
    ForgetsToReturnItsState: "row 0: state after act []; expected as before it [(torch.float32, (16,))]",
    RecordsAnotherLogp: "of the action that was recorded with it",
    NeedsLessThanItReads: "forward: log_prob",
    ValuesOtherwise: "of forward",
    ValuesTooFew: "values: shape (6, 16); expected (7, 16)",
    StateOfOneSlot: "initial_state['sum']: shapes ((1,), (1,)) for 16 and 4 slots; expected [B, ...]",
    StateByTheNumberOfSlots: "initial_state['sum']: slot differs from that of fewer slots: got 16.0 at [0], expected 4.0",
}


def test_the_unbroken_agent_passes() -> None:
    check_agent(lambda spec, settings: Good(), SPEC)


@pytest.mark.parametrize("agent", PROMISES, ids=lambda x: x.__name__)
def test_each_broken_promise_is_named(agent: type[Agent]) -> None:
    with pytest.raises(AssertionError) as caught:
        check_agent(agent(), SPEC)  # pyright: ignore[reportCallIssue]
    assert PROMISES[agent] in str(caught.value)


def test_a_member_that_is_missing_is_named_first() -> None:
    with pytest.raises(ConfigError, match=r"has no forward\(inputs: Inputs, state: Tree"):
        check_agent(_without_act(), SPEC)


def _without_act() -> Agent:
    agent = Agent()
    agent.spec, agent.noise_size = SPEC, 1
    return agent


def test_an_agent_that_loses_information_in_the_record_is_found() -> None:
    class Doubles(ActorCritic):
        def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
            action, info, after = super().act(inputs, state, noise)
            return action.double() + 1e-12, info, after

    with pytest.raises(AssertionError, match="is no value of LeafSpec"):
        check_agent(Doubles(EnvSpec(VECTOR, BOX), Net(hidden=(8,))), EnvSpec(VECTOR, BOX))
