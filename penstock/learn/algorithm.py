"""Algorithms: frozen settings that build a Policy out of functions, and the types of these functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.batch import TrainBatch
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.replay.replay import ReplaySchedule

if TYPE_CHECKING:
    from penstock.samplers.sampler import Sampler

ResultDict: TypeAlias = dict[str, float]
"""Metrics by name: `train/...` of gradient steps, `replay/...` of the replay."""


class Loss(NamedTuple):
    """The loss of one minibatch, as `loss_fn` returns it."""

    total: Tensor | dict[str, Tensor]
    """Scalar to minimise, or one for each optimizer by its name."""
    metrics: dict[str, Tensor]
    """Scalars to log, without gradient, averaged over the minibatches of a training step."""
    priorities: Tensor | None = None
    """[N] new priorities of replayed samples, for prioritized replay."""
    stop: bool = False
    """True: skip the gradient step on this minibatch, and end the training on its batch."""
    limits: Mapping[str, float] = MappingProxyType({})
    """Upper limits of metrics, by name; a metric above its limit (its mean over all learners) sets `stop`."""
    rows: Tensor | None = None
    """Number of rows that the means above are taken over, a scalar; None: the valid rows of the minibatch."""

    def totals(self) -> dict[str, Tensor]:
        """The totals by name of their optimizer; a single one is that of "all"."""
        return self.total if isinstance(self.total, dict) else {"all": self.total}


class Optimizer(Protocol):
    """The members of an optimizer that a Policy uses; every `torch.optim.Optimizer` has them."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> None: ...


Optimizers: TypeAlias = dict[str, Optimizer]
AgentFn: TypeAlias = Callable[[EnvSpec, Any], Agent]
"""(spec, settings)."""
PostprocessFn: TypeAlias = Callable[[Any, Any, Any], TrainBatch]
"""(agent, SampleBatch or sample of replay, settings); each algorithm names its own kind of agent and settings."""
LossFn: TypeAlias = Callable[[Any, TrainBatch, Any], Loss]
"""(agent, minibatch, settings)."""
OptimizerFn: TypeAlias = Callable[[Any, Any], Optimizers]
"""(agent, settings)."""
ReplayFn: TypeAlias = Callable[[Any, Any], ReplaySchedule]
"""(agent, settings)."""


class Algorithm(Protocol):
    """Frozen settings of an algorithm. Any frozen dataclass with these two members is one.

    With `takes_stale = True` it also learns from batches that an earlier policy collected, as an AsyncSampler of depth
    1 or more returns; the recorded `logp` and `version` say which. With `recomputes_logp = True` recorded `logp` that
    differ from the learner's own by rounding alone are replaced by these, so that ratios begin at 1. A setting
    `max_lag` leaves rows of older versions out. With `takes_fragments = True` its targets need one fragment at a time,
    so any fragments may make up a batch.
    With `offline = True` it learns from a dataset. With a method `training_step(policy, sampler, itr) -> TrainingStep`
    of its own, that is an iteration of a run.
    """

    if not TYPE_CHECKING:  # a checker holds a dataclass's plain class variable for no property

        @property
        def batch(self) -> BatchSpec:
            """T and B of the sampler that a run uses if it names none."""
            ...

    def build(self, spec: Any, seed: int = 0, device: str = "cpu") -> Any:
        """The live Policy for an EnvSpec; of several policies the PolicySet for {id: EnvSpec}."""
        ...


def batch_of(algo: Any) -> BatchSpec:
    """T and B of the sampler that a run of this algorithm uses if it names none."""
    return algo.batch


class TrainingStep(NamedTuple):
    """One iteration: its metrics and episodes, the environment steps sampled, and seconds of sampling and training."""

    metrics: ResultDict
    episodes: Any
    """`penstock.Episodes` that ended in it."""
    env_steps: int
    sample_s: float
    train_s: float


TrainingStepFn: TypeAlias = Callable[[Any, "Sampler", int], TrainingStep]
"""(Policy or PolicySet, sampler, number of the iteration)."""
