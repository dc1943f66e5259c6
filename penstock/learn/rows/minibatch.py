"""Post-processed batches cut into shuffled minibatches: valid rows, or whole columns where memory runs through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_paths, tree_structure, tree_unflatten
from penstock.learn.slot_partition import SlotPartition


def minibatches(
    data: TrainBatch,
    size: float | None,
    rng: np.random.Generator,
    epochs: int = 1,
    partition: SlotPartition | None = None,
    by_rows: bool = False,
) -> Iterator[TrainBatch]:
    """Passes over the data in shuffled parts that differ in size by at most one.

    Args:
        data: leaves [T, B, ...]. With recurrent state parts are columns [T, b, ...] and keep the mask; else they are
            valid rows [N, ...] and `valid` is None.
        size: rows of a part, see `part_count`: the number of updates does not depend on how episodes fell. None: one
            part, not shuffled.
        rng: shuffles.
        partition: of several learners, whose joint data are cut into parts; this learner gets its share of each, see
            `shares`.
        by_rows: the number of parts is that of the valid rows, which are few where an agent acts rarely.

    Raises:
        ConfigError: an array that is not [T, B, ...].
    """
    check_rows(data)
    assert data.valid is not None
    if partition is not None:
        yield from shares(data, size, rng, epochs, partition, by_rows)
        return
    (T, B), device = data.valid.shape, data.valid.device
    if data.state is not None:
        count = int(data.valid.sum())
        parts = _part_count(count if by_rows else T * B, size, B) if count else 0
        for _ in range(epochs if parts else 0):
            order = np.arange(B) if size is None else rng.permutation(B)
            for part in to_device(order, device).tensor_split(parts):
                yield _columns(data, part)
        return
    flat = valid_rows(data)
    count = len(tree_leaves(flat)[0])  # known since the rows were taken: to count `valid` would wait for a device
    if size is None:
        yield from [flat] * (epochs if count else 0)
        return
    parts = min(_part_count(count if by_rows else T * B, size, T * B), count)
    leaves, structure = tree_leaves(flat), tree_structure(flat)
    for _ in range(epochs if count else 0):
        for part in to_device(rng.permutation(count), device).tensor_split(parts):
            yield tree_unflatten(structure, [x.index_select(0, part) for x in leaves])


def to_device(x: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """The array as a tensor: the same memory on the CPU; elsewhere a copy that nothing waits for."""
    held = torch.from_numpy(x)
    if device.type == "cpu":
        return held
    return (held.pin_memory() if device.type == "cuda" else held).to(device, non_blocking=True)


def shares(
    data: TrainBatch,
    size: float | None,
    rng: np.random.Generator,
    epochs: int,
    partition: SlotPartition,
    by_rows: bool = False,
) -> Iterator[TrainBatch]:
    """This learner's share of each minibatch that one learner with the data of all would make.

    The order is drawn over the rows of all learners, so every learner yields the same number of parts. For a part in
    which it has no rows it yields one row, or column, that is not `valid`, so that it takes part with weight 0.

    Args:
        data: this learner's leaves [T, b, ...]; the other arguments as in `minibatches`, equal on all ranks.
    """
    assert data.valid is not None
    valid, device = partition.gather(data.valid), data.valid.device
    (T, B), own = valid.shape, partition.local_slots
    amount = int(valid.sum()) if by_rows else T * B
    if data.state is not None:
        parts = _part_count(amount, size, B) if valid.any() else 0
        for _ in range(epochs if parts else 0):
            order = np.arange(B) if size is None else rng.permutation(B)
            for part in np.array_split(order, parts):
                held = torch.from_numpy(part[(part >= own.start) & (part < own.stop)] - own.start).to(device)
                yield _columns(data, held) if len(held) else _without_weight(_columns(data, held.new_zeros(1)))
        return
    index = valid.flatten().nonzero().flatten()
    row, column = index // B, index % B
    width = own.stop - own.start
    place = torch.where((column >= own.start) & (column < own.stop), row * width + column - own.start, -1)
    count = len(index)
    parts = 1 if size is None else min(_part_count(amount, size, T * B), count)
    flat = tree_map(lambda x: x.flatten(0, 1), (tuple(data.inputs), dict(data.rows)))
    leaves, structure = tree_leaves(flat), tree_structure(flat)

    def rows(at: Tensor) -> TrainBatch:
        inputs, named = tree_unflatten(structure, [x.index_select(0, at) for x in leaves])
        return TrainBatch(Inputs(*inputs), named, None)

    for _ in range(epochs if count else 0):
        order = torch.arange(count) if size is None else torch.from_numpy(rng.permutation(count))
        for part in order.to(device).tensor_split(parts):
            held = place[part]
            held = held[held >= 0]
            yield rows(held) if len(held) else _without_weight(rows(held.new_zeros(1)))


def _without_weight(x: TrainBatch) -> TrainBatch:
    """The rows as ones that are not valid."""
    shape = (1,) if x.valid is None else x.valid.shape
    device = tree_leaves(dict(x.rows))[0].device
    return replace(x, valid=torch.zeros(shape, dtype=torch.bool, device=device))


def part_count(T: int, B: int, size: int | None, columns: bool = False) -> int:
    """The number of minibatches of about `size` rows in a batch [T, B], None for all; a column stays whole."""
    return _part_count(T * B, size, B if columns else T * B)


def _part_count(rows: int, size: float | None, most: int) -> int:
    return 1 if size is None else min(max(round(rows / size), 1), most)


def valid_rows(data: TrainBatch) -> TrainBatch:
    """[T, B, ...] leaves as [N, ...], valid rows only, time-major; `valid` is None."""
    assert data.valid is not None
    index = data.valid.flatten().nonzero().flatten()

    def rows(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat if len(index) == len(flat) else flat.index_select(0, index)

    return TrainBatch(_mapped(rows, data.inputs), tree_map(rows, data.rows), None)


def check_rows(data: TrainBatch) -> None:
    """Raises ConfigError that names the first array of post-processed data that is not a tensor [T, B, ...]."""
    if not isinstance(data.valid, Tensor) or data.valid.ndim != 2:
        raise ConfigError(f"TrainBatch.valid is {_shown(data.valid)}; expected bool [T, B]: pass batch.valid")
    lead = data.valid.shape
    arrays = tuple(data.inputs), dict(data.rows)
    if all(isinstance(x, Tensor) and x.shape[:2] == lead for x in tree_leaves(arrays)):
        return
    for name, tree in (("inputs", data.inputs._asdict()), ("rows", arrays[1])):
        for path, x in zip(tree_paths(tree), tree_leaves(tree)):
            if not (isinstance(x, Tensor) and x.shape[:2] == lead):
                T, B = lead
                raise ConfigError(
                    f"postprocess_fn returned {name}{path} of {_shown(x)}; expected [T, B, ...] with T={T}, B={B}, "
                    "as `valid` is" + _turned(x, lead)
                )


def _shown(x: Any) -> str:
    return f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"


def _turned(x: Any, lead: torch.Size) -> str:
    """A remark on the two mistakes that shapes tell apart."""
    T, B = lead
    if isinstance(x, Tensor) and x.shape[:2] == (T + 1, B):
        return "; is it of all T+1 observations? x[:-1] are those acted at"
    return "; is it transposed?" if isinstance(x, Tensor) and x.shape[:2] == (B, T) else ""


def _columns(data: TrainBatch, columns: Tensor) -> TrainBatch:
    def take(x: Tensor) -> Tensor:
        return x[:, columns]

    assert data.valid is not None
    state: Tree = tree_map(lambda x: x[columns], data.state)
    return TrainBatch(_mapped(take, data.inputs), tree_map(take, data.rows), take(data.valid), state)


def _mapped(fn: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    return Inputs(*(tree_map(fn, part) for part in inputs))
