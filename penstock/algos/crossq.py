"""CrossQ: SAC without target networks, by batch renormalisation (Bhatt et al. 2024, arXiv:1902.05605v4).

Critics see (s, a) and (s', a') as one batch, so that both are normalised by the moments of their mixture (section 4).
Normalisation is batch renorm (Ioffe 2017, arXiv:1702.03275, algorithm 1), in the actor too, as in the authors' code.

Differs from the paper: all losses of a step are taken at the same parameters, n-step targets may be used, truncated
episodes bootstrap, and critics are 1,024 wide, as in sbx and sb3-contrib.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.agents.agent import Agent
from penstock.agents.continuous import ControlAgent, control_agent
from penstock.agents.distributions import mean_std, squashed_sample, standard_normal
from penstock.agents.networks import Net
from penstock.agents.precision import in_full
from penstock.algos.sac import SAC, alpha, target_entropy
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Count, Rate, Unit, Whole
from penstock.core.spec import EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, refuse_atoms
from penstock.ops.activations import AnyActivation, activate, activations
from penstock.replay.replay import Replay, ReplaySchedule, make_view

MOMENTUM, EPS, R_MAX, D_MAX = 0.01, 1e-3, 3.0, 5.0
"""Weight of a batch in running moments, and the bounds of corrections, as in the authors' code."""


