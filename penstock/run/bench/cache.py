"""`sampler="auto"`: the fastest sampler on this machine, measured once and cached."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.core import VERSION
from penstock.core.config import to_plain
from penstock.core.errors import ConfigError
from penstock.core.files import write_atomic
from penstock.core.machine import allowed_cpus, cpu_quota
from penstock.core.spec import EnvSpec
from penstock.learn.policy_set import AnyPolicy, PolicySet
from penstock.processes.limits import why_no_children
from penstock.run.bench.search import (
    SECONDS,
    BenchmarkResult,
    Synchronous,
    base_sampler,
    bench,
    describe,
    settings_of,
    with_settings,
)
from penstock.run.experiment import Experiment
from penstock.samplers.serial import SerialSampler

if TYPE_CHECKING:  # it asks for the fastest sampler
    from penstock.run.plan import Plan

_SETTINGS = {"name", "workers", "groups"}


def auto_sampler(plan: Plan) -> Synchronous:
    """The settings of the fastest sampler for a plan here: from the cache, or measured and cached.

    T, B and all else that concerns the batches are those of the plan's sampler. Only samplers that act where the
    agent learns are tried, so the choice changes nothing but speed. Where no worker processes can be, it is serial.
    """
    exp, base = plan.exp, base_sampler(plan.exp)
    if why := why_no_children():
        _say(exp, f"sampler: serial; {why}")
        return base
    key = _key(exp, base, _network(plan.make_policy()))
    found = None if key is None else _read(cache_path(key), key)
    if key is not None and found is not None:
        sampler, where = with_settings(base, found["sampler"]), cache_path(key)
        _say(exp, f"sampler: {describe(sampler)}, as measured {found['measured']} ({where})")
        return sampler
    _say(exp, f"sampler: measuring which is fastest here, {SECONDS:.0f} s each ...")
    verdict = bench(plan, same_device=True)
    kept = "" if key is None else _keep(cache_path(key), key, verdict)
    speeds = "; ".join(f"{describe(row.sampler)}: {row.steps_per_s:,.0f}" for row in verdict.rows if row.steps_per_s)
    chosen = describe(verdict.best.sampler)
    _say(exp, f"sampler: {chosen}, measured in {verdict.seconds:.0f} s{kept}; steps/s of {speeds}")
    return verdict.best.sampler


def cache_path(key: dict[str, Any]) -> Path:
    """The cache file of a key, in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return Path(home) / "penstock" / "samplers" / f"{digest}.json"


def _network(policy: AnyPolicy) -> list[Any]:
    """Class and shapes of the parameters of an agent; of several policies those of each, with its id and seats."""
    if isinstance(policy, PolicySet) and not isinstance(policy.specs, EnvSpec):
        return [[name, own.spec.agents, *_network(own)] for name, own in policy.items()]
    shapes = [[name, list(x.shape)] for name, x in policy.agent.state_dict().items()]
    return [type(policy.agent).__qualname__, shapes]


def _key(exp: Experiment, base: SerialSampler, network: list[Any]) -> dict[str, Any] | None:
    """All that the result depends on; None if the environment is a function without an import path."""
    config = exp.env_config
    key = {
        "cpu": _cpu_model(),
        "cores": len(allowed_cpus()),
        "quota": cpu_quota(),
        "torch": torch.__version__,
        "penstock": VERSION,
        "device": exp.run.device,
        "gpu": torch.cuda.get_device_name(exp.run.device) if exp.run.device.startswith("cuda") else None,
        "threads": exp.run.learner_threads,
        "env": to_plain(config.env),
        "env_kwargs": to_plain(config.kwargs),
        "wrappers": to_plain(config.wrappers),
        "checks": config.checks,
        "drop": to_plain(config.drop),
        "text": config.text,
        "mask": config.mask_key,
        "options": to_plain(config.options),
        "network": network,
        "T": base.T,
        "B": base.B,
        "reset": base.reset,
    }
    return None if '"unstorable"' in json.dumps(key) else key


def _read(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The cached result, if the file holds a sound one for this very key."""
    try:
        found = json.loads(path.read_text())
        good = found["key"] == key and set(found["sampler"]) <= _SETTINGS and "measured" in found
        with_settings(replace(base_sampler(None), T=key["T"], B=key["B"]), found["sampler"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError):
        return None
    return found if good else None


def _keep(path: Path, key: dict[str, Any], verdict: BenchmarkResult) -> str:
    """Caches the result; returns a phrase that names the file."""
    answer = {
        "key": key,
        "sampler": settings_of(verdict.best.sampler),
        "measured": time.strftime("%Y-%m-%d"),
        "steps_per_s": {describe(row.sampler): round(row.steps_per_s) for row in verdict.rows if row.steps_per_s},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(answer, indent=1) + "\n").encode())
    except OSError as error:
        return f" (not kept: {path}: {error.strerror or error})"
    return f" and kept in {path}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _say(exp: Experiment, text: str) -> None:
    if exp.run.progress != "off":
        print(text, flush=True)
