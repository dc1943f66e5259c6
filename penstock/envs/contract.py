"""The environment contract, value by value: each function returns the first violation as text, or None.

They run in the step loop of every pool: they allocate little and never raise. `check.py` plays a whole environment.
A value outside its space is a violation only where `bounds` says so: `OutOfBounds` counts such values elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from penstock.core.spec import LeafSpec, moved_channels
from penstock.core.tree import Tree
from penstock.envs.conform.values import NOT_YOURS, conform_flag, conform_info, conform_reward, conforms

Checks = Literal["sampled", "always", "finite", "off"]
LARGEST_REWARD = float(np.finfo(np.float32).max)
_ONE_REWARD = (
    "add up the objectives, e.g. by --wrappers penstock.envs.wrappers:WeightedReward (with weights: "
    "'WeightedReward((1, 0.1))') or, in MO-Gymnasium, mo_gymnasium.wrappers:LinearReward"
)
_FOR_EACH = (
    "one for each agent? then it is an environment of many, which needs PettingZoo's API (docs/many-agents.md); else "
    "return float(reward)"
)
_CURE = "widen the space, clip the value, or leave bounds unchecked (env_checks='finite', --env-checks finite)"


Values = Literal["bounds", "finite", "any"]
"""The values that a check refuses: those outside the space and not finite ones, the latter alone, or none."""


def refused_values(checks: Checks) -> Values:
    """The values that end a run with these `env_checks`."""
    return "bounds" if checks == "always" else "any" if checks == "off" else "finite"


def describe_violation(obs: Any, spec_tree: Tree, where: str, values: Values = "bounds") -> str | None:
    """The first way in which an observation breaks its spec, None if it does not.

    Looks at structure, type, shape and dtype (exactly; any integer for `discrete`), then at values: NaN and infinity
    (even where the bounds are infinite), and bounds.

    Args:
        obs: of the environment. spec_tree: tree of LeafSpec. where: opens the key path, such as "observation".
    """
    if isinstance(spec_tree, LeafSpec):
        check = _discrete if spec_tree.kind == "discrete" else _array
        return check(obs, spec_tree, where, values)
    if isinstance(spec_tree, dict):
        if not isinstance(obs, dict):
            cure = NOT_YOURS if isinstance(obs, Mapping) else ""
            return (
                f"{where}: got {_shown(obs)}, expected a dict with keys {sorted(spec_tree)}; the space is a Dict{cure}"
            )
        if obs.keys() != spec_tree.keys():
            missing, extra = sorted(spec_tree.keys() - obs.keys()), sorted(map(str, obs.keys() - spec_tree.keys()))
            return (
                f"{where}: got keys {sorted(map(str, obs))}, expected {sorted(spec_tree)}; missing {missing}, "
                f"unexpected {extra}: return every key of the space and no other"
            )
        pairs = ((f"{where}[{key!r}]", obs[key], leaf) for key, leaf in spec_tree.items())
    else:
        if not isinstance(obs, tuple) or len(obs) != len(spec_tree):
            size = f" of {len(obs)}" if isinstance(obs, tuple) else ""
            cure = NOT_YOURS if isinstance(obs, list) and len(obs) == len(spec_tree) else ""  # pyright: ignore
            return f"{where}: got {_shown(obs)}{size}, expected a tuple of {len(spec_tree)}; the space is a Tuple{cure}"
        pairs = ((f"{where}[{i}]", below, leaf) for i, (below, leaf) in enumerate(zip(obs, spec_tree)))
    for path, below, leaf in pairs:
        if message := describe_violation(below, leaf, path, values):
            return message
    return None


def describe_step_violation(result: Any) -> str | None:
    """The first way in which a result of `step`, but for its observation, breaks Gymnasium's API; else None."""
    if not isinstance(result, tuple) or len(result) != 5:
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        hint = (
            f"; that is the old gym API: split done into terminated and truncated{NOT_YOURS}" if size == " of 4" else ""
        )
        return f"got {_shown(result)}{size}, expected a tuple (obs, reward, terminated, truncated, info){hint}"
    _, reward, terminated, truncated, info = result
    if not _is_real(reward):
        hint = "return float(reward)"
        if isinstance(reward, np.ndarray):
            hint = "return reward.item()" if reward.size == 1 else _ONE_REWARD
        elif isinstance(reward, (list, tuple, dict)):
            hint = _FOR_EACH
        hint += NOT_YOURS if isinstance(conform_reward(reward), float) else ""
        return f"reward: got {_shown(reward)}, expected one real number; {hint}"
    if not -LARGEST_REWARD <= float(reward) <= LARGEST_REWARD:
        return f"reward: got {reward}, expected a finite number that fits float32; look for a division by zero"
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            cure = NOT_YOURS if isinstance(conform_flag(flag), bool) else ""
            return f"{name}: got {_shown(flag)}, expected a bool; return bool({name}){cure}"
    if not isinstance(info, dict):
        return f"info: got {_shown(info)}, expected a dict; return {{}} if there is nothing to say{_of_info(info)}"
    return None


