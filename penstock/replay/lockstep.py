"""The view of teams: the n-step transition of all seats of a policy in one environment, drawn as one sample."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import STATE_KEY
from penstock.replay.columns import Array, Rows
from penstock.replay.partition import Partition
from penstock.replay.settings import ReplaySettings
from penstock.replay.storage import Storage
from penstock.replay.view import ALL_INPUTS

TeamReward: TypeAlias = Literal["mean", "sum"]


class LockstepTransitions:
    """n-step transitions of teams: a unit is a row of one environment, a sample the K adjacent columns of its seats.

    Rows of all seats are the same step of their environment (Parallel). `valid` [N, K] says which agents acted, and
    `next_valid` [N, K] which of them a target may bootstrap from: those that act after the last reward, or, where
    nobody does, those that acted before it and were not terminated there. Nothing else of a seat that is not valid
    reaches a sum: `return` [N] is of the rewards of agents that acted, in one number for the team at each step.
    `discount` [N] is discount^m after m rewards, 0 where nobody is left to bootstrap from. A team's return stops where
    no agent acts in the next row, as that is a reset, a cut or idle.

    Other rows are as those of `Transitions`, [N, K, ...]. Where observations have the key "state" it is left out of
    them and stands once for a sample, as `state` and `next_state` [N, *S] of an agent that acted.

    Args:
        seats: K. reward: of the agents that acted, the mean (a reward that all are given counts once) or the sum.
    """

    stride, noise, episodes = 1, 0, False

    def __init__(
        self,
        seats: int,
        n_step: int = 1,
        discount: float = 0.99,
        reward: TeamReward = "mean",
        clip_reward: bool = False,
        fed: frozenset[str] = ALL_INPUTS,
    ) -> None:
        if n_step < 1 or seats < 1:
            raise ConfigError(f"n_step={n_step}, seats={seats}; expected 1 or more of each")
        self.seats, self.n_step, self.fed, self.span = seats, n_step, fed, n_step + 1
        self._reward_of, self._clip = reward, clip_reward
        self._steps = np.arange(n_step + 1)[:, None, None]
        self.set_discount(discount)

    def set_discount(self, discount: float) -> None:
        self.discount = discount
        self._powers = discount ** np.arange(self.n_step + 1, dtype=np.float64)

    def usable(self, storage: Storage, t: Rows) -> Array:
        valid = storage.valid_rows(t)
        return np.logical_or.reduce(valid.reshape(len(valid), -1, self.seats), -1)

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array | None = None) -> TrainBatch:
        columns = b[:, None] * self.seats + np.arange(self.seats)
        at = storage.places(t[:, None] + self._steps, columns)
        total, after = self.returns(storage, at)
        sample = np.arange(len(t))
        last, following = at[after - 1, sample], at[after, sample]
        valid, acted, acting = storage.valid(at[0]), storage.valid(last), storage.valid(following)
        goes_on = acting.any(-1, keepdims=True)
        next_valid = np.where(goes_on, acting, acted & ~storage.terminated(last))
        inputs, state = _apart(storage.inputs(at[0], self.fed), valid)
        next_inputs, next_state = _apart(storage.inputs(following, self.fed), np.where(goes_on, acting, acted))
        shown: dict[str, Any] = {
            "action": storage.prev_action(at[1]),
            "return": total,
            "discount": np.where(next_valid.any(-1), self._powers[after], 0.0).astype(np.float32),
            "next": next_inputs,
            "next_valid": next_valid,
        }
        if state is not None:
            shown |= {"state": state, "next_state": next_state}
        return TrainBatch(inputs, shown, valid)

    def returns(self, storage: Storage, at: Rows) -> tuple[Array, Rows]:
        """[N] each: float32 returns of teams at places [n + 1, N, K], and the number of rewards in them."""
        acted = storage.valid(at[:-1])
        reward = self._rewards(storage.prev_reward(at[1:]), acted)
        goes_on: Array = np.logical_or.reduce(acted, -1)
        goes_on[0] = True
        np.logical_and.accumulate(goes_on, 0, None, goes_on)
        total, *more = np.where(goes_on, self._powers[:-1, None] * reward, 0.0)
        for x in more:  # one after the other, so that the sum does not depend on N
            total += x
        return total.astype(np.float32), np.add.reduce(goes_on, 0, np.int64)

    def _rewards(self, reward: Array, acted: Array) -> Array:
        """[n, N] float64 the team's rewards, of those [n, N, K] of its agents."""
        total = np.where(acted, np.sign(reward) if self._clip else reward, 0.0).sum(-1, dtype=np.float64)
        return total if self._reward_of == "sum" else total / np.maximum(1, acted.sum(-1))


def _apart(inputs: Inputs, acted: Array) -> tuple[Inputs, Array | None]:
    """The inputs [N, K, ...] without the state, and the state [N, *S] that an agent saw which acted."""
    if not isinstance(inputs.obs, dict) or STATE_KEY not in inputs.obs:
        return inputs, None
    obs = dict(inputs.obs)
    state = obs.pop(STATE_KEY)
    return inputs._replace(obs=obs), state[np.arange(len(state)), acted.argmax(-1)]


def check_teams(settings: ReplaySettings, B: int, seats: int) -> None:
    """Raises ConfigError unless B columns are those of whole environments, kept in one place."""
    if B % seats:
        raise ConfigError(
            f"a batch of B={B} columns for samples of the {seats} seats of an environment; expected a multiple of "
            f"{seats}: is this the batch of another policy?"
        )
    if settings.shards and seats > 1:
        raise ConfigError(
            f"replay.shards={settings.shards} with samples of {seats} seats, whose columns shards would tear apart; "
            "use replay.shards=0"
        )


class TeamPartition:
    """`Partition` for learners that share the columns of a replay; its slots are environments of `seats` columns."""

    def __init__(self, partition: Partition, seats: int) -> None:
        self._partition, self._seats = partition, seats

    @property
    def total(self) -> int:
        return self._partition.total // self._seats

    @property
    def local_slots(self) -> slice:
        own = self._partition.local_slots
        return slice(own.start // self._seats, own.stop // self._seats)

    def fit(self, width: int) -> None:
        self._partition.fit(width * self._seats)

    def gather_array(self, x: Array) -> Array:
        return self._partition.gather_array(np.repeat(x, self._seats, 1))[:, :: self._seats]

    def sum_array(self, x: Array) -> Array:
        return self._partition.sum_array(x)

    def request_rows(self, name: str, start: int, stop: int) -> None:
        self._partition.request_rows(name, start, stop)
