"""R2D1, which is R2D2 on one machine: Q-learning with memory, from replayed sequences with the state they began in.

Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning"; Stooke and Abbeel 2019
(rlpyt), who named it R2D1. Its parts: n-step double Q-learning, dueling heads, value rescaling (Pohlen et al. 2018),
prioritized replay (Schaul et al. 2016) with a priority for a sequence, and an epsilon per slot (Horgan et al. 2018).

Differs from the papers: a sequence may run over the ends of episodes, where memory starts anew and targets stop;
truncated episodes bootstrap; the value of rows after the trained ones passes no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.agents.q_agent import Ladder, QAgent, q_agent
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Chance, Count, NotNegative, Part, Positive, Rate, Share, Unit, Whole
from penstock.core.schedule import with_values
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.core.tree import tree_map
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.replay.columns import Array, Rows
from penstock.replay.replay import Replay, ReplaySchedule, ReplaySettings
from penstock.replay.storage import Storage
from penstock.replay.view import Sequences


def postprocess_fn(agent: QAgent, x: TrainBatch, cfg: R2D1) -> TrainBatch:
    """Runs both networks through the burn-in, each from the stored state, and leaves what lies after it.

    Returns:
        `inputs` [train_length + n_step, N, ...], rows and `valid` one row less, `state` of the online network before
        them, and `q_target` [train_length + n_step, N, A].
    """
    assert x.valid is not None
    # A sequence ends with an observation more than its last target needs.
    start, end = cfg.burn_in, len(x.valid)
    state = x.state
    if start:
        warm = between(x.inputs, 0, start)
        _, state = agent.online(warm, agent.prepared(warm.obs), state)
    q_target = agent.bootstrap(between(x.inputs, 0, end), x.state)[start:]
    rows = {name: x[name][start : end - 1] for name in ("action", "reward", "terminated", "truncated")}
    if "weight" in x.rows:
        rows["weight"] = x["weight"]
    return TrainBatch(between(x.inputs, start, end), {**rows, "q_target": q_target}, x.valid[start : end - 1], state)


def loss_fn(agent: QAgent, x: TrainBatch, cfg: R2D1) -> Loss:
    """Half the squared TD error over the valid trained rows, each sequence with its weight; and its new priority."""
    assert x.valid is not None
    train = cfg.train_length
    trained, beyond = between(x.inputs, 0, train), between(x.inputs, train, train + cfg.n_step)
    q, state = agent.online(trained, agent.prepared(trained.obs), x.state)
    with torch.no_grad():
        q_beyond, _ = agent.online(beyond, agent.prepared(beyond.obs), state)
        chooser = torch.cat((q, q_beyond)) if cfg.double else x["q_target"]
        value = agent.unless_stuck(x.inputs, ops.double_q(agent.legal(x.inputs, chooser), x["q_target"]))
        target = targets(agent, x["reward"], value, x["terminated"], x["truncated"], x.valid, cfg)
    chosen = q.gather(-1, agent.index(x["action"][:train]).unsqueeze(-1)).squeeze(-1)
    error, valid = chosen - target, x.valid[:train]
    each = 0.5 * error.square()
    total = ops.masked_mean(each * x["weight"] if "weight" in x.rows else each, valid)
    size = error.detach().abs()
    q_mean = ops.masked_mean(chosen.detach(), valid)
    metrics = {"loss": total.detach(), "q": q_mean, "td_error": ops.masked_mean(size, valid)}
    return Loss(total, metrics, ops.sequence_priority(size, valid, cfg.eta), rows=valid.sum())


def targets(
    agent: QAgent, reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, cfg: R2D1
) -> Tensor:
    """[train_length, N] h(sum of n discounted rewards + discount^n h^-1(value)) (Kapturowski et al. 2019, eq. 1).

    Args:
        reward, terminated, truncated, valid: [train_length + n_step - 1, N].
        value: [train_length + n_step, N] as the network gives it, of the rows' observations.
    """
    value = ops.value_unscale(value, cfg.rescale_eps) if cfg.value_rescale else value
    return_ = ops.n_step_return(
        agent.scaled_reward(reward), value, terminated, truncated, valid, discount=cfg.discount, n=cfg.n_step
    )[: cfg.train_length]
    return ops.value_rescale(return_, cfg.rescale_eps) if cfg.value_rescale else return_


def between(inputs: Inputs, start: int, end: int) -> Inputs:
    """Rows `start` to `end` of [T, ...] inputs."""
    return Inputs(*(tree_map(lambda x: x[start:end], part) for part in inputs))


def optimizer_fn(agent: QAgent, cfg: R2D1) -> Optimizers:
    """One optimizer over the online network."""
    return {"all": make_optimizer(agent.online.parameters(), cfg)}


def replay_fn(agent: QAgent, cfg: R2D1) -> ReplaySchedule:
    """Sequences with stored state, and the target network's update after each gradient step."""
    given = cfg.state_interval, cfg.burn_in, cfg.train_length, cfg.n_step, cfg.net.clip_reward, agent.fed, cfg.discount
    view = Sequences(*given)

    def recorded_priority(storage: Storage, t: Rows) -> Array:
        """[n, B] as `loss_fn` returns it, by the values that the agent saw when it acted."""
        at = t[:, None] + np.arange(view.span)[:, None, None]
        rows, slots = (x.reshape(len(at), -1) for x in np.broadcast_arrays(at, np.arange(storage.slots)))
        places = storage.places(rows, slots)
        valid = view.valid(storage, rows, places)[cfg.burn_in : -1]
        rows, slots, places = rows[cfg.burn_in :], slots[cfg.burn_in :], places[cfg.burn_in :]
        reward = storage.prev_reward(places[1:])
        kept = (
            np.sign(reward) if cfg.net.clip_reward else reward,
            storage.info("['q_max']", rows, slots),
            storage.terminated(places[:-1]),
            storage.truncated(places[:-1]),
            valid,
        )
        reward, value, terminated, truncated, valid = (torch.from_numpy(x).to(agent.epsilon.device) for x in kept)
        now = with_values(cfg, {"discount": view.discount})
        target = targets(agent, reward, value, terminated, truncated, valid, now).cpu()
        size = (torch.from_numpy(storage.info("['q']", rows[:-1], slots[:-1])[: cfg.train_length]) - target).abs()
        return ops.sequence_priority(size, valid[: cfg.train_length].cpu(), cfg.eta).reshape(len(t), -1).numpy()

    state = tree_map(lambda x: x[0].cpu().numpy(), agent.initial_state(1))
    fresh = cfg.records_q
    replay = Replay(
        agent.spec,
        cfg.replay,
        view,
        info=("['q']", "['q_max']") if fresh else (),
        priority_fn=recorded_priority if fresh else None,
        state=state,
    )

    def after_update(agent: QAgent, cfg: R2D1, updates: int) -> None:
        if updates % cfg.target_interval == 0:
            agent.update_target(cfg.tau)

    return ReplaySchedule(
        replay,
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        sample_rows=cfg.train_length,
        after_update=after_update,
    )


