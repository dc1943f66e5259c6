"""KeptRows: rows of a policy that acts rarely, kept batch after batch until there are enough to train on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from penstock.core.batch import ROWS, ROWS_AND_NEXT, SampleBatch, as_arrays
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.tree import tree_leaves, tree_map
from penstock.learn.comm import gathered
from penstock.learn.policy import Policy

Rows = np.ndarray[Any, Any]


class KeptRows:
    """Copies of the rows of one policy that it has not trained on, as one batch [T, B] of the same slots.

    Row T of a batch is row 0 of the next, so the kept rows are one record: returns, advantages and memory run through
    it, and rows keep all that was recorded when they were acted, `logp` too. Rows without a turn are left out.

    Args:
        least: valid rows, of all learners together, that the policy trains on at least.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.batch: SampleBatch | None = None
        """Arrays [T, B, ...] that it owns; None from a training step to the next batch."""
        self.slots = 0
        """B of the policy's batches, 0 until it is known."""
        self._waits: list[list[int]] = []
        """Versions [first, end) in which the policy waited: no parameter changed between them."""

    @property
    def rows(self) -> int:
        """Valid rows that wait, of this learner."""
        return 0 if self.batch is None else self.batch.env_steps

    def whole(self, policy: Policy, batch: SampleBatch) -> SampleBatch | None:
        """All rows that wait with those of a batch, which the policy is to train on now; None if it has to wait.

        Raises:
            ConfigError: the batch does not go on where the one before has ended.
        """
        self._add(as_arrays(batch))
        if policy.of_all(self.rows) < self.least:
            self._wait(policy.version)
            return None
        found, self.batch = self.batch, None
        if policy.partition is not None:
            assert found is not None
            found = _lengthened(found, max(gathered(policy.comm, found.spec.T)))
        return found

    def state_dict(self, policy: Policy) -> dict[str, Any]:
        """The rows of all learners, which all call this; the same on each."""
        batch = self.batch
        if batch is not None and policy.partition is not None:
            batch = _side_by_side(gathered(policy.comm, batch))
        plain = None if batch is None else {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "final"}
        return {"batch": plain, "waits": [list(x) for x in self._waits]}

    def load_state_dict(self, state: Mapping[str, Any], policy: Policy) -> None:
        """Inverse of `state_dict`, of any number of learners. Raises CheckpointError for other slots."""
        self._waits = [list(x) for x in state["waits"]]
        self.batch = None if state["batch"] is None else SampleBatch(**state["batch"])
        if self.batch is None:
            return
        own, total = slice(None), self.slots or self.batch.spec.B
        if policy.partition is not None:
            policy.partition.fit(self.slots)
            own, total = policy.partition.local_slots, policy.partition.total
        if total != self.batch.spec.B:
            raise CheckpointError(f"the rows that wait are of {self.batch.spec.B} slots; this run has {total}")
        self.batch = compacted(self.batch[:, own])

    def _add(self, batch: SampleBatch) -> None:
        if self.slots not in (0, batch.spec.B):
            raise ConfigError(
                f"a batch of B={batch.spec.B} after one of B={self.slots}; with min_rows all batches are of the same "
                "slots: sample whole rounds, not fragments of any runner"
            )
        self.slots = batch.spec.B
        if self.batch is not None and not batch.env_steps:
            return
        batch = replace(batch, version=self._since(batch.version, batch.valid))
        self.batch = compacted(batch if self.batch is None else _joined(self.batch, batch))

    def _wait(self, version: int) -> None:
        """Notes that the parameters of the next version are those of this one, with which rows seem acted since."""
        if self._waits and self._waits[-1][1] == version:
            self._waits[-1][1] += 1
        else:
            self._waits.append([version, version + 1])
        if self.batch is not None:
            self.batch = replace(self.batch, version=self.batch.version + 1)

    def _since(self, version: Rows, valid: Rows) -> Rows:
        """The versions [T, B] of rows, later by the steps since then in which the policy waited."""
        oldest = version[valid].min(initial=version.max())
        self._waits = [x for x in self._waits if x[1] > oldest]
        return version + sum((np.clip(end - np.maximum(version, first), 0, None) for first, end in self._waits), 0)


