"""Settings that algorithms share, and the one `build` that makes a Policy out of an algorithm's functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from penstock.agents.actor_critic import actor_critic
from penstock.agents.agent import Agent, check_agent_members
from penstock.agents.networks import Net
from penstock.core.batch import TrainBatch
from penstock.core.config import Elsewhere, known_names
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Chance, Count, NotNegative, Part, Positive, Rate, Whole, check_settings
from penstock.core.protocols import require_call
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.learn.algorithm import AgentFn, Loss, LossFn, OptimizerFn, PostprocessFn, ReplayFn
from penstock.learn.optimizers import OptimizerName
from penstock.learn.policy import Policy
from penstock.learn.step.groups import decayed_weights, scaled_groups
from penstock.replay.settings import ReplaySettings


def _chosen_agent(spec: EnvSpec, cfg: Settings) -> Agent:
    return cfg.agent(spec, cfg)


def _begun_anew(part: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Takes parameters of an agent without the part, too, such as those of a BC run for GAIL: it begins anew."""
    if not any(name.startswith(prefix) for name in state):
        state.update({prefix + name: x.detach() for name, x in part.state_dict().items()})


class AlgorithmFunctions(NamedTuple):
    """The functions of an algorithm, which `Settings.build` hands to its Policy."""

    postprocess: PostprocessFn
    loss: LossFn
    optimizer: OptimizerFn
    replay: ReplayFn | None = None
    """Makes the replay to train on; None for training on the batches themselves."""
    agent: AgentFn = _chosen_agent
    """Makes the agent; by default `settings.agent` does. Algorithms that add to that agent have a function of their
    own."""

    def with_part(
        self,
        name: str,
        module: Callable[[Agent, EnvSpec, Any], nn.Module],
        postprocess: Callable[..., TrainBatch],
        loss: Callable[..., Loss],
    ) -> AlgorithmFunctions:
        """These functions with a part around them, such as RND or GAIL's discriminator.

        A run with the part may start from one without it, and one without from one that has it (`init`).

        Args:
            name: of the agent's submodule that `module` makes from (agent, spec, settings).
            postprocess, loss: as an algorithm's, with the function that they are around as first argument.
        """

        def agent_fn(spec: EnvSpec, cfg: Any) -> Agent:
            agent = self.agent(spec, cfg)
            check_agent_members(agent)
            if hasattr(agent, name):
                raise ConfigError(
                    f"{type(agent).__name__} has {name!r} already, and a part of that name would take its place; give "
                    "the agent's own, or the part, another name"
                )
            part = module(agent, spec, cfg)
            part.register_load_state_dict_pre_hook(_begun_anew)
            agent.add_module(name, part)
            agent.outer_parts = (*agent.outer_parts, name)
            return agent

        inside = functools.partial(postprocess, self.postprocess), functools.partial(loss, self.loss)
        return self._replace(agent=agent_fn, postprocess=inside[0], loss=inside[1])


