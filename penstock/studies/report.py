"""The result of a study: its trials, the best settings as a preset, pictures, and how they were confirmed."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.algos import ALGOS
from penstock.core.config import import_path, to_plain
from penstock.core.errors import CheckpointError
from penstock.core.files import write_atomic
from penstock.core.machine import counted
from penstock.run.experiment import Experiment
from penstock.run.files.inits import Given, words_of
from penstock.run.files.trust import remember
from penstock.run.plots.bands import bootstrap_band, interquartile_mean
from penstock.run.presets import with_preset
from penstock.samplers import find_sampler, placed
from penstock.studies.toml import toml_table

PRESET = "best.toml"
_NOTHING = object()
_OF_THE_RUN = ("steps", "eval_max_steps")
"""Settings of the run that a preset carries."""
_OF_THE_ENV = {
    "kwargs": "env_kwargs", "wrappers": "wrappers", "info_keys": "info_keys", "imports": "imports",
    "checks": "env_checks", "drop": "env_drop", "text": "env_text", "mask_key": "env_mask",
    "state": "env_state", "options": "env_options",
}  # fmt: skip
"""Settings of an EnvConfig, with their names in an experiment."""


@dataclass(frozen=True)
class FoundTrial:
    """A trial as it ended."""

    number: int
    values: Mapping[str, Any]
    """Settings by dotted path."""
    state: str
    """finished, pruned or failed; paused or waiting in a study that was stopped."""
    score: float | None
    """The newest score; `scores` has one for each milestone that it reached."""
    scores: Mapping[int, float | None]
    steps: int
    """Environment steps trained."""
    run_dir: Path
    reason: str
    """Why it failed."""


@dataclass(frozen=True, repr=False)
class StudyResult:
    """The result of a sweep or a search."""

    trials: tuple[FoundTrial, ...]
    best: FoundTrial | None
    """The best of the trials that came farthest; None where none has a score, and in a sweep over environments."""
    experiment: Experiment | None
    """The experiment with the best settings, for `ps.train`."""
    metric: str
    folder: Path
    preset: Path | None
    """best.toml, for `penstock train ALGO --env ID --preset-file`; of an algorithm that no word names, as ps.Policies,
    a config.json for `penstock train --config`; None without a best trial."""
    pictures: tuple[Path, ...]
    """Pictures of a search; `penstock plot` draws the curves of a sweep."""
    confirmed: Mapping[int, float | None]
    """The best settings' scores by seed, of the runs after the search."""
    stopped_by: str
    """"trials", or the name of the signal that stopped it before its end."""

    def __repr__(self) -> str:
        counts = [(sum(t.state == s for t in self.trials), s) for s in ("finished", "pruned", "failed")]
        parts = [counted(len(self.trials), "trial") + ": " + ", ".join(f"{n} {state}" for n, state in counts if n)]
        if self.best is not None:
            values = ", ".join(f"{path}={setting(value)}" for path, value in self.best.values.items())
            parts.append(f"best {number(self.best.score)} by {values}")
        if self.confirmed:
            parts.append(confirmed(list(self.confirmed.values())))
        return f"StudyResult({'; '.join(parts)}; {self.folder})"


def write_preset(folder: Path, exp: Experiment, why: str, init: Given = "") -> Path:
    """Writes settings as best.toml: `penstock train ALGO --env ID --preset-file best.toml` trains that experiment.

    The file is trusted. What TOML has no form for, as a function among the environment's arguments, is named in a
    comment.

    Args:
        init: the run, or runs by policy, whose parameters all trials started from.

    Raises CheckpointError if the disk refuses.
    """
    name, (entries, lost) = env_word(exp), preset_of(exp)
    lines = [
        f"# {train_line(exp, folder / PRESET, init)}",
        *(f"# Not here, since TOML has no form for it: {what}" for what in lost),
        "",
        *toml_table(name, {"why": why, **entries}),
    ]
    path = folder / PRESET
    data = ("\n".join(lines) + "\n").encode()
    try:
        write_atomic(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}; free some space") from error
    remember(path, hashlib.sha256(data).hexdigest())
    return path


def train_line(exp: Experiment, preset: Path, init: Given = "") -> str:
    """The command that trains an experiment by its preset, or by its config.json."""
    named = [algo_word(exp), "--env", env_word(exp), "--preset-file"] if preset.suffix == ".toml" else ["--config"]
    line = ["penstock", "train", *named, str(preset)]
    return shlex.join([*line, *(x for word in words_of(init) for x in ("--init", word))])


def env_word(exp: Experiment) -> str:
    """The environment on the command line: its id, or the import path of a callable."""
    env = exp.env_config.env
    return env if isinstance(env, str) else import_path(env) or exp.env_config.name


