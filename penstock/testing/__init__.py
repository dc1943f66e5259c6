"""Conformance suites for pools, samplers, agents and algorithms of your own, and environments to test them with."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.core.errors import nearest

# As in penstock/__init__.py: nothing is imported before it is asked for, so that the suite for pools loads no torch.
_WHERE = {
    "CrashEnv": "penstock.envs.toy.crashes",
    "EchoAgent": "penstock.testing.samplers",
    "FaultEnv": "penstock.envs.toy.faults",
    "SeedEcho": "penstock.envs.toy.plumbing",
    "check_agent": "penstock.testing.agents",
    "check_algorithm": "penstock.testing.algorithms",
    "check_pool": "penstock.testing.pools",
    "check_resume": "penstock.testing.samplers",
    "check_sampler": "penstock.testing.samplers",
    "echo_config": "penstock.testing.pools",
}

__all__ = [*_WHERE]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from penstock.envs.toy.crashes import CrashEnv as CrashEnv
    from penstock.envs.toy.faults import FaultEnv as FaultEnv
    from penstock.envs.toy.plumbing import SeedEcho as SeedEcho
    from penstock.testing.agents import check_agent as check_agent
    from penstock.testing.algorithms import check_algorithm as check_algorithm
    from penstock.testing.pools import check_pool as check_pool, echo_config as echo_config
    from penstock.testing.samplers import (
        EchoAgent as EchoAgent,
        check_resume as check_resume,
        check_sampler as check_sampler,
    )


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'penstock.testing' has no {name!r}; {nearest(name, _WHERE)}")