class BatchRenorm(nn.Module):
    """[k, N, n] -> [k, N, n]: normalised by running moments, which training moves as parameters (`moments_loss`)."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(k, 1, n)), nn.Parameter(torch.zeros(k, 1, n))
        self.mean, self.variance = nn.Parameter(torch.zeros(k, 1, n)), nn.Parameter(torch.ones(k, 1, n))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x - self.mean) / (self.variance + EPS).sqrt() + self.shift

    def trained(self, x: Tensor, warm: bool) -> tuple[Tensor, Tensor]:
        """The output by the moments of the batch, and `moments_loss`, whose gradient is running minus batch moments.

        `warm`: corrected by r and d towards the running ones (Ioffe 2017, algorithm 1); before that batch norm.
        """
        mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
        deviation = (variance + EPS).sqrt()
        y = (x - mean) / deviation
        with torch.no_grad():
            running = (self.variance + EPS).sqrt()
            r = (deviation / running).clamp(1.0 / R_MAX, R_MAX)
            d = ((mean - self.mean) / running).clamp(-D_MAX, D_MAX)
        y = y * r + d if warm else y
        moments_loss = (self.mean - mean.detach()).square().sum() + (self.variance - variance.detach()).square().sum()
        return self.gain * y + self.shift, 0.5 * moments_loss


class RenormedMLP(nn.Module):
    """[N, inputs] -> [k, N, outputs] by k networks: batch renorm before each layer, the activation behind hidden ones.

    `outputs` None: one network -> [N, size], which ends in the batch renorm before an output layer.
    """

    def __init__(
        self, k: int, inputs: int, hidden: tuple[int, ...], activation: AnyActivation, outputs: int | None
    ) -> None:
        super().__init__()
        self._activation: Any = activation
        self.between = activations(activation, len(hidden))
        self.k, self.size, self.has_out = k, hidden[-1] if hidden else inputs, outputs is not None
        widths = (inputs, *hidden, *(() if outputs is None else (outputs,)))
        self.norms = nn.ModuleList(BatchRenorm(k, n) for n in (inputs, *hidden))
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for n, m in zip(widths, widths[1:]):
            bound = 1.0 / math.sqrt(n)  # as torch's Linear starts
            self.weights.append(nn.Parameter(torch.empty(k, n, m).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(k, 1, m).uniform_(-bound, bound)))

    def forward(self, x: Tensor) -> Tensor:
        return self._through(x, None)[0]

    def trained(self, x: Tensor, warm: bool) -> tuple[Tensor, Tensor]:
        """The output by the moments of the batch, and the sum of `moments_loss`; see `BatchRenorm.trained`."""
        return self._through(x, warm)

    def _layer(self, x: Tensor, i: int) -> Tensor:
        if self.k == 1:  # as other layers of actors: batched products round by the number of rows
            return torch.nn.functional.linear(x[0], self.weights[i][0].t(), self.biases[i][0, 0]).unsqueeze(0)
        return x @ self.weights[i] + self.biases[i]

    def _through(self, x: Tensor, warm: bool | None) -> tuple[Tensor, Tensor]:
        x, moments_loss = x.expand(self.k, *x.shape), x.new_zeros(())
        for i, norm in enumerate(self.norms):
            if warm is None:
                x = norm(x)
            else:
                x, own = norm.trained(x, warm)  # pyright: ignore[reportCallIssue]
                moments_loss = moments_loss + own
            if i == len(self.norms) - 1:
                x = in_full(lambda x: self._layer(x, -1), x) if self.has_out else x.squeeze(0)
            else:
                x = self._layer(x, i)
                x = activate(x, self._activation) if self.between is None else self.between[i](x)
        return x, moments_loss


class RunningAverage:
    """An optimizer that moves running moments by `MOMENTUM` times their gradient, whatever `lr` is."""

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    """A scalar on the parameters' device: 1 where the next step must not be taken; see `take_step`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 1.0, "weight_decay": 0.0}]

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            step = MOMENTUM * p.grad
            p.sub_(step if self.found_inf is None else torch.where(self.found_inf > 0.0, 0.0, step))

    def state_dict(self) -> dict[str, Any]:
        """Empty: the moments are parameters."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: CrossQ) -> TrainBatch:
    """Adds `next_action` a' ~ pi(s') [N, size] and `next_logp` [N], by running moments."""
    noise, next_noise = x["noise"].chunk(2, -1)
    action, logp = agent.sample(x["next"], next_noise)
    return TrainBatch(x.inputs, {**x.rows, "noise": noise, "next_action": action, "next_logp": logp}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: CrossQ) -> Loss:
    """Critics: (Q - y)^2 / 2, y = r + discount * (min_k Q(s', a') - alpha log pi), one forward (figure 2)."""
    warm, N = bool(x["update"] >= cfg.warmup_updates), len(x["return"])
    taken = agent.box.to_unit(x["action"])
    rows = torch.cat([_seen(agent, x.inputs, taken), _seen(agent, x["next"], x["next_action"])])
    both, moments_loss = agent.critics.stack.trained(rows, warm)
    q, following = both.squeeze(-1).split(N, 1)
    with torch.no_grad():
        value = following.amin(0) - alpha(agent) * x["next_logp"]
        target = agent.scaled_reward(x["return"]) + x["discount"] * value
    squares, priorities = ops.critic_loss(q, target, x.rows.get("weight"))
    totals, metrics = {"critic": 0.5 * squares}, {"critic_loss": 0.5 * squares, "q": q[0].mean()}
    if x["update"] % cfg.policy_delay == cfg.policy_delay - 1:
        obs, encoder = agent.prepared(x.inputs.obs), agent.actor.encoder
        h, own = agent.actor.mlp.trained(obs if encoder.is_identity else encoder(x.inputs, obs), warm)
        moments_loss = moments_loss + own
        out = in_full(agent.actor.out, h)
        action, logp = squashed_sample(out, standard_normal(x["noise"]))
        totals["actor"] = (alpha(agent) * logp - agent.smallest_q(x.inputs, action)).mean()
        entropy = -logp.detach().mean()
        metrics |= {"actor_loss": totals["actor"], "entropy": entropy, "ent_coef": alpha(agent)}
        metrics["action_std"] = mean_std(out)
        if cfg.alpha == "auto":
            assert agent.log_alpha is not None
            totals["alpha"] = agent.log_alpha.squeeze(0) * (entropy - target_entropy(agent, cfg))
    totals["moments"] = moments_loss
    return Loss(totals, {name: value.detach() for name, value in metrics.items()}, priorities)


def _seen(agent: ControlAgent, inputs: Inputs, action: Tensor) -> Tensor:
    """[N, features + size] what critics read."""
    obs, encoder = agent.for_critic(inputs), agent.critics.encoder
    return torch.cat([obs if encoder.is_identity else encoder(inputs, obs), action], -1)


def optimizer_fn(agent: ControlAgent, cfg: CrossQ) -> Optimizers:
    """Those of SAC, without the running moments, which have one of their own."""
    moments = [p for m in agent.modules() if isinstance(m, BatchRenorm) for p in (m.mean, m.variance)]
    held = {id(p) for p in moments}

    def learned(module: nn.Module) -> list[Tensor]:
        return [p for p in module.parameters() if id(p) not in held]

    out: Optimizers = {
        "critic": make_optimizer(learned(agent.critics), cfg),
        "actor": make_optimizer(learned(agent.actor), cfg, cfg.actor_lr),
        "moments": RunningAverage(moments),
    }
    if cfg.alpha == "auto":
        assert agent.log_alpha is not None
        out["alpha"] = make_optimizer([agent.log_alpha], cfg, cfg.alpha_lr, decays=False)
    return out


def replay_fn(agent: ControlAgent, cfg: CrossQ) -> ReplaySchedule:
    """Transitions, and two sets of noise for each: present and next action."""
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)
    replay = Replay(agent.spec, cfg.replay, view)
    given = cfg.batch_size, cfg.replay_ratio, cfg.learning_starts
    return ReplaySchedule(replay, *given, noise_size=2 * agent.box.size)


def agent_fn(spec: EnvSpec, cfg: CrossQ) -> Agent:
    """SAC's agent with `RenormedMLP`s, and without target networks."""
    agent = control_agent(spec, cfg)
    actor, critics = cfg.net.of("actor"), cfg.net.of("critic")
    agent.actor.mlp = RenormedMLP(1, agent.actor.encoder.size, actor.hidden, actor.activation, None)
    inputs = agent.critics.encoder.size + agent.box.size
    agent.critics.stack = RenormedMLP(cfg.critics, inputs, critics.hidden, critics.activation, 1)
    return agent


