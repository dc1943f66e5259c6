"""EnvPool: the Protocol between the one loop and the stepping of environments, here, in workers or in a library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError, EnvContractError
from penstock.core.protocols import required
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, struct, tree_map
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall, from_plain, plain

Ints: TypeAlias = npt.NDArray[np.int64]

TABLE_WORDS = 5
"""Words of each slot in a pool's episode table."""
_SMALL = 1024
"""Bytes of an observation up to which a copy of its own, put together with the others, is the faster way."""


class Group(NamedTuple):
    """Slots that step together and are served by one policy's agent in one forward."""

    policy: int
    """Index into the pool's `specs`, and into the agents and batches of the loop."""
    slots: slice
    """BatchColumns of that policy's batch."""


@dataclass
class PoolState:
    """The state of every slot between two batches, besides the record; every list is by slot."""

    episode: list[int] = field(default_factory=list[int])
    """Number of the slot's current episode; -1 before its first."""
    ended: list[bool] = field(default_factory=list[bool])
    """The slot resets in the next row that it takes part in."""
    idle: list[bool] = field(default_factory=list[bool])
    """The slot takes no part for now."""
    left: list[int | None] = field(default_factory=list[int | None])
    """Episodes that it has yet to play; None for no limit."""
    began: list[int] = field(default_factory=list[int])
    """`tick` of its reset."""
    snapshot: list[Any] = field(default_factory=list[Any])
    """State of its environment, where that offers one; else None."""
    tick: int = 0
    """Steps since the pool's first batch."""
    restarts: int = 0
    """Number of restarts of a native pool, which cannot restore its episodes."""
    faults: dict[str, int] = field(default_factory=dict[str, int])
    """Faults of worker processes by kind since the run began."""
    calls: list[list[CallRecord]] = field(default_factory=list[list[CallRecord]])
    """The calls that its environment has had; empty if no slot had any."""

    @classmethod
    def resetting(cls, episode: list[int], **rest: Any) -> PoolState:
        """The state of slots that have lost their open episodes, of these numbers: each resets into its next one.

        Args:
            rest: further PoolState fields, by name.
        """
        B = len(episode)
        known: dict[str, Any] = {"left": [None] * B, **rest}
        return cls(episode, [True] * B, [False] * B, began=[0] * B, snapshot=[None] * B, **known)

    def of(self, slots: slice) -> PoolState:
        """The same for some of the slots."""
        known: dict[str, Any] = {name: getattr(self, name)[slots] for name in PER_SLOT}
        return PoolState(**known, tick=self.tick, calls=self.calls[slots])

    def put(self, slots: slice, part: PoolState) -> None:
        """Replaces these slots."""
        for name in PER_SLOT:
            getattr(self, name)[slots] = getattr(part, name)
        if self.calls or part.calls:
            self.calls = self.calls or [[] for _ in self.episode]
            self.calls[slots] = part.calls or [[] for _ in part.episode]

    @classmethod
    def join(cls, parts: Sequence[PoolState]) -> PoolState:
        """The state of all slots, from those of pools of consecutive ones, by the tick of the first; faults are summed.

        Ticks differ where agents take turns, and after the workers of a pool were replaced.
        """
        joined: dict[str, Any] = {name: [x for part in parts for x in getattr(part, name)] for name in PER_SLOT}
        joined["began"] = [n + parts[0].tick - part.tick for part in parts for n in part.began]
        joined["faults"] = dict(sum((Counter(part.faults) for part in parts), Counter()))
        if any(part.calls for part in parts):
            joined["calls"] = [x for part in parts for x in part.calls or [[] for _ in part.episode]]
        return replace(parts[0], restarts=max(part.restarts for part in parts), **joined)

    def split(self, slots: Sequence[slice]) -> list[PoolState]:
        """The states of pools of these slots, of which the first has all faults."""
        parts = [replace(self.of(at), restarts=self.restarts) for at in slots]
        parts[0].faults = self.faults
        return parts

    def to_plain(self) -> dict[str, Any]:
        """Plain data for a checkpoint; `PoolState.from_plain` is the inverse."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "calls"}
        return {**known, "calls": plain(self.calls)} if any(self.calls) else known

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> PoolState:
        """The state that `to_plain` described. Raises TypeError if a number is none, or slots are missing in a part."""
        known: dict[str, Any] = {**state, "calls": from_plain(state.get("calls", ()))}
        made = cls(**known)
        numbers = [made.tick, made.restarts, *made.episode, *made.began, *filter(None, made.left)]
        lengths = {len(getattr(made, name)) for name in (*PER_SLOT, *(["calls"] if made.calls else []))}
        if not all(isinstance(n, int) for n in numbers) or len(lengths) > 1:
            raise TypeError(f"{made!r:.200} is no state of slots; expected whole numbers, and one for each slot")
        return made


PER_SLOT = ("episode", "ended", "idle", "left", "began", "snapshot")


class OpenEpisode(NamedTuple):
    """One slot's open episode. Observation k, and the reward that came with it, follow action k - 1."""

    actions: Tree
    """[L, *A] since it opened."""
    unseen: int = 0
    """Number of the first observation in the digest: those of random first steps are in no batch."""
    digest: Sequence[int] = ()
    """`restoring.checksums` of the observations and rewards from then on; empty if there is none."""


