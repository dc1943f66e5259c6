"""ReBRAC: TD3 held near the data in actor and critics (Tarasov et al. 2023, arXiv:2305.09836); TD3+BC (2106.06860).

ReBRAC: equations 4 and 5, Q divided by its mean size as in the authors' code. TD3+BC (Fujimoto and Gu 2021, equations 3
and 5) holds the actor alone. Differs from the papers: actor and critics step at the same parameters where both are due,
truncated episodes bootstrap, there without the critics' penalty as no next action was recorded, n-step targets may be
used, and norms stand before activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock import ops
from penstock.agents.continuous import ControlAgent
from penstock.agents.distributions import standard_normal
from penstock.agents.networks import Net
from penstock.algos.td3 import TD3, after_update, optimizer_fn
from penstock.core.batch import TrainBatch
from penstock.core.limits import Positive, Rate, Weight, Whole
from penstock.core.spec import BatchSpec
from penstock.learn.algorithm import Loss
from penstock.learn.settings import AlgorithmFunctions, refuse_atoms
from penstock.learn.slot_partition import sample_mean
from penstock.replay.replay import Replay, ReplaySchedule, make_view


def postprocess_fn(agent: ControlAgent, x: TrainBatch, cfg: ReBRAC) -> TrainBatch:
    """Adds `target` = r + discount * (min_k Q_target(s', a') - critic_bc * |a' - a_data'|^2), a' as in TD3 (eq. 5).

    a_data' is the action recorded at s'; where there is none, as after a time limit, its term is 0.
    """
    following = x["next"]
    noise = (cfg.target_noise * standard_normal(x["noise"])).clamp(-cfg.target_noise_clip, cfg.target_noise_clip)
    action = (agent.target_point(following) + noise).clamp(-1.0, 1.0)
    value = agent.target_q(following, action).amin(0)
    if "next_action" in x.rows:
        apart = (action - agent.box.to_unit(x["next_action"])).square().sum(1)
        value = value - cfg.critic_bc * apart * x["has_next_action"]
    target = agent.scaled_reward(x["return"]) + x["discount"] * value
    return TrainBatch(x.inputs, {**x.rows, "target": target}, None)


def loss_fn(agent: ControlAgent, x: TrainBatch, cfg: ReBRAC) -> Loss:
    """Critics: (Q - target)^2. Actor, every `policy_delay` steps: actor_bc |mu(s) - a|^2 - Q(s, mu(s)) / mean |Q|.

    That is equation 4. TD3+BC has the mean over elements, the first critic, and all of this times alpha = 1 / actor_bc,
    which changes nothing.
    """
    taken = agent.box.to_unit(x["action"])
    critic_loss, priorities = ops.critic_loss(agent.q(x.inputs, taken), x["target"], x.rows.get("weight"))
    totals, metrics = {"critic": critic_loss}, {"critic_loss": critic_loss, "q": x["target"].mean()}
    if x["update"] % cfg.policy_delay == cfg.policy_delay - 1:
        action = agent.point(x.inputs)
        q = agent.smallest_q(x.inputs, action, of=cfg.actor_critics)
        apart = (action - taken).square()
        apart = apart.mean(1) if cfg.mean_distance else apart.sum(1)
        totals["actor"] = (cfg.actor_bc * apart - q / sample_mean(q.detach().abs(), x.valid)).mean()
        metrics |= {"actor_loss": totals["actor"], "bc_loss": apart.mean()}
    return Loss(totals, {name: value.detach() for name, value in metrics.items()}, priorities)


def replay_fn(agent: ControlAgent, cfg: ReBRAC) -> ReplaySchedule:
    """TD3's, whose transitions hold the next recorded action where the critics' penalty needs it."""
    penalty = cfg.critic_bc != 0.0
    fed, clips = agent.fed, cfg.net.clip_reward
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, clips, fed, next_action=penalty)
    return ReplaySchedule(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        noise_size=agent.box.size,
        after_update=after_update,
    )


@dataclass(frozen=True)
class ReBRAC(TD3):
    """Settings of ReBRAC."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = TD3.fixed | {"critic_bc"}
    usual_batch = BatchSpec(T=16, B=16)
    offline: ClassVar[bool] = True
    """Learns from a dataset, which an OfflineSampler plays back or the replay keeps."""
    actor_critics: ClassVar[int | None] = None
    """Critics whose least value the actor climbs; None: all."""
    mean_distance: ClassVar[bool] = False
    """The actor's distance from the data is the mean over elements of an action; else their sum."""

    actor_bc: Weight = 1.0
    """Weight of the squared distance of the actor's actions from the data's, usually 0.001 to 1."""
    critic_bc: Weight = 1.0
    """Weight of that distance at the next step in targets, in units of Q, which adds up over steps; usually 0 to 0.1,
    for scaled rewards to 0.01."""
    replay_ratio: Positive = 256.0
    """Rows trained on for each row played back; 256 with batch_size 256 is a gradient step for each."""
    learning_starts: Whole = 0
    """Rows played back or collected before the first gradient step; with an environment, of random actions."""
    net: Net = Net(hidden=(256, 256, 256), activation="relu", norm="critic")
    """Networks of the default agent; norms keep critics from growing beyond the data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_atoms(self)


@dataclass(frozen=True)
class TD3BC(ReBRAC):
    """Settings of TD3+BC."""

    actor_critics = 1
    mean_distance = True

    lr: Rate = 3e-4
    """Adam's step size of the critics, usually 3e-4 to 1e-3."""
    actor_bc: Weight = 0.4
    """Weight of the mean squared distance of the actor's actions from the data's: 1 / alpha of the paper (2.5)."""
    critic_bc: Weight = 0.0
    """Weight of the squared distance at the next step in targets; 0 in the paper."""
    net: Net = Net(hidden=(256, 256), activation="relu", normalize_obs=True)
    """Networks of the default agent."""
