"""Steps out of bounds: observations outside their space, counted over whole batches."""

from __future__ import annotations

import warnings

import numpy as np

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
    """

    def __init__(self, config: EnvConfig, spec: EnvSpec, first_slot: int) -> None:
        self.count = 0
        """Env steps since the run began whose observation lies outside its space."""
        self._name, self._spec, self._first_slot = config.name, spec.obs, first_slot
        self._said = False
        leaves = tree_leaves(spec.obs) if config.checks == "sampled" else []
        sides = [
            (i, wrong, bound)
            for i, leaf in enumerate(leaves)
            for wrong, bound in zip((np.less, np.greater), value_limits(leaf)[1:])
            if bound is not None
        ]
        self._sides = {0: sides}
        """By B: leaf, comparison and bound, the latter [B, *O] since numpy compares slowly along a short axis."""

    def look(self, batch: SampleBatch, training: bool = True) -> None:
        """Counts the steps of a batch, if it is for training; warns once whatever it is for."""
        if not self._sides[0]:
            return
        leaves = [batch.obs] if isinstance(batch.obs, np.ndarray) else tree_leaves(batch.obs)
        B = batch.valid.shape[1]
        if B not in self._sides:
            self._sides[B] = [
                (i, wrong, bound if bound.ndim == 0 else np.broadcast_to(bound, leaves[i].shape[1:]).copy())
                for i, wrong, bound in self._sides[0]
            ]
        found = [bad for i, wrong, bound in self._sides[B] if np.count_nonzero(bad := wrong(leaves[i], bound))]
        if not found:
            return
        outside = np.any([bad.reshape(*bad.shape[:2], -1).any(-1) for bad in found], 0)
        outside[0] &= batch.first[0]  # the rest of row 0 was row T of the batch before
        outside[1:] &= batch.first[1:] | batch.valid
        if training:
            self.count += int((outside[1:] & batch.valid).sum())
        if not self._said and outside.any():
            self._said = True
            t, b = np.argwhere(outside)[0].tolist()
            self._warn(tree_map(lambda x: x[t, b], batch.obs), t, b)

    def metrics(self) -> dict[str, float]:
        """`env/out_of_bounds`; empty while there is none."""
        return {"env/out_of_bounds": float(self.count)} if self.count else {}

    def _warn(self, obs: Tree, t: int, b: int) -> None:
        warnings.warn(
            f"slot {self._first_slot + b} of {self._name}, row {t} of the batch: "
            f"{describe_violation(obs, self._spec, 'obs')}. Training goes on with the value as it is; "
            "env/out_of_bounds counts such steps, and env_checks='always' makes the next one an error",
            stacklevel=4,
        )
