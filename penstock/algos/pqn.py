"""PQN: Q-learning on fresh batches, without replay or target network, by LayerNorm (Gallici et al. 2024).

arXiv:2407.04811, algorithm 1 with the lambda-returns of its section 4. Differs from the paper: truncated episodes
bootstrap, illegal actions have no value, and convolutions of `net` have no norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from penstock import ops
from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.agents.q_agent import Ladder, QAgent, q_agent
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.limits import Bound, Chance, Count, Rate, Share, Unit
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.learn.algorithm import AgentFn, Loss
from penstock.learn.optimizers import OptimizerName, adam
from penstock.learn.settings import AlgorithmFunctions, MinibatchSettings


def postprocess_fn(agent: QAgent, batch: SampleBatch, cfg: PQN) -> TrainBatch:
    """Adds `target` [T, B] of a batch: G_t = r + discount [(1 - lambda) max_a Q(s', a) + lambda G_t+1].

    That is the return of GAE for the values max_a Q: advantage and value together.
    """
    with torch.no_grad():
        inputs = batch.inputs if batch.state is not None else batch.inputs.flat()
        q = agent.legal(inputs, agent(inputs, batch.state))
        value = agent.unless_stuck(inputs, q.amax(-1)).reshape(batch.first.shape)
    _, target = ops.gae(
        agent.scaled_reward(batch.reward),
        value,
        agent.terminal(batch),
        batch.truncated,
        batch.valid,
        discount=cfg.discount,
        gae_lambda=cfg.q_lambda,
    )
    metrics = {"explained_variance": ops.explained_variance(value[:-1], target, batch.valid)}
    rows = {"action": batch.action, "target": target}
    return TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state, metrics)


def loss_fn(agent: QAgent, x: TrainBatch, cfg: PQN) -> Loss:
    """(Q(s, a) - target)^2 / 2  (algorithm 1)."""
    q = agent(x.inputs, x.state).gather(-1, agent.index(x["action"]).unsqueeze(-1)).squeeze(-1)
    total = 0.5 * ops.squared_error(q, x["target"], x.valid)
    return Loss(total, {"loss": total.detach(), "q": ops.masked_mean(q.detach(), x.valid)})


optimizer_fn = adam


def agent_fn(spec: EnvSpec, cfg: PQN) -> Agent:
    """The default agent: a Q network with a LayerNorm before each activation, and no target network."""
    return q_agent(spec, cfg)  # pyright: ignore[reportArgumentType]  # its constants are of the class


@dataclass(frozen=True)
class PQN(MinibatchSettings):
    """Settings of PQN."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn)
    usual_batch = BatchSpec(T=32, B=32)
    fixed = MinibatchSettings.fixed | {"ladder", "eps_eval"}
    takes_stale = True
    """An earlier policy's actions are exploration like any other: lambda-returns are not corrected for that either."""
    has_target: ClassVar[bool] = False
    """The agent keeps no target network."""
    dueling: ClassVar[bool] = False
    dueling_hidden: ClassVar[None] = None
    noisy: ClassVar[bool] = False
    noisy_sigma: ClassVar[float] = 0.5
    outputs: ClassVar[int] = 1
    records_q: ClassVar[bool] = False
    learning_starts: ClassVar[int] = 0

    lr: Rate = 5e-4
    """The optimizer's step size, usually 1e-4 to 1e-3; best annealed to 0 over the run."""
    optimizer: OptimizerName = "radam"
    """radam (of the paper; Liu et al. 2020), adam, adamw or rmsprop."""
    epochs: Count = 4
    """Passes over each batch, usually 2 to 4."""
    minibatch: Count = 128
    """Rows of a gradient step, usually 64 to 512; with a recurrent net whole columns of T rows."""
    q_lambda: Chance = 0.65
    """Share of the following return in a target, beside max Q: 0 is one-step Q-learning; usually 0.5 to 0.95."""
    epsilon: Chance = "linear(1.0, 0.05, 0.2)"
    """Chance of a random action; with a ladder, the largest epsilon of any slot."""
    ladder: Ladder = "none"
    """Gives every slot its own epsilon: `ape-x` (epsilon^(1 + 7 i / (B - 1))) or `log-space` up from `epsilon_low`."""
    epsilon_low: Share = 0.0005
    """Smallest epsilon of the `log-space` ladder."""
    eps_eval: Unit = 0.0
    """Chance of a random action in evaluations, usually 0 to 0.05."""
    max_grad_norm: Bound = 10.0
    """Gradients are scaled down to this norm."""
    net: Net = Net(hidden=(128, 128), activation="relu", norm="layer")
    """Networks of the default agent; `norm="layer"` is what replaces the target network."""
    agent: AgentFn = agent_fn
