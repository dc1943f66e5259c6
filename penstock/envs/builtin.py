"""Environments, wrappers and modules that come with penstock, Gymnasium or ALE, so that a file may name them safely."""

from __future__ import annotations

import importlib
import re
from typing import Any

import gymnasium as gym

from penstock.envs.pettingzoo import is_known_family, is_pettingzoo_id

_MODULES = {"ale_py", "gymnasium", "minatar", "penstock"}
"""Modules that a stored experiment may import to register their ids."""
_HOMES = ("gymnasium.envs.", "penstock.envs.", "penstock.tensor_envs.", "ale_py.", "minatar.")
_MAKERS = ("penstock.envs.toy", "penstock.tensor_envs", "penstock.envs.atari", "penstock.envs.minatar")
_WRAPPERS = ("gymnasium.wrappers", "penstock.envs.wrappers", "penstock.envs.toy")
_BREAKS = {"penstock.envs.toy.crashes", "penstock.envs.toy.faults"}
"""Environments that kill or stop their process, for tests."""
_SIZES = 10**7
_WORD = re.compile(r"[\w-]*")


def is_builtin_module(name: str) -> bool:
    """True if the module may be imported because a file says so."""
    return name in _MODULES


def is_builtin_env(env: str) -> bool:
    """True if a Gymnasium id or `module:qualname` makes an environment of these packages, or none at all."""
    module, colon, name = env.partition(":")
    if is_pettingzoo_id(env):
        return is_known_family(env)
    if not colon:
        # Gymnasium takes an id without its version for the newest.
        found = [spec for key, spec in gym.registry.items() if env in (key, key.rpartition("-v")[0])]
        return all(_of_a_home(spec.entry_point) and not spec.additional_wrappers for spec in found)
    if is_builtin_module(module) and not is_attribute(name):
        return is_builtin_env(name)
    return callable(_own(module, name, _MAKERS))


def is_attribute(name: str) -> bool:
    """True if the name in `module:name` is that of an attribute, not of an id, which nearly always has a "-" or "/"."""
    return name not in gym.registry and name.replace(".", "").isidentifier()


def is_builtin_wrapper(path: str) -> bool:
    """True if `module:qualname` is a wrapper of Gymnasium or penstock."""
    module, _, name = path.partition(":")
    found = _own(module, name, _WRAPPERS)
    return isinstance(found, type) and issubclass(found, (gym.Wrapper, gym.vector.VectorWrapper))


def harmless_kwarg(value: Any) -> bool:
    """True for numbers, words, and lists and dicts of them; other text may name a file or a class.

    A whole number of ten millions and more may be the size of an array.
    """
    if isinstance(value, dict):
        return all(isinstance(k, str) and k not in ("class", "import") and harmless_kwarg(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(harmless_kwarg, value))
    if isinstance(value, int):
        return abs(value) < _SIZES
    return _WORD.fullmatch(value) is not None if isinstance(value, str) else True


def _of_a_home(entry_point: Any) -> bool:
    if not isinstance(entry_point, str):
        entry_point = f"{getattr(entry_point, '__module__', '')}.:"
    return entry_point.replace(":", ".").startswith(_HOMES)


def _own(module: str, name: str, homes: tuple[str, ...]) -> Any:
    """The object that a module of these packages has under a plain name, if one of them defines it, else None."""

    def inside(path: str) -> bool:
        return any(f"{path}.".startswith(f"{home}.") for home in homes)

    if not inside(module) or not name.isidentifier() or name.startswith("_"):
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    origin = str(getattr(found, "__module__", ""))
    return found if inside(origin) and origin not in _BREAKS else None