def _joined(kept: SampleBatch, batch: SampleBatch) -> SampleBatch:
    """Joins the kept rows and the next batch into one record; between them is row T of the kept rows, not valid.

    Raises ConfigError if the batch does not go on where the kept rows end.
    """
    gap = {name: tree_map(lambda x: np.zeros_like(x[:1]), getattr(kept, name)) for name in ROWS}
    record = SampleBatch(
        **{name: tree_map(_end_to_end, getattr(kept, name), getattr(batch, name)) for name in ROWS_AND_NEXT},
        **{name: tree_map(_end_to_end, getattr(kept, name), gap[name], getattr(batch, name)) for name in ROWS},
        state=kept.state,
    )
    T = kept.spec.T
    last = T - np.argmax(kept.valid[::-1], 0)  # of each slot the row after its last valid one
    opens = kept.valid.any(0) & batch.valid[0] & ~batch.first[0]
    slots = np.flatnonzero(opens)
    apart = slots[~_alike(record, last[slots], np.full(len(slots), T + 1), slots)]
    if len(apart):
        raise ConfigError(
            f"row 0 of slot {apart[0]} is not the last row of the batch before; with min_rows each batch goes on where "
            "the one before has ended: sample whole rounds (sampler.mode='rounds'), not fragments of any runner"
        )
    return record


def compacted(record: SampleBatch) -> SampleBatch:
    """A copy with the valid rows, and after each that another does not follow its successor, as its bootstrap.

    Rows in which an agent took no turn (`turns.py`) are left out where its next turn opens with the observation in
    them: then returns and memory run on, over the ends of batches too. Slots are filled up with rows that are not
    valid.
    """
    T, B = record.spec
    rows, slots = np.arange(T + 1)[:, None], np.arange(B)
    valid = np.concatenate([record.valid, np.zeros((1, B), bool)])
    following = np.minimum.accumulate(np.where(valid, rows, T)[::-1], 0)[::-1]
    kept = valid.copy()
    kept[1:] |= valid[:-1]
    t, b = np.nonzero(kept & ~valid)
    u = following[t, b]
    opened = np.cumsum(record.first, 0)
    goes_on = valid[u, b] & (opened[u, b] == opened[t, b] - record.first[t, b]) & _alike(record, t, u, b)
    kept[t[goes_on], b[goes_on]] = False
    count = kept.sum(0)
    order = np.argsort(~kept, axis=0, kind="stable")
    ends = np.where(count > 0, order[np.maximum(count, 1) - 1, slots], T)
    at = np.where(rows < count, order, ends)[: max(int(count.max()), 2)]
    return _taken(record, at, (valid[at, slots] & (rows < count)[: len(at)])[:-1])


def _taken(record: SampleBatch, at: Rows, valid: Rows) -> SampleBatch:
    """A copy of some rows of each slot.

    Args:
        at: [N+1, B] rows, in order. valid: [N, B] bool.
    """
    slots = np.arange(at.shape[1])
    before = np.minimum(at[:-1], record.spec.T - 1)
    taken = SampleBatch(
        **{name: tree_map(lambda x: x[at, slots], getattr(record, name)) for name in ROWS_AND_NEXT},
        **{name: tree_map(lambda x: x[before, slots], getattr(record, name)) for name in ROWS},
        state=tree_map(np.array, record.state),
    )
    return replace(taken, valid=valid, terminated=taken.terminated & valid, truncated=taken.truncated & valid)


def _lengthened(batch: SampleBatch, T: int) -> SampleBatch:
    """The batch with rows that are not valid behind, so that it has T."""
    own, B = batch.spec
    at = np.minimum(np.arange(T + 1), own)[:, None].repeat(B, 1)
    return _taken(batch, at, np.concatenate([batch.valid, np.zeros((T - own, B), bool)]))


def _side_by_side(batches: list[SampleBatch]) -> SampleBatch:
    """The batch of all learners from that of each."""
    T = max(batch.spec.T for batch in batches)
    filled = [_lengthened(batch, T) for batch in batches]
    timed = [{name: getattr(x, name) for name in ROWS_AND_NEXT + ROWS} for x in filled]
    state = tree_map(lambda *xs: np.concatenate(xs, 0), *(x.state for x in filled))
    return SampleBatch(**tree_map(lambda *xs: np.concatenate(xs, 1), *timed), state=state)


def _end_to_end(*parts: Rows) -> Rows:
    return np.concatenate(parts)


def _alike(record: SampleBatch, t: Rows, u: Rows, b: Rows) -> Rows:
    """[N] bool: the agent's inputs in rows t are those in rows u, of slots b."""
    same = np.ones(len(t), bool)
    for name in ROWS_AND_NEXT:
        for x in tree_leaves(getattr(record, name)):
            one, other = x[t, b], x[u, b]
            equal = (one == other) | ((one != one) & (other != other))
            same &= equal.all(tuple(range(1, equal.ndim)))
    return same
