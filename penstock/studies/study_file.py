"""Reading study.json: the settings in it, and whether it is the study that a command names."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.core.config import to_plain as settings_to_plain
from penstock.core.errors import CheckpointError, ConfigError, PenstockError
from penstock.run.experiment import Experiment
from penstock.run.files import stored_experiment as files
from penstock.run.files.modules import modules_named
from penstock.run.files.stored_experiment import CONFIG, read_json, require_plain_run
from penstock.run.files.trust import is_trusted
from penstock.studies.proposals import optuna_version
from penstock.studies.search import SearchSettings
from penstock.studies.space import as_tuples, grid_names
from penstock.studies.trial import LOGS

STATE, SETTINGS, BASE, INIT = "study.json", "settings", "base", "init"
ADVICE = "put a copy of it back, or begin anew with another --dir"
"""For a study.json that is damaged."""
FORMAT = 1


def read_state(folder: Path) -> dict[str, Any]:
    """The content of study.json. Raises CheckpointError if there is none, or it is of another format."""
    file = folder / STATE
    if not os.path.isfile(file):
        before = next((name for name in ("search.json", "launch.json") if os.path.isfile(folder / name)), None)
        cure = (
            f"its {before} is of an earlier penstock, whose runs go on one by one by penstock resume"
            if before
            else (f"begin with penstock tune (or launch) ALGO --env ID --dir {folder} ...")
        )
        raise CheckpointError(f"{folder} holds no {STATE}; {cure}")
    require_plain_run(folder, (STATE, LOGS, SETTINGS, INIT))
    plain = read_json(file)
    if plain.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {plain.get('format')}; this penstock reads {FORMAT}")
    return plain


def settings_of(plain: Mapping[str, Any]) -> SearchSettings:
    """The settings in the content of study.json."""
    given: dict[str, Any] = dict(plain["settings"])
    given["space"] = {path: as_tuples(form) for path, form in given["space"].items()}
    return SearchSettings(**given)


def digest(settings: SearchSettings) -> str:
    """sha256 of all that decides which settings a trial may have."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()


def warn_of_another_optuna(folder: Path, plain: Mapping[str, Any]) -> None:
    """Warns of a search that another version of Optuna has proposed settings for."""
    before, now = plain.get("optuna"), optuna_version()
    if before != now:
        warnings.warn(
            f"{folder / STATE} is of Optuna {before}, and this is {now}, which may propose other settings than that "
            f"would have; for the same ones: pip install optuna=={before}",
            stacklevel=2,
        )


def names_of(settings: SearchSettings) -> list[str]:
    """The folders of settings that a study begins with: the base of a search, or each run of a sweep."""
    return list(grid_names(settings.space)) if settings.sweep else [BASE]


def stored_modules(folder: Path, trust: bool = False) -> set[str]:
    """The modules that a study and its experiments name, as far as they can be read and are trusted."""
    try:
        settings = settings_of(read_state(folder))
        known = trust or is_trusted(folder / STATE, digest(settings))
    except (PenstockError, LookupError, TypeError, ValueError, AttributeError):
        return set()  # the command that opens it says why
    named = [files.stored_modules(folder / SETTINGS / name, trust) for name in names_of(settings)]
    return set[str]().union(*named, modules_named(settings.suggest if known else ""))


def require_same(
    folder: Path, plain: Mapping[str, Any], settings: SearchSettings, experiments: Sequence[Experiment]
) -> None:
    """Raises ConfigError that names the difference between the study of a directory and another one.

    Args:
        experiments: that of a search, or those of a sweep.
    """
    before, now = settings_of(plain), settings
    differ = [name for name in asdict(now) if _plain(getattr(before, name)) != _plain(getattr(now, name))]
    if not any(trial["scores"] for trial in plain["trials"]):
        differ = [name for name in differ if name not in ("metric", "mode")]
    what = [f"{name} was {getattr(before, name)!r} and is {getattr(now, name)!r}" for name in differ]
    begun = any(trial["scores"] or trial["run"]["attempts"] for trial in plain["trials"])
    for name, exp in () if what else zip(names_of(before), experiments):
        config = folder / SETTINGS / name / CONFIG
        if config.exists() or begun:  # else it was killed while it began
            stored, ours = read_json(config)["experiment"], json.loads(json.dumps(settings_to_plain(exp)))
            differences = [found for found in _differences(stored, ours) if found[0] != "run.dir"]
            what += [f"{where} was {a!r} and is {b!r}" for where, a, b in differences]
    if what:
        word = "launch" if before.sweep else "tune"
        raise ConfigError(
            f"{folder} holds another {'sweep' if before.sweep else 'search'}: {what[0]}. Choose another --dir, or go "
            f"on with what is there by `penstock {word} {folder}`"
        )


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _differences(a: Any, b: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """The leaves in which two plain experiments differ, by dotted path."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            found
            for key in dict.fromkeys((*a, *b))
            for found in _differences(a.get(key), b.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [] if a == b else [(where, a, b)]
