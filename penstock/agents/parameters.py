"""An agent's parameters: the device they are on, their names, and how processes share them."""

from __future__ import annotations

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
