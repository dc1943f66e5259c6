"""Episodes: returns and lengths of those that ended, running sums of those that are open."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SampleBatch

DISCOUNT = 0.99
"""Of episode returns where neither sampler nor algorithm names one."""
_LONGEST_TABLE = 1_000_000  # steps
_ENOUGH = 20
"""Episodes after which an info key that no step has reported is remarked on."""
_OPTIONAL = {"is_success"}
"""Keys that are recorded unasked."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def _no_floats() -> Floats:
    return np.empty(0)


def _no_ints() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Episodes:
    """E finished episodes, by the time they ended, then by slot."""

    return_: Floats = field(default_factory=_no_floats)
    """[E] undiscounted sum of unclipped rewards."""
    length: Ints = field(default_factory=_no_ints)
    """[E] environment steps."""
    discounted_return: Floats = field(default_factory=_no_floats)
    """[E] sum of discount^k * reward_k from the episode's first step."""
    slot: Ints = field(default_factory=_no_ints)
    """[E] which slot played it."""
    terminated: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, bool))
    """[E] ended in a terminal state, rather than cut by a limit."""
    columns: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """[E] for each recorded env info key its last reported value in the episode; NaN if it never was."""

    def __len__(self) -> int:
        return len(self.return_)

    def to_plain(self) -> dict[str, Any]:
        """The fields by name, for a message or a checkpoint; `Episodes(**plain)` is the inverse."""
        return {**{name: getattr(self, name) for name in _PER_EPISODE}, "columns": dict(self.columns)}

    @property
    def mean_return(self) -> float:
        """NaN if there are none."""
        return float(self.return_.mean()) if len(self) else float("nan")

    @property
    def mean_length(self) -> float:
        """NaN if there are none."""
        return float(self.length.mean()) if len(self) else float("nan")

    def last(self, n: int) -> Episodes:
        """Returns the n that ended last."""
        return self._at(slice(max(len(self) - n, 0), None))

    def first_of_each_slot(self, counts: Sequence[int]) -> Episodes:
        """The first `counts[b]` episodes of each slot b."""
        rank = np.zeros(len(self), np.int64)
        for b in range(len(counts)):
            mine = self.slot == b
            rank[mine] = np.arange(mine.sum())
        return self._at(rank < np.asarray(counts, np.int64)[self.slot])

    def no_longer_than(self, steps: int) -> Episodes:
        """Those of at most this many steps."""
        return self._at(self.length <= steps)

    def metrics(
        self, name: str = "rollout/ep_{key}_{stat}", return_: str = "rew", length: str = "len"
    ) -> dict[str, float]:
        """Statistics under Stable-Baselines3's names; empty without episodes.

        Mean, std, median, min and max of returns and lengths; means of discounted returns and of what was reported.
        """
        if not len(self):
            return {}
        out = {
            name.format(key=key, stat=stat): value
            for key, values in ((return_, self.return_), (length, self.length))
            for stat, value in _spread(values).items()
        }
        out[name.format(key=f"discounted_{return_}", stat="mean")] = float(self.discounted_return.mean())
        for key, value in self.reported().items():
            success = f"{name.split('/')[0]}/success_rate"
            out[success if key == "success_rate" else name.format(key=key, stat="mean")] = value
        return out

    def reported(self) -> dict[str, float]:
        """Mean of each recorded info key over the episodes that reported it; `is_success` as `success_rate`."""
        known = {key: values[~np.isnan(values)] for key, values in self.columns.items()}
        return {
            "success_rate" if key == "is_success" else key: float(values.mean())
            for key, values in known.items()
            if len(values)
        }

    def _at(self, index: Any) -> Episodes:
        columns = {key: values[index] for key, values in self.columns.items()}
        return Episodes(*(getattr(self, name)[index] for name in _PER_EPISODE), columns=columns)


def _spread(values: npt.NDArray[Any]) -> dict[str, float]:
    """Mean, population standard deviation, median, smallest and largest of at least one number."""
    ordered = np.sort(values)
    n = len(ordered)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "median": float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2,
        "min": float(ordered[0]),
        "max": float(ordered[-1]),
    }


_PER_EPISODE = ("return_", "length", "discounted_return", "slot", "terminated")


def join_episodes(parts: Sequence[Episodes]) -> Episodes:
    """Joins episodes, one after the other."""
    if len(parts) < 2:
        return parts[0] if parts else Episodes()
    keys = dict.fromkeys(key for part in parts for key in part.columns)
    columns = {
        key: np.concatenate([part.columns.get(key, np.full(len(part), np.nan)) for part in parts]) for key in keys
    }
    return Episodes(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in _PER_EPISODE), columns=columns
    )


def _env_info(batch: SampleBatch) -> Mapping[str, Any]:
    """Columns [T, B] of the env info that is recorded; NaN where a step reported nothing."""
    return batch.info.get("env", {}) if isinstance(batch.info, dict) else {}


def _all_go_on(batch: SampleBatch) -> bool:
    """True if every row of a batch continues an episode that it does not end."""
    flags = (batch.first[:-1], batch.terminated, batch.truncated)
    return b"\0" not in batch.valid.tobytes() and not any(b"\1" in x.tobytes() for x in flags)


class EpisodeStats:
    """Running sums of B slots over batches; `update` returns the episodes that ended in each."""

    def __init__(self, B: int, discount: float) -> None:
        self.discount = discount
        self._powers: Floats = np.ones(1)
        self.return_ = np.zeros(B)
        self.length = np.zeros(B, np.int64)
        self.discounted = np.zeros(B)
        self.columns: dict[str, Floats] = {}
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
            return Episodes(columns={key: _no_floats() for key in self.columns})
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
        """Adds T rows in which no episode opens or ends; to the same bits as `update` in general."""
        reward = batch.reward.astype(np.float64)
        age = self.length + np.arange(len(reward))[:, None]
        self.return_ = np.add.accumulate(reward)[-1] + self.return_
        self.discounted = np.add.accumulate(reward * self._powers_of(age))[-1] + self.discounted
        self.length = age[-1] + 1
        for key, column in _env_info(batch).items():
            unknown = np.isnan(column)
            if key not in self.columns:
                self.columns[key] = np.full(column.shape[1], np.nan)
            for row, missing in zip(column, unknown) if not unknown.all() else ():
                self.columns[key] = np.where(missing, self.columns[key], row.astype(np.float64))

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
        return {"return": self.return_, "length": self.length, "discounted": self.discounted, "columns": self.columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.return_, self.length, self.discounted = state["return"], state["length"], state["discounted"]
        self.columns = dict(state["columns"])
