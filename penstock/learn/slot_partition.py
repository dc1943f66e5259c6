"""Each learner's slots of a batch, and gathering arrays over learners."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.agents.actor_critic import value_unit
from penstock.agents.agent import Agent
from penstock.agents.preparation import RunningMoments
from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_map
from penstock.learn.comm import Comm

_present: ContextVar[SlotPartition | None] = ContextVar("partition of the policy that post-processes", default=None)


def batch_mean(x: Tensor, valid: Tensor) -> Tensor:
    """The mean of x [T, B] where `valid`, in a `postprocess_fn` over the batches of all learners."""
    return ops.masked_mean(of_all_learners(x), of_all_learners(valid))


def of_all_learners(x: Tensor) -> Tensor:
    """[T, total, ...] of the batches of all learners, in a `postprocess_fn` that has those of one, [T, B, ...]."""
    partition = _present.get()
    return x if partition is None else partition.gather(x)


def sample_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """The mean of x [N] over a minibatch, those parts of other learners included, in a `postprocess_fn` or `loss_fn`.

    Args:
        valid: of the minibatch.
    """
    partition = _present.get()
    if partition is None:
        return x.mean()
    held = x if valid is None else x[valid]
    total, count = partition.totals(float(held.sum()), len(held))
    return x.new_tensor(total / count)


def drawn(draw: Callable[[int, int], np.ndarray[Any, Any]], valid: Tensor) -> Tensor:
    """The columns [T, B] of `draw(T, B of all learners)` for the batch of this one, in a `postprocess_fn`."""
    (T, B), partition = valid.shape, _present.get()
    x = draw(T, B) if partition is None else draw(T, partition.total)[:, partition.local_slots]
    return torch.from_numpy(x).to(valid.device)


def moved_unit(agent: Any, return_: Tensor, valid: Tensor) -> Tensor | float:
    """Updates the agent's value scale by the returns [T, B] of the batches of all learners; returns the new unit.

    Advantages in this unit, and value errors over its square, do not depend on the size of rewards.
    """
    scale = getattr(agent, "value_scale", None)
    if scale is not None:
        scale.update(batch_mean(return_.double().square(), valid), agent.value_head)
    return value_unit(agent)


def watches(agent: Agent) -> bool:
    """True if the agent keeps running statistics, or may: its `observe` is its own."""
    kept = any(isinstance(module, RunningMoments) for module in agent.modules())
    return kept or type(agent).observe.__module__.partition(".")[0] != __name__.partition(".")[0]


class SlotPartition:
    """Slots [first, first + width) of the `total` that all ranks hold, rank by rank."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.widths: list[int] = []
        """Slots of each rank; none before the first batch."""
        self.first = self.total = 0
        self.metrics: list[str] = []
        """Metrics of losses that all ranks know, in their order."""
        self.ask: Callable[[str, int, int], None] | None = None
        """Sends the other ranks an order to give rows of their replay; None where they do so by themselves."""

    def fit(self, width: int) -> None:
        """Learns of every rank's number of slots. Raises ConfigError if the own one changes."""
        if not self.widths:
            self.widths = [int(x) for x in self.comm.all_gather(torch.tensor([width]))]
            self.first, self.total = sum(self.widths[: self.comm.rank]), sum(self.widths)
        if width != self.widths[self.comm.rank]:
            raise ConfigError(
                f"rank {self.comm.rank} got a batch of B={width} after batches of "
                f"B={self.widths[self.comm.rank]}; with several learners B must stay what it was"
            )

    def known_to(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, so that `of_all_learners` in it is of these slots."""
        context = copy_context()
        context.run(_present.set, self)
        return functools.partial(context.run, function)

    @property
    def local_slots(self) -> slice:
        """The own slots among all."""
        return slice(self.first, self.first + self.widths[self.comm.rank])

    def gather(self, x: Tensor, axis: int = 1) -> Tensor:
        """[..., total, ...] of every rank's [..., width, ...], the same on all ranks."""
        widest, own = max(self.widths), x.transpose(0, axis)
        padded = own if len(own) == widest else torch.cat((own, own.new_zeros(widest - len(own), *own.shape[1:])))
        parts = self.comm.all_gather(padded)
        return torch.cat([part[:width] for part, width in zip(parts, self.widths)]).transpose(0, axis)

    def batch(self, batch: SampleBatch) -> SampleBatch:
        """The batch of tensors of all ranks, the same on every rank."""
        timed = {name: getattr(batch, name) for name in batch.__dataclass_fields__ if name != "state"}
        whole = tree_map(self.gather, timed)
        return SampleBatch(**whole, state=tree_map(lambda x: self.gather(x, 0), batch.state))

    def gather_array(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Like `gather`, for arrays [n, width, ...]."""
        return self.gather(torch.from_numpy(np.ascontiguousarray(x))).numpy()

    def sum_array(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The sum over all ranks of an array, in float64."""
        return self.comm.all_reduce(torch.from_numpy(np.asarray(x, np.float64).copy())).numpy()

    def request_rows(self, name: str, start: int, stop: int) -> None:
        """Has the other ranks give their part of these rows of a replay's array next, by `ask` where that is set."""
        if self.ask is not None:
            self.ask(name, start, stop)

    def totals(self, *numbers: float) -> list[float]:
        """The sum over all ranks of each number, in float64."""
        return self.comm.all_reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def mean(self, metrics: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """The mean of each metric over the ranks, each weighted by its rows; {} if no rank has any."""
        own = [float(x) * rows if rows else 0.0 for x in metrics.values()]
        *sums, count = self.totals(*own, rows)
        return {name: torch.tensor(x / count) for name, x in zip(metrics, sums)} if count else {}
