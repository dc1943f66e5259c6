"""Full precision: output layers and memories compute in float32, though layers before them may run under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled  # pyright: ignore


def in_full(layer: nn.Module | Any, x: Tensor, *rest: Any) -> Any:
    """`layer(x, *rest)` with float32 products: an output in bfloat16 has three digits, too few for a value of 100."""
    if not _is_any_autocast_enabled():
        return layer(x, *rest)
    with torch.autocast(x.device.type, enabled=False):
        return layer(x.float(), *rest)
