"""Presets: settings known to work, in a TOML file for each algorithm with a table for each environment."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.algos import find_algo
from penstock.core.config import override
from penstock.core.errors import ConfigError, nearest
from penstock.run.experiment import Experiment
from penstock.samplers import find_sampler, sized

_FOLDER = Path(__file__).parent.parent / "presets"
_NOTES = ("why",)


@dataclass(frozen=True)
class Preset:
    """Changes to an experiment's defaults, with their source."""

    name: str
    """`ALGO/TABLE`, e.g. `ppo/CartPole-v1`."""
    changes: Mapping[str, Any]
    """Values by dotted path, for `override`; `sampler.name` names the sampler if it is not the serial one."""
    why: str
    path: Path


def find_preset(algo: str, env: str) -> Preset | None:
    """The preset of an algorithm for an environment id: its own table, else the first matching pattern, else None."""
    tables = _tables(algo)
    name = env if env in tables else next((t for t in tables if fnmatch.fnmatchcase(env, t)), None)
    return None if name is None else named_preset(f"{algo}/{name}")


def named_preset(name: str) -> Preset:
    """The preset `ALGO/TABLE`. Raises ConfigError that names the nearest."""
    algo, _, table = name.partition("/")
    tables = _tables(algo)
    if table not in tables:
        known = [f"{path.stem}/{t}" for path in _FOLDER.glob("*.toml") for t in _tables(path.stem)]
        raise ConfigError(f"unknown preset {name!r}; {nearest(name, known)}")
    entries = dict(tables[table])
    why = " ".join(str(entries.pop(key)) for key in _NOTES if key in entries)
    return Preset(name, _flat(entries), why, _FOLDER / f"{algo}.toml")


def is_full_name(name: str) -> bool:
    """True for `ALGO/TABLE`, even of an unknown algorithm; False for a table of DQN such as `c51/CartPole-v1`."""
    algo, slash, _ = name.partition("/")
    return bool(slash) and (
        bool(_tables(algo)) or not any(name in _tables(path.stem) for path in _FOLDER.glob("*.toml"))
    )


def preset_names(algo: str) -> list[str]:
    """The tables of an algorithm: environment ids and patterns."""
    return list(_tables(algo))


def preset(algo: str, env: str) -> Experiment:
    """The experiment that `penstock train ALGO --env ENV` would run: `ps.train(ps.preset("ppo", "CartPole-v1"))`.

    Change it with `ps.override(exp, {"run.seed": 1})`. Raises ConfigError if there is no preset for this pair.
    """
    found = find_preset(algo, env)
    if found is None:
        raise ConfigError(
            f"no preset for {algo!r} on {env!r}; {nearest(env, _tables(algo)) if _tables(algo) else _known()}"
        )
    return with_preset(algo, env, found)


def with_preset(algo: str, env: str, found: Preset | None) -> Experiment:
    """An experiment of an algorithm's defaults, changed by a preset if there is one."""
    if found is not None and ":" not in algo and found.name.partition("/")[0] != algo:
        own = ", ".join(preset_names(algo)) or "none"
        raise ConfigError(
            f"preset {found.name} is not one of {algo}, which has {own}; name another, or none for the defaults"
        )
    settings = find_algo(algo)()
    changes = dict(found.changes) if found else {}
    sampler = sized(find_sampler(changes.pop("sampler.name", "serial"))(), settings.batch)
    try:
        return override(Experiment(env=env, algo=settings, sampler=sampler), changes)
    except ConfigError as error:
        raise ConfigError(f"preset {found.name if found else None}: {error}") from error


def _known() -> str:
    return f"algorithms with presets: {', '.join(sorted(path.stem for path in _FOLDER.glob('*.toml')))}"


def _tables(algo: str) -> dict[str, dict[str, Any]]:
    path = _FOLDER / f"{algo}.toml"
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in entries.items():
        whole = f"{prefix}{key}"
        if isinstance(value, Mapping) and whole not in ("env_kwargs", "run.stop"):
            out |= _flat(value, f"{whole}.")
        else:
            out[whole] = _tuples(value)
    return out


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