def agent_fn(spec: EnvSpec, cfg: R2D1) -> Agent:
    """The default agent."""
    return q_agent(spec, cfg)


@dataclass(frozen=True)
class R2D1(OffPolicySettings):
    """Settings of R2D1."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = OffPolicySettings.fixed | {
        "burn_in",
        "train_length",
        "state_interval",
        "dueling",
        "dueling_hidden",
        "value_rescale",
        "rescale_eps",
        "eta",
        "ladder",
        "eps_eval",
    }
    usual_batch = BatchSpec(T=40, B=16)

    lr: Rate = 1e-3
    """Adam's step size, usually 1e-4 (Atari) to 1e-3."""
    discount: Chance = 0.997
    """Weight of the next step's value, usually 0.99 to 0.997."""
    batch_size: Count = 32
    """Sequences of a gradient step, usually 16 to 64."""
    replay_ratio: Positive = 16.0
    """Rows trained on for each row collected, usually 1 (Atari) to 16; burn-in does not count."""
    learning_starts: Whole = 1_000
    """Steps of random actions before the first gradient step; 1e5 in rlpyt."""
    n_step: Count = 5
    """Rewards in a target before the value, usually 3 to 5."""
    burn_in: Whole = 20
    """Rows at the start of a sequence that only refresh its stored state, usually 0 to 40."""
    train_length: Count = 40
    """Rows of a sequence after the burn-in, which the loss trains on; usually 20 to 80."""
    state_interval: Count = 40
    """Rows from the start of a sequence to that of the next; `sampler.T` must divide it."""
    double: bool = True
    """The online network chooses the action that the target network values (van Hasselt et al. 2016)."""
    dueling: bool = True
    """Compute value and advantages in two streams, each with its own hidden units (Wang et al. 2016)."""
    dueling_hidden: tuple[Count, ...] | None = None
    """Widths of each stream's hidden layers, behind the memory. None: one layer as wide as the memory, as in R2D2 and
    rlpyt. (): each stream is one linear layer."""
    value_rescale: bool = True
    """The network learns h(Q), which shrinks large returns (Pohlen et al. 2018)."""
    rescale_eps: Positive = 1e-3
    """Slope of h where returns are large."""
    eta: Chance = 0.9
    """Priority of a sequence: eta * its largest error + (1 - eta) * its mean error."""
    epsilon: Chance = 0.4
    """Chance of a random action; with a ladder, the largest epsilon of any slot."""
    ladder: Ladder = "ape-x"
    """Gives every slot its own epsilon: `ape-x` (epsilon^(1 + 7 i / (B - 1))) or `log-space` up from `epsilon_low`."""
    epsilon_low: Share = 0.0005
    """Smallest epsilon of the `log-space` ladder."""
    eps_eval: Unit = 0.0
    """Chance of a random action in evaluations, usually 0 to 0.05."""
    target_interval: Count = 100
    """Gradient steps between updates of the target network, usually 100 to 2,500 (Atari)."""
    tau: Part = 1.0
    """Share of the online network in a target update: 1 is a hard copy, 0.005 with interval 1 a soft one."""
    max_grad_norm: Bound = 80.0
    """Gradients are scaled down to this norm."""
    adam_eps: NotNegative = 1e-5
    """Added to the optimizer's divisor; the paper's 1e-3 suits the gradients of Atari."""
    replay: ReplaySettings = ReplaySettings(
        index="prioritized", priority_alpha=0.9, priority_beta=0.6, fresh_priority="agent"
    )
    """Replay: how many rows are kept, and how they are drawn."""
    net: Net = Net(hidden=(128,), activation="relu", recurrent="lstm", prev_action=True, prev_reward=True)
    """Networks of the default agent."""
    agent: AgentFn = agent_fn

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.net.is_recurrent:
            raise ConfigError("R2D1 with net.recurrent='none'; use 'lstm' or 'gru', or DQN for networks without memory")

    @property
    def outputs(self) -> int:
        """Numbers that the network has for an action."""
        return 1

    @property
    def noisy(self) -> bool:
        """Exploration is by epsilon."""
        return False

    @property
    def noisy_sigma(self) -> float:
        """Unused: R2D1 has no noisy layers."""
        return 0.5

    @property
    def records_q(self) -> bool:
        """The agent records what priorities of fresh rows need."""
        return self.replay.index == "prioritized" and self.replay.fresh_priority == "agent"
