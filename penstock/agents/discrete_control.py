"""The agent of discrete SAC: a categorical actor, k critics that value every action at once, and their targets."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from penstock.agents.agent import Agent, follow
from penstock.agents.critics import hold_temperature
from penstock.agents.distributions import Categorical
from penstock.agents.mlp import surely, through
from penstock.agents.networks import Encoder, Net
from penstock.agents.own.networks import own_discrete_critics, own_network
from penstock.agents.preparation import parted
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec, describe
from penstock.core.tree import Tree


def discrete_control_agent(
    spec: EnvSpec, settings: Any, actor: nn.Module | None = None, critics: nn.Module | None = None
) -> DiscreteControlAgent:
    """The default `agent` of DiscreteSAC, or that agent with networks of your own.

    Args:
        settings: with `net`, `discount` and `critics`.
        actor: maps observations [N, *O], without their mask, to logits [N, A]. critics: to Q [k, N, A] of k critics.
            Targets are copies.
    """
    return DiscreteControlAgent(spec, settings.net, settings.discount, settings.critics, actor, critics)


class ChoiceNetwork(nn.Module):
    """[N, ...] inputs -> [N, actions] (k None: one network), or [k, N, actions] by k networks."""

    def __init__(self, spec: EnvSpec, obs: Tree, net: Net, actions: int, k: int | None) -> None:
        super().__init__()
        self.encoder = Encoder(obs, spec.action, net)
        size = self.encoder.size
        self.mlp = net.body(size, net.hidden) if k is None else None
        self.out = nn.Linear(net.hidden[-1] if net.hidden else size, actions) if k is None else None
        stack = None if k is None else net.bodies(k, size, actions)
        self.stack = stack

    def forward(self, inputs: Inputs, obs: Tree) -> Tensor:
        features = obs if self.encoder.is_identity else self.encoder(inputs, obs)
        if self.stack is not None:
            return self.stack(features)
        assert self.mlp is not None
        assert self.out is not None
        return through(self.mlp, features, self.out)


class DiscreteControlAgent(Agent):
    """Samples one of A actions; until `learning_starts` steps all that are legal alike. Without noise: the likeliest.

    A Dict observation with the key `action_mask` masks actions; the mask is not fed to the networks.

    Raises:
        ConfigError: the action is no single choice, or the net is recurrent.
    """

    warm: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        net: Net,
        discount: float,
        critics: int,
        actor: nn.Module | None = None,
        own_critics: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if net.is_recurrent:
            raise ConfigError(
                f"DiscreteSAC with net.recurrent={net.recurrent!r}; off-policy learning with memory is R2D1's"
            )
        if net.use_sde:
            raise ConfigError("net.use_sde=True with one choice for an action; gSDE is for boxes, in PPO, A2C and SAC")
        action: Any = spec.action
        if not isinstance(action, LeafSpec) or action.kind != "discrete":
            raise ConfigError(
                f"DiscreteSAC needs one discrete action; the environment takes {describe(spec.action)}: use SAC for "
                "boxes, PPO for anything else"
            )
        self.spec, self.net, self.noise_size = spec, net, 1
        self.actions, self._start = action.sizes[0], int(action.start)  # pyright: ignore[reportArgumentType]
        self.fed, (self.preparation, self.central) = net.fed, parted(spec, net, discount)
        self.normalizer, self.reward_scaler = self.preparation.normalizer, self.preparation.reward_scaler
        if self.central is not None:
            self.central_normalizer = self.central.normalizer
        self.unseen, of_critic = self.preparation.unread, self.central or self.preparation
        seen, valued = self.preparation.obs, of_critic.obs
        self.actor = (
            ChoiceNetwork(spec, seen, net.of("actor").without_keys(self.unseen), self.actions, None)
            if actor is None
            else own_network("actor", actor, seen, (self.actions,))
        )
        self.critics = (
            ChoiceNetwork(spec, valued, net.of("critic").without_keys(of_critic.unread), self.actions, critics)
            if own_critics is None
            else own_discrete_critics(own_critics, valued, self.actions)
        )
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.register_buffer("warm", torch.ones(1))

    def set_exploration(self, settings: Any, env_steps: int) -> None:
        self.warm.fill_(float(env_steps < settings.learning_starts))
        hold_temperature(self.log_alpha, settings)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        if noise is not None and surely(self.warm > 0.0):
            even = self.warm.new_zeros(len(noise), self.actions)
            return Categorical(even, self._start, self.mask(inputs.obs)).sample(noise), {}, None
        logits = self.actor(inputs, self.prepared(inputs.obs))
        if noise is None:
            return Categorical(logits, self._start, self.mask(inputs.obs)).mode(), {}, None
        logits = torch.where(self.warm > 0.0, torch.zeros_like(logits), logits)
        return Categorical(logits, self._start, self.mask(inputs.obs)).sample(noise), {}, None

    def forward(self, inputs: Inputs, state: Tree = None) -> Tensor:
        """[N, A] log-probabilities, about `MASKED` for illegal actions."""
        return Categorical(self.actor(inputs, self.prepared(inputs.obs)), 0, self.mask(inputs.obs)).logp

    def q(self, inputs: Inputs) -> Tensor:
        """[k, N, A] of every action."""
        return self.critics(inputs, self.for_critic(inputs))

    def target_q(self, inputs: Inputs) -> Tensor:
        """Like `q`, by the target critics."""
        return self.target_critics(inputs, self.for_critic(inputs))

    def legal_count(self, inputs: Inputs) -> Tensor:
        """Number of legal actions: [N], or [1] if nothing is masked."""
        mask = self.mask(inputs.obs)
        return self.log_alpha.new_full((1,), self.actions) if mask is None else mask.sum(-1).to(self.log_alpha.dtype)

    def index(self, action: Tensor) -> Tensor:
        """[N] int64 number of an action from 0."""
        return action.long() - self._start if self._start else action.long()

    def update_targets(self, tau: float) -> None:
        """target <- (1 - tau) target + tau online."""
        follow(self.target_critics, self.critics, tau)
