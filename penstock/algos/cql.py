"""CQL: learns Q from a dataset alone, pushed down where the data has no actions (Kumar et al. 2020, arXiv:2006.04779).

CQL(H), equation 4: on SAC for boxes, and on double Q-learning for choices. Differs from the paper: all losses of a step
are taken at the same parameters, truncated episodes bootstrap, and the sum over sampled actions is a mean, so that the
gap estimates the integral itself (that of their code is larger by log(3 * sampled_actions)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.agents.agent import Agent
from penstock.agents.continuous import ControlAgent, control_agent
from penstock.agents.distributions import squashed_sample, standard_normal
from penstock.agents.networks import Net
from penstock.agents.q_agent import QAgent
from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Number, Positive, Rate, Weight, Whole
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec, describe
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.policy import Policy
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.native.elementwise import exp
from penstock.replay.replay import Replay, ReplaySchedule, ReplaySettings, make_view


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: CQL) -> TrainBatch:
    """Adds `target` = r + discount * min_k Q_target(s', a'), a' ~ pi, and the actions at which Q is pushed down.

    These are `proposed` [N, 3 n, size] with `density` [N, 3 n], their log-density where they come from: n uniform ones,
    n of pi(s) and n of pi(s') (appendix F).
    """
    N, n, size = len(x["return"]), cfg.sampled_actions, agent.box.size
    noise = x["noise"].view(N, 2 + 3 * n, size)
    present, following = agent(x.inputs), agent(x["next"])
    action, logp = squashed_sample(following, standard_normal(noise[:, 1]))
    value = agent.target_q(x["next"], action).amin(0)
    if cfg.entropy_backup:
        value = value - alpha(agent) * logp
    target = agent.scaled_reward(x["return"]) + x["discount"] * value
    uniform, *others = noise[:, 2:].chunk(3, 1)
    drawn = [squashed_sample(out.unsqueeze(1), standard_normal(z)) for out, z in zip((present, following), others)]
    proposed = torch.cat([2.0 * uniform - 1.0, *(a for a, _ in drawn)], 1)
    density = torch.cat([uniform.new_full((N, n), -size * math.log(2.0)), *(logp for _, logp in drawn)], 1)
    rows = {"noise": noise[:, 0], "target": target, "proposed": proposed, "density": density}
    return TrainBatch(x.inputs, {**x.rows, **rows}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: CQL) -> Loss:
    """Critics: (Q - target)^2 / 2 + multiplier * gap (eq. 4). Actor and temperature: SAC's."""
    taken = agent.box.to_unit(x["action"])
    actions = torch.cat([taken.unsqueeze(1), x["proposed"]], 1)
    q, others = agent.critics.each(x.inputs, agent.for_critic(x.inputs), actions).tensor_split([1], 2)
    q = q.squeeze(2)
    gap = (others - x["density"]).logsumexp(2) - math.log(others.shape[2]) - q
    totals, metrics = critic_losses(agent, x, cfg, q, gap)
    action, logp = agent.sample(x.inputs, x["noise"])
    totals["actor"] = (alpha(agent) * logp - agent.smallest_q(x.inputs, action)).mean()
    entropy = -logp.detach().mean()
    if cfg.alpha == "auto":
        wanted = -float(agent.box.size) if cfg.target_entropy is None else cfg.target_entropy
        assert agent.log_alpha is not None
        totals["alpha"] = (agent.log_alpha * (entropy - wanted)).mean()
    metrics |= {"actor_loss": totals["actor"].detach(), "ent_coef": alpha(agent), "entropy": entropy}
    return Loss(totals, metrics, (q.detach() - x["target"]).abs().mean(0))


def postprocess_choices(agent: QAgent, x: TrainBatch, cfg: CQL) -> TrainBatch:
    """Adds `target` = r + discount * Q_target(s', argmax Q(s')), as double DQN."""
    following = x["next"]
    value = ops.double_q(agent.legal(following, agent(following)), agent.bootstrap(following))
    target = agent.scaled_reward(x["return"]) + agent.unless_stuck(following, x["discount"]) * value
    return TrainBatch(x.inputs, {**x.rows, "target": target}, None)


def loss_choices(agent: QAgent, x: TrainBatch, cfg: CQL) -> Loss:
    """(Q - target)^2 / 2 + multiplier * gap, where the sum over actions is exact (eq. 4)."""
    every = agent(x.inputs)
    q = every.gather(1, agent.index(x["action"]).unsqueeze(1)).squeeze(1)
    gap = agent.legal(x.inputs, every).logsumexp(1) - q
    totals, metrics = critic_losses(agent, x, cfg, q.unsqueeze(0), gap.unsqueeze(0))
    return Loss(totals, metrics, (q.detach() - x["target"]).abs())


def critic_losses(
    agent: Agent, x: TrainBatch, cfg: CQL, q: Tensor, gap: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses of critics and multiplier from Q [k, N] of the data's actions and gaps [k, N], and their metrics."""
    weight = x["weight"] if "weight" in x.rows else torch.ones_like(x["target"])
    bellman = 0.5 * ((q - x["target"]).square() * weight).mean(1).sum()
    gaps = (gap * weight).mean(1)
    factor, totals = cfg.cql_alpha, dict[str, Tensor]()
    if cfg.threshold is not None:  # appendix F: the multiplier rises while the gap is above the threshold
        log_multiplier = agent.get_parameter("log_multiplier")
        factor = exp(log_multiplier.detach())
        totals["multiplier"] = -exp(log_multiplier) * (gaps.detach().mean() - cfg.threshold)
    totals["critic"] = bellman + factor * gaps.sum()
    metrics = {
        "critic_loss": bellman.detach(),
        "gap": gaps.detach().mean(),
        "multiplier": torch.as_tensor(factor),
        "q": q.detach()[0].mean(),
    }
    return totals, metrics


def alpha(agent: ControlAgent) -> Tensor:
    """The temperature, without gradient."""
    assert agent.log_alpha is not None
    return exp(agent.log_alpha.detach()).squeeze(0)


def optimizer_fn(agent: ControlAgent | QAgent, cfg: CQL) -> Optimizers:
    """An optimizer for each of critics, actor, temperature and multiplier, as far as there are any."""
    boxes = isinstance(agent, ControlAgent)
    out: Optimizers = {"critic": make_optimizer((agent.critics if boxes else agent.online).parameters(), cfg)}
    if boxes:
        out["actor"] = make_optimizer(agent.actor.parameters(), cfg, cfg.actor_lr)
        if cfg.alpha == "auto":
            assert agent.log_alpha is not None
            out["alpha"] = make_optimizer([agent.log_alpha], cfg, cfg.actor_lr, decays=False)
    if cfg.threshold is not None:
        out["multiplier"] = make_optimizer([agent.get_parameter("log_multiplier")], cfg, decays=False)
    return out


def replay_fn(agent: ControlAgent | QAgent, cfg: CQL) -> ReplaySchedule:
    """Transitions, noise for the actor's action, the next one and the proposed ones, and soft target updates."""
    boxes = isinstance(agent, ControlAgent)
    update = agent.update_targets if boxes else agent.update_target

    def after_update(agent: Agent, cfg: CQL, updates: int) -> None:
        if updates % cfg.target_interval == 0:
            update(cfg.tau)

    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)
    return ReplaySchedule(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        noise_size=(2 + 3 * cfg.sampled_actions) * agent.box.size if boxes else 0,
        after_update=after_update,
    )


def agent_fn(spec: EnvSpec, cfg: CQL) -> Agent:
    """The default agent: SAC's for a box, DQN's for a choice."""
    if isinstance(spec.action, LeafSpec) and spec.action.kind == "discrete":
        return QAgent(spec, cfg.net, cfg.discount)
    if not isinstance(spec.action, LeafSpec) or spec.action.kind != "box":
        raise ConfigError(
            f"CQL needs a box or one discrete action; the environment takes {describe(spec.action)}: use MARWIL "
            "or BC, which take any"
        )
    return control_agent(spec, cfg)


def _agent_with_multiplier(spec: EnvSpec, cfg: CQL) -> Agent:
    agent = cfg.agent(spec, cfg)
    if cfg.threshold is not None:
        agent.register_parameter("log_multiplier", nn.Parameter(torch.tensor(math.log(cfg.cql_alpha))))
    return agent


@dataclass(frozen=True)
class CQL(OffPolicySettings):
    """Settings of CQL."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn, _agent_with_multiplier)
    fixed = OffPolicySettings.fixed | {"critics", "sampled_actions", "threshold"}
    usual_batch = BatchSpec(T=16, B=16)
    takes_stale = False
    offline: ClassVar[bool] = True
    """Learns from a dataset, which an OfflineSampler plays back."""
    epsilon: ClassVar[float] = 0.0
    """Exploration epsilon: 0, as the algorithm never acts to explore."""
    epsilon_low: ClassVar[float] = 0.0

    lr: Rate = 3e-4
    """Adam's step size of the critics, usually 1e-4 to 1e-3."""
    actor_lr: Positive | None = 1e-4
    """Step size of actor and temperature, usually below the critics'; None for the critics' `lr`."""
    cql_alpha: Weight = 1.0
    """Weight of the gap between Q at all actions and at the data's, in units of Q: 0.02 to 10 for returns of about 1.

    With a `threshold`: the multiplier's first value. The alpha of equation 4; half of min_q_weight in the authors'
    code.
    """
    threshold: Number | None = None
    """Lagrange variant: learn the multiplier so that the gap stays below this; None: the multiplier is `cql_alpha`."""
    sampled_actions: Count = 10
    """Boxes: actions drawn from each of three distributions, at which Q is pushed down; usually 4 to 10."""
    entropy_backup: bool = False
    """Boxes: add the entropy of the next action to targets, as SAC does."""
    replay_ratio: Positive = 256.0
    """Rows trained on for each row played back; 256 with batch_size 256 is a gradient step for each."""
    learning_starts: Whole = 1_000
    """Rows played back before the first gradient step."""
    target_interval: Count = 1
    """Gradient steps between updates of the target critics."""
    alpha: Rate | Literal["auto"] = "auto"
    """Boxes: temperature, or `auto` to learn it."""
    target_entropy: Number | None = None
    """Boxes: entropy in nats, of actions scaled to [-1, 1], that `auto` aims at; None: minus the number of elements."""
    critics: Count = 2
    """Boxes: critics; targets and the actor use the smallest of their values."""
    replay: ReplaySettings = ReplaySettings()
    """Replay of the rows played back: how many are kept, and how they are drawn."""
    net: Net = Net(hidden=(256, 256), activation="relu")
    """Networks of the default agent."""
    agent: AgentFn = agent_fn

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.net.is_recurrent:
            raise ConfigError(f"CQL with net.recurrent={self.net.recurrent!r}; BC and MARWIL learn with memory")
        if self.threshold is not None and self.cql_alpha == 0.0:
            raise ConfigError(
                f"cql_alpha={self.cql_alpha}, threshold={self.threshold}; expected more than 0 with a threshold, "
                "where the multiplier begins at it"
            )

    def build(self, spec: EnvSpec, seed: int = 0, device: str = "cpu", total_steps: int | None = None) -> Policy:
        choices = isinstance(spec.action, LeafSpec) and spec.action.kind == "discrete"
        functions = (
            self.functions._replace(postprocess=postprocess_choices, loss=loss_choices) if choices else self.functions
        )
        policy = self.policy(functions, spec, seed, device)
        policy.clock.begin(total_steps)
        return policy
