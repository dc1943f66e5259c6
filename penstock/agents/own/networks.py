"""Whole networks of a user's own inside the agents of the Q, continuous and discrete soft families.

The agent keeps what an algorithm needs around them: exploration, masks, normalisers, target networks as copies.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.agents.own.probe import ROWS, check_module
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map


class RecurrentQNetwork(Protocol):
    """A module with memory for R2D1: Q [T, B, A] of rows [T, B, ...], and the state after them."""

    def initial_state(self, B: int) -> Tree: ...
    def __call__(self, inputs: Inputs, state: Tree) -> tuple[Tensor, Tree]: ...


class OwnNetwork(nn.Module):
    """A network of observations in place of a built-in one, which is given all inputs."""

    out = None

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Inputs, obs: Tree) -> Tensor:
        return self.network(obs)


class OwnQNetwork(nn.Module):
    """A Q network in place of the built-in one: with memory if it has an `initial_state`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @property
    def memory(self) -> RecurrentQNetwork | None:
        """The network where it has a memory."""
        return self.network if hasattr(self.network, "initial_state") else None  # pyright: ignore[reportReturnType]

    def forward(self, inputs: Inputs, obs: Tree, state: Tree = None) -> tuple[Tensor, Tree]:
        if self.memory is None:
            return self.network(obs), None
        return self.network(inputs._replace(obs=obs), state)


class OwnCritics(nn.Module):
    """Critics in place of the built-in ones."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Inputs, obs: Tree, action: Tensor) -> Tensor:
        return self.network(obs, action)

    def smallest(self, inputs: Inputs, obs: Tree, action: Tensor, of: int | None) -> Tensor:
        """[N] the least Q of the first `of` critics (None: all)."""
        return self.network(obs, action)[:of].amin(0)

    def each(self, inputs: Inputs, obs: Tree, action: Tensor) -> Tensor:
        """[k, N, m] of actions [N, m, size]."""
        m = action.shape[1]
        rows = tree_map(lambda x: x.repeat_interleave(m, 0), obs)
        return self.network(rows, action.flatten(0, 1)).unflatten(1, (-1, m))


def own_network(part: str, network: nn.Module, obs: Tree, shape: tuple[int | str, ...], axis: int = 0) -> OwnNetwork:
    """The network, once it has answered observations as it must; see `check_module`."""
    check_module(_name(part, network), network, network, obs, shape, axis)
    return OwnNetwork(network)


def own_discrete_critics(network: nn.Module, obs: Tree, actions: int) -> OwnNetwork:
    """Critics that value every action: [k, N, A] for any k."""
    return own_network("critics", network, obs, ("k", actions), 1)


def own_action_critics(network: nn.Module, obs: Tree, size: int) -> OwnCritics:
    """Critics of actions [N, size]: [k, N] for any k."""
    action = torch.linspace(-1.0, 1.0, ROWS).unsqueeze(1).repeat(1, size)

    def call(obs: Tree) -> Tensor:
        return network(obs, action[-len(tree_leaves(obs)[0]) :])

    check_module(_name("critics", network), network, call, obs, ("k",), 1)
    return OwnCritics(network)


def own_q_network(
    network: nn.Module, spec: EnvSpec, obs: Tree, actions: int, outputs: int, recurrent: bool
) -> OwnQNetwork:
    """The Q network, checked: [N, A], or [N, A, K] of K atoms or quantiles.

    Args:
        obs: spec of the observation without its mask. recurrent: the algorithm trains on sequences with memory.
    """
    own = OwnQNetwork(network)
    memory = own.memory
    if (memory is not None) != recurrent:
        seen = "has initial_state, a memory" if memory is not None else "has no initial_state"
        raise ConfigError(
            f"{_name('network', network)} {seen}; expected one without for DQN, and for R2D1 one with "
            "initial_state(B) and forward(inputs, state) -> (q [T, B, A], state)"
        )

    def call(rows: Tree) -> Tensor:
        if memory is None:
            return network(rows)
        n = len(tree_leaves(rows)[0])
        past = tree_map(lambda leaf: torch.from_numpy(leaf.null().copy()).expand(1, n, *leaf.shape), spec.action)
        inputs = Inputs(tree_map(lambda x: x.unsqueeze(0), rows), past, torch.zeros(1, n), torch.ones(1, n).bool())
        return memory(inputs, memory.initial_state(n))[0].squeeze(0)

    check_module(_name("network", network), network, call, obs, (actions,) if outputs == 1 else (actions, outputs))
    return own


def _name(part: str, network: object) -> str:
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{part}={network!r:.60}; expected a torch.nn.Module, made already: {part}=MyNetwork(spec)")
    return f"{part}={type(network).__name__}(...)"
