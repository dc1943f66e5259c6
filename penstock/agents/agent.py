"""The Agent: acts on one step for samplers, answers over a batch for algorithms; how its targets follow; its export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from penstock import ops
from penstock.agents.networks import Net
from penstock.agents.preparation import Preparation
from penstock.core.batch import Inputs, SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.noise import NOTHING_HELD
from penstock.core.protocols import require_members, required
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_structure, tree_unflatten
from penstock.native.acting import Acting

_PAGE = "docs/writing-an-algorithm.md"


class Agent(nn.Module):
    """A policy with its networks. A subclass sets `spec` and `noise_size` and defines `act` and `forward`.

    Acting is a pure function of inputs, state and noise: no modes, no generators of its own. The agent itself takes
    recurrent state, previous action and reward for null wherever `first`. `penstock.testing.check_agent` tests this.
    """

    spec: EnvSpec
    noise_size: int
    """Uniform numbers that `act` uses for each slot and step."""
    env_ranks = False
    """True: the last of the `noise_size` numbers is the slot's number instead, over all workers."""
    held_noise = NOTHING_HELD
    """The leading part of the `noise_size` numbers that is held for several steps; by default none."""
    evaluates_with_noise = False
    """True: deterministic evaluations also act with noise, by negative slot numbers (`env_ranks`)."""
    is_noisy = True
    """False: `renew_noise`, though defined, has nothing to draw and is not called."""
    fed = frozenset(("prev_action", "prev_reward", "first"))
    """Inputs that the networks read besides the observation: a replay draws no others."""
    unseen: frozenset[str] = frozenset()
    """Keys of a Dict observation that `act` does not read and `predict` does not need, such as the state of a team."""
    preparation = Preparation(EnvSpec((), ()), Net())
    """Mask, normaliser and reward scaling in front of the networks; by default none of these."""
    central: Preparation | None = None
    """That of a critic which reads other keys of the observation than the actor; None: `preparation`."""
    outer_parts: tuple[str, ...] = ()
    """Names of the submodules that stand around the algorithm, such as `rnd`; acting needs none of them."""

    def initial_state(self, B: int) -> Tree:
        """Recurrent state [B, ...] before an episode; None without memory."""
        return None

    @required
    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        """One step for B slots, called without gradients.

        Args:
            inputs: [B, ...] tensors, not to be written to. state: [B, ...] as the step before returned it.
            noise: [B, noise_size] float32 in (0, 1), or None for the deterministic action.

        Returns:
            action [B, *A] in the units of the environment, info [B, ...] to record, and the new state.
        """
        raise NotImplementedError(f"{type(self).__name__} must define act(inputs, state, noise)")

    def by_kernel(self, noisy: bool) -> Acting | None:
        """What `act` does, as one call of the native kernel, with or without noise; None where `act` itself must run.

        Asked for each batch. An agent that has it must be of exactly the class that defined it, without memory.
        """
        return None

    @required
    def forward(self, inputs: Inputs, state: Tree = None) -> Any:
        """Outputs that the loss reads, for [N, ...] rows, or for [T, B, ...] rows from `state` if recurrent."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(inputs, state)")

    def values(self, batch: SampleBatch) -> Tensor:
        """V(obs) [T+1, B] without gradient, in one forward (recurrent: one unroll from the batch's state)."""
        with torch.no_grad():
            if batch.state is not None:
                return output_of(self, self(batch.inputs, batch.state), "value")
            return output_of(self, self(batch.inputs.flat(), None), "value").reshape(batch.first.shape)

    def needed(self, inputs: Inputs) -> Inputs:
        """The inputs that `forward` reads, the others None, so that minibatches need not carry them."""
        return inputs

    def prepared(self, obs: Tree) -> Tree:
        """The observation as the networks see it: without its mask, normalised."""
        return self.preparation.prepared(obs) if self.preparation.active else obs

    def for_critic(self, inputs: Inputs) -> Tree:
        """The observation as a critic with networks of its own sees it."""
        return self.prepared(inputs.obs) if self.central is None else self.central.prepared(inputs.obs)

    def mask(self, obs: Tree) -> Tensor | None:
        """[N, choices] bool, True for legal choices; None if nothing is masked."""
        return self.preparation.mask(obs) if self.preparation.active else None

    def unless_stuck(self, inputs: Inputs, x: Tensor) -> Tensor:
        """Values or discounts [...] of inputs [...]; 0 where the mask allows nothing, as no action can follow.

        Masks may be empty where no action is asked for: at the observation at which an episode was truncated.
        """
        mask = self.mask(inputs.obs)
        return x if mask is None else x.masked_fill(~mask.reshape(*x.shape, -1).any(-1), 0.0)

    def observe(self, batch: SampleBatch) -> None:
        """Updates running statistics; called after training on a batch (with replay: before)."""
        if self.preparation.active:
            self.preparation.observe(batch)
        if self.central is not None:
            self.central.observe(batch)

    def scaled_reward(self, reward: Tensor) -> Tensor:
        """The reward that targets are made of; the record keeps the environment's own."""
        return self.preparation.scaled(reward) if self.preparation.active else reward

    def terminal(self, batch: SampleBatch) -> Tensor:
        """[T, B] bool: rows after which targets expect nothing more; the record keeps the environment's own."""
        return batch.terminal(self.preparation.net.terminal_info)

    def exported(self) -> Agent:
        """The agent whose deterministic acting an export holds; another one where this one's cannot be traced."""
        return self

    def norm_groups(self) -> Mapping[str, Sequence[nn.Module]]:
        """Norm groups: modules, by name, each with gradients scaled down to `max_grad_norm` by their own norm.

        For networks that share nothing, such as separate actor and critic: with one norm the larger gradient would
        scale the other to almost 0. All other parameters have one norm together.
        """
        return {}

    def set_slots(self, B: int) -> None:
        """Takes the number of slots; called by the sampler before anything is acted on."""

    def set_exploration(self, settings: Any, env_steps: int) -> None:
        """Sets exploration; called between batches with the algorithm's present settings. It must lie in buffers."""

    def renew_noise(self, rng: np.random.Generator) -> None:
        """Draws the noise of noisy networks; called before each gradient step from replay."""

    @property
    def needs_statistics(self) -> bool:
        """True if running statistics must be set by a batch before anything is learned."""
        return False


def output_of(agent: Agent, found: Any, name: str) -> Any:
    """`dist` or `value` of what `forward` returned. Raises ConfigError if it has none."""
    if not hasattr(found, name):
        raise ConfigError(
            f"forward() of {type(agent).__name__} returned {type(found).__name__} without {name!r}; expected "
            "penstock.Output(dist, value), or another NamedTuple with both"
        )
    return getattr(found, name)


def logp_and_values(agent: Agent, batch: SampleBatch) -> tuple[Tensor, Tensor]:
    """log pi(action | obs) [T, B] in nats and V(obs) [T+1, B] of a whole batch, without gradient, in one forward."""
    T, B = batch.valid.shape
    action = tree_map(lambda x: torch.cat((x[1:], x[-1:])), batch.prev_action)  # row T has none: its own is left out
    with torch.no_grad():
        if batch.state is not None:
            found = agent(batch.inputs, batch.state)
        else:
            found, action = agent(batch.inputs.flat(), None), tree_map(lambda x: x.flatten(0, 1), action)
        logp, value = output_of(agent, found, "dist").log_prob(action), output_of(agent, found, "value")
        return logp.reshape(T + 1, B)[:-1], value.reshape(T + 1, B)


def check_agent_members(agent: object) -> None:
    """Raises ConfigError that names the member of `Agent` that an object lacks, or a layer that one hides."""
    if not isinstance(agent, Agent):
        raise ConfigError(f"agent_fn returned {type(agent).__name__}; expected a penstock.Agent; see {_PAGE}")
    require_members(agent, Agent, _PAGE)
    if hidden := [name for name, _ in agent.named_children() if hasattr(type(agent), name)]:
        raise ConfigError(
            f"{type(agent).__name__} has a layer {hidden[0]!r} and an attribute of its class by that name, which "
            f"self.{hidden[0]} returns instead; give the layer another name"
        )


Agents: TypeAlias = Agent | Mapping[str, Agent]
"""An agent, or one for each policy id."""


def follow(target: nn.Module, online: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau online, parameter by parameter of one name.

    Raises:
        ConfigError: one of them was pruned, parametrised or given other layers, and the other was not.
    """
    own, followed = dict(target.named_parameters()), dict(online.named_parameters())
    if own.keys() != followed.keys():
        raise ConfigError(
            f"a target network has parameters {sorted(own.keys() - followed.keys())[:3]} that its online network "
            f"lacks, and lacks {sorted(followed.keys() - own.keys())[:3]}; expected the same names: do to the target "
            "what you do to the online network (pruning, parametrisations, other layers), best in agent_fn; networks "
            "of your own: ps.q_agent(spec, settings, network=...), ps.control_agent(spec, settings, actor=...)"
        )
    ops.polyak_(list(own.values()), [followed[name] for name in own], tau)


class ExportableAgent(nn.Module):
    """[N, ...] observations -> [N, *A] deterministic actions, clipped to their bounds as `Policy.predict` clips them.

    With memory it returns the action and the new state; `agent.initial_state(N)` is the state before an episode. The
    normaliser of observations is inside. An `Agent`'s own `forward` is for losses and may return a distribution.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent
        self._structure = tree_structure(agent.spec.action)
        leaves = tree_leaves(agent.spec.action)
        self._clips = [x.kind == "box" and any(np.isfinite(b).any() for b in x.limits()) for x in leaves]
        for i, leaf in enumerate(leaves):
            if self._clips[i]:
                for name in ("low", "high"):
                    exact = torch.float64 if leaf.dtype == "float64" else torch.float32
                    bound = torch.tensor(leaf.bound(name), dtype=exact)
                    self.register_buffer(f"{name}_{i}", bound, persistent=False)

    def forward(
        self,
        obs: Tree,
        state: Tree = None,
        first: Tensor | None = None,
        prev_action: Tree = None,
        prev_reward: Tensor | None = None,
    ) -> Tree:
        """The action [N, *A], or (action, state) with memory.

        Args:
            state: as the step before returned it. first: [N] bool, None where no observation opens an episode.
            prev_action, prev_reward: [N, ...], only for agents that are fed them.
        """
        if first is None and "first" in self.agent.fed:
            one = tree_leaves(obs)[0]
            first = torch.zeros(one.shape[:1], dtype=torch.bool, device=one.device)
        inputs = Inputs(obs, prev_action, prev_reward, first)  # pyright: ignore[reportArgumentType]
        action, _, state = self.agent.act(inputs, state, None)
        action = self.bounded(action)
        return action if state is None else (action, state)

    def bounded(self, action: Tree) -> Tree:
        """The action [N, *A] with boxes clipped to their bounds."""
        clipped = [
            x.clamp(getattr(self, f"low_{i}"), getattr(self, f"high_{i}")) if self._clips[i] else x
            for i, x in enumerate(tree_leaves(action))
        ]
        return tree_unflatten(self._structure, clipped)
