"""QMIX and VDN: Q-learning of a team with one reward; the joint Q mixes those of the agents.

Sunehag et al. 2018 (VDN): Q_tot is the sum of the agents' Q. Rashid et al. 2018 (QMIX, arXiv:1803.11485): Q_tot is a
network of them that rises with each (eq. 5), its weights made from the state of the team (section 4). Either way the
joint greedy action is the greedy action of each agent (eq. 4), so agents act alone. One policy plays all agents of the
team; where they should differ, their observations say who is who.

Differs from the papers: no memory, and no last action among the inputs; samples are transitions, not episodes, and
n-step targets may be used; targets are those of double Q-learning, as in the authors' code (`double=False`: eq. 6 as it
stands); Adam, not RMSprop; target networks and epsilon go by gradient steps and by the run, not by episodes; truncated
episodes bootstrap; and an agent that is dead or absent enters neither the sum nor the mixer (a row is of those that
acted).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from penstock import ops
from penstock.agents.agent import Agent, follow
from penstock.agents.networks import Net
from penstock.agents.precision import in_full
from penstock.agents.preparation import ObsNormalizer
from penstock.agents.q_agent import Ladder, QAgent
from penstock.algos.dqn import of_action
from penstock.algos.mappo import without_state
from penstock.core.batch import Inputs, SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Cap, Chance, Count, Part, Positive, Rate, Share, Unit, Whole
from penstock.core.spec import STATE_KEY, BatchSpec, EnvSpec
from penstock.core.tree import Tree
from penstock.learn.algorithm import AgentFn, Loss, Optimizers
from penstock.learn.optimizers import make_optimizer
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.replay.lockstep import LockstepTransitions, TeamReward
from penstock.replay.replay import Replay, ReplaySchedule


def postprocess_fn(agent: TeamQAgent, x: TrainBatch, cfg: QMIX) -> TrainBatch:
    """Adds `target` [N]: r + discount * Q_tot_target(next, each agent's argmax Q)  (eq. 6; `double` says whose Q)."""
    following, present = x["next"].flat(), x["next_valid"]
    out = agent.q.bootstrap(following)
    best = agent.q.greedy(following, agent.q(following) if cfg.double else out)
    value = agent.q.unless_stuck(following, of_action(out, best)).reshape(present.shape)
    joint = in_full(agent.target_mixer, value.masked_fill(~present, 0.0), agent.team_state(x, "next_state"))
    target = agent.scaled_reward(x["return"]) + x["discount"] * joint
    return TrainBatch(x.inputs, {**x.rows, "target": target}, x.valid)


def loss_fn(agent: TeamQAgent, x: TrainBatch, cfg: QMIX) -> Loss:
    """The mean over teams of half of (Q_tot - target)^2 (eq. 6), or of Huber's loss."""
    assert x.valid is not None
    q = of_action(agent.q(x.inputs.flat()), agent.q.index(x["action"].flatten())).reshape(x.valid.shape)
    joint = in_full(agent.mixer, q.masked_fill(~x.valid, 0.0), agent.team_state(x, "state"))
    total, priorities = ops.td_loss(joint, x["target"], x.rows.get("weight"), cfg.huber_delta)
    metrics = {"loss": total, "q": ops.masked_mean(q, x.valid), "q_tot": joint.mean()}
    return Loss(total, {name: m.detach() for name, m in metrics.items()}, priorities, rows=x.valid.any(-1).sum())


def optimizer_fn(agent: TeamQAgent, cfg: QMIX) -> Optimizers:
    """One optimizer over the online network and the mixer."""
    return {"all": make_optimizer([*agent.q.online.parameters(), *agent.mixer.parameters()], cfg)}


def replay_fn(agent: TeamQAgent, cfg: QMIX) -> ReplaySchedule:
    """Transitions of whole teams, and the target networks' update after each gradient step."""
    seats = agent.spec.agents
    view = LockstepTransitions(seats, cfg.n_step, cfg.discount, cfg.team_reward, cfg.net.clip_reward, agent.fed)

    def after_update(agent: TeamQAgent, cfg: QMIX, updates: int) -> None:
        if updates % cfg.target_interval == 0:
            agent.update_target(cfg.tau)

    return ReplaySchedule(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        sample_rows=seats,
        after_update=after_update,
    )


class SumMixer(nn.Module):
    """VDN's: Q_tot [N] is the sum of q [N, K]."""

    def forward(self, q: Tensor, state: Tensor | None) -> Tensor:
        return q.sum(-1)


class MonotonicMixer(nn.Module):
    """QMIX's mixer: Q_tot [N] of q [N, K] by a layer of `hidden` elu units; hypernetworks make weights from the state.

    Weights are absolute values, so Q_tot rises with each agent's Q; biases may have any sign, and the last one is a
    network of two layers (Rashid et al. 2018, section 4 and figure 2).
    """

    def __init__(self, seats: int, state: int, hidden: int) -> None:
        super().__init__()
        self.seats, self.hidden = seats, hidden
        self.first_weight, self.first_bias = nn.Linear(state, seats * hidden), nn.Linear(state, hidden)
        self.last_weight = nn.Linear(state, hidden)
        self.last_bias = nn.Sequential(nn.Linear(state, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        first = self.first_weight(state).abs().reshape(-1, self.seats, self.hidden)
        x = F.elu((q.unsqueeze(1) @ first).squeeze(1) + self.first_bias(state))
        return (x * self.last_weight(state).abs()).sum(-1) + self.last_bias(state).squeeze(-1)


class TeamQAgent(Agent):
    """Agents that act by their own Q (`q`, a QAgent), and mixers that compute the joint Q.

    Raises:
        ConfigError: the mixer needs a state and observations have none, or the net is recurrent.
    """

    unseen = frozenset((STATE_KEY,))

    def __init__(self, spec: EnvSpec, cfg: QMIX) -> None:
        super().__init__()
        if cfg.net.is_recurrent:
            raise ConfigError(
                f"QMIX with net.recurrent={cfg.net.recurrent!r}; expected 'none': its agents have no memory"
            )
        self.spec, mixed = spec, cfg.mixer == "qmix"
        obs: Any = without_state(spec.obs) if mixed or _has_state(spec.obs) else spec.obs
        seen = EnvSpec(obs, spec.action, spec.agents)
        net = cfg.net.without_keys((STATE_KEY,))
        self.q = QAgent(seen, net, cfg.discount, dueling=cfg.dueling, ladder=cfg.ladder, eps_eval=cfg.eps_eval)
        self.fed, self.preparation = self.q.fed, self.q.preparation
        self.noise_size, self.env_ranks = self.q.noise_size, self.q.env_ranks
        self.evaluates_with_noise, self.is_noisy = self.q.evaluates_with_noise, False
        leaf = spec.obs[STATE_KEY] if mixed else None
        self.state_normalizer = ObsNormalizer(leaf) if leaf is not None and cfg.net.normalize_obs else None
        self.mixer = SumMixer() if leaf is None else MonotonicMixer(spec.agents, leaf.size, cfg.mixing_hidden)
        self.target_mixer = copy.deepcopy(self.mixer).requires_grad_(False)

    def set_slots(self, B: int) -> None:
        self.q.set_slots(B)

    def set_exploration(self, settings: Any, env_steps: int) -> None:
        self.q.set_exploration(settings, env_steps)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        return self.q.act(self._visible(inputs), state, noise)

    def forward(self, inputs: Inputs, state: Tree = None) -> Tensor:
        """[N, A] Q of each agent's own actions."""
        return self.q(self._visible(inputs))

    def team_state(self, x: TrainBatch, name: str) -> Tensor | None:
        """[N, S] row `state` or `next_state` as the mixer sees it; None for a mixer without one."""
        if isinstance(self.mixer, SumMixer):
            return None
        state = x[name] if self.state_normalizer is None else self.state_normalizer(x[name])
        return state.float().flatten(1)

    def observe(self, batch: SampleBatch) -> None:
        if self.state_normalizer is not None:
            self.state_normalizer.update(batch.obs[STATE_KEY][:-1], batch.valid)
        if self.preparation.active:
            self.preparation.observe(SampleBatch(**{**vars(batch), "obs": self._visible(batch.inputs).obs}))

    @property
    def needs_statistics(self) -> bool:
        return self.preparation.empty

    def update_target(self, tau: float) -> None:
        """target <- (1 - tau) target + tau online, of network and mixer."""
        self.q.update_target(tau)
        follow(self.target_mixer, self.mixer, tau)

    def _visible(self, inputs: Inputs) -> Inputs:
        """The agent's own observation."""
        if not _has_state(inputs.obs):
            return inputs
        return inputs._replace(obs={key: x for key, x in inputs.obs.items() if key != STATE_KEY})


def _has_state(obs: Tree) -> bool:
    return isinstance(obs, dict) and STATE_KEY in obs


def agent_fn(spec: EnvSpec, cfg: QMIX) -> Agent:
    """The default agent."""
    return TeamQAgent(spec, cfg)


@dataclass(frozen=True)
class QMIX(OffPolicySettings):
    """Settings of QMIX and VDN."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = OffPolicySettings.fixed | {"mixer", "mixing_hidden", "team_reward", "dueling", "ladder", "eps_eval"}
    usual_batch = BatchSpec(T=1, B=8)
    lockstep = True
    """All agents act in each step; turn-based environments are refused."""

    mixer: Literal["qmix", "vdn"] = "qmix"
    """The joint Q: a monotonic network whose weights are computed from the state, or the sum of the agents' Q."""
    mixing_hidden: Count = 32
    """Units of the mixing network and of the hypernetwork of its last bias; 32 in the paper."""
    team_reward: TeamReward = "mean"
    """The team's reward of a step: the mean over the agents that acted (a reward given to all counts once), or the
    sum."""
    lr: Rate = 5e-4
    """Adam's step size, usually 1e-4 to 1e-3."""
    batch_size: Count = 64
    """Transitions of whole teams in a gradient step, usually 32 to 256."""
    replay_ratio: Positive = 8.0
    """Rows trained on for each row collected, usually 8 to 64."""
    learning_starts: Whole = 1_000
    """Rows of random actions before the first gradient step."""
    n_step: Count = 1
    """Rewards in a target before the value, usually 1 to 5."""
    double: bool = True
    """The online network chooses the actions that the target networks value (van Hasselt et al. 2016)."""
    dueling: bool = False
    """Compute value and advantages in two streams, each with its own hidden units (Wang et al. 2016)."""
    epsilon: Chance = "linear(1.0, 0.05, 0.2)"
    """Chance of a random action of an agent; with a ladder, the largest epsilon of any slot."""
    ladder: Ladder = "none"
    """Gives every slot its own epsilon: `ape-x` (epsilon^(1 + 7 i / (B - 1))) or `log-space` up from `epsilon_low`."""
    epsilon_low: Share = 0.0005
    """Smallest epsilon of the `log-space` ladder."""
    eps_eval: Unit = 0.0
    """Chance of a random action in evaluations, usually 0 to 0.05."""
    target_interval: Count = 200
    """Gradient steps between updates of the target networks; 200 episodes in the paper."""
    tau: Part = 1.0
    """Share of the online networks in a target update: 1 is a hard copy, 0.005 with interval 1 a soft one."""
    huber_delta: Cap = float("inf")
    """Huber loss: errors beyond this count linearly; inf: half the square, as in the papers."""
    max_grad_norm: Bound = 10.0
    """Gradients are scaled down to this norm."""
    net: Net = Net(hidden=(64, 64), activation="relu")
    """Network of the agents."""
    agent: AgentFn = agent_fn

    @property
    def observes_state(self) -> bool:
        """Observations are given the key "state": for the mixer, where it needs one."""
        return self.mixer == "qmix"
