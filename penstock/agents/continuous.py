"""Agents of continuous control: an actor, k critics, and their targets, for one box of actions.

Actors and critics work in [-1, 1]; the record and the environment see the environment's units.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from penstock.agents.actor_critic import ActorCriticSettings
from penstock.agents.agent import Agent, follow
from penstock.agents.critics import ActionBox, hold_temperature, least
from penstock.agents.distributions import LOG_STD_RANGE, squashed_sample, standard_normal
from penstock.agents.gsde import StateDependentOutput
from penstock.agents.mlp import chain_by_kernel, is_plain, surely, through
from penstock.agents.networks import Encoder, Net
from penstock.agents.own.networks import own_action_critics, own_network
from penstock.agents.preparation import parted
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.noise import HeldNoise
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree
from penstock.native import heads
from penstock.native.acting import Acting
from penstock.native.dense import takes_all
from penstock.native.elementwise import exp, softmax, tanh

_CLIP_MEAN = 2.0
"""Bound of the means of gSDE before tanh, as in Stable-Baselines3: beyond, gradients vanish and noise does nothing."""

_LOG_STD = -3.0
"""First log deviation of gSDE's weights, as there."""


def control_agent(
    spec: EnvSpec, settings: ActorCriticSettings, actor: nn.Module | None = None, critics: nn.Module | None = None
) -> ControlAgent:
    """The default `agent` of SAC, TD3, DDPG and CQL on boxes, or that agent with networks of your own.

    Args:
        actor: maps observations [N, *O] to [N, 2 size], means and log deviations before tanh; for TD3 and DDPG to
            [N, size], the action before tanh. critics: maps observations and actions [N, size] in
            [-1, 1] to Q [k, N] of k critics. Targets are copies.
    """
    gaussian, atoms = hasattr(settings, "alpha"), getattr(settings, "distributional", "none") == "c51"
    agent = ControlAgent(
        spec,
        settings.net,
        settings.discount,
        getattr(settings, "critics", 1),
        "gaussian" if gaussian else "point",
        type(settings).__name__,
        target_actor=getattr(settings, "target_actor", not gaussian),
        actor=actor,
        own_critics=critics,
        outputs=getattr(settings, "n_atoms" if atoms else "quantiles", None),
        has_target=getattr(settings, "has_target", True),
        noise_low=getattr(settings, "exploration_noise_low", None),
    )
    given: Any = settings
    if atoms:
        agent.atoms = torch.linspace(given.v_min, given.v_max, given.n_atoms)
    if agent.log_alpha is not None and (first := getattr(settings, "alpha_init", 1.0)) != 1.0:
        agent.log_alpha.data.fill_(math.log(first))
    return agent


class Critics(nn.Module):
    """[N, ...] inputs and [N, size] actions in [-1, 1] -> [k, N] Q, or [k, N, outputs] of its distribution."""

    def __init__(self, spec: EnvSpec, net: Net, actions: int, k: int, outputs: int | None = None) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs, spec.action, net)
        inputs = self.encoder.size + actions
        self.scalar = outputs is None
        self.stack = net.bodies(k, inputs, outputs or 1)

    def forward(self, inputs: Inputs, obs: Tree, action: Tensor) -> Tensor:
        features = obs if self.encoder.is_identity else self.encoder(inputs, obs)
        out = self.stack(torch.cat([features, action], -1))
        return out.squeeze(-1) if self.scalar else out

    def each(self, inputs: Inputs, obs: Tree, action: Tensor) -> Tensor:
        """[k, N, m] of actions [N, m, size], with the features of an observation made once."""
        features = obs if self.encoder.is_identity else self.encoder(inputs, obs)
        rows = torch.cat([features.unsqueeze(1).expand(-1, action.shape[1], -1), action], -1)
        return self.stack(rows.flatten(0, 1)).unflatten(1, action.shape[:2]).squeeze(-1)

    def smallest(self, inputs: Inputs, obs: Tree, action: Tensor, of: int | None) -> Tensor:
        """[N] the least Q of the first `of` critics; only the actions get a gradient."""
        with torch.no_grad():
            features = obs if self.encoder.is_identity else self.encoder(inputs, obs)
        return least(self.stack, features, action, of)


