"""search.json as it is read: whose settings it holds, and whether it is the search that a command asks for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.core.config import to_plain as settings_to_plain
from penstock.core.errors import CheckpointError, ConfigError, PenstockError
from penstock.run.experiment import Experiment
from penstock.run.files import stored as files
from penstock.run.files.modules import modules_named
from penstock.run.files.stored import CONFIG, read_json, require_plain_run
from penstock.run.files.trust import is_trusted
from penstock.run.launch.sweep import LOGS
from penstock.run.search.search import SearchSettings
from penstock.run.search.space import as_tuples

STATE, SETTINGS, BASE, INIT = "search.json", "settings", "base", "init"
ADVICE = "put a copy of it back, or begin anew with another --dir"
"""For a search.json that is damaged."""
FORMAT = 1


def read_state(folder: Path) -> dict[str, Any]:
    """The content of search.json. Raises CheckpointError if there is none, or it is of another format."""
    file = folder / STATE
    if not os.path.isfile(file):
        raise CheckpointError(f"{folder} holds no {STATE}; begin with penstock tune ALGO --env ID --dir {folder} ...")
    require_plain_run(folder, (STATE, LOGS, SETTINGS, INIT))
    plain = read_json(file)
    if plain.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {plain.get('format')}; this penstock reads {FORMAT}")
    return plain


def settings_of(plain: Mapping[str, Any]) -> SearchSettings:
    """The settings in the content of search.json."""
    given: dict[str, Any] = dict(plain["settings"])
    given["space"] = {path: as_tuples(form) for path, form in given["space"].items()}
    return SearchSettings(**given)


def digest(settings: SearchSettings) -> str:
    """sha256 of all that decides which settings a trial may have."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()


def stored_modules(folder: Path, trust: bool = False) -> set[str]:
    """The modules that a search and its experiment name, as far as they can be read and are trusted."""
    try:
        settings = settings_of(read_state(folder))
        known = trust or is_trusted(folder / STATE, digest(settings))
    except (PenstockError, LookupError, TypeError, ValueError, AttributeError):
        return set()  # the command that opens it says why
    return files.stored_modules(folder / SETTINGS / BASE, trust) | modules_named(settings.suggest if known else "")


def require_same(folder: Path, plain: Mapping[str, Any], settings: SearchSettings, exp: Experiment) -> None:
    """Raises ConfigError that names the difference between the search of a directory and another one."""
    before, now = settings_of(plain), settings
    differ = [name for name in asdict(now) if _plain(getattr(before, name)) != _plain(getattr(now, name))]
    if not any(trial["scores"] for trial in plain["trials"]):
        differ = [name for name in differ if name not in ("metric", "mode")]
    what = [f"{name} was {getattr(before, name)!r} and is {getattr(now, name)!r}" for name in differ]
    base = folder / SETTINGS / BASE
    if (base / CONFIG).exists() or plain["trials"]:  # else it was killed while it began
        stored = read_json(base / CONFIG)["experiment"]
        ours = json.loads(json.dumps(settings_to_plain(exp)))
        what += [f"{where} was {a!r} and is {b!r}" for where, a, b in _differences(stored, ours)]
    if what:
        raise ConfigError(
            f"{folder} holds another search: {what[0]}. Choose another --dir, or go on with what is there by "
            f"`penstock tune {folder}`"
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
