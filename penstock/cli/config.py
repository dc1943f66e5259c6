"""`--config FILE`: the experiment of a TOML file, or of a run that is to be made again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.core.config import override
from penstock.core.errors import ConfigError, nearest
from penstock.run.experiment import Experiment
from penstock.run.files.modules import modules_named, search_here
from penstock.run.files.settings_file import read_toml, require_trust
from penstock.run.presets import flat_settings, with_preset
from penstock.samplers import placed

_ENV = {
    "id": "env",
    "kwargs": "env_kwargs",
    "options": "env_options",
    "wrappers": "wrappers",
    "info_keys": "info_keys",
    "imports": "imports",
    "checks": "env_checks",
}
"""Keys of the table `env`, and the settings that they are."""
_TABLES = ("env", "algo", "sampler", "run", "eval_env", "eval_env_kwargs")


def experiment_from(
    path: str | Path, algo: str | None = None, env: str | None = None, trust: bool = False
) -> Experiment:
    """The experiment of a settings file.

    A TOML file has the tables env (or just an id), algo and sampler (`name` says which, `inner.name` the one inside it)
    and run; settings not named have their defaults, and no preset applies. The config.json of a run (or its directory)
    is read as `resume` reads it, and begins a new directory. Modules that a trusted file names are also searched in the
    current folder.

    Args:
        algo, env: of the command line; the environment wins, another algorithm than the file's is refused.
        trust: code that the file names may be imported and called.

    Raises:
        ConfigError: no such file, a setting that is unknown or of the wrong type, or a TOML file that names code and is
            not trusted. CheckpointError: a damaged run, or one that is not trusted.
    """
    from penstock.run.files.stored_experiment import CONFIG, Supplied, read_config, stored_modules  # it loads torch

    path = Path(path)
    if os.path.isdir(path) or path.name == CONFIG:
        run_dir = path if os.path.isdir(path) else path.parent
        search_here(stored_modules(run_dir, trust))
        exp = read_config(run_dir, trust).to_resume(Supplied(env))
        _refuse_another(path, algo, exp.algo_name)
        return replace(exp, run=replace(exp.run, dir=None))
    if path.suffix != ".toml":
        hint = "; `penstock convert` makes one of rsl_rl's YAML" if path.suffix in (".yaml", ".yml") else ""
        raise ConfigError(f"--config {path}; expected a file in .toml, a run directory, or the {CONFIG} in one{hint}")
    if not os.path.isfile(path):
        raise ConfigError(f"--config {path}: there is no such file")
    tables, digest = read_toml(path)
    for key in tables:
        if key not in _TABLES:
            raise ConfigError(f"{path} has {key!r}, which is no table of an experiment; {nearest(key, _TABLES)}")
    where = _environment(path, tables.pop("env", {}))
    changes = flat_settings(tables)
    settings = {**where, **changes}
    require_trust(path, digest, settings, trust)
    search_here(modules_named(settings))
    name = changes.pop("algo.name", algo)
    if name is None:
        raise ConfigError(f'{path} names no algorithm; add algo = {{name = "ppo"}}, or say it: penstock train ppo ...')
    if not isinstance(name, str):
        raise ConfigError(f'{path}: algo.name={name!r}; expected the name of an algorithm, e.g. "ppo"')
    _refuse_another(path, algo, name)
    exp = with_preset(name, env or where.pop("env", ""), None)
    where.pop("env", None)
    try:
        sampler, changes = placed(exp.sampler_settings, changes)
        return override(replace(exp, sampler=sampler), {**where, **changes})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _environment(path: Path, table: Any) -> dict[str, Any]:
    """The settings of the table `env`, by their names in an Experiment."""
    if isinstance(table, str):
        return {"env": table}
    if not isinstance(table, Mapping):
        raise ConfigError(f'{path}: env={table!r}; expected an id, or a table: env = {{id = "CartPole-v1"}}')
    for key in table:
        if key not in _ENV:
            raise ConfigError(f"{path}: the table env has {key!r}; {nearest(str(key), _ENV)}")
    return {_ENV[key]: value for key, value in table.items()}


def _refuse_another(path: Path, algo: str | None, theirs: str) -> None:
    if algo is not None and algo != theirs:
        raise ConfigError(f"{path} is of {theirs}, and {algo} was asked for; leave one of them out")
