"""The view makes samples of drawn units: n-step transitions, or sequences with recurrent state."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.replay.columns import Array, Rows
from penstock.replay.storage import Storage

ALL_INPUTS = frozenset(("prev_action", "prev_reward", "first"))


class View(Protocol):
    """Makes samples out of stored rows."""

    stride: int
    """Rows from one unit to the next."""
    span: int
    """Rows after a unit's first one that must be there; the last of them needs no action yet."""
    noise: int
    """Uniforms that `read` uses for a sample."""
    episodes: bool
    """True if `read` asks `storage.last`."""
    seats: int
    """Adjacent columns that are drawn together, those of one environment: then slots here are environments; else 1."""

    def usable(self, storage: Storage, t: Rows) -> Array:
        """[n, B] bool: True for units with first rows t [n] that can be drawn."""
        ...

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array) -> TrainBatch:
        """Samples whose first rows are t [N] of slots b [N], by uniforms [N, self.noise]."""
        ...


class Transitions:
    """n-step transitions (Sutton 1988; Watkins 1989, section 7.1; in replay as Hessel et al. 2018).

    `return` [N] is the sum of up to n discounted rewards; it stops at an end, and before a row that is not valid.
    `discount` [N] is the weight of the value of `next`: discount^m after m rewards, 0 after a terminal state.
    A truncated or cut transition bootstraps from the observation at which it was cut.

    Args:
        acted_next: the agent's record at `next` must be there too, as priorities of fresh rows need it.
    """

    stride, noise, episodes, seats = 1, 0, False, 1

    def __init__(
        self,
        n_step: int = 1,
        discount: float = 0.99,
        clip_reward: bool = False,
        fed: frozenset[str] = ALL_INPUTS,
        acted_next: bool = False,
    ) -> None:
        if n_step < 1:
            raise ConfigError(f"n_step={n_step}; expected 1 or more")
        self.n_step, self.discount, self.fed, self.span = n_step, discount, fed, n_step + acted_next
        self._clip = clip_reward
        self._powers = discount ** np.arange(n_step + 1, dtype=np.float64)

    def usable(self, storage: Storage, t: Rows) -> Array:
        return storage.valid_rows(t)

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array | None = None) -> TrainBatch:
        reward, terminated, after = self.returns(storage, t, b)
        rows = {
            "action": storage.action(t, b),
            "return": reward,
            "discount": np.where(terminated, 0.0, self._powers[after]).astype(np.float32),
            "next": storage.inputs(t + after, b, self.fed),
        }
        return TrainBatch(storage.inputs(t, b, self.fed), rows)

    def returns(self, storage: Storage, t: Rows, b: Rows) -> tuple[Array, Array, Rows]:
        """[N] each: float32 returns, True where they end in a terminal state, and the number of rewards in them."""
        total = self._reward(storage, t, b)
        terminated = storage.terminated(t, b)
        after = np.ones(len(t), np.int64)
        if self.n_step == 1:
            return total, terminated, after
        total = total.astype(np.float64)
        goes_on = ~(terminated | storage.truncated(t, b))
        for i in range(1, self.n_step):
            goes_on &= storage.valid(t + i, b)
            total += np.where(goes_on, self._powers[i] * self._reward(storage, t + i, b), 0.0)
            after += goes_on
            ended = goes_on & storage.terminated(t + i, b)
            terminated |= ended
            goes_on &= ~(ended | storage.truncated(t + i, b))
        return total.astype(np.float32), terminated, after

    def clipped(self, reward: Array) -> Array:
        """The rewards, or their signs if they are clipped."""
        return np.sign(reward) if self._clip else reward

    def _reward(self, storage: Storage, t: Rows, b: Rows) -> Array:
        return self.clipped(storage.reward(t, b))


class Sequences:
    """`burn_in + train` rows with the recurrent state before them, and n more for the last targets.

    A sequence may run over the ends of episodes: `first` clears the state there, and targets stop there. Rows that are
    not valid are masked, and so are those after a gap in the record, whose recurrent state is another. (Kapturowski et
    al. 2019, section 2.3; they cut sequences at ends instead.)

    `action`, `reward`, `terminated` and `truncated` are [L, N] with L = burn_in + train + n; `inputs` have one row
    more, for the value after the last.
    """

    noise, episodes, seats = 0, False, 1

    def __init__(
        self,
        every: int,
        burn_in: int,
        train: int,
        n_step: int = 1,
        clip_reward: bool = False,
        fed: frozenset[str] = ALL_INPUTS,
    ) -> None:
        if min(every, train, n_step) < 1 or burn_in < 0:
            raise ConfigError(
                f"sequences every {every} rows of burn_in={burn_in}, train={train}, n_step={n_step}; expected positive "
                "numbers (burn_in may be 0)"
            )
        self.stride, self.span = every, burn_in + train + n_step
        self._burn_in, self._train = burn_in, train
        self._clip, self._fed = clip_reward, fed | {"first"}

    def usable(self, storage: Storage, t: Rows) -> Array:
        rows, slots = np.broadcast_arrays(t + np.arange(self.span)[:, None, None], np.arange(storage.slots)[:, None])
        trained = self.valid(storage, rows, slots)[self._burn_in : self._burn_in + self._train].any(0)
        return trained.T & storage.has_state(t)[:, None]

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array | None = None) -> TrainBatch:
        rows, slots = np.broadcast_arrays(t + np.arange(self.span)[:, None], b)
        last = t + self.span
        with_next = np.concatenate([rows, last[None]])
        reward = storage.reward(rows, slots)
        shown: dict[str, Any] = {
            "action": storage.action(rows, slots),
            "reward": np.sign(reward) if self._clip else reward,
            "terminated": storage.terminated(rows, slots),
            "truncated": storage.truncated(rows, slots),
        }
        inputs = storage.inputs(with_next, np.broadcast_to(b, with_next.shape), self._fed)
        return TrainBatch(inputs, shown, self.valid(storage, rows, slots), storage.state(t, b))

    def valid(self, storage: Storage, rows: Rows, slots: Rows) -> Array:
        """[L, ...] bool, `valid` of sequences of rows [L, ...] that begin at rows[0]."""
        apart = storage.apart(rows)
        apart[0] = False
        return storage.valid(rows, slots) & ~np.logical_or.accumulate(apart, 0)
