"""Opponents: random play, a function of the user's own, likeliest moves, a policy trained with a team's state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError, words_of
from penstock.core.spec import MASK_KEY, EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.agent_observations import OBS_KEY

Script = Callable[[Any], Any]
"""(observation of one agent, arrays [*O] as it is shown them) -> its action."""


class RandomAgent(Agent):
    """Acts uniformly at random among the legal actions."""

    evaluates_with_noise = True

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.spec, self.noise_size = spec, action_noise_size(spec.action)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        rows = len(inputs.first)
        uniforms = np.full((rows, self.noise_size), 0.5) if noise is None else noise.cpu().numpy()
        mask = inputs.obs[MASK_KEY].cpu().numpy() if isinstance(inputs.obs, dict) and MASK_KEY in inputs.obs else None
        drawn = sample_action(self.spec.action, uniforms, None if mask is None else mask.reshape(rows, -1))
        return tree_map(torch.from_numpy, drawn), {}, None

    def forward(self, inputs: Inputs, state: Tree = None) -> Any:
        """Raises ConfigError: it learns nothing."""
        raise ConfigError("a RandomAgent is an opponent, which learns nothing")


class ScriptedAgent(Agent):
    """Acts by a function of one observation, which must always return the same for the same.

    It is not asked where the mask allows nothing, as nobody has to act there; without masks it may be asked about
    observations of zeros, whose answers count for nothing.

    Args:
        name: of the function, for messages.
    """

    noise_size = 0

    def __init__(self, spec: EnvSpec, script: Script, name: str) -> None:
        super().__init__()
        self.spec, self._script, self._name = spec, script, name

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        obs = tree_map(lambda x: x.cpu().numpy(), inputs.obs)
        taken = [self._asked(tree_map(lambda x, i=i: x[i].copy(), obs)) for i in range(len(inputs.first))]
        leaves = zip(tree_leaves(self.spec.action), zip(*map(tree_leaves, taken)))
        stacked = [torch.from_numpy(np.stack([np.asarray(x, leaf.dtype) for x in xs])) for leaf, xs in leaves]
        whole = iter(stacked)
        return tree_map(lambda leaf: next(whole), self.spec.action), {}, None

    def forward(self, inputs: Inputs, state: Tree = None) -> Any:
        """Raises ConfigError: it learns nothing."""
        raise ConfigError(f"{self._name} is an opponent, which learns nothing")

    def _asked(self, obs: Any) -> Tree:
        if isinstance(obs, dict) and MASK_KEY in obs and not obs[MASK_KEY].any():
            return self.spec.null_action
        try:
            found = self._script(obs)
        except Exception as error:
            raise ConfigError(f"{self._name}(obs) raised {words_of(error)}; it was given {obs!r:.300}") from error
        if len(tree_leaves(found)) != len(tree_leaves(self.spec.action)):
            raise ConfigError(f"{self._name}(obs) returned {found!r:.80}; expected one action")
        return found


class Deterministic(Agent):
    """Makes the likeliest moves of an agent wherever it acts, as deterministic evaluations do; random play stays."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.spec, self.agent = agent.spec, agent
        self._noisy = agent.evaluates_with_noise
        self.noise_size = agent.noise_size if self._noisy else 0
        self.env_ranks, self.evaluates_with_noise = agent.env_ranks and self._noisy, self._noisy

    def initial_state(self, B: int) -> Tree:
        return self.agent.initial_state(B)

    def set_slots(self, B: int) -> None:
        self.agent.set_slots(B)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        return self.agent.act(inputs, state, noise if self._noisy else None)

    def forward(self, inputs: Inputs, state: Tree = None) -> Any:
        """Raises ConfigError: it learns nothing."""
        raise ConfigError("an opponent learns nothing")


def placed(agent: Agent, spec: EnvSpec) -> Agent:
    """A copy that plays other seats than in training, which do not affect its observations."""
    found = copy.deepcopy(agent)
    found.spec = spec
    return found


class WithoutState(Agent):
    """Acts by an agent that was trained with keys which `act` does not read, where the environment does not show them.

    Args:
        spec: of the environment that it plays in.
    """

    def __init__(self, agent: Agent, spec: EnvSpec) -> None:
        super().__init__()
        self.spec, self.agent, self.noise_size = spec, agent, agent.noise_size
        self.env_ranks, self.held_noise, self.evaluates_with_noise = (
            agent.env_ranks, agent.held_noise, agent.evaluates_with_noise,
        )  # fmt: skip

    @staticmethod
    def shown(agent: Agent, spec: EnvSpec) -> Tree:
        """The observations that the agent acts on, without the keys that it does not read."""
        if not (agent.unseen and isinstance(spec.obs, dict)):
            return spec.obs
        seen = {key: leaf for key, leaf in spec.obs.items() if key not in agent.unseen}
        return seen[OBS_KEY] if list(seen) == [OBS_KEY] else seen

    def initial_state(self, B: int) -> Tree:
        return self.agent.initial_state(B)

    def set_slots(self, B: int) -> None:
        self.agent.set_slots(B)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        obs = inputs.obs if isinstance(inputs.obs, dict) else {OBS_KEY: inputs.obs}
        return self.agent.act(inputs._replace(obs=obs), state, noise)

    def forward(self, inputs: Inputs, state: Tree = None) -> Any:
        """Raises ConfigError: it learns nothing."""
        raise ConfigError("an opponent learns nothing")
