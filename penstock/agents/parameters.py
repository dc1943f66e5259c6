"""An agent's parameters: the device they are on, their names, how processes share them, and as bytes that travel."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError

Bytes = npt.NDArray[np.uint8]


def agent_device(agent: Agent) -> torch.device:
    """The device of the agent's parameters; the CPU if it has none."""
    modules: list[Any] = [agent]
    while modules:  # `parameters()` takes ten times as long to find the first
        held = modules.pop().__dict__
        for p in held["_parameters"].values():
            if p is not None:
                return p.device
        modules += [module for module in held["_modules"].values() if module is not None][::-1]
    return torch.device("cpu")


def require_device(name: str, setting: str) -> None:
    """Raises ConfigError, naming the setting, if this machine or this torch lacks the device."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        said = f"{setting}={name!r} is not here: {str(error).splitlines()[0]}; use 'cpu'"
        raise ConfigError(f"{said}; a GPU is 'cuda', by a torch that is built for it (docs/install.md)") from error


def parameters_of(agent: Agent) -> dict[str, Tensor]:
    """Parameters and buffers by name: everything that acting depends on. Live tensors, not copies."""
    return {**dict(agent.named_parameters()), **dict(agent.named_buffers())}


def tensors_of(agent: Agent) -> list[Tensor]:
    """The values of `parameters_of` in their order, without their names, which take longer to find."""
    modules: dict[nn.Module, None] = {}
    waiting: list[nn.Module] = [agent]
    while waiting:
        if (module := waiting.pop()) not in modules:
            modules[module] = None
            waiting += [x for x in reversed(vars(module)["_modules"].values()) if x is not None]
    held = [x for kind in ("_parameters", "_buffers") for module in modules for x in vars(module)[kind].values()]
    return list({id(x): x for x in held if x is not None}.values())  # by identity: a shared one stands there once


def copies_on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, each in memory of its own: safetensors refuses tensors that share any."""
    return {name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()}


def parameters_digest(agent: Agent) -> bytes:
    """32 bytes that are equal where names and bits of all parameters and buffers are."""
    found = hashlib.sha256()
    for name, x in parameters_of(agent).items():
        found.update(f"{name} {x.dtype} {list(x.shape)};".encode())
        found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def copy_parameters(agent: Agent, out: dict[str, Tensor]) -> None:
    """Copies parameters and buffers into CPU tensors of the same names, in the order of `parameters_of`."""
    sources = [x.detach() for x in tensors_of(agent)]
    with torch.no_grad():
        torch._foreach_copy_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            list(out.values()), sources
        )


def live_in(agent: Agent, arrays: dict[str, Any]) -> None:
    """Makes parameters and buffers views of the numpy arrays of their names, such as in shared memory."""
    for name, x in parameters_of(agent).items():
        x.data = torch.from_numpy(arrays[name]).reshape(x.shape)


def misfit(own: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """The first difference between two sets of parameters, and how many more there are."""

    def shape(x: Any) -> list[int] | None:
        return list(x.shape) if isinstance(x, Tensor) else None

    found = [
        f"{key} is {shape(stored[key])} there and {shape(own[key])} here"
        for key in own
        if key in stored and shape(own[key]) != shape(stored[key])
    ]
    found += [f"which has {key}" for key in own if key not in stored]
    found += [f"which has no {key}" for key in stored if key not in own]
    more = f", and {len(found) - 1} more such" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else "in what its modules keep besides"


def pack_parameters(agent: Agent) -> list[Bytes]:
    """The bytes of each parameter and buffer, [n] uint8, in the order of `tensors_of`, for `Backend.put`.

    They are views of the agent's memory, or copies where a tensor is not contiguous or not on the CPU.
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


def _raw(x: Tensor) -> Bytes:
    """[n] uint8: the bytes of a tensor of any dtype, also those unknown to numpy; a view of it if it is contiguous."""
    return x.contiguous().view(-1).view(torch.uint8).numpy()


def _cut(data: Any, sizes: Sequence[int]) -> Iterator[Bytes]:
    """Consecutive views of the given sizes in bytes."""
    at = 0
    for size in sizes:
        yield np.frombuffer(data, np.uint8, size, at)
        at += size
