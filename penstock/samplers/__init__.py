"""Samplers: settings that build a live sampler, and the one loop in which agents meet environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

from penstock.core.config import import_object, override, whole
from penstock.core.errors import ConfigError, nearest
from penstock.core.names.declared import declared

SAMPLERS = {
    "serial": "penstock.samplers.serial:SerialSampler",
    "cpu": "penstock.samplers.cpu:CpuSampler",
    "gpu": "penstock.samplers.gpu:GpuSampler",
    "alternating": "penstock.samplers.gpu:AlternatingSampler",
    "no-overlap-alternating": "penstock.samplers.gpu:NoOverlapAlternatingSampler",
    "async": "penstock.samplers.asynchronous:AsyncSampler",
    "async-serial": "penstock.samplers.asynchronous:AsyncSerialSampler",
    "async-cpu": "penstock.samplers.asynchronous:AsyncCpuSampler",
    "async-gpu": "penstock.samplers.asynchronous:AsyncGpuSampler",
    "async-alternating": "penstock.samplers.asynchronous:AsyncAlternatingSampler",
    "runners": "penstock.samplers.runners.settings:RunnerSampler",
    "offline": "penstock.samplers.offline:OfflineSampler",
}
"""Samplers by the name that the command line knows."""
INNER = ("serial", "cpu", "gpu", "alternating", "no-overlap-alternating")
"""Those that may stand inside another one."""
ACTING = ("penstock.workers.env_worker", "penstock.samplers.actor", "penstock.agents.actor_critic")
"""Modules that workers that act import, once for all of them; none of them starts a thread."""
PLAYING = ("max_decorrelation_steps", "reset", "discount", "journal_steps")
"""`SamplerSettings.kept` of samplers that step environments."""
_EARLY = ("sampler.mode", "sampler.runners", "sampler.min_runners")
"""Settings on which the slots of each runner depend, and one that depends on them."""


def find_sampler(name: str) -> Any:
    """The settings class of a sampler, or of `module:NAME`; it is not called.

    Raises:
        ConfigError: an unknown name (the message says the nearest), or an object that is no settings class.
    """
    if ":" not in name and name not in SAMPLERS:
        raise ConfigError(f"unknown sampler {name!r}; {nearest(name, SAMPLERS)}")
    cls = import_object(SAMPLERS.get(name, name))
    if not (isinstance(cls, type) and is_dataclass(cls) and callable(getattr(cls, "build", None))):
        raise ConfigError(f"{name} is {cls!r:.200}; expected a frozen dataclass with build(), as ps.SerialSampler")
    return cls


def samplers_with(setting: str) -> list[str]:
    """The names of samplers that have a setting of this name."""
    return [name for name, path in SAMPLERS.items() if setting in {f.name for f in fields(declared(path))}]


def placed(sampler: Any, changes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The sampler that `changes` names, with the same slots, and the remaining changes for `override`.

    T, B and all that determines the contents of a batch stay, for any number of runners.

    Args:
        sampler: the settings so far.
        changes: values by path, of an experiment. `sampler` or `sampler.name` names a sampler or is its settings,
            `sampler.inner` or `sampler.inner.name` the one inside it.

    Raises:
        ConfigError: an unknown name, or slots that the runners cannot share.
    """
    rest = dict(changes)
    name, inner = (rest.pop(f"{path}.name", rest.pop(path, None)) for path in ("sampler", "sampler.inner"))
    found = sampler
    if name is not None:
        found = find_sampler(name)().in_place_of(sampler) if isinstance(name, str) else name
    if inner is not None:
        found = replace(found, inner=_inside(found, inner))
    early = {path: rest[path] for path in _EARLY if path in rest and found.runners}
    if not (early or isinstance(name, str) or inner is not None):
        return found, rest
    spec = sampler.spec
    if found.runners:  # each is checked with the one before, and not with the number that it replaces
        early.setdefault("sampler.min_runners", found.min_runners)
        found = override({"sampler": replace(found, min_runners=1)}, early)["sampler"]
        if (B := rest.get("sampler.inner.B")) is not None:
            parts = found.spec.B // found.inner.spec.B
            spec = spec._replace(B=parts * (whole(B) if isinstance(B, str) else B))
    return found.sized(spec), rest


def _inside(outer: Any, inner: Any) -> Any:
    """Settings of the inner sampler of this name, with what decides the content of a batch as in the one so far."""
    if outer.inner is None:
        raise ConfigError(
            f"sampler.inner={inner!r} with {type(outer).__name__}, which has no sampler inside it; those that have "
            f"one: --sampler {', '.join(samplers_with('inner'))}"
        )
    if not isinstance(inner, str):
        return inner
    if ":" not in inner and inner not in INNER:
        raise ConfigError(f"sampler.inner={inner!r}; {nearest(inner, INNER)}")
    cls, of = find_sampler(inner), get_type_hints(type(outer))["inner"]
    if of is not Any and cls is not of:
        raise ConfigError(
            f"sampler.inner={inner!r} with {type(outer).__name__}, which is around a {of.__name__}; for another one "
            "use --sampler async (ps.AsyncSampler)"
        )
    return cls().in_place_of(outer.inner)
