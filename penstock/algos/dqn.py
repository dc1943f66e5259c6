"""DQN, and Rainbow's additions as settings: double, dueling, n-step, prioritized, C51 or quantiles, noisy nets.

Mnih et al. 2015 (Nature 518); van Hasselt et al. 2016 (double); Wang et al. 2016 (dueling); Schaul et al. 2016
(prioritized); Bellemare et al. 2017 (C51); Dabney et al. 2018 (QR-DQN); Fortunato et al. 2018 (noisy); Hessel et al.
2018 (all at once: Rainbow). Ape-X (Horgan et al. 2018) is this with `ladder="ape-x"` and an AsyncSampler.

Differs from the papers: Adam throughout, truncated episodes bootstrap, and noisy layers act with one noise for a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch

from penstock import ops
from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.agents.q_agent import Ladder, QAgent, q_agent
from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Chance, Count, Limit, Number, Part, Positive, Rate, Share, Unit, Whole
from penstock.core.spec import EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings, check_atoms
from penstock.native.elementwise import log_softmax, softmax
from penstock.replay.columns import Array, Rows
from penstock.replay.replay import Replay, ReplaySchedule, make_view
from penstock.replay.storage import Storage


def postprocess_fn(agent: QAgent, x: TrainBatch, cfg: DQN) -> TrainBatch:
    """Adds `target`: r + discount * Q_target(next, argmax Q), as a number, a distribution over atoms, or quantiles."""
    following = x["next"]
    out = agent.bootstrap(following)
    chooser = agent(following) if cfg.double else out
    best = agent.greedy(following, agent.expected(chooser))
    best_out = of_action(out, best)
    reward, discount = agent.scaled_reward(x["return"]), agent.unless_stuck(following, x["discount"])
    if cfg.distributional == "c51":
        target = ops.project_categorical(softmax(best_out), reward, discount, agent.atoms)
    elif cfg.distributional == "quantile":
        target = reward.unsqueeze(-1) + discount.unsqueeze(-1) * best_out
    else:
        target = reward + discount * best_out
    return TrainBatch(x.inputs, {**x.rows, "target": target}, None)


def loss_fn(agent: QAgent, x: TrainBatch, cfg: DQN) -> Loss:
    """Huber loss of Q - target, cross-entropy of the atoms (Bellemare eq. 7), or quantile Huber (Dabney eq. 10)."""
    chosen = of_action(agent(x.inputs), agent.index(x["action"]))
    if cfg.distributional == "none":
        total, priorities = ops.td_loss(chosen, x["target"], x.rows.get("weight"), cfg.huber_delta)
        return Loss(total, {"loss": total.detach(), "q": chosen.detach().mean()}, priorities)
    if cfg.distributional == "c51":
        each = ops.categorical_cross_entropy(x["target"], log_softmax(chosen))
        priorities, q = each.detach(), (softmax(chosen.detach()) * agent.atoms).sum(-1)
    else:
        each = ops.quantile_huber(chosen, x["target"], kappa=cfg.huber_delta)
        q = chosen.detach().mean(-1)
        priorities = (x["target"].mean(-1) - q).abs()
    total = (each * x["weight"]).mean() if "weight" in x.rows else each.mean()
    return Loss(total, {"loss": total.detach(), "q": q.mean()}, priorities)


def of_action(out: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[N] or [N, K] of a network's outputs [N, A] or [N, A, K] for one action of each row."""
    if out.ndim == 2:
        return out.gather(1, index.unsqueeze(1)).squeeze(1)
    return out.take_along_dim(index.view(-1, 1, 1), 1).squeeze(1)


def optimizer_fn(agent: QAgent, cfg: DQN) -> Optimizers:
    """One optimizer over the online network."""
    return {"all": make_optimizer(agent.online.parameters(), cfg)}


def replay_fn(agent: QAgent, cfg: DQN) -> ReplaySchedule:
    """n-step transitions, in hindsight if asked, and the target network's update after each gradient step."""
    fresh = cfg.records_q
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed, acted_next=fresh)

    def recorded_error(storage: Storage, t: Rows) -> Array:
        rows, slots = (x.ravel() for x in np.broadcast_arrays(t[:, None], np.arange(storage.slots)))
        total, terminated, after = view.returns(storage, rows, slots)
        scaled = agent.scaled_reward(torch.from_numpy(total).to(agent.epsilon.device)).cpu().numpy()
        following = storage.info("['q_max']", rows + after, slots) * ~terminated * view.discount**after
        return (scaled + following - storage.info("['q']", rows, slots)).reshape(len(t), -1)

    replay = Replay(
        agent.spec,
        cfg.replay,
        view,
        info=("['q']", "['q_max']") if fresh else (),
        priority_fn=recorded_error if fresh else None,
    )

    def after_update(agent: QAgent, cfg: DQN, updates: int) -> None:
        if updates % cfg.target_interval == 0:
            agent.update_target(cfg.tau)

    return ReplaySchedule(replay, cfg.batch_size, cfg.replay_ratio, cfg.learning_starts, after_update=after_update)


