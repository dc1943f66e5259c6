"""Post-processed batches cut into shuffled minibatches: valid rows, or whole columns where memory runs through them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.tree import Tree, tree_map
from penstock.learn.algorithm import TrainBatch


def minibatches(data: TrainBatch, size: int | None, rng: np.random.Generator) -> Iterator[TrainBatch]:
    """One pass over the data in shuffled parts that differ in size by at most one.

    Args:
        data: leaves [T, B, ...]. With recurrent state parts are columns [T, b, ...] and keep the mask; else they are
            valid rows [N, ...] and `valid` is None.
        size: rows of a part. There are round(T * B / size) parts, whatever number of rows is valid, so that the
            number of updates does not depend on how episodes fell. None: one part, not shuffled.
        rng: shuffles.

    Raises:
        ConfigError: a recurrent minibatch smaller than a column.
    """
    assert data.valid is not None
    T, B = data.valid.shape
    if data.state is not None:
        parts = 1 if size is None else max(round(T * B / size), 1)
        if parts > B:
            raise ConfigError(f"minibatch={size} cuts {B} columns of T={T} into {parts} parts; use minibatch >= {T}")
        order = np.arange(B) if size is None else rng.permutation(B)
        for columns in np.array_split(order, parts):
            yield _columns(data, torch.from_numpy(columns))
        return
    flat = valid_rows(data)
    count = len(flat.inputs.first)
    if size is None or not count:
        yield flat
        return
    shuffled = _rows(flat, torch.from_numpy(rng.permutation(count)))
    parts = min(max(round(T * B / size), 1), count)
    edges = [count * i // parts for i in range(parts + 1)]
    for start, stop in zip(edges, edges[1:]):
        yield _rows(shuffled, slice(start, stop))


def valid_rows(data: TrainBatch) -> TrainBatch:
    """[T, B, ...] leaves as [N, ...], valid rows only, time-major; `valid` is None."""
    assert data.valid is not None
    index = data.valid.flatten().nonzero().flatten()

    def rows(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat if len(index) == len(flat) else flat[index]

    return TrainBatch(_inputs(rows, data.inputs), tree_map(rows, data.rows), None)


def _rows(flat: TrainBatch, index: Tensor | slice) -> TrainBatch:
    return TrainBatch(
        _inputs(lambda x: x[index], flat.inputs),
        {k: tree_map(lambda x: x[index], v) for k, v in flat.rows.items()},
        None,
    )


def _columns(data: TrainBatch, columns: Tensor) -> TrainBatch:
    def take(x: Tensor) -> Tensor:
        return x[:, columns]

    assert data.valid is not None
    state: Tree = tree_map(lambda x: x[columns], data.state)
    return TrainBatch(_inputs(take, data.inputs), tree_map(take, data.rows), take(data.valid), state)


def _inputs(fn: object, inputs: Inputs) -> Inputs:
    return Inputs(*(tree_map(fn, part) for part in inputs))  # pyright: ignore[reportArgumentType]
