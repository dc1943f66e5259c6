"""Running sums of open episodes, from which their returns and lengths follow when they end."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SampleBatch
from penstock.samplers.episodes import Episodes, Floats, Ints

_LONGEST_TABLE = 1_000_000  # steps
_ENOUGH = 20
"""Episodes after which an info key that no step has reported is remarked on."""
_OPTIONAL = {"is_success"}
"""Keys that are recorded unasked."""
_UNSUMMED_ROWS = 64
"""Rows of which the sums are made at once: of a batch of one row they take as long as all else about episodes."""
_NO_FLOATS = np.empty(0)


def _env_info(batch: SampleBatch) -> Mapping[str, Any]:
    """Columns [T, B] of the env info that is recorded; NaN where a step reported nothing."""
    return batch.info.get("env", {}) if isinstance(batch.info, dict) else {}


def _all_go_on(batch: SampleBatch) -> bool:
    """True if every row of a batch continues an episode that it does not end."""
    return (
        b"\0" not in batch.valid.tobytes()
        and b"\1" not in batch.first[:-1].tobytes()
        and b"\1" not in batch.terminated.tobytes()
        and b"\1" not in batch.truncated.tobytes()
    )


class EpisodeStats:
    """Running sums of B slots over batches; `update` returns the episodes that ended in each."""

    def __init__(self, B: int, discount: float) -> None:
        self.discount = discount
        self._powers: Floats = np.ones(1)
        self.length = np.zeros(B, np.int64)
        self.return_ = np.zeros(B)
        self.discounted = np.zeros(B)
        self.columns: dict[str, Floats] = {}
        # Rewards [T, B] of the last batches, in which every episode went on: `return_` and `discounted` lack them yet.
        self._unsummed: list[npt.NDArray[np.float32]] = []
        self._missing: set[str] | None = None  # info keys that no row has reported; None before the first batch
        self._ended = 0

    def begin(self, b: int, rewards: Sequence[float]) -> None:
        """Counts rewards that slot b earned in its current episode before the first batch."""
        powers = self.discount ** np.arange(len(rewards))
        self.return_[b], self.length[b] = float(np.sum(rewards)), len(rewards)
        self.discounted[b] = float(np.sum(powers * np.asarray(rewards)))

    def update(self, batch: SampleBatch) -> Episodes:
        """Adds T rows of every slot. An episode that is cut without an end (a fault) is dropped."""
        if _all_go_on(batch):
            self._extend(batch)
            self._remark(batch, 0)
            return Episodes(columns=dict.fromkeys(self.columns, _NO_FLOATS))
        self._sum_up()
        T, B = batch.spec
        ended = np.logical_or(batch.terminated, batch.truncated)
        time = np.arange(T)[:, None]
        opened = np.maximum.accumulate(
            np.where(batch.first[:-1], time, -1), 0
        )  # row of the opening; -1: an earlier batch
        age = np.where(opened >= 0, time - opened, time + self.length)
        reward = batch.reward.astype(np.float64)
        sums = np.cumsum(reward, 0)
        discounted_sums = np.cumsum(reward * self._powers_of(age), 0)
        env_info = _env_info(batch)

        def since_opening(t: Ints, b: Ints) -> tuple[Floats, Floats, dict[str, Floats]]:
            """Sums and last reported columns of the episodes that rows (t, b) belong to."""
            row, earlier = opened[t, b], opened[t, b] < 0
            before = np.maximum(row - 1, 0)
            total = sums[t, b] - np.where(row > 0, sums[before, b], 0.0) + np.where(earlier, self.return_[b], 0.0)
            discounted = discounted_sums[t, b] - np.where(row > 0, discounted_sums[before, b], 0.0)
            discounted += np.where(earlier, self.discounted[b], 0.0)
            columns: dict[str, Floats] = {}
            for key, column in env_info.items():
                at = np.maximum.accumulate(np.where(np.isnan(column), -1, time), 0)[t, b]
                carried = np.where(earlier, self.columns.get(key, np.full(B, np.nan))[b], np.nan)
                columns[key] = np.where(at >= np.maximum(row, 0), column[at, b].astype(np.float64), carried)
            return total, discounted, columns

        rows, slots = np.nonzero(ended)
        total, discounted, columns = since_opening(rows, slots)
        finished = Episodes(total, age[rows, slots] + 1, discounted, slots, batch.terminated[rows, slots], columns)
        open_ = batch.valid[-1] & ~ended[-1]
        total, discounted, columns = since_opening(np.full(B, T - 1), np.arange(B))
        self.return_, self.discounted = np.where(open_, total, 0.0), np.where(open_, discounted, 0.0)
        self.length = np.where(open_, age[-1] + 1, 0)
        self.columns = {key: np.where(open_, values, np.nan) for key, values in columns.items()}
        self._remark(batch, len(finished))
        return finished

    def _extend(self, batch: SampleBatch) -> None:
        """Adds T rows in which no episode opens or ends. Sums of several such batches are made at once."""
        reward = batch.reward.copy()
        if self._unsummed and self._unsummed[0].shape != reward.shape:
            self._sum_up()
        self._unsummed.append(reward)
        self.length = self.length + len(reward)
        if len(self._unsummed) * len(reward) >= _UNSUMMED_ROWS:
            self._sum_up()
        for key, column in _env_info(batch).items():
            unknown = np.isnan(column)
            if key not in self.columns:
                self.columns[key] = np.full(column.shape[1], np.nan)
            for row, missing in zip(column, unknown) if b"\0" in unknown.tobytes() else ():
                self.columns[key] = np.where(missing, self.columns[key], row.astype(np.float64))

    def _sum_up(self) -> None:
        """Adds the rewards that are kept, batch by batch; to the same bits as `update` in general."""
        if not self._unsummed:
            return
        reward = np.stack(self._unsummed).astype(np.float64)
        rows = reward.shape[0] * reward.shape[1]
        age = self.length + np.arange(-rows, 0)[:, None]
        discounted = reward * self._powers_of(age).reshape(reward.shape)
        self.return_, self.discounted = (
            np.add.accumulate(np.concatenate([before[None], np.add.accumulate(x, 1)[:, -1]]))[-1]
            for before, x in ((self.return_, reward), (self.discounted, discounted))
        )
        self._unsummed.clear()

    def _remark(self, batch: SampleBatch, ended: int) -> None:
        """Warns, once, of info keys that the environment has not reported in its first episodes."""
        if self._missing == set():
            return
        env_info = _env_info(batch)
        missing = set(env_info) - _OPTIONAL if self._missing is None else self._missing
        self._missing = {key for key in missing if np.isnan(env_info[key]).all()}
        self._ended += ended
        if self._missing and self._ended >= _ENOUGH:
            names = ", ".join(map(repr, sorted(self._missing)))
            warnings.warn(
                f"info_keys {names} (--info-keys): no step has reported that in the first {_ENOUGH} episodes; expected "
                "a key of the info that the environment's step() returns",
                stacklevel=2,
            )
            self._missing = set()

    def _powers_of(self, age: Ints) -> Floats:
        """discount ** age, looked up: powers of a whole batch take a third of the time of `update`."""
        try:
            return self._powers[age]
        except IndexError:
            oldest = int(age.max())
        if oldest > _LONGEST_TABLE:
            return np.asarray(self.discount**age, np.float64)
        self._powers = np.asarray(self.discount ** np.arange(2 * oldest + 1), np.float64)
        return self._powers[age]

    def state_dict(self) -> dict[str, Any]:
        """The running sums, as arrays."""
        self._sum_up()
        return {"return": self.return_, "length": self.length, "discounted": self.discounted, "columns": self.columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.return_, self.length, self.discounted = state["return"], state["length"], state["discounted"]
        self.columns = dict(state["columns"])
        self._unsummed.clear()
