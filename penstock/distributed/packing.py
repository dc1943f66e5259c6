"""Parameters and fragments as bytes: one message for each, however many arrays they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.parameters import parameters_of
from penstock.core.tree import Tree, tree_leaves

INLINE_BYTES = 256 << 10
"""Fragments up to this size travel as one string of bytes; of larger ones each array is copied once on its way."""
_ALIGNMENT = 8
Bytes = npt.NDArray[np.uint8]


def pack_parameters(agent: Agent) -> Bytes:
    """[n] uint8: all parameters and buffers in the order of `parameters_of`, each at a multiple of 8 bytes."""
    tensors = list(parameters_of(agent).values())
    out = np.empty(sum(map(_room, tensors)), np.uint8)
    at = 0
    for x in tensors:
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        out[at : at + raw.size] = raw
        at += _room(x)
    return out


def unpack_parameters(data: Any, agent: Agent) -> None:
    """Copies what `pack_parameters` returned, as bytes or an array, into an agent of the same parameters.

    Raises:
        ValueError: the sizes differ.
    """
    flat = np.frombuffer(data, np.uint8)
    tensors = list(parameters_of(agent).values())
    size = sum(map(_room, tensors))
    if flat.size != size:
        raise ValueError(
            f"the weights have {flat.size} bytes; expected {size}, as of this runner's agent with "
            f"{len(tensors)} arrays: build driver and runners from the same settings"
        )
    at = 0
    with torch.no_grad():
        for x in tensors:
            raw = flat[at : at + x.numel() * x.element_size()]
            own = torch.empty(x.shape, dtype=x.dtype)  # torch warns of read-only memory, and of nothing to be gained
            np.copyto(own.reshape(-1).view(torch.uint8).numpy(), raw)
            x.copy_(own)
            at += _room(x)


def pack_rows(tree: Tree) -> bytes | list[npt.NDArray[Any]]:
    """The leaves of a batch: one string of bytes if they are small, else copies of the arrays."""
    leaves = tree_leaves(tree)
    if sum(x.nbytes for x in leaves) <= INLINE_BYTES:
        return b"".join([x.tobytes() for x in leaves])
    return [np.array(x, order="C") for x in leaves]


def unpack_rows(packed: bytes | Sequence[npt.NDArray[Any]], out: Tree) -> None:
    """Copies what `pack_rows` returned into the leaves of `out`, such as columns of a larger batch."""
    leaves, at = tree_leaves(out), 0
    if not isinstance(packed, bytes):
        for x, y in zip(leaves, packed, strict=True):
            np.copyto(x, y)
        return
    for x in leaves:
        np.copyto(x, np.frombuffer(packed, x.dtype, x.size, at).reshape(x.shape))
        at += x.nbytes


def _room(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT
