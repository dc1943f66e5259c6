"""Settings as data: frozen dataclasses to and from plain JSON, and changes by dotted path with strict names."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import importlib
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.core.errors import ConfigError, nearest, nearest_words

S = TypeVar("S")
_LARGEST = (1 << 63) - 1
"""The largest whole number that arrays and files hold."""
_FINITE = sys.float_info.max
_MOST_VALUES = 1 << 12
"""Values of one setting, at most."""
_LONGEST = 200
"""Most characters of a value in a message."""


def override(settings: S, changes: Mapping[str, Any]) -> S:
    """A copy with some fields changed: `override(exp, {"algo.lr": 3e-4, "run.seed": 1})`.

    Values are converted to the field's type where that loses nothing (a list for a tuple, an int for a float, text
    for anything it spells).

    Raises:
        ConfigError: an unknown path (the message names the nearest), or a value of the wrong type.
    """
    for path, value in changes.items():
        settings = _override_one(settings, path.split("."), path, value)
    return settings


def known_names(cls: type[S], *args: object, **given: object) -> S:
    """The `__new__` of settings: refuses names that they do not have before the dataclass's `__init__` does.

    Raises:
        ConfigError: names the setting that was meant, where another library calls it so, or the nearest.
    """
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # pyright: ignore[reportArgumentType]
    for name in given:
        if name not in known:
            raise ConfigError(f"{cls.__name__} has no setting {name!r}; {meant(name, known)}")
    return object.__new__(cls)


def meant(name: str, known: Iterable[str]) -> str:
    """A hint at the setting that a wrong name stands for: ours for another library's word, else the nearest known.

    Args:
        name: of a setting, the last part of a dotted path. known: settings that are there.
    """
    known = list(known)
    if name == "init":
        return "to start from another run's networks: ps.train(exp, init=RUN), ps.Run(exp, init=RUN) (--init RUN)"
    path = our_path(name, known) or (f"sampler.{name}" if name in ("T", "B") else "")
    if not path:
        return nearest(name, known)
    parts = path.split(".")
    if path in ("sampler.T", "sampler.B") and "inner" in known:
        return f"it is 'inner.{parts[1]}' here (--sampler.inner.{parts[1]})"
    for i, part in enumerate(parts):
        if part in known:
            return f"it is {'.'.join(parts[i:])!r} here (--{path})"
    if path == "sampler.workers":
        return (
            "it is 'workers' of ps.CpuSampler, ps.GpuSampler or ps.AlternatingSampler (--sampler cpu --sampler.workers)"
        )
    owner = "another algorithm" if "lr" in known and parts[0] == "algo" else _OWNERS.get(parts[0], "ps.Experiment")
    return f"it is {'.'.join(parts[1:]) or path!r} of {owner} here (--{path})"


def our_path(name: str, known: Iterable[str]) -> str:
    """The dotted path of our setting for another library's name, misspelt or not; "" if `known` has a nearer one."""
    known = set(known)
    likely = [name] if name in FOREIGN else nearest_words(name, [*known, *FOREIGN])[:1]
    path = FOREIGN[likely[0]] if likely and likely[0] not in known else ""
    other = "" if path.endswith(f".{name}") else _INSTEAD.get(path, "")  # a name of ours is meant as it stands
    return other if other.rpartition(".")[2] in known else path


def check_fields(settings: Any) -> None:
    """For `__post_init__`: raises ConfigError if a field of a settings dataclass is not of its annotated type.

    A whole number given as 1e4 or "1e4", or any number as text, is stored as the number that it means.
    """
    hints = _hints(type(settings))
    for f in dataclasses.fields(settings):
        given = getattr(settings, f.name)
        meant = _convert(given, hints[f.name], f.name)
        if hints[f.name] in (int, float, bool) and type(meant) is not type(given) and isinstance(given, (str, float)):
            object.__setattr__(settings, f.name, meant)


def to_plain(value: Any) -> Any:
    """Settings as JSON data. Dataclasses carry their class, functions their import path; see `unstorable`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": import_path(type(value)), **plain}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        path = import_path(value)
        return {"import": path} if path else {"unstorable": getattr(value, "__qualname__", repr(value))}
    if isinstance(value, np.generic):
        return value.item()
    return {"unstorable": repr(value)}


def from_plain(plain: Any) -> Any:
    """The inverse of `to_plain`. Raises ConfigError for a class that is gone, a field it lacks, or unstorable data.

    A class whose new field's default differs from what stored settings without the field meant says so in a class
    attribute: `absent = {"field": value}`.
    """
    if isinstance(plain, Mapping):
        if "import" in plain:
            return import_object(plain["import"])
        if "unstorable" in plain:
            raise ConfigError(
                f"{plain['unstorable']} could not be stored with the run (a lambda or local object); pass it again"
            )
        if "class" in plain:
            if plain["class"] is None:
                raise ConfigError(
                    "stored settings are of a class that cannot be imported (local, or of the user's "
                    "script); pass them again, or move the class into a module"
                )
            cls = import_object(plain["class"])
            known = {f.name: f for f in dataclasses.fields(cls)}
            given = {key: from_plain(item) for key, item in plain.items() if key != "class"}
            for key in given:
                if key not in known:
                    raise ConfigError(f"stored settings of {cls.__name__} name {key!r}; {nearest(key, known)}")
            given = {**getattr(cls, "absent", {}), **given}
            hints = _hints(cls)
            return cls(**{key: _convert(value, hints[key], key) for key, value in given.items()})
        return {key: from_plain(item) for key, item in plain.items()}
    return [from_plain(item) for item in plain] if isinstance(plain, list) else plain


def import_path(obj: Any) -> str | None:
    """`module:qualname` if importing it returns this very object, else None."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is obj else None


def import_object(path: str) -> Any:
    """The object at `module:qualname`. Raises ConfigError that says which half is wrong."""
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ConfigError(f"{path!r} is no import path; expected module:name, e.g. my_package.algos:MyPPO")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"cannot import {module!r} of {path!r}: {error}; is its folder on PYTHONPATH?") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"module {module!r} has no {part!r}; {nearest(part, [n for n in vars(found) if n[0] != '_'])}"
            )
        found = getattr(found, part)
    return found


def _of_one(settings: Any, key: str, path: str) -> str:
    """The path of a setting that each of several has, such as `algo.algos.ID.lr`; "" if none has it."""
    for name, several in ((name, getattr(settings, name)) for name in getattr(settings, "__dataclass_fields__", ())):
        for id_ in several if isinstance(several, Mapping) else ():
            if key in getattr(several[id_], "__dataclass_fields__", ()):
                start, end = path.split(key, 1)
                return f"each of {', '.join(several)} has its own: {start}{name}.{id_}.{key}{end}"
    return ""


def _override_one(settings: Any, keys: list[str], path: str, value: Any) -> Any:
    key, *rest = keys
    if isinstance(settings, Mapping):
        if rest and key not in settings and any(map(dataclasses.is_dataclass, settings.values())):
            raise ConfigError(f"unknown setting {path!r}: there is no {key!r}; {nearest(key, settings)}")
        below = _override_one(settings.get(key, {}), rest, path, value) if rest else value
        return {**settings, key: below}
    if _is_named_tuple(type(settings)):
        known = list(settings._fields)
    elif dataclasses.is_dataclass(settings):
        known = [f.name for f in dataclasses.fields(settings)]
    else:
        raise ConfigError(f"{path!r}: nothing lies below {type(settings).__name__} {settings!r}; shorten the path")
    if key not in known:
        hint = _of_one(settings, key, path) or meant(key, known)
        raise ConfigError(f"unknown setting {path!r}: {type(settings).__name__} has no {key!r}; {hint}")
    if rest:
        changed = _override_one(getattr(settings, key), rest, path, value)
    else:
        changed = _convert(value, _hints(type(settings))[key], path)
    if _is_named_tuple(type(settings)):
        return settings._replace(**{key: changed})  # pyright: ignore[reportAttributeAccessIssue]
    return dataclasses.replace(settings, **{key: changed})  # pyright: ignore[reportArgumentType]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the annotated type, or ConfigError; types that cannot be checked by value pass as they are."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in sorted(args, key=lambda a: a is not type(value)):  # an exact match first
            try:
                return _convert(value, choice, path)
            except ConfigError:
                continue
        names = [name for choice in args if typing.get_origin(choice) is typing.Literal for name in choice.__args__]
        if isinstance(value, str) and names:
            raise ConfigError(f"{path}={_told(value)}; {nearest(value, map(str, names))}")
        raise ConfigError(f"{path}={_told(value)} ({type(value).__name__}); expected {hint}")
    if origin is typing.Literal:
        if value in args:
            return value
        raise ConfigError(f"{path}={_told(value)}; {nearest(str(value), map(str, args))}")
    if origin is tuple and isinstance(value, (list, tuple)):
        if len(value) > _MOST_VALUES:
            raise ConfigError(f"{path} has {len(value):,} values; expected at most {_MOST_VALUES:,}")
        inner = args[:1] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        if args and len(inner) != len(value):
            raise ConfigError(f"{path}={_told(value)}; expected {len(inner)} values")
        return tuple(_convert(v, h, path) for v, h in zip(value, inner)) if args else tuple(value)
    if origin in (collections.abc.Mapping, dict) and isinstance(value, Mapping):
        return {key: _convert(item, args[1], f"{path}.{key}") for key, item in value.items()} if args else dict(value)
    if origin is collections.abc.Callable and (callable(value) or isinstance(value, str)):
        return import_object(value) if isinstance(value, str) else value
    if hint is Any:
        return value
    if hint is types.NoneType and isinstance(value, str) and value.lower() == "none":
        return None
    if not isinstance(hint, type):
        if origin is None:
            return value
        raise ConfigError(f"{path}={_told(value)} ({type(value).__name__}); expected {hint}")
    if getattr(hint, "_is_protocol", False):
        return value
    if _is_named_tuple(hint) and isinstance(value, (list, tuple, Mapping)):
        fields = _hints(hint)
        given = value if isinstance(value, Mapping) else dict(zip(fields, value))
        if len(value) != len(fields) or set(given) != set(fields):
            raise ConfigError(f"{path}={_told(value)}; expected {len(fields)} values: {', '.join(fields)}")
        return hint(**{name: _convert(given[name], fields[name], f"{path}.{name}") for name in fields})
    whole_, most = hint is int or isinstance(value, int), _LARGEST if hint is int else _FINITE
    if hint in (int, float) and isinstance(value, (int, float)) and whole_ and abs(value) > most:
        raise ConfigError(f"{path}={_told(value)}; expected at most {_LARGEST:,}")
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isnan(value):
            raise ConfigError(f"{path}={_told(value)}; expected a number")
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    if isinstance(value, str) and hint in (int, float, bool):
        try:
            if hint is int:
                return whole(value)
            found = {"true": True, "false": False}[value.lower()] if hint is bool else float(value.replace("_", ""))
            if not math.isnan(found):
                return found
        except (ValueError, KeyError):
            pass
    if hint is Path and isinstance(value, str):
        return Path(value)
    expected = "a whole number, such as 100000, 1e5 or 100_000" if hint is int else getattr(hint, "__name__", hint)
    raise ConfigError(f"{path}={_told(value)} ({type(value).__name__}); expected {expected}")


def _told(value: Any) -> str:
    """The `repr` of a value, cut short."""
    if isinstance(value, int) and value.bit_length() > 64:  # from 4,300 digits on it has no repr
        return f"a whole number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def whole(text: str) -> int:
    """The whole number that a text spells: 100000, 1e5, 1.5e3 or 100_000.

    Raises ValueError for any other text, and for a number that takes more than 64 bits.
    """
    try:
        found = int(text)
    except ValueError:
        number = float(text.replace("_", ""))
        if not number.is_integer():  # nor are inf and nan
            raise
        found = int(number)
    if abs(found) > _LARGEST:
        raise ValueError(f"{text:.30} takes more than 64 bits")
    return found


_OWNERS = {"algo": "the algorithm", "sampler": "the sampler", "run": "ps.RunConfig"}
"""What the first part of a path names; all else are settings of the experiment."""
_INSTEAD = {"sampler.workers": "sampler.runners", "algo.gae_lambda": "algo.vtrace_lambda"}
"""What a name stands for among settings that have the second, not the first."""
FOREIGN = {
    # Stable-Baselines3 2, rlpyt, RLlib 2, CleanRL
    "gamma": "algo.discount",
    "learning_rate": "algo.lr",
    "lr_schedule": "algo.lr",
    "lambda": "algo.gae_lambda",
    "lambda_": "algo.gae_lambda",
    "n_epochs": "algo.epochs",
    "num_epochs": "algo.epochs",
    "update_epochs": "algo.epochs",
    "num_sgd_iter": "algo.epochs",
    "batch_size": "algo.minibatch",
    "minibatch_size": "algo.minibatch",
    "minibatches": "algo.minibatch",
    "num_minibatches": "algo.minibatch",
    "sgd_minibatch_size": "algo.minibatch",
    "ent_coef": "algo.entropy_coef",
    "entropy_coeff": "algo.entropy_coef",
    "entropy_loss_coeff": "algo.entropy_coef",
    "vf_coef": "algo.value_coef",
    "vf_loss_coeff": "algo.value_coef",
    "value_loss_coeff": "algo.value_coef",
    "clip_range": "algo.clip",
    "clip_coef": "algo.clip",
    "clip_param": "algo.clip",
    "ratio_clip": "algo.clip",
    "norm_adv": "algo.normalize_advantage",
    "clip_grad_norm": "algo.max_grad_norm",
    "grad_clip": "algo.max_grad_norm",
    "train_batch_size": "algo.batch_size",
    "train_batch_size_per_learner": "algo.batch_size",
    "buffer_size": "algo.replay.capacity",
    "replay_size": "algo.replay.capacity",
    "replay_buffer_config": "algo.replay",
    "pri_alpha": "algo.replay.priority_alpha",
    "pri_beta_init": "algo.replay.priority_beta",
    "min_steps_learn": "algo.learning_starts",
    "num_steps_sampled_before_learning_starts": "algo.learning_starts",
    "gradient_steps": "algo.replay_ratio",
    "training_intensity": "algo.replay_ratio",
    "n_steps_return": "algo.n_step",
    "n_step_return": "algo.n_step",
    "target_update_tau": "algo.tau",
    "polyak": "algo.tau",
    "target_update_interval": "algo.target_interval",
    "target_network_frequency": "algo.target_interval",
    "target_network_update_freq": "algo.target_interval",
    "vtrace_clip_rho_threshold": "algo.rho_bar",
    "vtrace_clip_pg_rho_threshold": "algo.rho_bar",
    "policy_lr": "algo.actor_lr",
    "policy_frequency": "algo.policy_delay",
    "double_dqn": "algo.double",
    "double_q": "algo.double",
    "exploration_fraction": "algo.epsilon",
    "exploration_initial_eps": "algo.epsilon",
    "exploration_final_eps": "algo.epsilon",
    "eps_init": "algo.epsilon",
    "eps_final": "algo.epsilon",
    "start_e": "algo.epsilon",
    "end_e": "algo.epsilon",
    "policy_kwargs": "algo.net",
    "model_kwargs": "algo.net",
    "model_config": "algo.net",
    "net_arch": "algo.net.hidden",
    "fcnet_hiddens": "algo.net.hidden",
    "hidden_sizes": "algo.net.hidden",
    "activation_fn": "algo.net.activation",
    "fcnet_activation": "algo.net.activation",
    "use_lstm": "algo.net.recurrent",
    "lstm_cell_size": "algo.net.recurrent_size",
    "log_std_init": "algo.net.log_std_init",
    "n_envs": "sampler.B",
    "num_envs": "sampler.B",
    "batch_B": "sampler.B",
    "num_envs_per_env_runner": "sampler.B",
    "num_envs_per_worker": "sampler.B",
    "n_steps": "sampler.T",
    "num_steps": "sampler.T",
    "batch_T": "sampler.T",
    "train_freq": "sampler.T",
    "rollout_fragment_length": "sampler.T",
    "num_workers": "sampler.workers",
    "num_env_runners": "sampler.workers",
    "n_workers": "sampler.workers",
    "num_cpus_per_env_runner": "sampler.num_cpus",
    "sample_timeout_s": "sampler.deadline_s",
    "max_num_env_runner_restarts": "sampler.restarts",
    "restart_failed_env_runners": "sampler.fault_policy",
    "ignore_env_runner_failures": "sampler.fault_policy",
    "max_requests_in_flight_per_env_runner": "sampler.depth",
    "steps": "run.steps",
    "total_timesteps": "run.steps",
    "n_timesteps": "run.steps",
    "timesteps_total": "run.steps",
    "cuda_idx": "run.device",
    "verbose": "run.progress",
    "tensorboard_log": "run.dir",
    "log_dir": "run.dir",
    "log_interval_steps": "run.log_interval",
    "eval_freq": "run.eval_interval",
    "n_eval_episodes": "run.eval_episodes",
    "evaluation_duration": "run.eval_episodes",
    "save_freq": "run.checkpoint_interval",
    "checkpoint_freq": "run.checkpoint_interval",
    "seed": "run.seed",
    "device": "run.device",
    "env_id": "env",
    "gym_id": "env",
    "env_config": "env_kwargs",
}
"""Paths of our settings by the names that other libraries have for them."""