def preset_of(exp: Experiment) -> tuple[dict[str, Any], list[str]]:
    """The settings of an experiment that are other than the defaults of its algorithm, as tables of a preset.

    Also the paths of those that TOML cannot hold.
    """
    plain = with_preset(algo_word(exp), "", None)
    sampler = exp.sampler_settings
    entries: dict[str, Any] = {"algo": _changed(exp.algo, plain.algo)}
    entries["sampler"] = _sampler(sampler, plain.sampler)
    entries["run"] = {
        key: getattr(exp.run, key) for key in _OF_THE_RUN if getattr(exp.run, key) != getattr(plain.run, key)
    }
    config, usual = exp.env_config, plain.env_config
    entries |= {
        key: getattr(config, name) for name, key in _OF_THE_ENV.items() if getattr(config, name) != getattr(usual, name)
    }
    entries |= _of_evaluations(exp)
    lost = list[str]()
    for key in (*_OF_THE_ENV.values(), "eval_env", "eval_env_kwargs"):
        if key in entries:
            entries[key] = _of_toml(entries[key], key, lost)
    return {key: value for key, value in entries.items() if value != {} and value is not _NOTHING}, lost


def _of_evaluations(exp: Experiment) -> dict[str, Any]:
    """The environment of evaluations, where it is one of its own."""
    if exp.eval_env is None:
        return {"eval_env_kwargs": exp.eval_env_kwargs} if exp.eval_env_kwargs else {}
    eval_env = exp.eval_env_config
    entries: dict[str, Any] = {"eval_env": eval_env.env, "eval_env_kwargs": eval_env.kwargs}
    if replace(eval_env, env="", kwargs={}) != replace(exp.env_config, env="", kwargs={}):
        entries["eval_env"] = eval_env  # with wrappers and more of its own, which presets have no words for
    return entries


def _of_toml(value: Any, path: str, lost: list[str]) -> Any:
    """A value as TOML holds it, without the parts of which it cannot; their paths are added to `lost`."""
    if isinstance(value, Mapping):
        parts = {key: _of_toml(item, f"{path}.{key}", lost) for key, item in value.items()}
        return {key: item for key, item in parts.items() if item is not _NOTHING}
    if isinstance(value, (list, tuple)):
        parts = [_of_toml(item, f"{path}[{i}]", lost) for i, item in enumerate(value)]
        return [item for item in parts if item is not _NOTHING]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float, str)):
        return value
    if callable(value) and path.partition("[")[0] in ("wrappers", "eval_env") and (path_of_value := import_path(value)):
        return path_of_value
    lost.append(f"{path} = {value!r}")
    return _NOTHING


def algo_word(exp: Experiment) -> str:
    """The word for the algorithm on the command line: ppo, or module:NAME of a user's own."""
    return exp.algo_name if exp.algo_name in ALGOS else import_path(type(exp.algo)) or exp.algo_name


def has_word(exp: Experiment) -> bool:
    """True if a preset can hold the experiment: the algorithm is made without arguments, and no setting is a partial,
    for which TOML has no form.
    """
    if '"args": ' in json.dumps(to_plain(exp)):
        return False
    try:
        inspect.signature(type(exp.algo).__init__).bind(exp.algo)  # __new__ takes anything
    except (TypeError, ValueError):
        return False
    return True


def number(value: float | None) -> str:
    """A score for people; `-` for none."""
    return (
        "-" if value is None or not math.isfinite(value) else f"{value:,.4g}" if abs(value) < 100 else f"{value:,.1f}"
    )


def setting(value: Any) -> str:
    """A setting for people: four digits of a number."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def confirmed(scores: Sequence[float | None]) -> str:
    """Scores of settings with several seeds in words: interquartile mean, its 95% bootstrap interval, and the range."""
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
    changes: dict[str, Any] = {}
    for f in fields(settings):
        now = getattr(settings, f.name)
        if not hasattr(default, f.name):
            changes[f.name] = _plain(now)
        elif now != (before := getattr(default, f.name)):
            inside = is_dataclass(now) and type(now) is type(before)
            changes[f.name] = _changed(now, before) if inside else _plain(now)
    return changes


def _sampler(sampler: Any, default: Any) -> dict[str, Any]:
    """The settings of a sampler that differ from the defaults of its name, and the name unless it is serial."""
    names = {"name": sampler.name}
    if sampler.inner is not None:
        names["inner.name"] = sampler.inner.name
    base, _ = placed(default, {f"sampler.{key}": name for key, name in names.items()})
    changes = _changed(sampler, base)
    if "inner.name" in names and type(sampler.inner) is not type(find_sampler(names["name"])().inner):
        changes["inner"] = {"name": names["inner.name"], **changes.get("inner", {})}
    return changes if names["name"] == "serial" else {"name": names["name"], **changes}


def _plain(value: Any) -> Any:
    plain = to_plain(value)
    return plain["import"] if isinstance(plain, dict) and "import" in plain else plain