@struct
class EpisodeLog:
    """Episodes of environments of K agents that ended in a batch, in the order of their ends: M at most in each of E.

    An agent that was there without a turn of its own counts, with length 0.
    """

    count: Any
    """[E] int64, how many."""
    marked: Any
    """[E] int64, of how many all rows are valid, where agents take turns: those of the newest are marked after it."""
    steps: Any
    """[E, M] int64 environment steps, of turn-based ones moves."""
    row: Any
    """[E, M] int64 row of the batch in which it ended; 0 of turn-based ones, whose columns are not in step."""
    policy: Any
    """[E, M, K] int64 index of the policy that played each of `possible_agents`; -1: it was not there."""
    return_: Any
    """[E, M, K] float64 undiscounted."""
    discounted: Any
    """[E, M, K] float64 sum of discount^k * reward_k over its own steps."""
    length: Any
    """[E, M, K] int64 own steps."""
    terminated: Any
    """[E, M, K] bool, its episode ended in a terminal state, rather than cut by a limit."""
    columns: Any
    """{key: [E, M, K] float64} of each info key the value last reported; NaN if there was none."""

    @staticmethod
    def allocate(E: int, M: int, K: int, info_keys: Sequence[str] = ()) -> EpisodeLog:
        """An empty log."""
        return EpisodeLog(
            count=np.zeros(E, np.int64),
            marked=np.zeros(E, np.int64),
            steps=np.zeros((E, M), np.int64),
            row=np.zeros((E, M), np.int64),
            policy=np.full((E, M, K), -1, np.int64),
            return_=np.zeros((E, M, K)),
            discounted=np.zeros((E, M, K)),
            length=np.zeros((E, M, K), np.int64),
            terminated=np.zeros((E, M, K), bool),
            columns={key: np.full((E, M, K), np.nan) for key in info_keys},
        )

    def unmarked(self, envs: slice) -> list[int]:
        """The turn-based environments among these with rows of their newest episode that may not be valid yet."""
        return (envs.start + np.flatnonzero(self.marked[envs] < self.count[envs])).tolist()

    def cut(self, envs: slice, row: int) -> None:
        """Takes out the episodes of these environments that ended in `row` or later."""
        place = np.arange(self.row.shape[1])
        self.count[envs] = ((place < self.count[envs, None]) & (self.row[envs] < row)).sum(1)


class BatchColumns(Protocol):
    """The columns of batches that a source fills: their policies, specs and buffers."""

    specs: tuple[EnvSpec, ...]
    """One for each policy; environments of one agent have one."""
    groups: tuple[Group, ...]
    """The slots of each policy's groups are consecutive, and together all columns of its batch."""
    info_keys: tuple[str, ...]
    """Keys of the env info that are written where the batch has columns for them."""
    seats: tuple[int, ...] = (1,)
    """Slots of each policy in one environment; seat i of policy p in environment e is column `e * seats[p] + i`."""
    takes_turns: bool = False
    """Rows are an agent's own turns."""
    log: EpisodeLog | None = None
    """The log of the episodes that ended in these batches, of environments of many agents; None for one."""
    calls: Sequence[list[CallRecord]] = ()
    """By slot the calls that its training environment has had; () where there can be none."""
    device: Any | None = None
    """The torch device on which its batches lie as tensors, as `place` returns them; None for numpy arrays."""

    @required
    def close(self) -> None:
        """Ends the environments. A second call does nothing."""

    def call(self, call: EnvCall, slots: Sequence[int]) -> list[Answer]:
        """Executes a call in the environments of these slots, between two batches; returns an answer for each."""
        text = (
            f"{type(self).__name__} steps all slots as one batched environment and has no environment for each slot to "
            f"{call.kind} {call.name!r} in; make the environments one by one to reach them"
        )
        return [Answer("refused", text)] * len(slots)

    def recall(self, calls: Sequence[Sequence[CallRecord]]) -> None:
        """Repeats the calls of each slot in environments that have had none yet."""
        if any(calls):
            raise ConfigError(f"{type(self).__name__} has no environment for each slot; these slots had calls of envs")

    def place(self, batches: list[SampleBatch], states: Tree) -> tuple[list[SampleBatch], Tree]:
        """Moves buffers, and recurrent states [B, ...] of agents that act there, to where it writes them."""
        return batches, states


