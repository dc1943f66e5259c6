"""BatchQueue: the queue of a sampler that works ahead of its learner; a batch is requested, collected, handed out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.tree import tree_leaves
from penstock.samplers.episodes import Episodes, join_episodes
from penstock.samplers.trackers.lag import lags
from penstock.samplers.trackers.states import LiveState, State, check_slots, columns_of


class BatchQueue:
    """The queue of batches between their collector and the learner.

    Batch k is released when the learner asks for batch k - depth; it has then finished training on batch
    k - 1 - depth. The first depth + 1 batches are released at once.

    Args:
        depth: number of released batches that the learner does not have yet, counted between two of its calls.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.first = 0
        """Number of the first batch that was released here; 0 in a run that goes on from a checkpoint."""
        self.next = 0
        """Number of the batch that the learner is given next."""
        self.released = 0
        """Number of the first batch that is not released yet; 0 while none is released."""
        self.versions: dict[int, int] = {}
        """By batch number, the version of the parameters to collect a released batch with, until it is collected."""
        self.waiting: dict[int, Episodes] = {}
        """By batch number, the episodes of collected batches that are not handed out yet."""
        self.lag: dict[str, float] = {}
        """`sampler/lag` metrics of the last batch that had a valid row."""
        self._buffers: Sequence[Sequence[SampleBatch]] = ()

    def attach(self, buffers: Sequence[Sequence[SampleBatch]]) -> None:
        """Takes the buffers that are filled in turn, more than `depth` + 1, each with a batch for every policy."""
        self._buffers = buffers

    @property
    def buffers(self) -> int:
        """How many are attached."""
        return len(self._buffers)

    def buffer(self, itr: int) -> Sequence[SampleBatch]:
        """The memory of batch `itr`, one batch for each policy."""
        return self._buffers[itr % len(self._buffers)]

    def write(self, itr: int, leaves: Sequence[Any]) -> None:
        """Copies arrays, in the order of the leaves of all policies' batches, into the memory of batch `itr`."""
        for x, y in zip(tree_leaves(self.buffer(itr)), leaves, strict=True):
            x[...] = y

    def release(self, itr: int, version: int) -> range:
        """Releases batches when the learner wants `itr`; returns their numbers, to request with parameters `version`.

        Raises:
            ConfigError: another batch is next.
        """
        if not self.released:
            self.first = self.next = self.released = itr
        if itr != self.next:
            raise ConfigError(
                f"obtain_samples({itr}), but batch {self.next} is next; this sampler collects batches ahead of the "
                f"learner, so ask for them in order: obtain_samples({self.next})"
            )
        numbers = range(self.released, itr + self.depth + 1)
        self.released = numbers.stop
        self.versions.update(dict.fromkeys(numbers, version))
        return numbers

    def forget(self) -> None:
        """Revokes the release of batches that will not be collected any more."""
        self.released = self.next
        self.versions.clear()

    def take(self) -> Episodes:
        """Hands out the next batch, which must be waiting; returns the episodes that ended in it."""
        itr, self.next = self.next, self.next + 1
        self.versions.pop(itr, None)
        return self.waiting.pop(itr)

    def measure(self, version: int) -> None:
        """Notes the lag of the batch handed out last, when training has reached `version`."""
        self.lag |= lags(self.buffer(self.next - 1), version)

    def state_dict(self, inner: Any, opened: Any) -> dict[str, Any]:
        """The numbers, and copies of the waiting batches. Every released batch must have been collected by now.

        Args:
            inner: the collector's state after the last waiting batch. opened: [B] int64, number of each slot's episode.
        """
        waiting = {str(itr): waiting_state(self.buffer(itr), x) for itr, x in sorted(self.waiting.items())}
        return {"released": self.released, "next": self.next, "inner": inner, "waiting": waiting, "opened": opened}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError unless as many batches wait in the state as this sampler is ahead."""
        ahead = state["released"] - state["next"] if state.get("released") else 0
        if ahead != self.depth:
            raise CheckpointError(f"the checkpoint holds {ahead} batches ahead; this sampler has depth={self.depth}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; to call after the collector has loaded `inner`, as that may write to the buffers."""
        self.released, self.next = state["released"], state["next"]
        self.waiting = {int(itr): Episodes(**kept["episodes"]) for itr, kept in state["waiting"].items()}
        for itr, kept in state["waiting"].items():
            self.write(int(itr), kept["rows"])

    def join_states(self, states: Sequence[State]) -> State:
        """Joins states into one of all slots, as `Divisible.join_states`; the collectors must be LiveSamplers."""
        first = states[0]
        if not first["released"]:
            return (
                {**first, "inner": LiveState.join_states([x["inner"] for x in states])} if "inner" in first else first
            )
        starts = np.cumsum([0] + [len(x["opened"]) for x in states]).tolist()
        waiting: State = {}
        for itr in first["waiting"]:
            kept = [x["waiting"][itr] for x in states]
            rows = [np.concatenate(xs, axis) for *xs, axis in zip(*(x["rows"] for x in kept), self._axes())]
            episodes = [Episodes(**x["episodes"]).numbered(start) for x, start in zip(kept, starts)]
            waiting[itr] = {"rows": rows, "episodes": join_episodes(episodes).to_plain()}
        inner = LiveState.join_states([x["inner"] for x in states])
        opened = np.concatenate([x["opened"] for x in states])
        return {**first, "inner": inner, "waiting": waiting, "opened": opened}

    def split_state(self, state: State, slots: Sequence[slice]) -> list[State]:
        """Inverse of `join_states`.

        Raises:
            CheckpointError: the state has another number of slots, or of batches ahead.
        """
        if state.get("released") == 0:
            inner = LiveState.split_state(state["inner"], slots) if "inner" in state else []
            return [{**state, "inner": x} for x in inner] or [state] * len(slots)
        self.check(state)
        total = len(state["opened"])
        check_slots(total, slots)
        parts: list[State] = []
        for at, inner in zip(slots, LiveState.split_state(state["inner"], slots)):
            waiting: State = {}
            for itr, kept in state["waiting"].items():
                rows = [columns_of(x, at, total, axis) for x, axis in zip(kept["rows"], self._axes())]
                waiting[itr] = {"rows": rows, "episodes": Episodes(**kept["episodes"]).of_slots(at).to_plain()}
            parts.append({**state, "inner": inner, "waiting": waiting, "opened": state["opened"][at]})
        return parts

    def _axes(self) -> list[int]:
        """Axis of the slots, for each array of a waiting batch."""
        axes: list[int] = []
        for batch in self.buffer(0):
            for f in fields(batch):  # pyright: ignore[reportArgumentType]
                axes += [0 if f.name == "state" else 1 for _ in tree_leaves(getattr(batch, f.name))]
        return axes


def waiting_state(batches: Sequence[SampleBatch], episodes: Episodes) -> dict[str, Any]:
    """Plain data of a batch that waits: copies of the arrays of all policies' batches, and the episodes."""
    return {"rows": [x.copy() for x in tree_leaves(batches)], "episodes": episodes.to_plain()}
