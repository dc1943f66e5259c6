"""What an algorithm is: frozen settings that build a Policy out of four functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.batch import Inputs, SampleBatch
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.core.tree import Tree, struct

ResultDict: TypeAlias = dict[str, float]
"""Metrics by name, `train/...` for what a training step reports."""


@struct
class TrainBatch:
    """What `postprocess_fn` makes of a SampleBatch, and, cut into minibatches, what `loss_fn` is given.

    After `postprocess_fn` leaves are [T, B, ...]. A minibatch of a memoryless agent is [N, ...], valid rows only; of
    a recurrent one [T, b, ...], whole columns with a mask.
    """

    inputs: Inputs
    """What the agent sees; call `agent(x.inputs, x.state)`."""
    rows: Mapping[str, Tree]
    """The algorithm's own arrays by name; `x["advantage"]` reads one."""
    valid: Tensor | None
    """bool mask over rows; None in a minibatch whose rows are all valid."""
    state: Tree = None
    """[B, ...] recurrent state before row 0."""
    metrics: Mapping[str, Tensor] | None = None
    """Scalars about the whole batch to log; minibatches have none."""

    def __getitem__(self, name: str) -> Tree:
        return self.rows[name]


class Loss(NamedTuple):
    """What `loss_fn` returns."""

    total: Tensor | dict[str, Tensor]
    """Scalar to minimise, or one for each optimizer by its name."""
    metrics: dict[str, Tensor]
    """Scalars to log, without gradient, averaged over the minibatches of a training step."""
    priorities: Tensor | None = None
    """[N] new priorities of replayed samples, where replay is prioritised."""


Optimizers: TypeAlias = dict[str, torch.optim.Optimizer]
AgentFn: TypeAlias = Callable[[EnvSpec, Any], Agent]
PostprocessFn: TypeAlias = Callable[[Agent, SampleBatch, Any], TrainBatch]
LossFn: TypeAlias = Callable[[Agent, TrainBatch, Any], Loss]
OptimizerFn: TypeAlias = Callable[[Agent, Any], Optimizers]


class Algorithm(Protocol):
    """Frozen settings of an algorithm. Any frozen dataclass with these two members is one."""

    @property
    def batch(self) -> BatchSpec:
        """T and B of the sampler that a run uses if it names none."""
        ...

    def build(self, spec: EnvSpec, seed: int = 0, device: str = "cpu") -> Any:
        """The live `Policy` for an environment."""
        ...