@dataclass(frozen=True)
class CrossQ(SAC):
    """Settings of CrossQ."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    has_target: ClassVar[bool] = False
    """The agent keeps no target networks."""

    lr: Rate = 1e-3
    """Adam's step size, usually 3e-4 to 1e-3; 1e-3 in the paper."""
    beta1: Unit = 0.5
    """Decay of running gradients in adam, adamw and radam, less than 1; 0.5 in the paper, or steps overshoot."""
    policy_delay: Count = 3
    """Gradient steps of the critics for each step of actor and temperature; 3 in the paper."""
    warmup_updates: Whole = 100_000
    """Gradient steps with plain batch norm, before outputs are corrected towards running moments."""
    max_grad_norm: Bound | None = None
    """Must be None: running moments move by what would be scaled."""
    net: Net = Net(hidden=(256, 256), critic_hidden=(1024, 1024), activation="relu")
    """Networks of the default agent, critics usually 512 to 2,048 wide (2,048 in the paper)."""
    agent: AgentFn = agent_fn

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_atoms(self)
        if self.beta1 == 1.0:
            raise ConfigError(
                "beta1=1.0, by which running gradients would never move; expected less, usually 0.5 to 0.9"
            )
        if self.optimizer == "rmsprop" and self.beta1 != CrossQ.beta1:
            raise ConfigError(
                f"beta1={self.beta1} with optimizer='rmsprop', which averages no gradients; leave it out, or use "
                "optimizer='adam', 'adamw' or 'radam'"
            )
        if self.max_grad_norm is not None:
            raise ConfigError(f"max_grad_norm={self.max_grad_norm} with CrossQ, whose moments it would scale; use None")
        if self.tau != SAC.tau or self.target_interval != SAC.target_interval:
            raise ConfigError(
                f"tau={self.tau}, target_interval={self.target_interval} with CrossQ, which has no target networks; "
                "leave them out, or use SAC"
            )
        net = self.net
        if (net.norm, net.block, net.init, net.use_sde) != ("none", "none", "auto", False):
            raise ConfigError(
                f"CrossQ with net.norm={net.norm!r}, net.block={net.block!r}, net.init={net.init!r}, net.use_sde="
                f"{net.use_sde}; its networks have batch renorm and a start of their own: leave these, or use SAC"
            )
