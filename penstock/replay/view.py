"""The view makes samples of drawn units: n-step transitions, or sequences with recurrent state."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves
from penstock.replay.columns import Array, Rows
from penstock.replay.endings import Endings
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

    @property
    def discount(self) -> float:
        """The algorithm's, at present."""
        ...

    def set_discount(self, discount: float) -> None:
        """Has returns and weights of targets discounted so from now on."""
        ...

    def usable(self, storage: Storage, t: Rows) -> Array:
        """[n, B] bool: True for units with first rows t [n] that can be drawn."""
        ...

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array) -> TrainBatch:
        """Samples that begin at rows t [N] of slots b [N], by uniforms [N, self.noise]."""
        ...


class Transitions:
    """n-step transitions (Sutton 1988; Watkins 1989, section 7.1; in replay as Hessel et al. 2018).

    `return` [N] is the sum of up to n discounted rewards; it stops at an end, and before a row that is not valid.
    `discount` [N] is the weight of the value of `next`: discount^m after m rewards, 0 after a terminal state.
    A truncated or cut transition bootstraps from the observation at which it was cut.

    Args:
        acted_next: the agent's record at `next` must be there too, as priorities of fresh rows need it.
        next_action: samples hold `next_action` [N, *A], the recorded action at `next`, and `has_next_action` [N] bool,
            False where none was recorded: after an end or a fault, and at the newest row.
    """

    stride, noise, episodes, seats = 1, 0, False, 1

    def __init__(
        self,
        n_step: int = 1,
        discount: float = 0.99,
        clip_reward: bool = False,
        fed: frozenset[str] = ALL_INPUTS,
        acted_next: bool = False,
        next_action: bool = False,
    ) -> None:
        if n_step < 1:
            raise ConfigError(f"n_step={n_step}; expected 1 or more")
        self.n_step, self.fed, self.span = n_step, fed, n_step + acted_next
        self._clip, self._next_action = clip_reward, next_action
        self._steps = np.arange(n_step + 1)[:, None]
        self.set_discount(discount)

    def set_discount(self, discount: float) -> None:
        self.discount = discount
        self._powers = discount ** np.arange(self.n_step + 1, dtype=np.float64)
        self._weights = self._powers.astype(np.float32)

    def usable(self, storage: Storage, t: Rows) -> Array:
        return storage.valid_rows(t)

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array | None = None) -> TrainBatch:
        at = storage.places(t + self._steps, b)
        total, terminated, after = self._returns(storage, at)
        last = at[1] if self.n_step == 1 else storage.places(t + after, b)
        rows = {
            "action": storage.prev_action(at[1]),
            "return": total,
            "discount": self._weights.take(after) * ~terminated,
            "next": storage.successors(t + after - 1, b, last, self.fed),
        }
        if self._next_action:
            following = t + after
            rows["next_action"] = storage.prev_action(storage.places(following + 1, b))
            rows["has_next_action"] = self._goes_on(storage, following, b)
        return TrainBatch(storage.inputs(at[0], self.fed), rows)

    def _goes_on(self, storage: Storage, t: Rows, b: Rows) -> Array:
        """[N] bool: rows t were acted on, in the episode of the rows before them; the row after an end is not valid."""
        found = storage.valid(storage.places(t, b)) & (t < storage.head)
        return found if storage.endings is None else found & ~storage.endings.ended(t - 1, b)

    def returns(self, storage: Storage, t: Rows, b: Rows) -> tuple[Array, Array, Rows]:
        """[N] each: float32 returns, True where they end in a terminal state, and the number of rewards in them."""
        return self._returns(storage, storage.places(t + self._steps, b))

    def _returns(self, storage: Storage, at: Rows) -> tuple[Array, Array, Rows]:
        """`returns` of rows at places [n + 1, N]: each column is gathered once for all steps."""
        reward, terminated = self.clipped(storage.prev_reward(at[1:])), storage.terminated(at[:-1])
        if self.n_step == 1:
            return reward[0], terminated[0], np.ones(len(at[0]), np.int64)
        goes_on = storage.valid(at[:-1])
        goes_on[0] = True
        goes_on[1:] &= ~(terminated | storage.truncated(at[:-1]))[:-1]
        np.logical_and.accumulate(goes_on, 0, None, goes_on)
        total, *more = np.where(goes_on, self._powers[:-1, None] * reward, 0.0)
        for x in more:  # one after the other, so that the sum does not depend on N
            total += x
        ended = np.logical_or.reduce(goes_on & terminated, 0)
        return total.astype(np.float32), ended, np.add.reduce(goes_on, 0, np.int64)

    def clipped(self, reward: Array) -> Array:
        """The rewards, or their signs if they are clipped."""
        return np.sign(reward) if self._clip else reward


