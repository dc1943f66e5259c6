"""Steps out of bounds: observations outside their space, counted over whole batches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SampleBatch
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.envs.contract import describe_violation, value_limits
from penstock.envs.make import EnvConfig


class OutOfBounds:
    """Counts env steps that return a value outside its space, and warns of the first.

    Whole batches are looked at, so that the count is the same wherever the environments step. With
    `env_checks="always"` pools raise at such a value; with `finite` and `off` nobody looks.

    Args:
        first_slot: number of the batches' first slot among those of all samplers of the run.
        seats: columns of each slot. policy: that the batches are of, in environments of many agents.
    """

    def __init__(self, config: EnvConfig, spec: EnvSpec, first_slot: int, seats: int = 1, policy: str = "") -> None:
        self.count = 0
        """Env steps since the run began whose observation lies outside its space."""
        self._name, self._spec, self._first_slot = config.name, spec.obs, first_slot
        self._seats, self._policy = seats, policy
        self.said = False
        """It has warned."""
        leaves = tree_leaves(spec.obs) if config.checks == "sampled" else []
        sides = [
            (i, wrong, bound)
            for i, leaf in enumerate(leaves)
            for wrong, bound in zip((np.less, np.greater), value_limits(leaf)[1:])
            if bound is not None
        ]
        self._sides = sides

    def limits(self, batch: SampleBatch) -> list[tuple[Any, npt.NDArray[Any], npt.NDArray[Any]]]:
        """The comparisons to make of a buffer's observations: function, array [T+1, B, *O], bound [B, *O] or a number.

        A value is outside where one returns True; see `found`. Empty where nobody looks.
        """
        leaves = tree_leaves(batch.obs)
        # Of the shape of a row, since numpy compares slowly along a short axis.
        return [
            (wrong, leaves[i], bound if bound.ndim == 0 else np.broadcast_to(bound, leaves[i].shape[1:]).copy())
            for i, wrong, bound in self._sides
        ]

    def look(self, batch: SampleBatch, training: bool = True) -> None:
        """Makes the comparisons; the sampler makes those of its training buffers itself, with limits made once."""
        bad = [where for wrong, obs, bound in self.limits(batch) if (where := wrong(obs, bound)).any()]
        if bad:
            self.found(batch, bad, training)

    def found(self, batch: SampleBatch, bad: Sequence[npt.NDArray[np.bool_]], training: bool = True) -> None:
        """Counts the steps of a batch, if it is for training; warns once, also for other batches.

        Args:
            bad: [T+1, B, *O] where values lie outside, for some leaves.
        """
        outside = np.any([where.reshape(*where.shape[:2], -1).any(-1) for where in bad], 0)
        outside[0] &= batch.first[0]  # the rest of row 0 was row T of the batch before
        outside[1:] &= batch.first[1:] | batch.valid
        if training:
            self.count += int((outside[1:] & batch.valid).sum())
        if not self.said and outside.any():
            self.said = True
            t, b = np.argwhere(outside)[0].tolist()
            self.warn(tree_map(lambda x: x[t, b], batch.obs), t, b)

    def warn(self, obs: Tree, t: int, b: int) -> None:
        """Warns of an observation in row t of slot b."""
        slot, seat = divmod(b, self._seats)
        whose = f", policy {self._policy!r}, seat {seat}" if self._policy else ""
        warnings.warn(
            f"slot {self._first_slot + slot} of {self._name}{whose}, row {t} of the batch: "
            f"{describe_violation(obs, self._spec, 'obs')}. Training goes on with the value as it is; "
            "env/out_of_bounds counts such steps, and env_checks='always' makes the next one an error",
            stacklevel=5,
        )
