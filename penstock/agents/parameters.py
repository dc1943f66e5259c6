"""An agent's parameters: the device they are on, their names, and how processes share them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError


def agent_device(agent: Agent) -> torch.device:
    """The device of the agent's parameters; the CPU if it has none."""
    return next((p.device for p in agent.parameters()), torch.device("cpu"))


def require_device(name: str, setting: str) -> None:
    """Raises ConfigError, naming the setting, if this machine or this torch has no such device."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{setting}={name!r} is not here: {str(error).splitlines()[0]}; use 'cpu'") from error


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
