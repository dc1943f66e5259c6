"""Bootstrapped DQN with randomized priors: an ensemble of Q networks, one of which is followed for a whole episode.

Osband et al. 2016, "Deep exploration via bootstrapped DQN", arXiv:1602.04621 (algorithm 1), and Osband et al. 2018,
"Randomized prior functions for deep reinforcement learning", arXiv:1806.03335 (algorithm 3, as bsuite's boot_dqn).

Differs from the papers: evaluations act by the mean Q of all heads, where the first lets the heads vote; the target is
double DQN's by default; the heads of an image share their convolutions, and so do their priors; and truncated episodes
bootstrap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.agents.agent import Agent
from penstock.agents.distributions import MASKED
from penstock.agents.networks import Encoder, Net
from penstock.agents.preparation import Preparation
from penstock.agents.q_agent import QAgent, one_choice, q_agent
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Chance, Count, Limit, NotNegative, Part, Positive, Rate, Whole
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree
from penstock.learn.algorithm import AgentFn, Loss
from penstock.learn.optimizers import adam
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.replay.columns import Array, Rows
from penstock.replay.replay import Replay, ReplaySchedule
from penstock.replay.storage import Storage
from penstock.replay.view import Transitions

_MASK = "['mask']"


def postprocess_fn(agent: BootAgent, x: TrainBatch, cfg: BootDQN) -> TrainBatch:
    """Adds `target` [N, K]: r + discount * Q_k^target(next, argmax Q_k) of each head k by its own target network."""
    following = x["next"]
    values = agent.q.bootstrap(following)
    chooser = agent.q(following) if cfg.double else values
    best = agent.legal(following, chooser).argmax(1, keepdim=True)
    discount = agent.unless_stuck(following, x["discount"]).unsqueeze(1)
    target = agent.scaled_reward(x["return"]).unsqueeze(1) + discount * values.gather(1, best).squeeze(1)
    return TrainBatch(x.inputs, {**x.rows, "target": target}, None)


def loss_fn(agent: BootAgent, x: TrainBatch, cfg: BootDQN) -> Loss:
    """The mean over rows and heads of mask * huber(Q_k - target_k); priorities are mean errors over heads."""
    q = agent(x.inputs).take_along_dim(agent.q.index(x["action"]).view(-1, 1, 1), 1).squeeze(1)
    weight = x["mask"].float() * x["weight"].unsqueeze(1) if "weight" in x.rows else x["mask"].float()
    total, error = ops.td_loss(q.flatten(), x["target"].flatten(), weight.flatten(), cfg.huber_delta)
    assert error is not None
    metrics = {"loss": total.detach(), "q": q.detach().mean(), "q_std": q.detach().std(1, correction=0).mean()}
    return Loss(total, metrics, error.reshape(q.shape).mean(1))


class MaskedTransitions(Transitions):
    """Transitions with the row `mask` [N, K] bool that the agent drew for each when it acted."""

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array | None = None) -> TrainBatch:
        x = super().read(storage, t, b, noise)
        return TrainBatch(x.inputs, {**x.rows, "mask": storage.info(_MASK, t, b)})


def replay_fn(agent: BootAgent, cfg: BootDQN) -> ReplaySchedule:
    """Transitions with their masks, and the target networks' update after each gradient step."""
    view = MaskedTransitions(cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)

    def after_update(agent: BootAgent, cfg: BootDQN, updates: int) -> None:
        if updates % cfg.target_interval == 0:
            agent.q.update_target(cfg.tau)

    replay = Replay(agent.spec, cfg.replay, view, info=(_MASK,))
    return ReplaySchedule(replay, cfg.batch_size, cfg.replay_ratio, cfg.learning_starts, after_update=after_update)


optimizer_fn = adam


class Ensemble(nn.Module):
    """[N, *O] observations -> [N, A, K]: Q of K heads, each with a prior of its own added that never learns.

    Q_k = f_k + prior_scale * p_k (Osband et al. 2018, eq. 6), p_k a network like f_k that stays as it was drawn.
    Heads share nothing but the networks of images.
    """

    def __init__(self, spec: EnvSpec, net: Net, heads: int, prior_scale: float) -> None:
        super().__init__()
        obs, actions = Preparation(spec, net).obs, one_choice(spec).sizes[0]
        self.prior_scale = prior_scale
        self.encoder = Encoder(obs, spec.action, net)
        self.heads = net.bodies(heads, self.encoder.size, actions)
        self.prior_encoder = Encoder(obs, spec.action, net).requires_grad_(False) if prior_scale else None
        self.priors = net.bodies(heads, self.encoder.size, actions).requires_grad_(False) if prior_scale else None

    def forward(self, obs: Tree) -> Tensor:
        out = self.heads(_features(self.encoder, obs))
        if self.prior_encoder is not None and self.priors is not None:
            with torch.no_grad():
                prior = self.priors(_features(self.prior_encoder, obs))
            out = out + self.prior_scale * prior
        return out.permute(1, 2, 0)


def _features(encoder: Encoder, obs: Tree) -> Tensor:
    none: Any = None  # previous actions and rewards, which BootDQN refuses
    return obs if encoder.is_identity else encoder(none, obs)


