"""IQL: learns Q and V of a dataset's actions, never of others (Kostrikov et al. 2021, arXiv:2110.06169).

V is an expectile of Q over the data's actions, Q bootstraps from V, and the policy imitates actions by how much better
than V they are. Differs from the paper: all losses of a step are taken at the same parameters (the authors' code
updates V first), the Gaussian's mean is not squashed, truncated episodes bootstrap, n-step targets may be used, and
single choices have critics of every action.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from penstock import ops
from penstock.agents.actor_critic import actor_critic
from penstock.agents.agent import Agent, follow, output_of
from penstock.agents.continuous import Critics
from penstock.agents.critics import ActionBox
from penstock.agents.discrete_control import ChoiceNetwork
from penstock.agents.networks import Net
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Inner, Positive, Weight, Whole
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec, describe
from penstock.learn.algorithm import AgentFn, Loss
from penstock.learn.optimizers import adam
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.native.elementwise import exp
from penstock.replay.replay import Replay, ReplaySchedule, make_view


def agent_fn(spec: EnvSpec, settings: Any) -> Agent:
    """The default agent with IQL's critics; by it other algorithms go on with an IQL run (`--algo.agent`)."""
    return with_critics(actor_critic(spec, settings), spec, settings)


def with_critics(agent: Agent, spec: EnvSpec, settings: Any) -> Agent:
    """The agent, with modules `q` and `target_q`: [k, N] of a box, [k, N, A] of every choice.

    Raises:
        ConfigError: the action is neither one box nor one choice, or the net is recurrent.
    """
    if hasattr(agent, "q"):
        return agent
    net, seen, action, k = settings.net, agent.preparation.obs, spec.action, getattr(settings, "critics", 2)
    if net.is_recurrent:
        raise ConfigError(f"IQL with net.recurrent={net.recurrent!r}; BC and MARWIL learn with memory")
    if (net.actor_keys, net.critic_keys) != (None, None):
        raise ConfigError(
            f"IQL with net.actor_keys={net.actor_keys}, net.critic_keys={net.critic_keys}; its critics read what the "
            "actor reads: leave both out, and keys out of the environment by env_drop"
        )
    if isinstance(action, LeafSpec) and action.kind == "discrete":
        critics: Any = ChoiceNetwork(spec, seen, net.of("critic"), action.sizes[0], k)
    elif isinstance(action, LeafSpec) and action.kind == "box":
        agent.add_module("box", ActionBox(action, "IQL"))
        critics = Critics(spec, net.of("critic"), action.size, k)
    else:
        raise ConfigError(
            f"IQL needs a box or one discrete action; the environment takes {describe(action)}: use MARWIL or BC, "
            "which take any"
        )
    agent.add_module("q", critics)
    agent.add_module("target_q", copy.deepcopy(critics).requires_grad_(False))
    return agent


def q_of(agent: Any, critics: Any, inputs: Inputs, action: Tensor) -> Tensor:
    """[k, N] of actions [N, *A] in the environment's units."""
    obs = agent.prepared(inputs.obs)
    if hasattr(agent, "box"):
        return critics(inputs, obs, agent.box.to_unit(action))
    every, index = critics(inputs, obs), action.long() - int(agent.spec.action.start)
    return every.gather(2, index.expand(len(every), -1).unsqueeze(2)).squeeze(2)


def postprocess_fn(agent: Agent, x: TrainBatch, cfg: IQL) -> TrainBatch:
    """Adds `target` = r + discount * V(s') (eq. 6) and `value` = min_k Q_target(s, a), which V is fitted to (eq. 5)."""
    following = output_of(agent, agent(x["next"]), "value")
    target = agent.scaled_reward(x["return"]) + x["discount"] * following
    value = q_of(agent, agent.target_q, x.inputs, x["action"]).amin(0)
    return TrainBatch(x.inputs, {**x.rows, "target": target, "value": value}, None)


def loss_fn(agent: Agent, x: TrainBatch, cfg: IQL) -> Loss:
    """Critics: (Q - target)^2 (eq. 6). V: |expectile - 1(u < 0)| u^2, u = value - V (eq. 5). Policy: -w log pi (eq. 7).

    w = exp(beta * u), at most `max_weight`. Priorities are the critics'.
    """
    dist, value = agent(x.inputs)
    critic_loss, priorities = ops.critic_loss(
        q_of(agent, agent.q, x.inputs, x["action"]), x["target"], x.rows.get("weight")
    )
    advantage = x["value"] - value
    above = advantage.detach()
    value_loss = ((cfg.expectile - (above < 0.0).float()).abs() * advantage.square()).mean()
    weight = exp(cfg.beta * above).clamp(max=cfg.max_weight)
    logp = dist.log_prob(x["action"])
    policy_loss = -(weight * logp).mean()
    metrics = {
        "critic_loss": critic_loss,
        "value_loss": value_loss,
        "policy_gradient_loss": policy_loss,
        "q": x["value"].mean(),
        "advantage": above.mean(),
        "weight_mean": weight.mean(),
        "weight_clipped": (weight >= cfg.max_weight).float().mean(),
        "neglogp": -logp.mean(),
    }
    total = critic_loss + value_loss + policy_loss
    return Loss(total, {name: x.detach() for name, x in metrics.items()}, priorities)


optimizer_fn = adam


def replay_fn(agent: Agent, cfg: IQL) -> ReplaySchedule:
    """Transitions, and soft updates of the target critics."""
    view = make_view(cfg.replay, agent.spec, cfg.n_step, cfg.discount, cfg.net.clip_reward, agent.fed)

    def after_update(agent: Any, cfg: IQL, updates: int) -> None:
        follow(agent.target_q, agent.q, cfg.tau)

    return ReplaySchedule(
        Replay(agent.spec, cfg.replay, view),
        cfg.batch_size,
        cfg.replay_ratio,
        cfg.learning_starts,
        after_update=after_update,
    )


def _agent_with_critics(spec: EnvSpec, cfg: IQL) -> Agent:
    return with_critics(cfg.agent(spec, cfg), spec, cfg)


@dataclass(frozen=True)
class IQL(OffPolicySettings):
    """Settings of IQL."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn, _agent_with_critics)
    fixed = OffPolicySettings.fixed | {"critics"}
    usual_batch = BatchSpec(T=16, B=16)
    offline: ClassVar[bool] = True
    """Learns from a dataset, which an OfflineSampler plays back or the replay keeps."""

    expectile: Inner = 0.7
    """Expectile of Q over the data's actions that V is: 0.5 is their mean, towards 1 the best; usually 0.7 to 0.9."""
    beta: Weight = 3.0
    """Inverse temperature of the policy, in units of 1 / Q: 0 imitates all actions alike; usually 0.5 to 10."""
    max_weight: Positive = 100.0
    """Largest weight of an action in the policy's loss."""
    replay_ratio: Positive = 256.0
    """Rows trained on for each row played back; 256 with batch_size 256 is a gradient step for each."""
    learning_starts: Whole = 0
    """Rows played back or collected before the first gradient step."""
    critics: Count = 2
    """Number of critics; V is fitted to the smallest of their targets' values."""
    net: Net = Net(hidden=(256, 256), activation="relu")
    """Networks of the default agent."""
    agent: AgentFn = actor_critic
