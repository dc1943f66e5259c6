"""Environments, wrappers and modules that come with penstock, Gymnasium or ALE, so that a file may name them safely."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from penstock.core.config import import_path
from penstock.core.errors import ConfigError, nearest
from penstock.core.names.calls import Call, read_call
from penstock.envs.envpool import is_envpool_id
from penstock.envs.ids import is_simulator_id
from penstock.envs.pettingzoo import is_known_family, is_pettingzoo_id

_MODULES = {"ale_py", "gymnasium", "minatar", "penstock"}
"""Modules that a stored experiment may import to register their ids."""
_HOMES = ("gymnasium.envs.", "penstock.envs.", "penstock.tensor_envs.", "ale_py.", "minatar.")
_MAKERS = ("penstock.envs.toy", "penstock.tensor_envs", "penstock.envs.atari", "penstock.envs.minatar")
_WRAPPERS = ("gymnasium.wrappers", "penstock.envs.wrappers", "penstock.envs.toy")
_OWN_WRAPPERS = ("ActionMask", "Conform", "DropKeys", "TextBytes", "WeightedReward", "copy_obs")
_OF_SHIMMY = "CompatibilityV0"
_BREAKS = {"penstock.envs.toy.crashes", "penstock.envs.toy.faults"}
"""Environments that kill or stop their process, for tests."""
_WRITES = {"RecordVideo"}
"""Wrappers that write files where their arguments say."""
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
    if is_envpool_id(env) or is_simulator_id(env):
        return True
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


def wrapper_path(name: str) -> str:
    """The `module:NAME` of a wrapper's short name: penstock's, Gymnasium's, or Shimmy's where that is installed.

    What has a colon stays as it is. Raises ConfigError for any other name.
    """
    if (written := re.fullmatch(r"([\w.:]+)[\s,=:]+([^:]*\S)", name.strip())) and not written[2].isidentifier():
        raise ConfigError(
            f"wrapper {name!r}: arguments stand in brackets, as {f'{written[1]}({written[2]})'!r}, by position or by "
            "name, e.g. 'FrameStackObservation(stack_size=4)'"
        )
    if ":" in name:
        return name
    if name in _OWN_WRAPPERS:
        return f"penstock.envs.wrappers:{name}"
    known = [word for word in gym.wrappers.__all__ if word != "vector"]
    if name in known:
        return f"gymnasium.wrappers:{name}"
    if name.endswith(_OF_SHIMMY) and importlib.util.find_spec("shimmy") is not None:
        return f"shimmy:{name}"
    module, dot, last = name.rpartition(".")
    said = f"did you mean '{module}:{last}'?" if dot else nearest(name, [*known, *_OWN_WRAPPERS])
    raise ConfigError(
        f"unknown wrapper {name!r}; {said} Short names are those of gymnasium.wrappers, penstock.envs.wrappers and "
        "shimmy, if it is installed; any other is module:NAME"
    )


def public_path(wrap: Any) -> str | None:
    """The import path of a wrapper, for one of Gymnasium's that of its short name; None if it cannot be imported."""
    name = getattr(wrap, "__name__", "")
    return f"gymnasium.wrappers:{name}" if vars(gym.wrappers).get(name) is wrap else import_path(wrap)


def is_builtin_wrapper(wrapper: Any) -> bool:
    """True if a wrapper, as a file names it, is one of Gymnasium or penstock with harmless arguments.

    Args:
        wrapper: a name, `NAME(arguments)`, [name, arguments], or a partial as `to_plain` returns it.
    """
    try:
        call = _wrapper_call(wrapper)
        module, _, name = wrapper_path(call.name).partition(":")
    except ConfigError:
        return False
    found = _own(module, name, _WRAPPERS)
    known = isinstance(found, type) and issubclass(found, (gym.Wrapper, gym.vector.VectorWrapper))
    known = (known and name not in _WRITES) or (found is not None and name in _OWN_WRAPPERS)
    return known and harmless_kwarg([call.args, call.kwargs])


def _wrapper_call(wrapper: Any) -> Call:
    if isinstance(wrapper, Mapping):
        return Call(str(wrapper.get("import")), wrapper.get("args", ()), wrapper.get("kwargs", {}))
    if isinstance(wrapper, (list, tuple)):
        return Call(str(wrapper[0]), (), wrapper[1]) if len(wrapper) == 2 else Call("")
    return read_call(str(wrapper))


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
    return _WORD.fullmatch(value) is not None if isinstance(value, str) else value is None or isinstance(value, float)


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
