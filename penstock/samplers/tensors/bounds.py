"""Steps out of bounds in batches of tensors, counted where they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.core.batch import SampleBatch, as_arrays
from penstock.core.spec import EnvSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.contract import value_limits
from penstock.envs.make import EnvConfig
from penstock.envs.pools.bounds import OutOfBounds


class TensorBounds:
    """Like `OutOfBounds`, for batches of tensors; `look` waits for the device once, for the counts."""

    def __init__(self, config: EnvConfig, spec: EnvSpec, first_slot: int, device: torch.device) -> None:
        self._told = OutOfBounds(config, spec, first_slot)
        self.count = 0
        """Env steps since the run began with an observation outside its space."""

        def on_device(bound: Any) -> Tensor | None:
            return None if bound is None else torch.as_tensor(bound, device=device)

        leaves = tree_leaves(spec.obs) if config.checks == "sampled" else []
        limits = [tuple(map(on_device, value_limits(leaf)[1:])) for leaf in leaves]
        self._limits = [(i, low, high) for i, (low, high) in enumerate(limits) if low is not None or high is not None]

    def look(self, batch: SampleBatch, training: bool = True) -> None:
        """Counts the steps of a batch, if it is for training; warns once, also for other batches."""
        if not self._limits:
            return
        obs, outside = tree_leaves(batch.obs), torch.zeros_like(batch.first)
        for i, low, high in self._limits:
            beyond = torch.zeros_like(obs[i], dtype=torch.bool)
            if low is not None:
                beyond |= obs[i] < low
            if high is not None:
                beyond |= obs[i] > high
            outside |= beyond.flatten(2).any(-1) if beyond.ndim > 2 else beyond
        total, steps = torch.stack([outside.sum(), (outside[1:] & batch.valid).sum()]).tolist()
        if training:
            self.count += steps
        if total and not self._told.said:
            self._told.said = True
            t, b = outside.nonzero()[0].tolist()
            self._told.warn(as_arrays(tree_map(lambda x: x[t, b], batch.obs)), t, b)
