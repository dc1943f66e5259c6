"""What an algorithm is: frozen settings that build a Policy out of four functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.learn.minibatch import TrainBatch

ResultDict: TypeAlias = dict[str, float]
"""Metrics by name, `train/...` for what a training step reports."""


class Loss(NamedTuple):
    """What `loss_fn` returns."""

    total: Tensor | dict[str, Tensor]
    """Scalar to minimise, or one for each optimizer by its name."""
    metrics: dict[str, Tensor]
    """Scalars to log, without gradient, averaged over the minibatches of a training step."""
    priorities: Tensor | None = None
    """[N] new priorities of replayed samples, where replay is prioritised."""


class Optimizer(Protocol):
    """What a Policy needs of an optimizer; every `torch.optim.Optimizer` has it."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> None: ...


Optimizers: TypeAlias = dict[str, Optimizer]
AgentFn: TypeAlias = Callable[[EnvSpec, Any], Agent]
PostprocessFn: TypeAlias = Callable[[Any, Any, Any], TrainBatch]  # (agent, SampleBatch or sample of replay, settings)
LossFn: TypeAlias = Callable[[Any, TrainBatch, Any], Loss]  # (agent, minibatch, settings)
OptimizerFn: TypeAlias = Callable[[Any, Any], Optimizers]


class Algorithm(Protocol):
    """Frozen settings of an algorithm. Any frozen dataclass with these two members is one.

    With `takes_stale = True` it also learns from batches that an earlier policy collected, as an AsyncSampler of depth
    1 or more gives; the recorded `logp` and `version` say which.
    """

    @property
    def batch(self) -> BatchSpec:
        """T and B of the sampler that a run uses if it names none."""
        ...

    def build(self, spec: EnvSpec, seed: int = 0, device: str = "cpu") -> Any:
        """The live `Policy` for an environment."""
        ...
