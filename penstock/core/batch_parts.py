"""Batches put together and taken apart: side by side, one after the other, by episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np

from penstock.core.batch import ROWS, ROWS_AND_NEXT, AnyBatch, Array, MultiAgentBatch, SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import SHARED
from penstock.core.tree import Tree, tree_map

Batches = TypeVar("Batches", SampleBatch, MultiAgentBatch)


def concat_samples(batches: Sequence[Batches], axis: Literal["T", "B"] = "B") -> Batches:
    """Batches of the same layout side by side (`axis="B"`), or one after the other in time (`axis="T"`).

    Joined in time, row T of each batch must be row 0 of the next; the joined batch keeps the first one's state. Of
    several policies each is joined for itself, a batch that lacks it adds nothing to it; a SampleBatch among them
    counts as one of the policy "shared".

    Raises:
        ConfigError: no batches, unequal layouts, or batches that do not follow each other.
    """
    if not batches:
        raise ConfigError("concat_samples got no batch; expected at least one")
    if axis not in ("T", "B"):
        raise ConfigError(f"concat_samples got axis={axis!r}; expected 'T' or 'B'")
    if any(isinstance(batch, MultiAgentBatch) for batch in batches):
        return _concat_many([as_multi_agent(batch) for batch in batches], axis)  # pyright: ignore[reportReturnType]
    samples: list[Any] = list(batches)
    other = 0 if axis == "B" else 1
    if len({(batch.spec[other], batch.state is None, batch.final is None) for batch in samples}) > 1:
        raise ConfigError(
            f"concat_samples(axis={axis!r}) got batches of [T, B] = {[tuple(b.spec) for b in samples]}; expected one "
            f"common {'TB'[other]}, and recurrent state in all or none, as last observations"
        )
    if axis == "B":
        timed = tree_map(lambda *xs: _concat(xs, 1), *[_timed(b) for b in samples])
        state = tree_map(lambda *xs: _concat(xs, 0), *[b.state for b in samples])
        return SampleBatch(**timed, state=state)  # pyright: ignore[reportReturnType]
    for earlier, later in zip(samples, samples[1:]):
        same = (earlier.first[-1] == later.first[0]) & (earlier.prev_reward[-1] == later.prev_reward[0])
        if not bool(same.all()):
            raise ConfigError("concat_samples(axis='T'): row T of a batch is not row 0 of the next; pass them in order")
    heads = [_timed(b[: b.spec.T], drop_last=True) for b in samples[:-1]]
    timed = tree_map(lambda *xs: _concat(xs, 0), *heads, _timed(samples[-1]))
    return SampleBatch(**timed, state=samples[0].state)  # pyright: ignore[reportReturnType]


@overload
def split_by_episode(batch: SampleBatch) -> list[SampleBatch]: ...
@overload
def split_by_episode(batch: MultiAgentBatch) -> dict[str, list[SampleBatch]]: ...
def split_by_episode(batch: AnyBatch) -> list[SampleBatch] | dict[str, list[SampleBatch]]:
    """Every run of valid rows of one episode as its own [L, 1] batch (a view), by slot, then by time.

    An episode that spans batches has a fragment in each. A fragment that starts after row 0 has no state. For a
    MultiAgentBatch the fragments are returned by policy.
    """
    if isinstance(batch, MultiAgentBatch):
        return {key: split_by_episode(part) for key, part in batch.items()}
    valid = np.asarray(batch.valid)
    ended = np.asarray(batch.terminated) | np.asarray(batch.truncated)
    fragments: list[SampleBatch] = []
    T, B = batch.spec
    for b in range(B):
        start: int | None = None
        for t in range(T):
            if not valid[t, b]:
                if start is not None:
                    fragments.append(batch[start:t, b : b + 1])
                start = None
                continue
            start = t if start is None else start
            if ended[t, b]:
                fragments.append(batch[start : t + 1, b : b + 1])
                start = None
        if start is not None:
            fragments.append(batch[start:T, b : b + 1])
    return fragments


def as_multi_agent(batch: AnyBatch, policy: str = SHARED) -> MultiAgentBatch:
    """The batch of one policy as that of many, with its valid rows as env steps; a MultiAgentBatch as it is."""
    if isinstance(batch, MultiAgentBatch):
        return batch
    return MultiAgentBatch({policy: batch}, batch.env_steps, batch.spec.B)


def wrap_as_needed(
    policy_batches: Mapping[str, SampleBatch], env_steps: int, environments: int | None = None
) -> AnyBatch:
    """The SampleBatch itself if the policy "shared" is the only one, else the MultiAgentBatch of these policies."""
    if list(policy_batches) == [SHARED]:
        return policy_batches[SHARED]
    return MultiAgentBatch(policy_batches, env_steps, environments)


def timeslices(batch: Batches, n: int) -> list[Batches]:
    """Views of n steps of every environment each, in order; the last may be shorter.

    Raises:
        ConfigError: n below 1, or agents take turns: row t of one policy is then another moment than row t of the next.
    """
    if n < 1:
        raise ConfigError(f"timeslices got n={n}; expected 1 or more steps in a slice")
    if isinstance(batch, SampleBatch):
        return [batch[t : t + n] for t in range(0, batch.spec.T, n)]
    many: Any = batch
    if many.environments is None:
        raise ConfigError(
            "timeslices got a MultiAgentBatch whose policies share no rows, as agents take turns: slice the batch of "
            "one policy, or use split_by_episode"
        )
    stepped = _stepped(many)
    return [
        MultiAgentBatch(
            {key: part[t : t + n] for key, part in many.items()}, int(stepped[t : t + n].sum()), many.environments
        )
        for t in range(0, len(stepped), n)
    ]  # pyright: ignore[reportReturnType]


def _stepped(batch: MultiAgentBatch) -> np.ndarray[Any, Any]:
    """[T, E] bool: some agent of the environment acted."""
    E = batch.environments or 1
    columns = [np.asarray(part.valid).reshape(len(part.valid), E, -1).any(-1) for part in batch.values()]
    return np.logical_or.reduce(columns) if columns else np.zeros((0, E), bool)


def _concat_many(many: list[MultiAgentBatch], axis: Literal["T", "B"]) -> MultiAgentBatch:
    ids = dict.fromkeys(key for m in many for key in m)
    joined = {key: concat_samples([m[key] for m in many if key in m], axis) for key in ids}
    known = [m.environments for m in many if m.environments is not None]
    environments: int | None = None
    if len(known) == len(many) and len({_seats(m) for m in many}) == 1:  # columns stay a row of seats
        environments = sum(known) if axis == "B" else known[0]
    return MultiAgentBatch(joined, sum(m.env_steps for m in many), environments)


def _seats(batch: MultiAgentBatch) -> frozenset[tuple[str, float]]:
    """Columns of each policy for an environment."""
    return frozenset((key, part.spec.B / (batch.environments or 1)) for key, part in batch.items())


def _timed(batch: SampleBatch, drop_last: bool = False) -> dict[str, Tree]:
    """Every leaf with a time axis; `drop_last` leaves out row T, which the next batch repeats as its row 0."""
    out = {name: getattr(batch, name) for name in ROWS}
    nexts = {name: getattr(batch, name) for name in ROWS_AND_NEXT}
    return out | (tree_map(lambda x: x[:-1], nexts) if drop_last else nexts)


def _concat(xs: Sequence[Array], axis: int) -> Array:
    shape = list(xs[0].shape)
    shape[axis] = sum(x.shape[axis] for x in xs)
    out = np.empty(shape, xs[0].dtype) if isinstance(xs[0], np.ndarray) else xs[0].new_empty(shape)
    at = 0
    for x in xs:
        out[(slice(None),) * axis + (slice(at, at + x.shape[axis]),)] = x
        at += x.shape[axis]
    return out
