"""The episode tracker of slots of one agent each: sums of open episodes, and a journal to replay them from."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_structure, tree_unflatten
from penstock.envs.pools.pool import OpenEpisode, Source
from penstock.envs.pools.slot_start import thinned
from penstock.samplers.episodes import Episodes, Floats, Ints

_LONGEST_TABLE = 1_000_000  # steps
_ENOUGH = 20
"""Episodes after which an info key that no step has reported is remarked on."""
_OPTIONAL = {"is_success"}
"""Keys that are recorded unasked."""
_UNSUMMED_ROWS = 64
"""Rows of which the sums are made at once: of a batch of one row they take as long as all else about episodes."""
_FIRST_ROWS = 64
_NO_FLOATS = np.empty(0)


def env_info(batch: SampleBatch) -> Mapping[str, Any]:
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


def _last_reported(column: npt.NDArray[Any], time: Ints) -> Ints | None:
    """[T, B] the last row so far that reported a number, or -1; None where no row did."""
    unknown = np.isnan(column)
    if b"\0" not in unknown.tobytes():
        return None
    return _over_rows(np.maximum, np.where(unknown, -1, time))


def _over_rows(ufunc: np.ufunc, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`ufunc.accumulate` [T, B] from row to row, column by column: numpy takes twice as long across columns."""
    return ufunc.accumulate(np.ascontiguousarray(x.T), 1).T