def agent_fn(spec: EnvSpec, cfg: DQN) -> Agent:
    """The default agent."""
    return q_agent(spec, cfg)


@dataclass(frozen=True)
class DQN(OffPolicySettings):
    """Settings of DQN and Rainbow."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = OffPolicySettings.fixed | {
        "dueling",
        "dueling_hidden",
        "distributional",
        "n_atoms",
        "v_min",
        "v_max",
        "noisy",
        "noisy_sigma",
        "ladder",
        "eps_eval",
    }

    lr: Rate = 1e-4
    """Adam's step size, usually 6e-5 (Atari) to 1e-3."""
    batch_size: Count = 32
    """Transitions of a gradient step, usually 32 to 256."""
    replay_ratio: Positive = 8.0
    """Rows trained on for each row collected, usually 8 (Atari: 32 every 4 steps) to 256."""
    learning_starts: Whole = 1_000
    """Steps of random actions before the first gradient step."""
    n_step: Count = 1
    """Rewards in a target before the value, usually 1 to 5; 3 in Rainbow."""
    double: bool = True
    """The online network chooses the action that the target network values (van Hasselt et al. 2016)."""
    dueling: bool = False
    """Compute value and advantages in two streams, each with its own hidden units (Wang et al. 2016)."""
    dueling_hidden: tuple[Count, ...] | None = None
    """Widths of each stream's hidden layers, which follow those of `net`. None: each stream has one hidden layer of the
    last width of `net.hidden`, which is then not shared, or 512 if `hidden` is empty (as in the paper). (): each stream
    is one linear layer."""
    distributional: Literal["none", "c51", "quantile"] = "none"
    """Learn the distribution of returns: over fixed atoms, or by quantiles."""
    n_atoms: Annotated[int, Limit(2)] = 51
    """Atoms of C51, or quantiles; 51 and 200 in the papers."""
    v_min: Number = -10.0
    """Smallest return that C51 can tell apart."""
    v_max: Number = 10.0
    """Largest return that C51 can tell apart; for rewards of 1 a step about 1 / (1 - discount)."""
    noisy: bool = False
    """Explore by noisy layers; `noisy_epsilon` then replaces `epsilon`. Noise for acting is drawn once a batch, so
    choose a small T."""
    noisy_epsilon: Chance = 0.0
    """With noisy layers: chance of a random action after `learning_starts`; 0 in Rainbow."""
    noisy_sigma: Positive = 0.5
    """Initial standard deviation of noisy layers, times sqrt(inputs): 0.5 in Fortunato et al. 2018, 0.1 to 0.5
    elsewhere."""
    epsilon: Chance = "linear(1.0, 0.05, 0.1)"
    """Chance of a random action; with a ladder, the largest epsilon of any slot."""
    ladder: Ladder = "none"
    """Gives every slot its own epsilon: `ape-x` (epsilon^(1 + 7 i / (B - 1))) or `log-space` up from `epsilon_low`."""
    epsilon_low: Share = 0.0005
    """Smallest epsilon of the `log-space` ladder."""
    eps_eval: Unit = 0.0
    """Chance of a random action in evaluations, usually 0 to 0.05; 0.001 in Dopamine, 0.05 in Mnih et al. 2015."""
    target_interval: Count = 250
    """Gradient steps between updates of the target network."""
    tau: Part = 1.0
    """Share of the online network in a target update: 1 is a hard copy, 0.005 with interval 1 a soft one."""
    huber_delta: Rate = 1.0
    """Huber loss: errors beyond this count linearly."""
    max_grad_norm: Bound = 10.0
    """Gradients are scaled down to this norm."""
    net: Net = Net(hidden=(256, 256), activation="relu")
    """Networks of the default agent."""
    agent: AgentFn = agent_fn

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.net.is_recurrent:
            raise ConfigError(f"DQN with net.recurrent={self.net.recurrent!r}; sequences with memory are R2D1's")
        check_atoms(self)
        if self.records_q and self.distributional == "c51":
            raise ConfigError("replay.fresh_priority='agent' with C51, whose priorities are no TD errors; use 'max'")

    @property
    def outputs(self) -> int:
        """Numbers that the network has for an action."""
        return 1 if self.distributional == "none" else self.n_atoms

    @property
    def records_q(self) -> bool:
        """The agent records what priorities of fresh rows need."""
        return self.replay.index == "prioritized" and self.replay.fresh_priority == "agent"
