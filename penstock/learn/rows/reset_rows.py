"""Batches of environments that reset in the step of an end, in the form of all others: with reset rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.core.batch import SampleBatch
from penstock.core.tree import tree_map
from penstock.learn.comm import Comm, gathered


def with_reset_rows(batch: SampleBatch, comm: Comm | None = None) -> SampleBatch:
    """The same steps [T + n, B] with a reset row after each row that `resets`, which holds its last observation.

    So values, traces, memory and whatever an algorithm computes of a batch need no rule of their own: `obs[t+1]` is the
    true successor of every valid row, and `final` is None. n is the largest number of resets of a slot, the same for
    all learners; slots with fewer end with rows that are not valid and repeat row T. Waits for the device once.

    Args:
        batch: of tensors. comm: of the learners that train on such batches together.
    """
    if batch.final is None:
        return batch
    T, B = batch.spec
    resets, none = batch.resets, torch.zeros(1, B, dtype=torch.int64, device=batch.valid.device)
    before = torch.cat((none, resets.cumsum(0)))  # resets before row t
    n = int(before[-1].max())
    n = n if comm is None else max(gathered(comm, n))
    rows = torch.arange(T + 1, device=none.device).unsqueeze(1)
    shown = torch.zeros(T + 1 + n, B, dtype=torch.int64, device=none.device).scatter_(0, rows + before, 1)
    source = shown.cumsum(0) - 1  # the row that stands there, or whose end the reset row follows
    ends = (shown == 0) & (source < T)
    slots = torch.arange(B, device=none.device)
    at = source.clamp(max=T - 1)
    real = (shown[:-1] == 1) & (source[:-1] < T)

    def taken(x: Tensor) -> Tensor:
        return x[source, slots]

    def row(x: Tensor) -> Tensor:
        return x[at[:-1], slots]

    def with_final(x: Tensor, final: Tensor) -> Tensor:
        return torch.where(_wide(ends, x), final[at, slots], taken(x))

    def led(x: Any) -> Any:
        return torch.where(_wide(ends, x), x[at + 1, slots], taken(x))

    first = taken(batch.first) & ~ends
    return replace(
        batch,
        obs=tree_map(with_final, batch.obs, batch.final),
        first=first,
        prev_action=tree_map(led, batch.prev_action),
        prev_reward=led(batch.prev_reward).masked_fill(first, 0.0),
        terminated=row(batch.terminated) & real,
        truncated=row(batch.truncated) & real,
        valid=row(batch.valid) & real,
        info=tree_map(row, batch.info),
        version=row(batch.version),
        final=None,
    )


def _wide(mask: Tensor, x: Tensor) -> Tensor:
    """[T, B] as [T, B, 1, ...], with as many dimensions as x."""
    return mask.view(*mask.shape, *[1] * (x.ndim - 2))
