"""The result of a search: its trials, the best settings as a preset, pictures, and the seed study in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.algos import ALGOS
from penstock.core.config import import_path, to_plain
from penstock.core.errors import CheckpointError
from penstock.core.files import write_atomic
from penstock.core.machine import counted
from penstock.run.experiment import Experiment
from penstock.run.plots.bands import bootstrap_band, interquartile_mean
from penstock.run.presets import with_preset
from penstock.run.search.toml import toml_table
from penstock.samplers import SAMPLERS, find_sampler, placed

PRESET = "best.toml"
_OF_THE_RUN = ("steps", "eval_max_steps")
"""Settings of the run that a preset carries."""
_OF_THE_EXPERIMENT = ("env_kwargs", "wrappers", "info_keys", "env_checks", "env_drop", "env_text", "env_state")


@dataclass(frozen=True)
class FoundTrial:
    """A trial as it ended."""

    number: int
    values: Mapping[str, Any]
    """Settings by dotted path."""
    state: str
    """finished, pruned or failed; paused or waiting in a search that was stopped."""
    score: float | None
    """The newest score; `scores` has one for each milestone that it reached."""
    scores: Mapping[int, float | None]
    steps: int
    """Environment steps trained."""
    run_dir: Path
    reason: str
    """Why it failed."""


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The result of a search."""

    trials: tuple[FoundTrial, ...]
    best: FoundTrial | None
    """The best of the trials that came farthest; None where none has a score."""
    experiment: Experiment | None
    """The experiment with the best settings, for `ps.train`."""
    metric: str
    folder: Path
    preset: Path | None
    """best.toml, for `penstock train ALGO --env ID --preset-file`; None without a best trial."""
    pictures: tuple[Path, ...]
    confirmed: Mapping[int, float | None]
    """The best settings' scores by seed, of the study after the search."""
    stopped_by: str
    """"trials", or the name of the signal that stopped it before its end."""

    def __repr__(self) -> str:
        counts = [(sum(t.state == s for t in self.trials), s) for s in ("finished", "pruned", "failed")]
        parts = [counted(len(self.trials), "trial") + ": " + ", ".join(f"{n} {state}" for n, state in counts if n)]
        if self.best is not None:
            values = ", ".join(f"{path}={setting(value)}" for path, value in self.best.values.items())
            parts.append(f"best {number(self.best.score)} by {values}")
        if self.confirmed:
            parts.append(study(list(self.confirmed.values())))
        return f"SearchResult({'; '.join(parts)}; {self.folder})"


def write_preset(folder: Path, exp: Experiment, why: str) -> Path:
    """Writes settings as best.toml: `penstock train ALGO --env ID --preset-file best.toml` trains that experiment.

    Raises CheckpointError if the disk refuses.
    """
    name = exp.env if isinstance(exp.env, str) else exp.env_config.name
    lines = [
        f"# penstock train {algo_word(exp)} --env {name} --preset-file {folder / PRESET}",
        "",
        *toml_table(name, {"why": why, **preset_of(exp)}),
    ]
    path = folder / PRESET
    try:
        write_atomic(path, ("\n".join(lines) + "\n").encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}; free some space") from error
    return path


def preset_of(exp: Experiment) -> dict[str, Any]:
    """The settings of an experiment that are other than the defaults of its algorithm, as tables of a preset."""
    plain = with_preset(algo_word(exp), "", None)
    sampler = exp.sampler_settings
    found: dict[str, Any] = {"algo": _changed(exp.algo, plain.algo)}
    found["sampler"] = _sampler(sampler, plain.sampler)
    found["run"] = {
        key: getattr(exp.run, key) for key in _OF_THE_RUN if getattr(exp.run, key) != getattr(plain.run, key)
    }
    for key in _OF_THE_EXPERIMENT:
        if getattr(exp, key) != getattr(plain, key):
            found[key] = to_plain(getattr(exp, key))
    return {key: value for key, value in found.items() if value != {}}


def algo_word(exp: Experiment) -> str:
    """The word for the algorithm on the command line: ppo, or module:NAME of a user's own."""
    return exp.algo_name if exp.algo_name in ALGOS else import_path(type(exp.algo)) or exp.algo_name


def number(value: float | None) -> str:
    """A score for people; `-` for none."""
    return (
        "-" if value is None or not math.isfinite(value) else f"{value:,.4g}" if abs(value) < 100 else f"{value:,.1f}"
    )


def setting(value: Any) -> str:
    """A setting for people: four digits of a number."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def study(scores: Sequence[float | None]) -> str:
    """The scores of a seed study in words: interquartile mean, its 95% bootstrap interval, and the range."""
    known = np.array([score for score in scores if score is not None and math.isfinite(score)])
    if len(known) < 2:
        return f"confirmed by {counted(len(known), 'seed')}: {number(float(known[0])) if len(known) else '-'}"
    low, high = (number(float(end[0])) for end in bootstrap_band(known[:, None]))
    return (
        f"confirmed by {len(known)} of {counted(len(scores), 'seed')}: {number(float(interquartile_mean(known)))} "
        f"(95% {low} to {high}; from {number(known.min())} to {number(known.max())})"
    )


def _changed(settings: Any, default: Any) -> dict[str, Any]:
    """The settings that differ, those within them by their own differences."""
    found: dict[str, Any] = {}
    for f in fields(settings):
        now = getattr(settings, f.name)
        if not hasattr(default, f.name):
            found[f.name] = _plain(now)
        elif now != (before := getattr(default, f.name)):
            inside = is_dataclass(now) and type(now) is type(before)
            found[f.name] = _changed(now, before) if inside else _plain(now)
    return found


def _sampler(sampler: Any, default: Any) -> dict[str, Any]:
    """The settings of a sampler other than those that its name alone stands for, and its name unless it is serial."""
    names = {"name": _sampler_word(sampler)}
    if hasattr(sampler, "inner"):
        names["inner.name"] = _sampler_word(sampler.inner)
    base, _ = placed(default, {f"sampler.{key}": name for key, name in names.items()})
    found = _changed(sampler, base)
    if "inner.name" in names and type(sampler.inner) is not type(find_sampler(names["name"])().inner):
        found["inner"] = {"name": names["inner.name"], **found.get("inner", {})}
    return found if names["name"] == "serial" else {"name": names["name"], **found}


def _sampler_word(sampler: Any) -> str:
    cls = type(sampler)
    own = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, path in SAMPLERS.items() if path == own), own)


def _plain(value: Any) -> Any:
    plain = to_plain(value)
    return plain["import"] if isinstance(plain, dict) and "import" in plain else plain
