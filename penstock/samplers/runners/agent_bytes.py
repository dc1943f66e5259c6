"""Agents as bytes: copies of them that an owner sends to its runners."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any, cast

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from penstock.agents.agent import Agent
from penstock.agents.parameters import Bytes
from penstock.core.errors import ConfigError
from penstock.processes.serialization import unship


def together(agents: Sequence[Agent]) -> Any:
    """Agents as one module that travels: the only one itself, or a list of those of all policies."""
    return agents[0] if len(agents) == 1 else nn.ModuleList(agents)


def pack_agent(agent: Agent) -> Bytes:
    """[n] uint8: a copy of an agent on the CPU, pickled; `unpack_agent` is the inverse.

    Raises:
        ConfigError: it cannot be pickled.
    """
    file = io.BytesIO()
    file.write(bytes(8))  # no import path travels along, for `unship`
    try:
        _AgentPickler(file).dump(copy.deepcopy(agent).cpu())
    except Exception as error:
        raise ConfigError(
            f"the agent {type(agent).__name__} cannot be sent to a runner ({type(error).__name__}: {error}); make "
            "what it holds open, such as a lock or a file, where it is first used, and leave out torch.jit.script"
        ) from error
    return np.frombuffer(file.getvalue(), np.uint8)


def unpack_agent(data: Any) -> Agent:
    """The agent that `pack_agent` made these bytes of, as a method receives them from `Backend.put`."""
    return unship(b"".join(data) if isinstance(data, list) else data)


class _AgentPickler(cloudpickle.Pickler):
    """Pickles modules with parametrisations too, such as `spectral_norm`'s, which torch itself refuses."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return _parametrized, (type(obj).__bases__[0], list(cast(Any, obj).parametrizations)), obj.__dict__
        return super().reducer_override(obj)


def _parametrized(kind: type[nn.Module], names: list[str]) -> nn.Module:
    """A module of this class with parametrisations of these names, before its state is set."""
    module: nn.Module = object.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, nn.Identity())
    return module
