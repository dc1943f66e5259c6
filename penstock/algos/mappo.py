"""MAPPO: PPO with a critic that sees the state of the whole team, while each agent acts on its own observation.

Yu et al. 2022, "The surprising effectiveness of PPO in cooperative multi-agent games", arXiv:2103.01955. The critic is
given the agent's own observation and `obs["state"]` side by side (section 5.2, "agent-specific"); rows of agents that
are dead or absent are not trained on, so they need no zeros (their appendix, "death masking"). Loss and targets are
those of PPO.

Differs from the paper: values are normalised by their scale alone, without a shift (section 5.1); the value loss is
half the square, not clipped and not Huber's; a pass is made of minibatches, where theirs is one of the whole batch
(section 5.3); inputs are normalised only with `net.normalize_obs`; nothing that an observation shares with the state is
left out of it; and with a recurrent net the actor alone has memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from penstock.agents.actor_critic import FIRST_GAIN, ActionHead, Body, Output, ValueScale
from penstock.agents.agent import Agent
from penstock.agents.distributions import acted
from penstock.agents.mlp import orthogonal
from penstock.agents.networks import Net
from penstock.agents.precision import in_full
from penstock.agents.preparation import Preparation
from penstock.agents.recurrent import Memory
from penstock.algos.ppo import loss_fn, postprocess_fn
from penstock.core.batch import Inputs, SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Chance, Rate, Weight
from penstock.core.spec import STATE_KEY, EnvSpec, describe
from penstock.core.tree import Tree
from penstock.learn.algorithm import AgentFn
from penstock.learn.optimizers import adam
from penstock.learn.settings import AlgorithmFunctions, MinibatchSettings

optimizer_fn = adam


class CentralCriticAgent(Agent):
    """An actor that sees the observation without its key "state", and a critic that sees all of it.

    Raises:
        ConfigError: the observation has no state, or a setting asks for one body or gSDE.
    """

    unseen = frozenset((STATE_KEY,))

    def __init__(self, spec: EnvSpec, net: Net, discount: float = 0.99, normalize_value: bool = False) -> None:
        super().__init__()
        if net.shared or net.use_sde:
            raise ConfigError(
                f"net.shared={net.shared}, net.use_sde={net.use_sde} with a critic that sees more than the actor; "
                "expected net.shared=None or False, and net.use_sde=False"
            )
        if net.critic_recurrent == "own":
            raise ConfigError("net.critic_recurrent='own' with MAPPO, whose actor alone has memory; leave it out")
        self.spec, self.net, self.fed = spec, net, net.fed
        acted_on = EnvSpec(without_state(spec.obs), spec.action, spec.agents)
        self.preparation = Preparation(acted_on, net, discount)
        self.central = Preparation(spec, replace(net, normalize_reward=False), discount)
        self.normalizer, self.reward_scaler = self.preparation.normalizer, self.preparation.reward_scaler
        self.central_normalizer = self.central.normalizer
        self.actor = Body(spec, self.preparation.obs, net.of("actor").without_key(STATE_KEY))
        self.memory = Memory(net.recurrent, self.actor.size, net.recurrent_size) if net.recurrent != "none" else None
        features = self.memory.size if self.memory is not None else self.actor.size
        self.head = ActionHead(features, spec.action, net.squash, net.log_std())
        self.critic = Body(spec, self.central.obs, net.of("critic"))
        self.value_head = nn.Linear(self.critic.size, 1)
        orthogonal(self.value_head, FIRST_GAIN if normalize_value else 1.0)
        self.value_scale = ValueScale() if normalize_value else None
        self.noise_size = sum(self.head.noise_sizes)

    def initial_state(self, B: int) -> Tree:
        return self.memory.initial_state(B) if self.memory is not None else None

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        obs = self._visible(inputs.obs)
        if self.memory is None:
            params = self.actor(inputs, self.prepared(obs), self.head.linear)
        else:
            features = self.actor(inputs, self.prepared(obs))
            out, state = self.memory(features.unsqueeze(0), inputs.first.unsqueeze(0), state)
            params = self.head.linear(out[0])
        action, logp = acted(self.head(params, self.mask(obs)), noise)
        return action, {"logp": logp}, state

    def forward(self, inputs: Inputs, state: Tree = None) -> Output:
        if self.memory is None:
            obs = self._visible(inputs.obs)
            params = self.actor(inputs, self.prepared(obs), self.head.linear)
            return Output(self.head(params, self.mask(obs)), self._value(inputs))
        lead, flat = inputs.first.shape, inputs.flat()
        obs = self._visible(flat.obs)
        features = self.actor(flat, self.prepared(obs)).reshape(*lead, -1)
        out, _ = self.memory(features, inputs.first, state, inputs.idle)
        mask = self.mask(obs)
        dist = self.head(in_full(self.head.linear, out), None if mask is None else mask.reshape(*lead, -1))
        return Output(dist, self._value(flat).reshape(lead))

    def values(self, batch: SampleBatch) -> Tensor:
        with torch.no_grad():
            return self._value(batch.inputs.flat()).reshape(batch.first.shape)

    def needed(self, inputs: Inputs) -> Inputs:
        others = zip(Inputs._fields[1:], inputs[1:])
        return Inputs(inputs.obs, *(x if name in self.fed else None for name, x in others))

    def observe(self, batch: SampleBatch) -> None:
        if self.preparation.active:
            self.preparation.observe(replace(batch, obs=self._visible(batch.obs)))
            self.central.observe(batch)

    def scaled_reward(self, reward: Tensor) -> Tensor:
        return super().scaled_reward(reward.sign() if self.net.clip_reward else reward)

    def norm_groups(self) -> Mapping[str, Sequence[nn.Module]]:
        actor = [x for x in (self.actor, self.memory, self.head) if x is not None]
        return {"actor": actor, "critic": (self.critic, self.value_head)}

    @property
    def needs_statistics(self) -> bool:
        return self.preparation.empty or self.central.empty

    def _value(self, inputs: Inputs) -> Tensor:
        """[N] by flat inputs."""
        output = self.critic(inputs, self.central.prepared(inputs.obs), self.value_head).squeeze(-1)
        return output if self.value_scale is None else self.value_scale(output)

    def _visible(self, obs: Tree) -> Tree:
        """The part of the observation that the actor may read."""
        return {key: x for key, x in obs.items() if key != STATE_KEY}


def without_state(obs: Tree) -> Tree:
    """The spec of an observation without its key "state". Raises ConfigError if it has none, or nothing else."""
    if not isinstance(obs, dict) or STATE_KEY not in obs or len(obs) == 1:
        seen = f"keys {sorted(obs)}" if isinstance(obs, dict) else describe(obs)
        raise ConfigError(
            f"an observation of {seen}; expected a Dict with the key {STATE_KEY!r}, the state of all agents, and what "
            "an agent sees itself: the Trainer and Policies.seat(env) add it to environments of many agents; for an "
            "environment of one agent use PPO, or DQN in place of QMIX"
        )
    return {key: x for key, x in obs.items() if key != STATE_KEY}


def agent_fn(spec: EnvSpec, cfg: MAPPO) -> Agent:
    """The default agent."""
    return CentralCriticAgent(spec, cfg.net, cfg.discount, cfg.normalize_value)


@dataclass(frozen=True)
class MAPPO(MinibatchSettings):
    """Settings of MAPPO."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn)
    reports_kl = True
    takes_stale = True
    """The ratio to the recorded log-probabilities corrects for batches of an earlier policy."""
    recomputes_logp: ClassVar[bool] = True
    """Recorded log-probabilities that differ from the learner's own by rounding alone are replaced by these."""
    observes_state: ClassVar[bool] = True
    """The environment adds the key "state" to observations."""

    gae_lambda: Chance = 0.95
    """Bias against variance of advantages, usually 0.9 to 1."""
    clip: Rate = 0.2
    """How far the probability ratio may move, usually 0.05 to 0.2."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus per nat, usually 0 to 0.02; 0.01 in the paper."""
    value_coef: Weight = 1.0
    """Weight of half the squared value error, usually 0.5 to 1."""
    value_clip: Rate | None = None
    """How far a value may move from that before training on the batch until its loss counts no gain, in units of
    `normalize_value`, usually 0.2 in libraries that clip; None: no clipping, which Andrychowicz et al. 2021 prefer."""
    target_kl: Rate | None = None
    """Training on a batch stops at the first minibatch with `approx_kl` over 1.5 times this, usually 0.01 to 0.05;
    None: it never stops early."""
    max_grad_norm: Bound = 10.0
    """Gradients are scaled down to this norm; 10 in the paper."""
    normalize_advantage: bool = True
    """Shift and scale the advantages of each batch to mean 0 and deviation 1."""
    normalize_value: bool = True
    """Learn values in units of the running root mean square of returns (`ValueScale`), and advantages too, so that the
    size of rewards does not matter."""
    agent: AgentFn = agent_fn
