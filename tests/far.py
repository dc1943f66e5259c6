"""A device of its own for tests without a GPU: CPU memory behind tensors that say they are elsewhere, and every wait counted.

Torch treats `far` as it treats CUDA: a CPU tensor beside one of `far` is an error, and numbers come back by a copy. Where CUDA
would wait (`item`, `nonzero`, a mask as an index, a copy between host and device that is not `non_blocking`), the place is
noted. What it changes in torch stays, so a process has it for itself: `python -m tests.far_cases`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # pyright: ignore

import penstock

PACKAGE = str(Path(penstock.__file__).parent)
WAITS: Counter[str] = Counter()
"""Waits since it was cleared, by file and line of the package."""
aten = torch.ops.aten
SYNCHRONOUS = {aten._local_scalar_dense, aten.nonzero, aten.is_nonzero, aten.masked_select, aten.equal}
INDEXING = {aten.index, aten.index_put, aten.index_put_}
COMPOSITE = {aten.to, aten.contiguous, aten.reshape}
"""Operations that arrive whole where autograd is off."""


def note() -> None:
    """Counts a wait at the innermost line of the package."""
    frame: Any = sys._getframe(1)  # pyright: ignore
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    place = frame and f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
    WAITS[place or "outside"] += 1


class Far(Tensor):
    """A tensor on `far`, which holds one of the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Far:  # pyright: ignore
        how: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return Tensor._make_wrapper_subclass(cls, held.size(), device=torch.device("far:0"), **how)  # pyright: ignore

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        note()
        return self.held.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(f, args, kwargs or {})


def near(x: Any) -> Any:
    if isinstance(x, torch.device) and x.type == "far":
        return torch.device("cpu")
    return x.held if isinstance(x, Far) else x


def called(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation on the memory of the CPU; its results are on `far`, unless it brings them back."""
    kind, leaves = f.overloadpacket, tree_leaves((args, kwargs))
    if kind in COMPOSITE and (made := f.decompose(*args, **kwargs)) is not NotImplemented:
        return made
    given = tree_map(near, args), tree_map(near, kwargs)
    if kind is aten._to_copy:
        to = kwargs.get("device")
        target = isinstance(args[0], Far) if to is None else torch.device(to).type == "far"
        if isinstance(args[0], Far) != target and not (target and kwargs.get("non_blocking")):
            note()
        out = f(*given[0], **given[1])
        return Far(out) if target else out
    if kind is aten.copy_:
        if isinstance(args[0], Far) != isinstance(args[1], Far) and args[1].ndim:
            note()
        f(*given[0], **given[1])
        return args[0]
    masks = [x for x in args[1] if x is not None and x.dtype == torch.bool] if kind in INDEXING else []
    if kind in SYNCHRONOUS or masks:
        note()
    if any(isinstance(x, Far) for x in leaves):
        assert not (other := [x for x in leaves if type(x) is Tensor and x.ndim]), f"{f}: {other} is on the CPU"
    out = f(*given[0], **given[1])
    if kind is aten._local_scalar_dense:
        return out
    away = tree_map(lambda x: Far(x) if type(x) is Tensor else x, out)
    return return_and_correct_aliasing(f, args, kwargs, away) if isinstance(args[0] if args else None, Far) else away


class OnFar(TorchDispatchMode):
    """Where tensors are made on `far`."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")
        away = (to is not None and torch.device(to).type == "far") or any(
            isinstance(x, Far) for x in tree_leaves((args, kwargs))
        )
        return called(f, args, kwargs) if away else f(*args, **kwargs)


class Generator(torch.Generator):
    """Of the CPU, wherever it is asked for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")  # pyright: ignore


def install() -> OnFar:
    """Makes the device known to torch in this process; its tensors are made within the mode returned."""
    _setup_privateuseone_for_python_backend("far")
    changed: Any = torch
    changed.Generator = Generator
    changed.Tensor.pin_memory = lambda self: self
    # Tensors of a subclass cannot be viewed in it.
    changed.inference_mode = lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()
    return OnFar()
