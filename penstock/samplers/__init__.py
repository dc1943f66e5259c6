"""Samplers: settings that build a live sampler, and the one loop in which agents meet environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

from penstock.core.config import import_object, override, whole
from penstock.core.errors import ConfigError, nearest
from penstock.core.machine import counted
from penstock.core.spec import BatchSpec

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
_EARLY = ("sampler.mode", "sampler.runners", "sampler.min_runners")
"""Settings on which the slots of each runner depend, and one that depends on them."""
_KEPT = ("max_decorrelation_steps", "reset", "discount", "journal_steps", "depth", "weights")
"""Settings that decide what is in a batch, besides T and B; all others are of its place and its speed."""


def find_sampler(name: str) -> Any:
    """The settings class of a sampler, or of `module:NAME`; it is not called.

    Raises:
        ConfigError: an unknown name (the message says the nearest), or something that is no such class.
    """
    if ":" not in name and name not in SAMPLERS:
        raise ConfigError(f"unknown sampler {name!r}; {nearest(name, SAMPLERS)}")
    found = import_object(SAMPLERS.get(name, name))
    if not (isinstance(found, type) and is_dataclass(found) and callable(getattr(found, "build", None))):
        raise ConfigError(f"{name} is {found!r:.200}; expected a frozen dataclass with build(), as ps.SerialSampler")
    return found


def described(sampler: Any) -> str:
    """A sampler in words, as in `cpu with 2 workers` or `runners: 4 on processes, 16 slots each, serial`."""
    path = f"{type(sampler).__module__}:{type(sampler).__qualname__}"
    name = next((known for known, at in SAMPLERS.items() if at == path), type(sampler).__name__)
    if not hasattr(sampler, "inner"):
        return f"{name} with {counted(sampler.workers, 'worker')}" if hasattr(sampler, "workers") else name
    inner, ahead = described(sampler.inner), f", depth {sampler.depth}" if sampler.depth else ""
    if not hasattr(sampler, "runners"):
        return f"{name}: {inner}{ahead}"
    mode = ", ready mode" if sampler.mode == "ready" else ""
    slots = counted(sampler.inner.spec.B, "slot")
    return f"{name}: {sampler.runners} on {sampler.backend}, {slots} each, {inner}{mode}{ahead}"


def samplers_with(setting: str) -> list[str]:
    """The names of samplers that have a setting of this name."""
    return [name for name in SAMPLERS if setting in {f.name for f in fields(find_sampler(name))}]


def sized(sampler: Any, spec: BatchSpec) -> Any:
    """The settings with this T and B, inner sampler included; fewer workers and groups where B demands it.

    Raises:
        ConfigError: B cannot be divided among the runners of a RunnerSampler.
    """
    if hasattr(sampler, "inner"):
        parts = sampler.spec.B // sampler.inner.spec.B
        if spec.B % parts:
            each = -(-spec.B // parts)
            fit = f"a number that divides {spec.B}"
            if parts > spec.B:
                fit = f"at most {spec.B}, since more runners than slots make no sense"
            raise ConfigError(
                f"sampler.runners={parts} for the B={spec.B} of a batch; expected {fit}; or set the slots of "
                f"each runner, e.g. sampler.inner.B={each} (--sampler.inner.B {each}) for {each * parts} in all"
            )
        return replace(sampler, inner=sized(sampler.inner, spec._replace(B=spec.B // parts)))
    changes: dict[str, Any] = {"T": spec.T, "B": spec.B}
    if hasattr(sampler, "groups"):
        changes["groups"] = min(sampler.groups, spec.B)
    if hasattr(sampler, "workers"):
        changes["workers"] = max(min(sampler.workers, spec.B // changes.get("groups", 1)), 1)
    return replace(sampler, **changes)


def placed(sampler: Any, changes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The same slots in the sampler that `changes` name, and the changes that remain for `override`.

    T, B and all that decides the content of a batch stay as they are, however many runners share the slots.

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
        found = _in_place_of(sampler, find_sampler(name)) if isinstance(name, str) else name
    if inner is not None:
        found = replace(found, inner=_inside(found, inner))
    early = {path: rest[path] for path in _EARLY if path in rest and hasattr(found, path.partition(".")[2])}
    if not (early or isinstance(name, str) or inner is not None):
        return found, rest
    spec = sampler.spec
    if hasattr(found, "runners"):  # each is checked with the one before, and not with the number that it replaces
        early.setdefault("sampler.min_runners", found.min_runners)
        found = override({"sampler": replace(found, min_runners=1)}, early)["sampler"]
    if hasattr(found, "runners") and (B := rest.get("sampler.inner.B")) is not None:
        parts = found.spec.B // found.inner.spec.B
        spec = spec._replace(B=parts * (whole(B) if isinstance(B, str) else B))
    return sized(found, spec), rest


def content(sampler: Any) -> dict[str, Any]:
    """The settings that decide what is in a batch: of two samplers with equal ones each can go on for the other."""
    found: dict[str, Any] = {"T": sampler.spec.T, "B": sampler.spec.B, "mode": "rounds", "depth": 0, "weights": "exact"}
    for settings in (getattr(sampler, "inner", sampler), sampler):
        found |= {key: getattr(settings, key) for key in (*_KEPT, "mode") if hasattr(settings, key)}
    if not found["depth"]:  # an AsyncSampler that waits has checkpoints of its own form
        found["asynchronous"] = hasattr(sampler, "inner") and not hasattr(sampler, "runners")
    return found


def _in_place_of(old: Any, cls: Any) -> Any:
    """Settings of this class with what decides the content of a batch as in `old`."""
    if type(old) is cls:
        return old
    new = cls()
    if hasattr(new, "inner"):
        new = replace(new, inner=_in_place_of(getattr(old, "inner", old), type(new.inner)))
    elif hasattr(old, "inner"):
        old = old.inner
    own = {f.name for f in fields(new)}
    return replace(new, **{key: getattr(old, key) for key in _KEPT if key in own and hasattr(old, key)})


def _inside(outer: Any, inner: Any) -> Any:
    """Settings of the inner sampler of this name, with what decides the content of a batch as in the one so far."""
    if not hasattr(outer, "inner"):
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
    return _in_place_of(outer.inner, cls)
