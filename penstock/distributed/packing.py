"""Parameters and fragments as bytes: one message for each, however many arrays they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import parameters_of
from penstock.core.tree import Tree, tree_leaves

INLINE_BYTES = 256 << 10
"""Fragments up to this size travel as one string of bytes; of larger ones each array is copied once on its way."""
_ALIGNMENT = 8
Bytes = npt.NDArray[np.uint8]


def pack_parameters(agent: Agent, out: Bytes | None = None) -> Bytes:
    """[n] uint8: all parameters and buffers in the order of `parameters_of`, each at a multiple of 8 bytes.

    Args:
        out: what an earlier call returned, which is overwritten: new memory takes longer than the copy.
    """
    arrays = [x.detach().cpu().numpy() for x in parameters_of(agent).values()]
    size = sum(_room(x.nbytes) for x in arrays)
    if out is None or out.size != size:
        out = np.zeros(size, np.uint8)
    at = 0
    for x in arrays:
        out[at : at + x.nbytes] = _raw(x)
        at += _room(x.nbytes)
    return out


def unpack_parameters(data: Any, agent: Agent) -> None:
    """Copies what `pack_parameters` returned, as bytes or an array, into an agent of the same parameters.

    Raises:
        ValueError: the sizes differ.
    """
    flat = np.frombuffer(data, np.uint8)
    tensors = [x.detach() for x in parameters_of(agent).values()]
    size = sum(_room(x.nbytes) for x in tensors)
    if flat.size != size:
        raise ValueError(
            f"the weights have {flat.size} bytes; expected {size}, as of this runner's agent with "
            f"{len(tensors)} arrays: build driver and runners from the same settings"
        )
    at = 0
    for x in tensors:
        there = x.device.type == "cpu" and x.is_contiguous()
        own = x if there else torch.empty(x.shape, dtype=x.dtype)
        _raw(own.numpy())[...] = flat[at : at + x.nbytes]
        if not there:
            x.copy_(own)
        at += _room(x.nbytes)


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


def _raw(x: npt.NDArray[Any]) -> Bytes:
    """[n] uint8: the bytes of an array, a view of it where it is contiguous."""
    return x.reshape(-1).view(np.uint8)


def _room(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
