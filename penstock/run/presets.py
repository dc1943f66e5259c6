"""Presets: settings known to work, in a TOML file for each algorithm with a table for each environment."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.algos import make_algo
from penstock.core.config import override
from penstock.core.errors import ConfigError, nearest
from penstock.envs.ids import import_path_of, is_raw
from penstock.run.experiment import Experiment
from penstock.run.files.settings_file import read_toml, require_trust
from penstock.samplers import find_sampler, placed

_FOLDER = Path(__file__).parent.parent / "presets"
_NOTES = ("why",)
_POLICIES = "policies."
"""Prefix of keys that name agents; their values are policy ids. Each policy has the algorithm's settings."""


@dataclass(frozen=True)
class Preset:
    """Changes to an experiment's defaults, with their source."""

    name: str
    """`ALGO/TABLE`, e.g. `ppo/CartPole-v1`."""
    changes: Mapping[str, Any]
    """Values by dotted path, for `override`; `sampler.name` names the sampler if it is not the serial one, and
    `sampler.inner.name` the one inside it."""
    why: str
    path: Path

    def misfit(self, env: str, kwargs: Mapping[str, Any], wrappers: Sequence[Any] = ()) -> str:
        """The reason why its network does not suit the observations; "" if none is known."""
        if self.changes.get("algo.net.cnn") is None:
            return ""
        if is_raw(env, kwargs):
            return f"its network is for preprocessed frames, which raw=true leaves out for {env}"
        return "its network is for images, and wrappers may show something else" if wrappers else ""

    def require_fit(self, env: str, kwargs: Mapping[str, Any]) -> None:
        """Raises ConfigError for a preset that was asked for by name and cannot fit; wrappers are the user's choice."""
        if reason := self.misfit(env, kwargs):
            raise ConfigError(f"preset {self.name}: {reason}; leave one of the two out")


def find_preset(
    algo: str, env: str, kwargs: Mapping[str, Any] | None = None, wrappers: Sequence[Any] = ()
) -> Preset | None:
    """The preset of an algorithm for an environment id: its own table, else the first matching pattern, else None.

    None too if its network does not suit what these keyword arguments or wrappers make of the environment.
    """
    preset_of_id = _preset_of_id(algo, env)
    return None if preset_of_id is None or preset_of_id.misfit(env, kwargs or {}, wrappers) else preset_of_id


def why_no_preset(algo: str, env: str, kwargs: Mapping[str, Any], wrappers: Sequence[Any] = ()) -> str:
    """A line on why `find_preset` found nothing."""
    preset_of_id = _preset_of_id(algo, env)
    if preset_of_id is None:
        return f"no preset for {algo} on {env}: default settings"
    return f"preset {preset_of_id.name} left out, since {preset_of_id.misfit(env, kwargs, wrappers)}: default settings"


def _preset_of_id(algo: str, env: str) -> Preset | None:
    tables = _tables(algo)
    name = _matching(tables, env)
    return None if name is None else named_preset(f"{algo}/{name}")


def named_preset(name: str) -> Preset:
    """The preset `ALGO/TABLE`. Raises ConfigError that names the nearest."""
    algo, _, table = name.partition("/")
    tables = _tables(algo)
    if table not in tables:
        known = [f"{path.stem}/{t}" for path in _FOLDER.glob("*.toml") for t in _tables(path.stem)]
        raise ConfigError(f"unknown preset {name!r}; {nearest(name, known)}")
    return _preset(name, tables[table], _FOLDER / f"{algo}.toml")


def preset_of_file(
    path: str | Path, algo: str, env: str, name: str | None = None, trust: bool = False
) -> Preset | None:
    """The preset of an algorithm for an environment in a file in the format of the package's presets.

    Args:
        name: of a table; None for the environment's own table, else the first pattern that matches, else None.
        trust: allow importing and calling code that it names; not needed for a file written by this user's search.

    Raises:
        ConfigError: no such file or table, it is not TOML, or it names code and is not trusted.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise ConfigError(f"preset file {path}: there is no such file")
    tables, digest = read_toml(path)
    table = name if name is not None else _matching(tables, env)
    if table is None:
        return None
    if not isinstance(tables.get(table), dict):
        raise ConfigError(f"preset file {path} has no table {table!r}; {nearest(table, tables)}")
    of_file = _preset(f"{algo}/{table}", tables[table], path)
    require_trust(path, digest, of_file.changes, trust)
    return of_file


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
    known_preset = find_preset(algo, env)
    if known_preset is None:
        raise ConfigError(
            f"no preset for {algo!r} on {env!r}; {nearest(env, _tables(algo)) if _tables(algo) else _known()}"
        )
    return with_preset(algo, env, known_preset)


def with_preset(algo: str, env: str, changed_by: Preset | None) -> Experiment:
    """An experiment of an algorithm's defaults, changed by a preset if there is one."""
    if changed_by is not None and ":" not in algo and changed_by.name.partition("/")[0] != algo:
        names = ", ".join(preset_names(algo)) or "none"
        raise ConfigError(
            f"preset {changed_by.name} is not one of {algo}, which has {names}; name another, or none for the defaults"
        )
    settings = make_algo(algo)
    changes = dict(changed_by.changes) if changed_by else {}
    players = {key.removeprefix(_POLICIES): changes.pop(key) for key in [*changes] if key.startswith(_POLICIES)}
    sampler = find_sampler("serial")().sized(settings.batch)
    try:
        sampler, changes = placed(sampler, changes)
        exp = override(Experiment(env=env, algo=settings, sampler=sampler), changes)
        if not players:
            return exp
        from penstock.learn.policies import Policies  # it loads torch

        return replace(exp, algo=Policies(dict.fromkeys(players.values(), exp.algo), players))
    except ConfigError as error:
        raise ConfigError(f"preset {changed_by.name if changed_by else None}: {error}") from error


def _known() -> str:
    return f"algorithms with presets: {', '.join(sorted(path.stem for path in _FOLDER.glob('*.toml')))}"


def _tables(algo: str) -> dict[str, dict[str, Any]]:
    path = _FOLDER / f"{algo}.toml"
    return read_toml(path)[0] if os.path.isfile(path) else {}


def _matching(tables: Mapping[str, Any], env: str) -> str | None:
    """The table of an environment's id, or of the import path of its entry point."""
    for name in dict.fromkeys((env, import_path_of(env))):
        if name in tables:
            return name
        if found := next((t for t in tables if fnmatch.fnmatchcase(name, t)), None):
            return found
    return None


def _preset(name: str, table: Mapping[str, Any], path: Path) -> Preset:
    entries = dict(table)
    why = " ".join(str(entries.pop(key)) for key in _NOTES if key in entries)
    return Preset(name, flat_settings(entries), why, path)


def flat_settings(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as values by dotted path, for `override`."""
    out: dict[str, Any] = {}
    for key, value in entries.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in ("env_kwargs", "env_options", "eval_env_kwargs", "run.stop"):
            out |= flat_settings(value, f"{path}.")
        else:
            out[path] = _tuples(value)
    return out


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
