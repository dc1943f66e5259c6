"""Parameters and fragments as bytes that travel in one message each, however many arrays they are made of."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Sequence
from typing import Any, cast

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from penstock.agents.agent import Agent
from penstock.agents.parameters import tensors_of
from penstock.core.errors import ConfigError
from penstock.core.tree import Tree, tree_leaves

INLINE_BYTES = 256 << 10
"""Fragments up to this size travel as one string of bytes; of larger ones each array is copied once on its way."""
Bytes = npt.NDArray[np.uint8]


def together(agents: Sequence[Agent]) -> Any:
    """Agents as one module that travels: the only one itself, or a list of those of all policies."""
    return agents[0] if len(agents) == 1 else nn.ModuleList(agents)


def pack_parameters(agent: Agent) -> list[Bytes]:
    """The bytes of each parameter and buffer, [n] uint8, in the order of `tensors_of`, for `Backend.put`.

    They are views of the agent's memory; copies of what is not contiguous or not on the CPU.
    """
    return [_raw(x.detach().cpu()) for x in tensors_of(agent)]


def unpack_parameters(data: Any, agent: Agent) -> None:
    """Copies what `pack_parameters` returned into an agent of the same parameters.

    Args:
        data: as a method receives it from `Backend.put`: the bytes of all arrays one after the other, or a list of
            [n] uint8.

    Raises:
        ValueError: the sizes differ.
    """
    tensors = [x.detach() for x in tensors_of(agent)]
    sizes = [x.nbytes for x in tensors]
    given = [len(x) for x in data] if isinstance(data, list) else [len(data)]
    if sum(given) != sum(sizes) or (isinstance(data, list) and given != sizes):
        raise ValueError(
            f"the weights have {sum(given)} bytes; expected {sum(sizes)}, as of this runner's agent with "
            f"{len(tensors)} arrays: build driver and runners from the same settings"
        )
    for x, part in zip(tensors, data if isinstance(data, list) else _cut(data, sizes), strict=True):
        there = x.device.type == "cpu" and x.is_contiguous()
        own = x if there else torch.empty(x.shape, dtype=x.dtype)
        _raw(own)[...] = part
        if not there:
            x.copy_(own)


def pack_agent(agent: Agent) -> Bytes:
    """[n] uint8: a copy of an agent on the CPU, pickled; `cloudpickle.loads` brings it back.

    Raises:
        ConfigError: it cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _AgentPickler(file).dump(copy.deepcopy(agent).cpu())
    except Exception as error:
        raise ConfigError(
            f"the agent {type(agent).__name__} cannot be sent to a runner ({type(error).__name__}: {error}); make "
            "what it holds open, such as a lock or a file, where it is first used, and leave out torch.jit.script"
        ) from error
    return np.frombuffer(file.getvalue(), np.uint8)


class _AgentPickler(cloudpickle.Pickler):
    """Pickles modules with parametrisations too, such as `spectral_norm`'s, which torch itself refuses."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return _parametrized, (type(obj).__bases__[0], list(cast(Any, obj).parametrizations)), obj.__dict__
        return super().reducer_override(obj)


def _parametrized(kind: type[nn.Module], names: list[str]) -> nn.Module:
    """A module of this class with parametrisations of these names, whose state is still to be set."""
    module: nn.Module = object.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, nn.Identity())
    return module


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


def _raw(x: Tensor) -> Bytes:
    """[n] uint8: the bytes of a tensor of any dtype, also those unknown to numpy; a view of it if it is contiguous."""
    return x.contiguous().view(-1).view(torch.uint8).numpy()


def _cut(data: Any, sizes: Sequence[int]) -> Iterator[Bytes]:
    """Views of so many bytes each, one after the other."""
    at = 0
    for size in sizes:
        yield np.frombuffer(data, np.uint8, size, at)
        at += size