class BootAgent(Agent):
    """Acts by the largest Q of the head that a slot follows, drawn anew at `first`; the state is its number [B].

    Without noise it acts by the mean Q of all heads. `q` holds networks, target and epsilon.
    """

    def __init__(self, spec: EnvSpec, cfg: BootDQN) -> None:
        super().__init__()
        network = Ensemble(spec, cfg.net, cfg.heads, cfg.prior_scale)
        settings: Any = cfg
        self.q: QAgent = q_agent(spec, settings, network)
        self.spec, self.fed, self.preparation = spec, frozenset[str](), self.q.preparation
        first: Any = one_choice(spec).start
        self.start = int(first)
        self.heads, self.mask_prob, self.noise_size, self.is_noisy = cfg.heads, cfg.mask_prob, 3 + cfg.heads, False

    def set_exploration(self, settings: Any, env_steps: int) -> None:
        self.q.set_exploration(settings, env_steps)

    def initial_state(self, B: int) -> Tree:
        return torch.zeros(B, dtype=torch.int64, device=self.q.epsilon.device)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        heads = self(inputs)
        if noise is None:
            kept = torch.ones(heads.shape[0], self.heads, dtype=torch.bool, device=heads.device)
            index = self.legal(inputs, heads.mean(-1, keepdim=True)).squeeze(-1).argmax(-1)
        else:
            kept = noise[:, 3:] < self.mask_prob
            state = torch.where(inputs.first, (noise[:, 2] * self.heads).long(), state)
            q = self.legal(inputs, heads.take_along_dim(state.view(-1, 1, 1), -1)).squeeze(-1)
            legal = q > MASKED / 2
            nth = (noise[:, 1] * legal.sum(-1)).long()
            random = (legal.cumsum(-1) > nth.unsqueeze(-1)).long().argmax(-1)
            index = torch.where(noise[:, 0] < self.q.epsilon[0], random, q.argmax(-1))
        return index + self.start, {"mask": kept}, state

    def forward(self, inputs: Inputs, state: Tree = None) -> Tensor:
        """[N, A, K] Q of every head; [T, B, A, K] of sequences, with a state."""
        return self.q(inputs) if state is None else self.q(inputs.flat()).unflatten(0, inputs.first.shape)

    def legal(self, inputs: Inputs, q: Tensor) -> Tensor:
        """[N, A, k] q, illegal actions set to `MASKED`."""
        mask = self.mask(inputs.obs)
        return q if mask is None else q.masked_fill(~mask.unsqueeze(-1), MASKED)


def agent_fn(spec: EnvSpec, cfg: BootDQN) -> Agent:
    """The default agent."""
    return BootAgent(spec, cfg)


@dataclass(frozen=True)
class BootDQN(OffPolicySettings):
    """Settings of bootstrapped DQN."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn)
    fixed = OffPolicySettings.fixed | {"heads", "prior_scale", "mask_prob"}
    dueling: ClassVar[bool] = False
    dueling_hidden: ClassVar[None] = None
    noisy: ClassVar[bool] = False
    noisy_sigma: ClassVar[float] = 0.5
    ladder: ClassVar[Any] = "none"
    epsilon_low: ClassVar[float] = 0.0
    records_q: ClassVar[bool] = False

    heads: Annotated[int, Limit(2)] = 10
    """Q networks of the ensemble, usually 10 to 20."""
    prior_scale: NotNegative = 3.0
    """Weight of each head's prior, a network that does not learn; 0 leaves priors out, usually 1 to 10 for rewards of
    about 1."""
    mask_prob: Part = 0.5
    """Chance that a head learns from a transition; 1: every head from all, usually 0.5 to 1."""
    lr: Rate = 1e-3
    """Adam's step size, usually 1e-4 (images) to 1e-3."""
    batch_size: Count = 128
    """Transitions of a gradient step, usually 32 to 256."""
    replay_ratio: Positive = 32.0
    """Rows trained on for each row collected, usually 8 to 128."""
    learning_starts: Whole = 128
    """Steps of random actions before the first gradient step."""
    double: bool = True
    """Each head's online network chooses the action that its target network values (van Hasselt et al. 2016)."""
    epsilon: Chance = 0.0
    """Chance of a random action besides; 0 in both papers."""
    target_interval: Count = 4
    """Gradient steps between updates of the target networks."""
    tau: Part = 1.0
    """Share of the online networks in a target update."""
    huber_delta: Rate = 1.0
    """Huber loss: errors beyond this count linearly."""
    max_grad_norm: Bound = 10.0
    """Gradients are scaled down to this norm."""
    net: Net = Net(hidden=(50, 50), activation="relu", init="orthogonal")
    """Networks of each head and of each prior."""
    agent: AgentFn = agent_fn

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.net.is_recurrent or self.net.prev_action or self.net.prev_reward:
            raise ConfigError(
                f"BootDQN with net.recurrent={self.net.recurrent!r}, net.prev_action={self.net.prev_action}, "
                f"net.prev_reward={self.net.prev_reward}; expected 'none' and False: its heads see the observation"
            )
        if self.replay.hindsight or self.replay.shards or self.replay.fresh_priority == "agent":
            raise ConfigError(
                f"BootDQN with replay.hindsight={self.replay.hindsight}, replay.shards={self.replay.shards}, "
                f"replay.fresh_priority={self.replay.fresh_priority!r}; expected 0, 0 and 'max': masks are kept beside "
                "the rows, in the learner"
            )

    @property
    def outputs(self) -> int:
        """Numbers that the network has for an action: one for each head."""
        return self.heads
