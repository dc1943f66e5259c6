"""The episode tracker of slots with tensor batches: summed on their device, so that only finished episodes leave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.batch import SampleBatch
from penstock.envs.pools.pool import OpenEpisode, Source
from penstock.samplers.episodes import Episodes
from penstock.samplers.trackers.slots import ReportedKeys, env_info


class TensorStats:
    """Running sums of B slots over batches of tensors, to the same numbers as `EpisodeStats`.

    `update` waits for the device twice: for the number of episodes that ended, and for their sums.
    """

    def __init__(self, B: int, discount: float, device: torch.device) -> None:
        self.discount = discount
        # Apple's devices have no float64.
        self._float = torch.float32 if device.type == "mps" else torch.float64
        self.length = torch.zeros(B, dtype=torch.int64, device=device)
        self._sums = torch.zeros(2, B, dtype=self._float, device=device)  # returns, and discounted ones
        self._columns: dict[str, Tensor] = {}
        self._keys = ReportedKeys()

    def update(self, batch: SampleBatch) -> Episodes:
        """Adds T rows of every slot. An episode that is cut without an end is dropped."""
        T, _ = batch.spec
        ended = batch.terminated.logical_or(batch.truncated)
        time = torch.arange(T, device=ended.device).unsqueeze(1)
        opened = torch.where(batch.first[:-1], time, -1).cummax(0).values  # row of the opening; -1: an earlier batch
        earlier = opened < 0
        age = torch.where(earlier, time + self.length, time - opened)
        reward = batch.reward.to(self._float)
        sums = torch.stack([reward, reward * torch.pow(self.discount, age.to(self._float))]).cumsum(1)  # [2, T, B]
        before = sums.gather(1, (opened - 1).clamp(min=0).expand(2, -1, -1)).masked_fill(opened < 1, 0.0)
        totals = sums - before + torch.where(earlier, self._sums.unsqueeze(1), 0.0)
        columns = {key: self._reported(key, x, time, opened) for key, x in env_info(batch).items()}
        parts = [*totals, age + 1, batch.terminated, *columns.values()]
        rows, slots = ended.nonzero(as_tuple=True)
        found = torch.stack([x[rows, slots].to(self._float) for x in parts] + [slots.to(self._float)]).cpu().numpy()
        open_ = batch.valid[-1] & ~ended[-1]
        self._sums = totals[:, -1].masked_fill(~open_, 0.0)
        self.length = (age[-1] + 1).masked_fill(~open_, 0)
        self._columns = {key: x[-1].masked_fill(~open_, float("nan")) for key, x in columns.items()}
        if self._keys.waits:
            self._keys.look(columns, lambda key: bool(env_info(batch)[key].isnan().all()), len(rows))
        return_, discounted, length, terminated, *reported, slot = found.astype(np.float64)
        known = dict(zip(columns, reported))
        return Episodes(return_, length.astype(np.int64), discounted, slot.astype(np.int64), terminated > 0, known)

    def cut(self, batch: SampleBatch, max_steps: int) -> Tensor:
        """[T, B] bool: the rows after which an episode has lasted this long without an end; truncates them there."""
        time = torch.arange(batch.spec.T, device=batch.valid.device).unsqueeze(1)
        opened = torch.where(batch.first[:-1], time, -1).cummax(0).values
        age = torch.where(opened < 0, time + self.length, time - opened)
        cut = batch.valid & (age == max_steps - 1) & ~batch.terminated.logical_or(batch.truncated)
        batch.truncated.logical_or_(cut)
        return cut

    def state_dict(self) -> dict[str, Any]:
        """The running sums, as arrays, in the form of `EpisodeStats`."""
        return_, discounted = self._sums.double().cpu().numpy()
        columns = {key: x.double().cpu().numpy() for key, x in self._columns.items()}
        return {"return": return_, "length": self.length.cpu().numpy(), "discounted": discounted, "columns": columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        sums = np.stack([state["return"], state["discounted"]])
        self._sums = torch.from_numpy(sums).to(self._sums)
        self.length = torch.from_numpy(np.array(state["length"])).to(self.length)
        self._columns = {key: torch.from_numpy(np.array(x)).to(self._sums) for key, x in state["columns"].items()}

    def _reported(self, key: str, column: Tensor, time: Tensor, opened: Tensor) -> Tensor:
        """[T, B] the value of the episode that was last reported up to each row; NaN if there is none."""
        at = torch.where(column.isnan(), -1, time).cummax(0).values
        carried = self._columns.get(key)
        old = torch.full_like(column[0], float("nan")).to(self._float) if carried is None else carried
        found = column.to(self._float).gather(0, at.clamp(min=0))
        none = torch.where(opened < 0, old, float("nan"))
        return torch.where((at >= 0) & (at >= opened), found, none)


class TensorEpisodeTracker:
    """The episode tracker of B slots with tensor batches; it keeps no journal, since nothing can be replayed."""

    def __init__(self, B: int, discount: float, device: torch.device) -> None:
        self._B, self._stats = B, TensorStats(B, discount, device)
        self._batches: Sequence[SampleBatch] = ()

    def attach(self, batches: Sequence[SampleBatch]) -> None:
        self._batches = batches

    def begin(self, pool: Source, buffer: int) -> None:
        """Does nothing: every episode opens in a batch."""

    def record(self, pool: Source, buffer: int) -> Episodes:
        return self._stats.update(self._batches[buffer])

    def open_episodes(self) -> list[OpenEpisode | None]:
        return [None] * self._B

    def state_dict(self) -> dict[str, Any]:
        return {"stats": self._stats.state_dict(), "journal": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stats.load_state_dict(state["stats"])
