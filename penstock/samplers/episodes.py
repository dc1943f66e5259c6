"""Episodes: returns and lengths of those that ended, running sums and recorded actions of those that are open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree, tree_leaves, tree_map

_LONGEST_TABLE = 1_000_000  # steps
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

    def metrics(self, name: str = "rollout/ep_{}_mean", return_: str = "rew", length: str = "len") -> dict[str, float]:
        """Means under Stable-Baselines3's names, `{}` standing for what is averaged; empty without episodes."""
        if not len(self):
            return {}
        out = {name.format(return_): self.mean_return, name.format(length): self.mean_length}
        for key, values in self.columns.items():
            known = values[~np.isnan(values)]
            if len(known):
                success = f"{name.split('/')[0]}/success_rate"
                out[success if key == "is_success" else name.format(key)] = float(known.mean())
        return out

    def _at(self, index: Any) -> Episodes:
        columns = {key: values[index] for key, values in self.columns.items()}
        return Episodes(*(getattr(self, name)[index] for name in _PER_EPISODE), columns=columns)


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


class EpisodeStats:
    """Running sums of B slots over batches; `update` returns the episodes that ended in each."""

    def __init__(self, B: int, discount: float) -> None:
        self.discount = discount
        self._powers: Floats = np.ones(1)
        self.return_ = np.zeros(B)
        self.length = np.zeros(B, np.int64)
        self.discounted = np.zeros(B)
        self.columns: dict[str, Floats] = {}

    def begin(self, b: int, rewards: Sequence[float]) -> None:
        """Counts rewards that slot b earned in its current episode before the first batch."""
        powers = self.discount ** np.arange(len(rewards))
        self.return_[b], self.length[b] = float(np.sum(rewards)), len(rewards)
        self.discounted[b] = float(np.sum(powers * np.asarray(rewards)))

    def update(self, batch: SampleBatch) -> Episodes:
        """Adds T rows of every slot. An episode that is cut without an end (a fault) is dropped."""
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
        env_info = batch.info.get("env", {}) if isinstance(batch.info, dict) else {}

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
        return finished

    def _powers_of(self, age: Ints) -> Floats:
        """discount ** age, looked up: powers of a whole batch take a third of the time of `update`."""
        oldest = int(age.max(initial=0))
        if oldest > _LONGEST_TABLE:
            return np.asarray(self.discount**age, np.float64)
        if oldest >= len(self._powers):
            self._powers = np.asarray(self.discount ** np.arange(2 * oldest + 1), np.float64)
        return self._powers[age]

    def state_dict(self) -> dict[str, Any]:
        """The running sums, as arrays."""
        return {"return": self.return_, "length": self.length, "discounted": self.discounted, "columns": self.columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.return_, self.length, self.discounted = state["return"], state["length"], state["discounted"]
        self.columns = dict(state["columns"])


class Journal:
    """Copies of the actions of recent batches, back to the opening of the oldest open episode.

    A slot whose episode has more than `limit` actions cannot be replayed, and they are forgotten.
    """

    def __init__(self, B: int, limit: int) -> None:
        self._limit = limit
        self._chunks: list[tuple[int, Tree]] = []  # number of the first row, and actions [T, B, *A]; oldest first
        self._rows = 0  # recorded so far
        self._opened = np.zeros(B, np.int64)  # the row in which each episode opened; negative before the first batch
        self._known = np.ones(B, bool)
        self._before: list[Tree | None] = [None] * B  # [L, *A] actions of the episode from before row 0
        self._none: Tree = None  # [0, *A]

    def begin(self, b: int, actions: Tree | None) -> None:
        """Sets the actions [L, *A] that slot b took in its current episode before the first batch."""
        self._before[b], self._opened[b] = actions, self._rows - _length(actions)

    def record(self, batch: SampleBatch) -> None:
        """Adds the actions of a batch and forgets what no open episode needs."""
        T = batch.spec.T
        self._chunks.append((self._rows, tree_map(np.copy, batch.action)))
        first = batch.first[1:]
        opens = first.any(0)
        self._opened[opens] = self._rows + (T - np.argmax(first[::-1], 0))[opens]
        self._known |= opens
        self._rows += T
        self._known &= self._rows - self._opened <= self._limit
        for b in np.nonzero(opens | ~self._known)[0].tolist():
            self._before[b] = None
        needed = self._opened[self._known].min(initial=self._rows)
        self._none = tree_map(lambda x: x[:0, 0].copy(), batch.action)
        self._chunks = [(start, chunk) for start, chunk in self._chunks if start + _length(chunk) > needed]

    def actions(self, b: int) -> Tree | None:
        """[L, *A] the actions of slot b since its episode opened, or None if they are too many to have been kept."""
        if not self._known[b]:
            return None
        parts = [self._none if self._before[b] is None else self._before[b]]
        for start, chunk in self._chunks:
            skip = max(int(self._opened[b]) - start, 0)
            parts.append(tree_map(lambda x, s=skip: x[s:, b], chunk))
        return tree_map(lambda *xs: np.concatenate(xs), *parts)

    def state_dict(self) -> list[dict[str, Any]]:
        """For each slot whether its actions are known, and their tree."""
        return [{"known": known, "actions": self.actions(b)} for b, known in enumerate(self._known.tolist())]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """The inverse of `state_dict`."""
        self._chunks, self._rows = [], 0
        self._before = [slot["actions"] for slot in state]
        self._known = np.array([slot["known"] for slot in state], bool)
        self._opened = np.array([-_length(actions) for actions in self._before], np.int64)


def _length(actions: Tree | None) -> int:
    return 0 if actions is None else len(tree_leaves(actions)[0])