class Sequences:
    """`burn_in + train` rows with the recurrent state before them, and n more for the last targets.

    A sequence may run over the ends of episodes: `first` clears the state there, and targets stop there. Rows that are
    not valid are masked, and so are those after a gap in the record, which have another recurrent state. Memory passes
    over rows without a turn (`inputs.idle`), which stand where a batch ended before the agent's next turn had come.
    (Kapturowski et al. 2019, section 2.3; they cut sequences at ends instead.)

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
        discount: float = 0.99,
    ) -> None:
        if min(every, train, n_step) < 1 or burn_in < 0:
            raise ConfigError(
                f"sequences every {every} rows of burn_in={burn_in}, train={train}, n_step={n_step}; expected positive "
                "numbers (burn_in may be 0)"
            )
        self.stride, self.span = every, burn_in + train + n_step
        self._burn_in, self._train = burn_in, train
        self._clip, self._fed = clip_reward, fed | {"first"}
        self._steps = np.arange(self.span + 1)[:, None]
        self.discount = discount

    def set_discount(self, discount: float) -> None:
        self.discount = discount  # rewards are discounted in the loss

    def usable(self, storage: Storage, t: Rows) -> Array:
        rows, slots = np.broadcast_arrays(t + np.arange(self.span)[:, None, None], np.arange(storage.slots)[:, None])
        trained = self.valid(storage, rows, storage.places(rows, slots))[
            self._burn_in : self._burn_in + self._train
        ].any(0)
        return trained.T & storage.has_state(t)[:, None]

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array | None = None) -> TrainBatch:
        if storage.endings is not None:
            return self._unfolded(storage, storage.endings, t, b)
        rows = t + self._steps
        at = storage.places(rows, b)
        reward = storage.prev_reward(at[1:])
        shown: dict[str, Any] = {
            "action": storage.prev_action(at[1:]),
            "reward": np.sign(reward) if self._clip else reward,
            "terminated": storage.terminated(at[:-1]),
            "truncated": storage.truncated(at[:-1]),
        }
        valid = self.valid(storage, rows[:-1], at[:-1])
        inputs = storage.inputs(at, self._fed)
        inputs = inputs._replace(idle=_idle(valid, inputs.first))
        return TrainBatch(inputs, shown, valid, storage.state(t, b))

    def _unfolded(self, storage: Storage, endings: Endings, t: Rows, b: Rows) -> TrainBatch:
        """`read` of a record in which environments reset in the step of an end: with a reset row after each."""
        rows, ends = endings.unfolded(t, b, self._steps)
        at, after = storage.places(rows, b), storage.places(rows[:-1] + 1, b)
        reward = storage.prev_reward(after)
        shown: dict[str, Any] = {
            "action": storage.prev_action(after),
            "reward": np.where(ends[:-1], 0.0, np.sign(reward) if self._clip else reward).astype(np.float32),
            "terminated": storage.terminated(at[:-1]) & ~ends[:-1],
            "truncated": storage.truncated(at[:-1]) & ~ends[:-1],
        }
        valid = self.valid(storage, rows[:-1], at[:-1]) & ~ends[:-1]
        inputs = storage.inputs(at, self._fed)
        if ends.any():
            ended, slots = rows[ends], np.broadcast_to(b, rows.shape)[ends]
            last = storage.successors(ended, slots, storage.places(ended + 1, slots), self._fed)
            for x, y in zip(tree_leaves(tuple(inputs)), tree_leaves(tuple(last))):
                x[ends] = y
        inputs = inputs._replace(idle=_idle(valid, inputs.first))
        return TrainBatch(inputs, shown, valid, storage.state(t, b))

    def valid(self, storage: Storage, rows: Rows, at: Rows) -> Array:
        """[L, ...] bool, `valid` of sequences of rows [L, ...] that begin at rows[0], at their places."""
        apart = storage.apart(rows)
        apart[0] = False
        return storage.valid(at) & ~np.logical_or.accumulate(apart, 0)


def _idle(valid: Array, first: Array) -> Array:
    """[L + 1, ...] bool: rows that are not valid, and after which the next valid one goes on with the same episode.

    Args:
        valid: [L, ...] bool. first: [L + 1, ...] bool.
    """
    L = len(valid)
    rows = np.arange(L).reshape(-1, *[1] * (valid.ndim - 1))
    following = np.minimum.accumulate(np.where(valid, rows, L)[::-1], 0)[::-1]
    idle = np.zeros(first.shape, bool)
    idle[:L] = ~valid & (following < L) & ~np.take_along_axis(first, following, 0)
    return idle