class EvaluationSource(BatchColumns, Protocol):
    """Plays the episodes of evaluations."""

    broken: bool = False
    """Environments were lost, as what stepped them died: the evaluation is to be played anew, by another one."""

    @required
    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with a reset of all slots.

        Args:
            episodes: for each slot how many it plays before it idles for good; native pools play on.
        """

    def limit(self, max_steps: int) -> None:
        """Cuts each episode after this many steps, from the next `restart` on; for pools of many agents.

        Agents present then are truncated, and their episodes and that of the environment are logged.
        """
        raise TypeError(f"{type(self).__name__} keeps no log of episodes")


class Source(BatchColumns, Protocol):
    """The training environments of a live sampler: here, in workers, or in runners."""

    @required
    def get_state(self) -> PoolState:
        """Returns the state of every slot that the record does not show."""
        ...

    @required
    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        """Brings every slot back to where `get_state` found it; returns the slots that could not be.

        Args:
            outs: the batches last written, whose row T each restored slot must show bit for bit.
            journal: for each slot its open episode, or None if its actions were not kept.
        """
        ...

    @required
    def for_evaluation(self, B: int, first_slot: int = 0) -> EvaluationSource:
        """One of its own with B slots, as `evaluation_slots` said, and evaluation seeds.

        Args:
            first_slot: number of the first slot among those of several samplers that evaluate together.
        """
        ...

    def evaluation_slots(self, wanted: int) -> int:
        """Number of slots of an evaluation that requests this many; a native pool has a fixed number."""
        return wanted

    def invalidate(self, slot: int, row: int, message: str) -> list[int]:
        """Called for a slot that broke the contract in a row of the batch; returns the slots that were cut there.

        Raises:
            EnvContractError: there is no worker to replace.
        """
        raise EnvContractError(message)

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        """For each slot the random actions of its current episode from before the first batch, and their rewards."""
        return [([], [])] * slots_of(self)

    def newest_episodes(self) -> Ints:
        """[E] int64: number of the newest episode of each slot, in a row or not; one -1 where they have no numbers."""
        return np.array([-1])

    def metrics(self) -> dict[str, float]:
        """Further `sampler/...` and `faults/...` metrics."""
        return {}


class EnvPool(Source, EvaluationSource, Protocol):
    """Slots that step in groups. The pool writes the environment's leaves of a batch, the loop writes the agent's.

    On `send(group, row)` a pool reads `action[row]` of the group's slots and, by the time `recv` returns that group,
    has written `obs[row+1]`, `first[row+1]`, `reward[row]`, `terminated[row]`, `truncated[row]`, `valid[row]` and the
    named env info. A slot whose episode ended ignores its next action and resets, or idles: that row is not valid and
    has reward 0. Where agents take turns the loop asks `pending(group)` before `send` which of them wait for an action.
    A pool of your own inherits this class and writes the methods marked `required`; the others suit a pool in this
    process.
    """

    evaluation: bool = False
    """Episodes have evaluation seeds, which no training episode uses."""

    @required
    def bind(self, outs: Sequence[SampleBatch]) -> None:
        """Makes `outs`, one for each policy, the batches to write: row 0 is row T of those before, or a reset."""

    @required
    def send(self, group: int, row: int) -> None:
        """Steps the group's slots with the actions of this row, or begins to."""

    @required
    def recv(self) -> int:
        """Returns the group whose step has finished; waits for it."""
        ...

    def pending(self, group: int) -> tuple[Ints, Ints]:
        """The turns of a group that wait for an action: their slots [n], and the row of each [n]; maybe none."""
        raise TypeError(f"{type(self).__name__} takes no turns")

    def finished(self, group: int) -> bool:
        """True once the group's rows of this batch are complete; asked of pools that take turns."""
        raise TypeError(f"{type(self).__name__} takes no turns")


def lost_rewards(episode_table: Ints) -> dict[str, float]:
    """`env/lost_rewards`: how many rewards were for agents that did not act; nothing where there was none.

    Args:
        episode_table: [E, TABLE_WORDS] of a pool.
    """
    lost = int(episode_table[:, 4].sum())
    return {"env/lost_rewards": float(lost)} if lost else {}


def slots_of(pool: BatchColumns, policy: int = 0) -> int:
    """Number of columns of a policy's batch."""
    return max(group.slots.stop for group in pool.groups if group.policy == policy)


def row_views(out: SampleBatch, t: int) -> tuple[Tree, Tree, Any, Any, Any, Any, dict[str, Any]]:
    """Views that a step of row t reads and writes, made once for each buffer: making them costs as much as a step.

    Returns:
        obs and action, then reward, terminated, truncated and valid, then the env info columns; obs is of row t + 1.
    """
    env_info = out.info.get("env", {}) if isinstance(out.info, dict) else {}
    return (
        tree_map(lambda x: x[t + 1], out.obs),
        tree_map(lambda x: x[t], out.action),
        out.reward[t],
        out.terminated[t],
        out.truncated[t],
        out.valid[t],
        {key: column[t] for key, column in env_info.items()},
    )


def small_rows(out: SampleBatch) -> tuple[list[Any], tuple[Any, Any]]:
    """The memory of the observations that each step writes, where each is one small array, for copies put together.

    Returns:
        for every row t the bytes of row t + 1, else None; and shape and dtype of one observation.
    """
    obs = out.obs
    if isinstance(obs, np.ndarray) and obs.ndim > 2 and 0 < obs[0, 0].nbytes <= _SMALL and obs[0].flags.c_contiguous:
        return [memoryview(x.reshape(-1).view(np.uint8)) for x in obs[1:]], (obs.shape[2:], obs.dtype)
    return [None] * len(out.valid), (None, None)
