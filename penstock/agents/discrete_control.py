"""The agent of discrete SAC: a categorical actor, k critics that value every action at once, and their targets."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.agents.actor_critic import MASK_KEY
from penstock.agents.agent import Agent
from penstock.agents.critics import StackedMLP
from penstock.agents.distributions import Categorical
from penstock.agents.mlp import MLP
from penstock.agents.networks import Encoder, Net
from penstock.agents.normalizer import ObsNormalizer, RewardScaler
from penstock.core.batch import Inputs, SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec, describe
from penstock.core.tree import Tree, tree_map


class Body(nn.Module):
    """[N, ...] inputs -> [N, actions] (k None: one network), or [k, N, actions] by k networks of relu layers."""

    def __init__(self, spec: EnvSpec, obs: Tree, net: Net, actions: int, k: int | None) -> None:
        super().__init__()
        self.encoder = Encoder(obs, spec.action, net)
        size = self.encoder.size
        self.mlp = MLP(size, net.hidden, net.activation) if k is None else None
        self.out = nn.Linear(net.hidden[-1] if net.hidden else size, actions) if k is None else None
        self.stack = StackedMLP(k, size, net.hidden, actions) if k is not None else None

    def forward(self, inputs: Inputs, obs: Tree) -> Tensor:
        features = obs if self.encoder.is_identity else self.encoder(inputs, obs)
        if self.stack is not None:
            return self.stack(features)
        assert self.mlp is not None
        assert self.out is not None
        return self.mlp(features, (self.out.weight, self.out.bias))


class DiscreteControlAgent(Agent):
    """Samples one of A actions; until `learning_starts` steps all that are legal alike. Without noise: the likeliest.

    A Dict observation with the key `action_mask` masks actions; the mask is not fed to the networks.

    Raises:
        ConfigError: the action is no single choice, or the net is recurrent.
    """

    warm: Tensor

    def __init__(self, spec: EnvSpec, net: Net, discount: float, critics: int) -> None:
        super().__init__()
        if net.is_recurrent:
            raise ConfigError(
                f"DiscreteSAC with net.recurrent={net.recurrent!r}; off-policy learning with memory is R2D1's"
            )
        action: Any = spec.action
        if not isinstance(action, LeafSpec) or action.kind != "discrete":
            raise ConfigError(
                f"DiscreteSAC needs one discrete action; the environment takes {describe(spec.action)}: use SAC for "
                "boxes, PPO for anything else"
            )
        self.spec, self.net, self.noise_size = spec, net, 1
        self.actions, self._start = action.sizes[0], int(action.start)  # pyright: ignore[reportArgumentType]
        self.masked = isinstance(spec.obs, dict) and MASK_KEY in spec.obs
        seen = self._unmasked(spec.obs)
        if self.masked and spec.obs[MASK_KEY].size != self.actions:
            raise ConfigError(
                f"obs['{MASK_KEY}'] has {spec.obs[MASK_KEY].size} elements for {self.actions} actions; expected one "
                "for each"
            )
        self.normalizer = ObsNormalizer(seen) if net.normalize_obs else None
        self.reward_scaler = RewardScaler(discount) if net.normalize_reward else None
        self.actor = Body(spec, seen, net, self.actions, None)
        self.critics = Body(spec, seen, net, self.actions, critics)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.register_buffer("warm", torch.ones(1))

    def set_exploration(self, settings: Any, env_steps: int) -> None:
        self.warm.fill_(float(env_steps < settings.learning_starts))

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        logits = self.actor(inputs, self.prepared(inputs.obs))
        if noise is None:
            return Categorical(logits, self._start, self._mask(inputs)).mode(), {}, None
        logits = torch.where(self.warm > 0.0, torch.zeros_like(logits), logits)
        return Categorical(logits, self._start, self._mask(inputs)).sample(noise), {}, None

    def forward(self, inputs: Inputs, state: Tree = None) -> Tensor:
        """[N, A] log-probabilities, hopeless where the mask forbids."""
        return Categorical(self.actor(inputs, self.prepared(inputs.obs)), 0, self._mask(inputs)).logp

    def q(self, inputs: Inputs) -> Tensor:
        """[k, N, A] of every action."""
        return self.critics(inputs, self.prepared(inputs.obs))

    def target_q(self, inputs: Inputs) -> Tensor:
        """As `q`, of the target critics."""
        return self.target_critics(inputs, self.prepared(inputs.obs))

    def legal_count(self, inputs: Inputs) -> Tensor:
        """[N] (or [1], if nothing is masked) the number of actions to choose from."""
        mask = self._mask(inputs)
        return self.log_alpha.new_full((1,), self.actions) if mask is None else mask.sum(-1).to(self.log_alpha.dtype)

    def index(self, action: Tensor) -> Tensor:
        """[N] int64 number of an action from 0."""
        return action.long() - self._start if self._start else action.long()

    def update_targets(self, tau: float) -> None:
        """target <- (1 - tau) target + tau online."""
        ops.polyak_(list(self.target_critics.parameters()), list(self.critics.parameters()), tau)

    @property
    def fed(self) -> frozenset[str]:
        """Inputs that the networks read besides the observation."""
        net = self.net
        either = net.prev_action or net.prev_reward
        used = {"prev_action": net.prev_action, "prev_reward": net.prev_reward, "first": either}
        return frozenset(name for name, yes in used.items() if yes)

    def prepared(self, obs: Tree) -> Tree:
        """The observation as the networks see it."""
        obs = self._unmasked(obs)
        return obs if self.normalizer is None else self.normalizer(obs)

    def observe(self, batch: SampleBatch) -> None:
        if self.normalizer is not None:
            self.normalizer.update(tree_map(lambda x: x[:-1], self._unmasked(batch.obs)), batch.valid)
        if self.reward_scaler is not None:
            self.reward_scaler.update(batch.reward, batch.terminated.logical_or(batch.truncated), batch.valid)

    def terminal(self, batch: SampleBatch) -> Tensor:
        return batch.terminal(self.net.terminal_info)

    def scaled_reward(self, reward: Tensor) -> Tensor:
        return reward if self.reward_scaler is None else self.reward_scaler(reward)

    def _unmasked(self, obs: Tree) -> Tree:
        return {k: v for k, v in obs.items() if k != MASK_KEY} if self.masked else obs

    def _mask(self, inputs: Inputs) -> Tensor | None:
        return inputs.obs[MASK_KEY].flatten(1).bool() if self.masked else None
