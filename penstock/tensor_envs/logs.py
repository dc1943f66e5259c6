"""EnvLog: the scalars that a simulator logs by itself in the `info` of its steps, averaged on its device."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import EnvContractError


class EnvLog:
    """Means of what the steps of a batch have logged; nothing leaves the device before `metrics` is asked."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, int]] = {}
        self._known: dict[str, float] = {}

    def clear(self) -> None:
        """Begins a batch."""
        self._sums, self._known = {}, {}

    def add(self, log: Any, where: str) -> None:
        """Adds the log of a step: numbers and tensors by name, of which those of many numbers count with their mean.

        Raises:
            EnvContractError: it is no such dict.
        """
        if not isinstance(log, Mapping):
            raise EnvContractError(
                f"{where}: info['log']: got {type(log).__name__}, expected a dict of numbers by name"
            )
        for key, x in log.items():
            if not isinstance(x, (Tensor, numbers.Real)):
                raise EnvContractError(
                    f"{where}: info['log'][{key!r}]: got {type(x).__name__}, expected a number or a tensor of numbers"
                )
            total, count = self._sums.get(key, (0.0, 0))
            self._sums[key] = total + (x.detach().float().mean() if isinstance(x, Tensor) else float(x)), count + 1

    def metrics(self) -> dict[str, float]:
        """`env/KEY` of every name, by one transfer from the device; later calls in the same batch need none."""
        if self._sums:
            sums, self._sums = self._sums, {}
            totals = [torch.as_tensor(total) for total, _ in sums.values()]
            device = next((x.device for x in totals if x.device.type != "cpu"), torch.device("cpu"))
            found = torch.stack([x.to(device) for x in totals]).tolist()
            self._known = {f"env/{key.lstrip('/')}": x / n for (key, (_, n)), x in zip(sums.items(), found)}
        return self._known