@dataclass(frozen=True)
class Settings:
    """Settings of every algorithm, checked at construction. Whole batches are trained on, each once."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        if args and (isinstance(args[0], type) or (isinstance(args[0], str) and args[0].isidentifier())):
            raise ConfigError(
                f"{cls.__name__}({args[0]!r}, ...): settings of an algorithm go by keyword, networks by net=ps.Net() "
                f"and the environment comes beside it: ps.train(ps.Experiment('CartPole-v1', ps.{cls.__name__}()))"
            )
        return known_names(cls, *args, **given)

    if not TYPE_CHECKING:  # a type checker says by itself that they are not there
        learn, train, fit, predict, evaluate, save, load = map(
            Elsewhere, ("learn", "train", "fit", "predict", "evaluate", "save", "load")
        )
    functions: ClassVar[AlgorithmFunctions]
    """Functions of the algorithm: postprocess, loss, agent, replay."""
    usual_batch: ClassVar[BatchSpec] = BatchSpec(T=128, B=16)
    recurrent_batch: ClassVar[BatchSpec | None] = None
    """T and B with a recurrent net, where minibatches are whole columns; None: the same as `usual_batch`."""
    reports_kl: ClassVar[bool] = False
    """The metrics of the loss contain `approx_kl`, which `lr="kl(...)"` follows."""
    fixed: ClassVar[frozenset[str]] = frozenset(("net", "agent", "optimizer", "normalize_value"))
    """Settings that `run.set` does not change, as networks, optimizers or replay are made by them."""

    lr: Rate = 3e-4
    """The optimizer's step size, usually 1e-4 to 1e-3; `linear(3e-4, 0)` anneals it over the run,
    `kl(1e-3, desired=0.01)` adapts it to how far PPO moves the policy."""
    discount: Chance = 0.99
    """Weight of the next step's value, usually 0.9 to 0.999."""
    optimizer: OptimizerName = "adam"
    """adam (Kingma and Ba 2015), adamw (Loshchilov and Hutter 2019), radam (Liu et al. 2020) or rmsprop."""
    weight_decay: NotNegative | None = None
    """Weight decay of weight matrices, not of biases, norms, deviations and temperatures: adamw shrinks them by lr
    times this each step, usually 1e-4 to 1e-2; the others add it to gradients as L2. None: the optimizer's default,
    0.01 with adamw, 0 with the others."""
    adam_eps: NotNegative = 1e-5
    """Added to the divisor of Adam and RMSprop, usually 1e-8 to 1e-4; 1e-5 in OpenAI baselines."""
    lr_scales: Mapping[str, float] | None = None
    """Step sizes of some parameters, as factors by a pattern of their names: `{"encoder.*": 0.1}`."""
    max_grad_norm: Bound | None = None
    """Gradients are scaled down to this norm, norm group by norm group (`Agent.norm_groups`); None for no limit."""
    net: Net = Net()
    """Networks of the default agent."""
    agent: AgentFn = actor_critic
    """Makes the agent from (spec, settings): `my_module:my_agent_fn` on the command line."""

    def __post_init__(self) -> None:
        check_settings(self)
        for pattern, scale in (self.lr_scales or {}).items():
            if not 0.0 < scale < math.inf:
                raise ConfigError(
                    f"lr_scales[{pattern!r}]={scale}; expected more than 0, finite: encoders that shall not learn are "
                    "frozen by net.encoder_freeze, others by requires_grad_(False) in an agent function"
                )

    @property
    def batch(self) -> BatchSpec:
        """T and B of the sampler, where a run names none."""
        recurrent = self.net.is_recurrent and self.recurrent_batch
        return recurrent or self.usual_batch

    def build(self, spec: EnvSpec, seed: int = 0, device: str = "cpu", total_steps: int | None = None) -> Policy:
        """The live policy for an environment.

        Args:
            total_steps: environment steps that schedules run over in a loop of one's own; a run says it by itself.
        """
        part = getattr(self, "rnd", None)
        functions = self.functions if part is None else part.added_to(self.functions)
        policy = self.policy(functions, spec, seed, device)
        policy.clock.begin(total_steps)
        return policy

    def policy(self, functions: AlgorithmFunctions, spec: EnvSpec, seed: int, device: str) -> Policy:
        """The live policy of these settings with the functions given."""
        require_call("agent", self.agent, "spec", "settings", returns="a penstock.Agent")
        require_call("optimizer_fn", functions.optimizer, "agent", "settings", returns="optimizers by name")
        optimizer = decayed_weights(functions.optimizer)
        return Policy(
            self,
            spec,
            agent_fn=functions.agent,
            postprocess_fn=functions.postprocess,
            loss_fn=functions.loss,
            optimizer_fn=scaled_groups(optimizer) if self.lr_scales else optimizer,
            replay_fn=functions.replay,
            max_grad_norm=self.max_grad_norm,
            standardize=("advantage",) if getattr(self, "normalize_advantage", False) else (),
            seed=seed,
            device=device,
        )


def check_atoms(settings: Any) -> None:
    """Raises ConfigError unless `v_min` is below `v_max`, and `clipped_double=False` comes with atoms."""
    if not settings.v_min < settings.v_max:
        raise ConfigError(f"v_min={settings.v_min}, v_max={settings.v_max}; expected v_min < v_max")
    if settings.distributional == "none" and not getattr(settings, "clipped_double", True):
        raise ConfigError(
            "clipped_double=False with distributional='none'; expected distributional='c51', whose critics can have a "
            "target each, or critics=1"
        )


def refuse_atoms(settings: Any) -> None:
    """Raises ConfigError for atoms, asked of an algorithm whose critics have others than C51's or none."""
    if settings.distributional != "none":
        raise ConfigError(
            f"distributional={settings.distributional!r} with {type(settings).__name__}, whose critics learn "
            "otherwise; expected 'none', or SAC or TD3"
        )


@dataclass(frozen=True)
class MinibatchSettings(Settings):
    """Settings of algorithms that pass over each batch in shuffled minibatches."""

    epochs: Count = 10
    """Passes over each batch, usually 3 to 20."""
    minibatch: Count = 64
    """Rows of a gradient step, usually 32 to 512; a batch is cut into round(T * B / minibatch) parts, with a recurrent
    net into whole columns of T rows, at least one each."""

    def build(self, spec: EnvSpec, seed: int = 0, device: str = "cpu", total_steps: int | None = None) -> Policy:
        policy = super().build(spec, seed, device, total_steps)
        policy.epochs, policy.minibatch = self.epochs, self.minibatch
        return policy


@dataclass(frozen=True)
class OffPolicySettings(Settings):
    """Settings of algorithms that learn from samples of replay."""

    usual_batch: ClassVar[BatchSpec] = BatchSpec(T=1, B=1)
    """T and B of the sampler, where a run names none."""
    takes_stale: ClassVar[bool] = True
    """Replay holds batches of earlier policies anyway."""
    fixed = Settings.fixed | {"n_step"}

    adam_eps: NotNegative = 1e-8
    """Added to the optimizer's divisor, usually 1e-8 to 1e-4; 1e-8 is torch's, 1.5e-4 Rainbow's."""
    batch_size: Count = 256
    """Transitions of a gradient step, usually 64 to 512."""
    replay_ratio: Positive = 256.0
    """Rows trained on for each row collected; 256 with batch_size 256 is a gradient step for each environment step."""
    learning_starts: Whole = 100
    """Steps of random actions before the first gradient step, usually 100 to 10,000."""
    n_step: Count = 1
    """Rewards in a target before the value."""
    tau: Part = 0.005
    """Share of the online networks in an update of the target ones."""
    replay: ReplaySettings = ReplaySettings()
    """Replay: how many rows are kept, and how they are drawn."""
    net: Net = Net(hidden=(256, 256), activation="relu")
    """Networks of the default agent."""