def describe_reset_violation(result: Any) -> str | None:
    """The first way in which a result of `reset`, but for its observation, breaks Gymnasium's API; else None."""
    if not isinstance(result, tuple) or len(result) != 2:
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        cure = "" if isinstance(result, tuple) else f"; return obs, {{}}{NOT_YOURS}"
        return f"got {_shown(result)}{size}, expected a tuple (obs, info){cure}"
    if not isinstance(info := result[1], dict):
        return f"info: got {_shown(info)}, expected a dict; return {{}} if there is nothing to say{_of_info(info)}"
    return None


def _of_info(info: Any) -> str:
    return NOT_YOURS if isinstance(conform_info(info), dict) else ""


def _is_real(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    return isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 and value.dtype.kind in "biuf"


def _discrete(obs: Any, leaf: LeafSpec, where: str, values: Values) -> str | None:
    if isinstance(obs, np.ndarray) and obs.ndim == 0:
        obs = obs[()]
    if not isinstance(obs, (int, np.integer)) or isinstance(obs, bool):
        return f"{where}: got {_shown(obs)}, expected an integer; return int(obs){_of_obs(obs, leaf)}"
    start: Any = leaf.start
    if values == "bounds" and not start <= obs < start + leaf.sizes[0]:
        return f"{where}: got {obs}, expected {start} to {start + leaf.sizes[0] - 1}; {_CURE}"
    return None


def _array(obs: Any, leaf: LeafSpec, where: str, values: Values) -> str | None:
    if not isinstance(obs, (np.ndarray, np.generic)):
        return (
            f"{where}: got {_shown(obs)}, expected a numpy array {leaf.dtype}{list(leaf.shape)}; return "
            f"np.asarray(obs, dtype=np.{leaf.dtype}){_of_obs(obs, leaf)}"
        )
    if obs.shape != leaf.shape:
        hint = f"nothing is broadcast, declare it so{moved_channels(obs.shape, leaf.shape, ', or return ')}"
        hint += _of_obs(obs, leaf)
        return f"{where}: got shape {list(obs.shape)}, expected {list(leaf.shape)}; {hint}"
    dtype, low, high = value_limits(leaf)
    if obs.dtype != dtype:
        hint = f"return obs.astype(np.{leaf.dtype}) or declare it so{_of_obs(obs, leaf)}"
        return f"{where}: got dtype {obs.dtype}, expected {leaf.dtype}; {hint}"
    if values != "any" and dtype.kind == "f" and not np.isfinite(obs).all():
        index = _first(~np.isfinite(obs))
        got = np.asarray(obs)[index]
        return f"{where}: got {got} at {list(index)}, expected finite numbers; look for a division by zero"
    limits = ((low, np.less, "least"), (high, np.greater, "most")) if values == "bounds" else ()
    for bound, wrong, word in limits:
        if bound is not None and (outside := wrong(obs, bound)).any():
            index = _first(outside)
            got, limit = np.asarray(obs)[index], np.broadcast_to(bound, leaf.shape)[index]
            return f"{where}: got {got} at {list(index)}, expected at {word} {limit}; {_CURE}"
    return None


def _of_obs(obs: Any, leaf: LeafSpec) -> str:
    return NOT_YOURS if conforms(obs, leaf) else ""


@functools.lru_cache(maxsize=256)
def value_limits(leaf: LeafSpec) -> tuple[np.dtype[Any], Any, Any]:
    """dtype, lower and upper bound of a leaf; bounds in that dtype, scalars or arrays, None if none can be broken."""
    dtype = np.dtype(leaf.dtype)
    if leaf.kind == "box":
        lows, highs = leaf.low, leaf.high
    elif leaf.kind == "multi_binary":
        lows, highs = 0, 1
    else:
        start = np.broadcast_to(np.asarray(leaf.start), len(leaf.sizes))
        lows, highs = tuple(start), tuple(start + np.asarray(leaf.sizes) - 1)
    least, most = (-np.inf, np.inf) if dtype.kind == "f" else (0, 1) if dtype.kind == "b" else _int_range(dtype)
    low = None if np.all(np.asarray(lows) <= least) else _shaped(lows, leaf, dtype)
    high = None if np.all(np.asarray(highs) >= most) else _shaped(highs, leaf, dtype)
    return dtype, low, high


def _int_range(dtype: np.dtype[Any]) -> tuple[float, float]:
    info = np.iinfo(dtype)
    return float(info.min), float(info.max)


def _shaped(bound: Any, leaf: LeafSpec, dtype: np.dtype[Any]) -> Any:
    return np.asarray(bound).astype(dtype).reshape(leaf.shape if np.ndim(bound) else ())


def _first(where: Any) -> tuple[int, ...]:
    """The index of the first True, as plain numbers so that messages stay readable."""
    return tuple(int(i) for i in np.argwhere(where)[0])


def _shown(value: Any) -> str:
    """A value for a message: its type, and its shape or itself where that is short."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype}{list(value.shape)}"
    text = repr(value)
    return type(value).__name__ + (
        f" {text}" if len(text) <= 40 and not isinstance(value, (tuple, dict, type(None))) else ""
    )
