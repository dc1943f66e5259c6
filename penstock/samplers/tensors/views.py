"""TensorViews: the parts of a tensor batch, on any device, that the loop reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.batch import Inputs, SampleBatch, padded_rows
from penstock.core.errors import ConfigError
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_structure, tree_unflatten


class TensorViews:
    """Views of one group's slots in a batch of tensors, row by row, made once for each buffer.

    As `GroupViews`, but that nothing is brought to the CPU and nothing waits for the device.

    Args:
        device: of the agent.

    Raises:
        ConfigError: the agent is on another device than the batch.
    """

    def __init__(
        self, batch: SampleBatch, slots: slice, null_action: Tree, device: torch.device, noise_size: int
    ) -> None:
        T, _ = batch.spec
        self.device: torch.device = batch.valid.device
        if torch.empty(0, device=device).device != self.device:
            raise ConfigError(
                f"the agent is on {device} and the environment's tensors are on {self.device}: every step would be "
                f"copied; use run.device='{self.device}' (--run.device {self.device}), or make the environment on "
                f"{device} (--env-kwargs device={device})"
            )
        self.n = slots.stop - slots.start
        self.padded = padded_rows(self.n)
        self.direct = self.n == self.padded
        views = tree_map(lambda x: x[:, slots], tuple(batch.inputs))
        self._inputs = [Inputs(*tree_map(lambda x, t=t: x[t], views)) for t in range(T)]
        self._structure = tree_structure(self._inputs[0])
        missing = self.padded - self.n
        self._padding = [x.new_zeros(missing, *x.shape[1:]) for x in tree_leaves(self._inputs[0])]
        self._state = [x[slots] for x in tree_leaves(batch.state)]
        agent_info = {k: v for k, v in batch.info.items() if k != "env"}
        outputs = [x[:, slots] for x in tree_leaves((batch.action, agent_info))]
        self.outputs = [[x[t] for x in outputs] for t in range(T)]
        self._flat = isinstance(batch.action, Tensor) and all(isinstance(x, Tensor) for x in agent_info.values())
        self._keys = sorted(agent_info)
        actions = [x[:, slots] for x in tree_leaves(batch.action)]
        nulls = [torch.from_numpy(x).to(self.device) for x in tree_leaves(null_action)]
        self._nulled = [
            [(x[t], _wide(batch.valid[t, slots], x[t]), y) for x, y in zip(actions, nulls)] for t in range(T)
        ]

    def served(self, agent: Any, noise: Any) -> None:
        """None: the agent's `act` is called."""

    def record_state(self, state: Tree) -> None:
        """Writes the recurrent state before row 0 [padded, ...] into the batch."""
        for x, y in zip(self._state, tree_leaves(state)):
            x.copy_(y[: self.n])

    def null_ignored(self, t: int) -> None:
        """Puts the null action where row t was a reset, before the next row is served."""
        for x, valid, null in self._nulled[t]:
            x.copy_(torch.where(valid, x, null))

    def input(self, t: int) -> Inputs:
        """[padded, ...] inputs of row t; rows of padding are zero."""
        if self.direct:
            return self._inputs[t]
        leaves = [torch.cat(parts) for parts in zip(tree_leaves(self._inputs[t]), self._padding)]
        return tree_unflatten(self._structure, leaves)

    def leaves(self, action: Tree, info: dict[str, Tree]) -> list[Tensor]:
        """The leaves of an answer of the agent, in the order of `outputs`."""
        return [action, *[info[key] for key in self._keys]] if self._flat else tree_leaves((action, info))

    def noise(self, noise: Tensor | np.ndarray[Any, Any] | None, slots: slice) -> list[Tensor] | list[None]:
        """[padded, noise_size] for every row."""
        if noise is None:
            return [None] * len(self._inputs)
        rows = torch.as_tensor(noise)[:, slots]
        if not self.direct:
            rows = torch.cat([rows, rows.new_full((len(rows), self.padded - self.n, rows.shape[2]), 0.5)], 1)
        return list(rows.unbind(0))


def _wide(mask: Tensor, x: Tensor) -> Tensor:
    """[n] as [n, 1, ...], with as many dimensions as x."""
    return mask.view(-1, *[1] * (x.ndim - 1))
