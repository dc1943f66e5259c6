"""MAPPO: PPO with a critic that sees the state of the whole team, while each agent acts on its own observation.

Yu et al. 2022, "The surprising effectiveness of PPO in cooperative multi-agent games", arXiv:2103.01955. The critic is
given the agent's own observation and `obs["state"]` side by side (section 5.2, "agent-specific"); rows of agents that
are dead or absent are not trained on, so they need no zeros (their appendix, "death masking"). Loss and targets are
those of PPO.

Differs from the paper: values are normalised by their scale alone, without a shift (section 5.1); the value loss is
half the square, by default not clipped, and not Huber's; a pass is made of minibatches, where theirs is one of the
whole batch (section 5.3); inputs are normalised only with `net.normalize_obs`; nothing that an observation shares with
the state is left out of it; and with a recurrent net the actor alone has memory, unless
`net.critic_recurrent="own"`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from penstock.agents.actor_critic import ActorCritic
from penstock.agents.agent import Agent
from penstock.algos.ppo import loss_fn, postprocess_fn
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Chance, Rate, Weight
from penstock.core.spec import MASK_KEY, STATE_KEY, EnvSpec, describe
from penstock.core.tree import Tree
from penstock.learn.algorithm import AgentFn
from penstock.learn.optimizers import adam
from penstock.learn.settings import AlgorithmFunctions, MinibatchSettings

optimizer_fn = adam


def without_state(obs: Tree) -> Tree:
    """The spec of an observation without its key "state". Raises ConfigError if it has none, or nothing else."""
    if not isinstance(obs, dict) or STATE_KEY not in obs or len(obs) == 1:
        seen = f"keys {sorted(obs)}" if isinstance(obs, dict) else describe(obs)
        raise ConfigError(
            f"an observation of {seen}; expected a Dict with the key {STATE_KEY!r}, the state of all agents, and what "
            "an agent sees itself: the Trainer and Policies.seat(env) add it to environments of many agents; for an "
            "environment of one agent use PPO, or DQN in place of QMIX"
        )
    return {key: x for key, x in obs.items() if key != STATE_KEY}


def agent_fn(spec: EnvSpec, cfg: MAPPO) -> Agent:
    """The default agent: an actor that sees the observation without its key "state", and a critic that sees all of it.

    Raises:
        ConfigError: the observation has no state, or a setting asks for one body or gSDE.
    """
    net, seen = cfg.net, without_state(spec.obs)
    if net.shared or net.use_sde:
        raise ConfigError(
            f"net.shared={net.shared}, net.use_sde={net.use_sde} with a critic that sees more than the actor; "
            "expected net.shared=None or False, and net.use_sde=False"
        )
    if net.actor_keys is None:
        net = replace(net, actor_keys=tuple(key for key in seen if key != MASK_KEY))
    if net.is_recurrent and net.critic_recurrent == "shared":
        net = replace(net, critic_recurrent="none")  # the actor alone has memory
    return ActorCritic(spec, net, cfg.discount, cfg.normalize_value)


@dataclass(frozen=True)
class MAPPO(MinibatchSettings):
    """Settings of MAPPO."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn)
    reports_kl = True
    takes_stale = True
    """The ratio to the recorded log-probabilities corrects for batches of an earlier policy."""
    recomputes_logp: ClassVar[bool] = True
    """Recorded log-probabilities that differ from the learner's own by rounding alone are replaced by these."""
    observes_state: ClassVar[bool] = True
    """The environment adds the key "state" to observations."""

    gae_lambda: Chance = 0.95
    """Bias against variance of advantages, usually 0.9 to 1."""
    clip: Rate = 0.2
    """How far the probability ratio may move, usually 0.05 to 0.2."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus per nat, usually 0 to 0.02; 0.01 in the paper."""
    value_coef: Weight = 1.0
    """Weight of half the squared value error, usually 0.5 to 1."""
    value_clip: Rate | None = None
    """How far a value may move from that before training on the batch until its loss counts no gain, in units of
    `normalize_value`, usually 0.2 in libraries that clip; None: no clipping, which Andrychowicz et al. 2021 prefer."""
    target_kl: Rate | None = None
    """Training on a batch stops at the first minibatch with `approx_kl` over 1.5 times this, usually 0.01 to 0.05;
    None: it never stops early."""
    max_grad_norm: Bound = 10.0
    """Gradients are scaled down to this norm; 10 in the paper."""
    normalize_advantage: bool = True
    """Shift and scale the advantages of each batch to mean 0 and deviation 1."""
    normalize_value: bool = True
    """Learn values in units of the running root mean square of returns (`ValueScale`), and advantages too, so that the
    size of rewards does not matter."""
    agent: AgentFn = agent_fn
