"""State encoded as tensors and plain Python, all that a checkpoint holds and all that loading it can create."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import CheckpointError

_NUMPY = "__numpy__"
"""Key that marks a dict as an array. Bytes are stored, since torch lacks some dtypes and treats others unevenly."""
_ARRAY_KINDS = "biufcSU"
"""No objects: the bytes of an object array are addresses, and a forged one would be followed."""
_MAX_INT_BITS = 2040
"""torch's weights-only unpickler reads integers of up to 255 bytes."""


def encode(value: Any, path: str = "state") -> Any:
    """A copy of a nested state that `torch.load(weights_only=True)` reads; arrays become marked dicts of bytes.

    Tensors go to the CPU without their history; numpy scalars become Python numbers.

    Raises:
        CheckpointError: at anything but dict, list, tuple, tensor, array, int, float, str, bool and None; names where.
    """
    kind = type(value)
    if kind in (str, bool, float, type(None)):
        return value
    if kind is int and value.bit_length() < _MAX_INT_BITS:
        return value
    if kind in (dict, OrderedDict):
        return {_key(key, path): encode(item, f"{path}[{key!r}]") for key, item in value.items()}
    if kind in (list, tuple):
        return kind(encode(item, f"{path}[{i}]") for i, item in enumerate(value))
    if kind in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        return _compact(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        flat = flat if flat.flags.writeable else flat.copy()
        return {_NUMPY: value.dtype.str, "shape": list(value.shape), "bytes": torch.from_numpy(flat)}
    if isinstance(value, np.generic) and not isinstance(item := value.item(), np.generic):
        return encode(item, path)
    raise CheckpointError(
        f"{path} is {_describe(value)}, which a checkpoint cannot hold; expected dict, list, "
        "tuple, tensor, numpy array of numbers, int, float, str, bool or None"
    )


def decode(plain: Any) -> Any:
    """The inverse of `encode`; arrays are views of the tensors. Raises CheckpointError on a malformed array."""
    if isinstance(plain, dict):
        if _NUMPY not in plain:
            return {key: decode(item) for key, item in plain.items()}
        try:
            dtype = np.dtype(plain[_NUMPY])
            if dtype.kind not in _ARRAY_KINDS:
                raise ValueError(f"dtype {dtype} is not allowed")
            return _whole(plain["bytes"]).numpy().view(dtype).reshape(plain["shape"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"state holds a malformed array ({error}); the checkpoint was not written by penstock"
            ) from error
    if isinstance(plain, (list, tuple)):
        return type(plain)(decode(item) for item in plain)
    if isinstance(plain, Tensor):
        return _whole(plain)
    return plain


def encoded_bytes(plain: Any) -> int:
    """Bytes of the tensors in an encoded state, which is its size on disk but for names and numbers."""
    if isinstance(plain, Tensor):
        return plain.numel() * plain.element_size()
    items = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, (list, tuple)) else ()
    return sum(encoded_bytes(item) for item in items)


def _key(key: Any, path: str) -> str | int:
    if key == _NUMPY or type(key) not in (str, int):
        raise CheckpointError(f"{path} has the key {key!r}; expected a str or int other than {_NUMPY!r}")
    return key


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; a view is copied, since torch.save would write the whole storage under it."""
    tensor = tensor.detach().cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _whole(tensor: Tensor) -> Tensor:
    """The tensor if every element of it was stored. A forged view repeats some, and its copy may be of any size."""
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"state holds a tensor {list(tensor.shape)} with fewer elements; it was not written by us"
        )
    return tensor


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__} {text if len(text) <= 60 else text[:57] + '...'}"
