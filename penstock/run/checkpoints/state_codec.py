"""States by `penstock.core.wire`, with tensors: all that a checkpoint holds and that loading it can make."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core import wire
from penstock.core.errors import CheckpointError


def pack(state: Any) -> wire.Packed:
    """A nested state as JSON and bytes, which share memory with it. Tensors come back on the CPU, without history.

    Raises:
        CheckpointError: it holds what cannot be stored; says where.
    """
    try:
        return wire.pack(state, "state", TENSORS)
    except TypeError as error:
        raise CheckpointError(str(error)) from None
    except RecursionError:
        raise CheckpointError("the state is nested too deeply to be stored, or holds itself") from None


def unpack(text: bytes, data: npt.NDArray[np.uint8]) -> Any:
    """Inverse of `pack`; errors as in `wire.unpack`."""
    return wire.unpack(text, data, TENSORS)


def encode(state: Any) -> bytes:
    """A nested state in one piece. Raises CheckpointError as `pack`."""
    try:
        return wire.encode(state, "state", TENSORS)
    except TypeError as error:
        raise CheckpointError(str(error)) from None
    except RecursionError:
        raise CheckpointError("the state is nested too deeply to be stored, or holds itself") from None


def decode(data: bytes) -> Any:
    """Inverse of `encode`; errors as in `wire.unpack`."""
    return wire.decode(data, TENSORS)


def _to_array(value: Any) -> tuple[Any, npt.NDArray[Any]] | None:
    """Dtype, shape and order in memory of a tensor, and its bytes; some of torch's dtypes are none of numpy's."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        return None
    x = value.detach().cpu().resolve_conj().resolve_neg()
    order = sorted(range(x.ndim), key=lambda i: -x.stride(i))
    about = [str(x.dtype).removeprefix("torch."), list(x.shape), order]
    if not x.numel():  # torch cannot view it as bytes
        return about, np.zeros(0, np.uint8)
    return about, x.permute(order).contiguous().reshape(-1).view(torch.uint8).numpy()


def _from_array(about: Any, array: npt.NDArray[Any]) -> Tensor:
    name, shape, order = about
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or sorted(order) != list(range(len(shape))):
        raise ValueError(f"a tensor of dtype {name!r}, shape {shape}, order {order} is not allowed")
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    x = torch.from_numpy(array).view(dtype).reshape([shape[i] for i in order])
    return x.permute([order.index(i) for i in range(len(order))]).clone()


TENSORS = wire.Extension(_to_array, _from_array)
