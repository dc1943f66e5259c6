"""Samplers: settings that build a live sampler, and the one loop in which agents meet environments."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from penstock.core.config import import_object
from penstock.core.errors import ConfigError, nearest
from penstock.core.spec import BatchSpec

SAMPLERS = {
    "serial": "penstock.samplers.serial:SerialSampler",
    "cpu": "penstock.samplers.cpu:CpuSampler",
    "gpu": "penstock.samplers.gpu:GpuSampler",
    "alternating": "penstock.samplers.gpu:AlternatingSampler",
    "no-overlap-alternating": "penstock.samplers.gpu:NoOverlapAlternatingSampler",
    "async-serial": "penstock.samplers.asynchronous:AsyncSerialSampler",
    "async-cpu": "penstock.samplers.asynchronous:AsyncCpuSampler",
    "async-gpu": "penstock.samplers.asynchronous:AsyncGpuSampler",
    "async-alternating": "penstock.samplers.asynchronous:AsyncAlternatingSampler",
    "offline": "penstock.samplers.offline:OfflineSampler",
}
"""Samplers by the name that the command line knows."""


def find_sampler(name: str) -> Any:
    """The settings class of a sampler, or of `module:NAME`. Raises ConfigError that names the nearest."""
    if ":" not in name and name not in SAMPLERS:
        raise ConfigError(f"unknown sampler {name!r}; {nearest(name, SAMPLERS)}")
    return import_object(SAMPLERS.get(name, name))


def samplers_with(setting: str) -> list[str]:
    """The names of samplers that have a setting of this name."""
    return [name for name in SAMPLERS if setting in {f.name for f in fields(find_sampler(name))}]


def sized(sampler: Any, spec: BatchSpec) -> Any:
    """The settings with this T and B, inner sampler included; fewer workers and groups where B demands it."""
    if hasattr(sampler, "inner"):
        return replace(sampler, inner=sized(sampler.inner, spec))
    changes: dict[str, Any] = {"T": spec.T, "B": spec.B}
    if hasattr(sampler, "groups"):
        changes["groups"] = min(sampler.groups, spec.B)
    if hasattr(sampler, "workers"):
        changes["workers"] = max(min(sampler.workers, spec.B // changes.get("groups", 1)), 1)
    return replace(sampler, **changes)