class ReportedKeys:
    """Warns, once, of info keys that the environment has not reported in its first episodes."""

    def __init__(self) -> None:
        self._missing: set[str] | None = None  # None before the first batch
        self._ended = 0

    @property
    def waits(self) -> bool:
        """There are keys that have not been reported, and it has not warned yet."""
        return self._missing != set()

    def look(self, keys: Iterable[str], silent: Callable[[str], bool], ended: int) -> None:
        """Takes a batch in which this many episodes ended; `silent(key)`: True if no row of it reports the key."""
        missing = set(keys) - _OPTIONAL if self._missing is None else self._missing
        self._missing = {key for key in missing if silent(key)}
        self._ended += ended
        if self._missing and self._ended >= _ENOUGH:
            names = ", ".join(map(repr, sorted(self._missing)))
            warnings.warn(
                f"info_keys {names} (--info-keys): no step has reported that in the first {_ENOUGH} episodes; expected "
                "a key of the info that the environment's step() returns",
                stacklevel=2,
            )
            self._missing = set()


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
        self._keys = ReportedKeys()

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
        opened = _over_rows(np.maximum, np.where(batch.first[:-1], time, -1))  # of each row; -1: an earlier batch
        age = np.where(opened >= 0, time - opened, time + self.length)
        reward = batch.reward.astype(np.float64)
        sums, discounted_sums = _over_rows(np.add, reward), _over_rows(np.add, reward * self._powers_of(age))
        reported = env_info(batch)
        last = {key: _last_reported(column, time) for key, column in reported.items()}

        def since_opening(t: Ints, b: Ints) -> tuple[Floats, Floats, dict[str, Floats]]:
            """Sums and last reported columns of the episodes that rows (t, b) belong to."""
            row, earlier = opened[t, b], opened[t, b] < 0
            before = np.maximum(row - 1, 0)
            total = sums[t, b] - np.where(row > 0, sums[before, b], 0.0) + np.where(earlier, self.return_[b], 0.0)
            discounted = discounted_sums[t, b] - np.where(row > 0, discounted_sums[before, b], 0.0)
            discounted += np.where(earlier, self.discounted[b], 0.0)
            columns: dict[str, Floats] = {}
            for key, column in reported.items():
                columns[key] = np.where(earlier, self.columns.get(key, np.full(B, np.nan))[b], np.nan)
                if (rows_TB := last[key]) is not None:
                    at = rows_TB[t, b]
                    known = at >= np.maximum(row, 0)
                    columns[key] = np.where(known, column[at, b].astype(np.float64), columns[key])
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
        """Adds T rows in which no episode opens or ends. Several batches of this kind are summed at once."""
        reward = batch.reward.copy()
        if self._unsummed and self._unsummed[0].shape != reward.shape:
            self._sum_up()
        self._unsummed.append(reward)
        self.length = self.length + len(reward)
        if len(self._unsummed) * len(reward) >= _UNSUMMED_ROWS:
            self._sum_up()
        for key, column in env_info(batch).items():
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
        if self._keys.waits:
            columns = env_info(batch)
            self._keys.look(columns, lambda key: bool(np.isnan(columns[key]).all()), ended)

    def cut(self, batch: SampleBatch, max_steps: int) -> npt.NDArray[np.bool_]:
        """[T, B]: the rows after which an episode has lasted this long without an end; truncates them there."""
        time = np.arange(batch.spec.T)[:, None]
        opened = np.maximum.accumulate(np.where(batch.first[:-1], time, -1), 0)
        age = np.where(opened >= 0, time - opened, time + self.length)
        cut = batch.valid & (age == max_steps - 1) & ~np.logical_or(batch.terminated, batch.truncated)
        np.logical_or(batch.truncated, cut, out=batch.truncated)
        return cut

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
        """Inverse of `state_dict`."""
        for own, name in ((self.return_, "return"), (self.length, "length"), (self.discounted, "discounted")):
            own[:] = state[name]
        self.columns = dict(state["columns"])
        self._unsummed.clear()

    @staticmethod
    def join_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of all slots, from those of consecutive ones; a key is NaN in those that have not reported it."""
        keys = dict.fromkeys(key for x in states for key in x["columns"])
        columns = {
            key: np.concatenate([x["columns"].get(key, np.full(len(x["return"]), np.nan)) for x in states])
            for key in keys
        }
        sums = {name: np.concatenate([x[name] for x in states]) for name in ("return", "length", "discounted")}
        return {**sums, "columns": columns}


class JournalViews:
    """Views of a batch that a journal copies from and digests, made once for each buffer."""

    def __init__(self, batch: SampleBatch) -> None:
        self.opens = batch.first[1:]
        self.structure = tree_structure(batch.prev_action)
        self.actions = [x[1:] for x in tree_leaves(batch.prev_action)]
        seen = [*tree_leaves(batch.obs), batch.prev_reward]
        self.row_0 = [thinned(x[:1]) for x in seen]
        self.rows = [thinned(x[1:]) for x in seen]


class Journal:
    """Copies of the actions of recent batches, back to the opening of the oldest open episode.

    They lie in a ring that grows up to `limit` rows, so a batch costs the same however long an episode is. A slot
    whose episode has more than `limit` actions cannot be replayed, and they are forgotten.
    """

    def __init__(self, B: int, limit: int) -> None:
        self._B, self._limit = B, limit
        self._structure = tree_structure(None)
        self._ring: list[npt.NDArray[Any]] = []  # [R, B, *A]; row n is at n % R
        self._rows = 0  # recorded so far
        self._opened = np.zeros(B, np.int64)  # the row in which each episode opened
        self._known = np.ones(B, bool)
        self._oldest = 0  # the row in which the first of the known episodes opened
        self._unseen = np.zeros(B, np.int64)
        self._digests: list[list[int]] = []  # of each leaf and slot

    def begin(self, views: JournalViews, before: Sequence[Tree | None]) -> None:
        """Takes the actions [L, *A] of each slot's episode from before the first batch, which opens with row 0."""
        self._set(before)
        self._unseen[:] = self._rows - self._opened
        self._digest(views.row_0, [0] * self._B)

    def record(self, views: JournalViews) -> None:
        """Adds the actions of a batch and drops those that no open episode needs."""
        T, start = len(views.opens), self._rows
        self._rows += T
        since: list[int] | None = None
        if b"\1" in views.opens.tobytes():
            opens, last = views.opens.any(0), T - 1 - np.argmax(views.opens[::-1], 0)
            self._opened[opens], self._unseen[opens] = start + 1 + last[opens], 0
            self._known |= opens
            since = np.where(opens, last, -1).tolist()
            self._find_oldest()
        if self._rows - self._oldest > self._limit:
            self._known &= self._rows - self._opened <= self._limit
            self._find_oldest()
        if self._limit:
            self._digest(views.rows, since)
        if not self._ring:
            self._structure, self._ring = views.structure, [np.empty((0, *x.shape[1:]), x.dtype) for x in views.actions]
        self._write(views.actions, min(T, self._rows - self._oldest))

    def episode(self, b: int) -> OpenEpisode | None:
        """The open episode of slot b, or None if its actions are too many to have been kept."""
        if not self._known[b]:
            return None
        rows = np.arange(self._opened[b], self._rows)
        actions = [x[rows % max(len(x), 1), b] for x in self._ring]
        digest = [sums[b] for sums in self._digests]
        return OpenEpisode(tree_unflatten(self._structure, actions), int(self._unseen[b]), digest)

    def state_dict(self) -> list[dict[str, Any]]:
        """For each slot whether its actions are known, and its open episode."""
        found = [self.episode(b) for b in range(self._B)]
        return [{"known": x is not None, **(OpenEpisode(None) if x is None else x)._asdict()} for x in found]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `state_dict`."""
        self._known = np.array([slot["known"] for slot in state], bool)
        self._set([slot["actions"] for slot in state])
        self._unseen[:] = [slot["unseen"] for slot in state]
        digests = [slot["digest"] for slot in state]
        leaves = max(map(len, digests), default=0)
        self._digests = [list(sums) for sums in zip(*([*x, *[0] * (leaves - len(x))] for x in digests))]

    def _set(self, actions: Sequence[Tree | None]) -> None:
        """Makes these the actions [L, *A] of each slot's open episode."""
        known = [x for x in actions if x is not None]
        lengths = [0 if x is None else len(tree_leaves(x)[0]) for x in actions]
        self._rows, self._ring = max(lengths), []
        self._opened[:] = self._rows - np.array(lengths, np.int64)
        self._find_oldest()
        if known:
            self._structure = tree_structure(known[0])
            self._ring = [np.empty((self._rows, self._B, *x.shape[1:]), x.dtype) for x in tree_leaves(known[0])]
        for b, (mine, n) in enumerate(zip(actions, lengths)):
            for x, y in zip(self._ring, tree_leaves(mine)):
                x[self._rows - n :, b] = y

    def _find_oldest(self) -> None:
        self._oldest = int(self._opened[self._known].min(initial=self._rows))

    def _write(self, actions: Sequence[npt.NDArray[Any]], count: int) -> None:
        """Writes the last `count` rows of a batch, which have been counted already, into the ring."""
        if not count:
            return
        held, needed = len(self._ring[0]), self._rows - self._oldest
        if needed > held:
            size = min(max(needed, 2 * held, _FIRST_ROWS), self._limit)
            kept = np.arange(self._oldest, self._rows - count)
            grown = [np.empty((size, *x.shape[1:]), x.dtype) for x in self._ring]
            for x, y in zip(grown, self._ring):
                x[kept % size] = y[kept % max(held, 1)]
            self._ring, held = grown, size
        at = (self._rows - count) % held
        where = slice(at, at + count) if at + count <= held else np.arange(at, at + count) % held
        for x, y in zip(self._ring, actions):
            x[where] = y[len(y) - count :]

    def _digest(self, views: Sequence[npt.NDArray[Any]], since: Sequence[int] | None) -> None:
        """Adds rows to the digests; those of slots with `since` of 0 or more begin anew, with that row of the views."""
        if not self._digests:
            self._digests = [[0] * self._B for _ in views]
        for sums, view in zip(self._digests, views):
            B, T, _ = view.shape
            data = memoryview(view.tobytes())
            row = len(data) // (B * T)
            for b in range(B):
                first = -1 if since is None else since[b]
                part = data[(b * T + max(first, 0)) * row : (b + 1) * T * row]
                sums[b] = zlib.crc32(part, sums[b] if first < 0 else 0)