class Actor(nn.Module):
    """[N, ...] inputs -> [N, outputs], before any squashing. Starts as torch's Linear layers do, like the critics."""

    def __init__(self, spec: EnvSpec, net: Net, outputs: int) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs, spec.action, net)
        self.mlp = net.body(self.encoder.size, net.hidden, gain=None)
        size = self.mlp.size
        self.out = (
            StateDependentOutput(size, outputs // 2, net.log_std(_LOG_STD), _CLIP_MEAN)
            if net.use_sde
            else nn.Linear(size, outputs)
        )

    def forward(self, inputs: Inputs, obs: Tree) -> Tensor:
        features = obs if self.encoder.is_identity else self.encoder(inputs, obs)
        return through(self.mlp, features, self.out)

    def features(self, inputs: Inputs, obs: Tree) -> Tensor:
        """[N, L] before the output layer."""
        return self.mlp(obs if self.encoder.is_identity else self.encoder(inputs, obs))


class Squashed(NamedTuple):
    """Actions [N, size] in (-1, 1) and their log-density [N] there."""

    action: Tensor
    logp: Tensor


class ControlAgent(Agent):
    """An actor that is a tanh-squashed Gaussian (SAC) or a point (DDPG, TD3), with critics and target networks.

    Until `learning_starts` steps, actions are uniform over the box; then the Gaussian's samples, or the point with
    Gaussian noise of `exploration_noise` half-ranges, clipped to the box. Without noise: the mean.

    Args:
        kind: the actor's distribution. algo: name in messages. target_actor: keep a target of the actor (DDPG, TD3).
        outputs: numbers of each critic for an action, quantiles (TQC) or logits of `atoms` (C51); None: one, Q.
        has_target: keep targets of critics. noise_low: the noise of slot 0, from which slots are spread evenly up to
            `exploration_noise` in the last one; None: the same for all.
    """

    warm: Tensor
    spread: Tensor
    atoms: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        net: Net,
        discount: float,
        critics: int,
        kind: Literal["gaussian", "point"],
        algo: str,
        target_actor: bool = False,
        *,
        actor: nn.Module | None = None,
        own_critics: nn.Module | None = None,
        outputs: int | None = None,
        has_target: bool = True,
        noise_low: float | None = None,
    ) -> None:
        super().__init__()
        if net.is_recurrent:
            raise ConfigError(f"{algo} with net.recurrent={net.recurrent!r}; off-policy learning with memory is R2D1's")
        if net.use_sde and kind == "point":
            raise ConfigError(f"net.use_sde=True with {algo}, whose actor is a point; use SAC, PPO or A2C for gSDE")
        self.box = ActionBox(spec.action, algo)
        self.spec, self.net, self._gaussian = spec, net, kind == "gaussian"
        self.fed, (self.preparation, self.central) = net.fed, parted(spec, net, discount)
        self.normalizer, self.reward_scaler = self.preparation.normalizer, self.preparation.reward_scaler
        if self.central is not None:
            self.central_normalizer = self.central.normalizer
        self.unseen, of_critic = self.preparation.unread, self.central or self.preparation
        size = self.box.size
        if actor is not None and net.use_sde:
            raise ConfigError("net.use_sde=True with an actor of your own; gSDE needs the built-in one")
        if own_critics is not None and outputs is not None:
            raise ConfigError(
                f"{algo} with critics of your own, while only the built-in ones have {outputs} quantiles or atoms; use "
                "SAC or TD3 with distributional='none'"
            )
        if not has_target and (actor is not None or own_critics is not None):
            raise ConfigError(f"{algo} with networks of your own, which have no batch renorm; use SAC")
        width, seen, valued = 2 * size if self._gaussian else size, self.preparation.obs, of_critic.obs
        self.actor: Any = (
            Actor(replace(spec, obs=seen), net.of("actor").without_keys(self.unseen), width)
            if actor is None
            else own_network("actor", actor, seen, (width,))
        )
        of_critics = net.of("critic").without_keys(of_critic.unread)
        self.critics: Any = (
            Critics(replace(spec, obs=valued), of_critics, size, critics, outputs)
            if own_critics is None
            else own_action_critics(own_critics, valued, size)
        )
        self.target_critics: Any = copy.deepcopy(self.critics).requires_grad_(False) if has_target else None
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False) if target_actor else None
        self.log_alpha = nn.Parameter(torch.zeros(1)) if self._gaussian else None
        if isinstance(self.actor.out, StateDependentOutput):
            self.held_noise = HeldNoise(self.actor.out.noise_size, net.sde_sample_freq)
        self.env_ranks, self._noise_low, self._slots = noise_low is not None, noise_low, 1
        self.noise_size = self.held_noise.size + size + self.env_ranks
        self.register_buffer("warm", torch.ones(1))
        self.register_buffer("spread", torch.zeros(1))
        self.register_buffer("atoms", torch.zeros(0), persistent=False)

    def set_slots(self, B: int) -> None:
        self._slots = B

    def set_exploration(self, settings: Any, env_steps: int) -> None:
        self.warm.fill_(float(env_steps < settings.learning_starts))
        if not self._gaussian:
            self.spread.fill_(float(getattr(settings, "exploration_noise", 0.0)))
        elif self.log_alpha is not None:
            hold_temperature(self.log_alpha, settings)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        slot = None
        if self._noise_low is not None and noise is not None:
            noise, slot = noise[:, :-1], noise[:, -1:]
        if noise is not None and surely(self.warm > 0.0):
            return self.box.to_env(2.0 * noise[:, -self.box.size :] - 1.0), {}, None
        obs, output = self.prepared(inputs.obs), self.actor.out
        if isinstance(output, StateDependentOutput):
            h = self.actor.features(inputs, obs)
            mean = output(h).chunk(2, -1)[0]
            if noise is None:
                unit = tanh(mean)
            else:
                matrices, noise = noise.split([output.noise_size, self.box.size], -1)
                unit = tanh(mean + output.offset(h, matrices))
        else:
            out, box = self.actor(inputs, obs), self.box
            fits = out.shape[1:] == (box.size * (1 + self._gaussian),)  # len() would fix the rows of an export
            fits = fits and slot is None and (noise is None or noise.shape == (*out.shape[:1], box.size))
            if fits and heads.takes_rows(out, noise, box.center, box.half_range):  # and nobody is warm
                spread = None if self._gaussian else float(self.spread)
                return box.shaped(heads.control(out, noise, spread, box.center, box.half_range)), {}, None
            if self._gaussian:
                mean, log_std = out.chunk(2, -1)
                spread = exp(log_std.clamp(*LOG_STD_RANGE))
                unit = tanh(mean if noise is None else mean + spread * standard_normal(noise))
            else:
                unit = tanh(out)
                if noise is not None:
                    unit = (unit + self._spread(slot) * standard_normal(noise)).clamp(-1.0, 1.0)
        if noise is not None:
            unit = torch.where(self.warm > 0.0, 2.0 * noise - 1.0, unit)
        return self.box.to_env(unit), {}, None

    def by_kernel(self, noisy: bool) -> Acting | None:
        actor, box = self.actor, self.box
        if (
            not is_plain(actor, Actor)
            or not takes_all((box.center, box.half_range))
            or (noisy and (self.env_ranks or surely(self.warm > 0.0)))
        ):
            return None
        outputs = box.size * (1 + self._gaussian)
        acting = chain_by_kernel(self, ControlAgent, actor.encoder, actor.mlp, actor.out, outputs)
        if acting is None:  # also on a GPU, which reading the spread would wait for
            return None
        given = {"center": box.center, "half": box.half_range, "spread": float(self.spread)}
        return acting("control" if self._gaussian else "point", box.size, **given)

    def _spread(self, slot: Tensor | None) -> Tensor:
        """[1] deviation of the noise, or [N, 1] for slots of these numbers [N, 1]."""
        if slot is None or self._noise_low is None or self._slots == 1:
            return self.spread
        low = self.spread.clamp(max=self._noise_low)
        return low + (self.spread - low) * (slot.remainder(self._slots) / (self._slots - 1))

    def sample(self, inputs: Inputs, noise: Tensor) -> Squashed:
        """Reparametrised actions of the Gaussian from uniforms [N, size] (Haarnoja et al. 2018, appendix C)."""
        out = self.actor(inputs, self.prepared(inputs.obs))
        return Squashed(*squashed_sample(out, standard_normal(noise)))

    def point(self, inputs: Inputs) -> Tensor:
        """[N, size] the deterministic action in [-1, 1]."""
        return tanh(self.actor(inputs, self.prepared(inputs.obs)))

    def target_point(self, inputs: Inputs) -> Tensor:
        """Like `point`, by the target actor, if there is one."""
        actor = self.actor if self.target_actor is None else self.target_actor
        return tanh(actor(inputs, self.prepared(inputs.obs)))

    def q(self, inputs: Inputs, action: Tensor) -> Tensor:
        """[k, N] of actions [N, size] in [-1, 1], or [k, N, outputs]."""
        return self.critics(inputs, self.for_critic(inputs), action)

    def smallest_q(self, inputs: Inputs, action: Tensor, of: int | None = None) -> Tensor:
        """[N] the least of the first `of` critics (None: all), as an actor's loss needs it: no gradient for critics."""
        return self.critics.smallest(inputs, self.for_critic(inputs), action, of)

    def pooled_q(self, inputs: Inputs, action: Tensor, clipped: bool) -> Tensor:
        """[N] the smallest mean of the critics' distributions over `atoms`, or if not `clipped` the mean of all."""
        q = self.expected(self.q(inputs, action))
        return q.amin(0) if clipped else q.mean(0)

    def expected(self, out: Tensor) -> Tensor:
        """[k, N] means of the critics' distributions over `atoms`, of their outputs."""
        return (softmax(out) * self.atoms).sum(-1)

    def target_q(self, inputs: Inputs, action: Tensor) -> Tensor:
        """Like `q`, by the target critics."""
        return self.target_critics(inputs, self.for_critic(inputs), action)

    def forward(self, inputs: Inputs, state: Tree = None) -> Tensor:
        """[N, outputs] of the actor, before squashing."""
        return self.actor(inputs, self.prepared(inputs.obs))

    def update_targets(self, tau: float) -> None:
        """target <- (1 - tau) target + tau online."""
        follow(self.target_critics, self.critics, tau)
        if self.target_actor is not None:
            follow(self.target_actor, self.actor, tau)
