"""OutOfBounds: counts env steps that return a value outside its space, and warns of the first."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.spec import EnvSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.contract import describe_violation, value_limits
from penstock.envs.make import EnvConfig


class OutOfBounds:
    """Looks at whole batches, so that the count is the same wherever the environments step.

    With `env_checks="always"` pools raise at such a value; with `finite` and `off` nobody looks.

    Args:
        first_slot: number of the batches' first slot among those of all samplers of the run.
    """

    def __init__(self, config: EnvConfig, spec: EnvSpec, first_slot: int = 0) -> None:
        self.count = 0
        """Env steps since the run began whose observation lies outside its space."""
        self._name, self._spec, self._first_slot = config.name, spec.obs, first_slot
        self._said = False
        limits = [value_limits(leaf)[1:] for leaf in tree_leaves(spec.obs)] if config.checks == "sampled" else []
        self._limits = [(i, low, high) for i, (low, high) in enumerate(limits) if low is not None or high is not None]

    def look(self, batch: SampleBatch, training: bool = True) -> None:
        """Counts the steps of a batch, if it is for training; warns once whatever it is for."""
        if not self._limits:
            return
        leaves = tree_leaves(batch.obs)
        outside: Any = None
        for i, low, high in self._limits:
            x = leaves[i]
            for bound, wrong in ((low, np.less), (high, np.greater)):
                if bound is not None and (bad := wrong(x, bound)).any():
                    rows = bad.reshape(*bad.shape[:2], -1).any(-1)
                    outside = rows if outside is None else outside | rows
        if outside is None:
            return
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

    def _warn(self, obs: Any, t: int, b: int) -> None:
        message = describe_violation(obs, self._spec, "obs")
        warnings.warn(
            f"slot {self._first_slot + b} of {self._name}, row {t} of the batch: {message}. Training goes on with the "
            "value as it is; env/out_of_bounds counts such steps, and env_checks='always' makes the next one an error",
            stacklevel=3,
        )