class SlotEpisodeTracker:
    """The episode tracker of B slots of one agent each.

    Args:
        journal_steps: rows of actions kept to replay open episodes.
    """

    def __init__(self, B: int, discount: float, journal_steps: int) -> None:
        self._stats = EpisodeStats(B, discount)
        self._journal = Journal(B, journal_steps)
        self._batches: Sequence[SampleBatch] = ()
        self._views: list[JournalViews] = []

    def attach(self, batches: Sequence[SampleBatch]) -> None:
        self._batches = batches
        self._views = [JournalViews(batch) for batch in batches]

    def begin(self, pool: Source, buffer: int) -> None:
        warmup = pool.warmup()
        for b, (_, rewards) in enumerate(warmup):
            self._stats.begin(b, rewards)
        before = [tree_map(lambda *xs: np.stack(xs), *taken) if taken else None for taken, _ in warmup]
        self._journal.begin(self._views[buffer], before)

    def record(self, pool: Source, buffer: int) -> Episodes:
        self._journal.record(self._views[buffer])
        return self._stats.update(self._batches[buffer])

    def open_episodes(self) -> list[OpenEpisode | None]:
        return [self._journal.episode(b) for b in range(len(self._stats.length))]

    def state_dict(self) -> dict[str, Any]:
        return {"stats": self._stats.state_dict(), "journal": self._journal.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stats.load_state_dict(state["stats"])
        self._journal.load_state_dict(state["journal"])
