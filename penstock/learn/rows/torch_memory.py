"""The memory of the learner's device, in which a replay keeps observations and actions as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.batch import SampleBatch, as_arrays
from penstock.core.errors import ConfigError
from penstock.learn.rows.minibatch import to_device
from penstock.learn.rows.postprocess import as_tensors


class TorchMemory:
    """The `DeviceMemory` of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def free(self) -> int | None:
        """Bytes that are left on a CUDA device, with those that torch has reserved and not used; None elsewhere."""
        if self.device.type != "cuda":
            return None
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """A tensor of zeros; in the host's memory, page by page, as it is first written."""
        if self.device.type == "cpu":
            return torch.from_numpy(np.zeros(shape, dtype))
        try:
            return torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def send(self, x: Any) -> Tensor:
        """An array or tensor as a tensor on the device."""
        if isinstance(x, Tensor):
            return x.to(self.device)
        return to_device(x if x.flags.writeable else x.copy(), self.device)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors, one after the other."""
        return torch.cat([*parts])


def batch_on_device(batch: SampleBatch, memory: Any, device: torch.device) -> tuple[SampleBatch, SampleBatch]:
    """A batch as a replay on the learner's device takes it, observations and actions there, and all of it as tensors.

    Args:
        memory: the replay's. device: the policy's.

    Raises:
        ConfigError: the policy has been moved since it was built.
    """
    if memory.device != device:
        raise ConfigError(
            f"replay.device='learner' on {memory.device}, and the policy has moved to {device}; expected one device "
            "for both: build the policy with it (device=, or run.device)"
        )
    tensors = as_tensors(batch, device)
    there = {name: getattr(tensors, name) for name in ("obs", "prev_action", "final", "version")}
    return replace(as_arrays(replace(batch, **dict.fromkeys(there))), **there), tensors
