"""Spaces in Minari's JSON: from a spec, and back to one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import Tree
from penstock.envs.builtin import harmless_kwarg, is_builtin_env
from penstock.envs.spaces import env_spec, space_to_spec
from penstock.envs.wrappers import text_as_bytes, without_keys


def stored_spec(metadata: Mapping[str, Any], where: str, drop: Sequence[str] = (), text: int = 0) -> EnvSpec:
    """The spec of the spaces in a dataset's metadata, or else of its environment, which is made for that if built in.

    Args:
        drop, text: of the environment's settings, by which its observations are shown too.

    Raises:
        ConfigError: a space without a fixed-size array, or neither spaces nor an environment that may be made.
    """
    try:
        if "observation_space" in metadata and "action_space" in metadata:
            shown = _gym_space(json.loads(metadata["observation_space"]))
            return EnvSpec(
                space_to_spec(text_as_bytes(without_keys(shown, drop), text), "observation"),
                space_to_spec(_gym_space(json.loads(metadata["action_space"])), "action"),
            )
        env = _builtin(json.loads(metadata["env_spec"]))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # forged spaces may raise anything
        raise ConfigError(
            f"{where} does not say which spaces its data has ({type(error).__name__}: {error}); expected "
            "observation_space and action_space as Minari 0.5 writes them"
        ) from error
    try:
        return env_spec(env)
    finally:
        env.close()


def _builtin(stored: Mapping[str, Any]) -> gym.Env[Any, Any]:
    """The environment of a stored Gymnasium spec, by its id: its entry point may be any callable, so it is not used."""
    name, kwargs = str(stored["id"]), stored.get("kwargs", {})
    if stored.get("additional_wrappers") or not is_builtin_env(name) or not harmless_kwarg(kwargs):
        raise ConfigError(
            f"it names no spaces, and to find them {stored.get('entry_point', name)} would be called, which a dataset "
            "must not (docs/security.md); load and save it with Minari 0.5, which writes the spaces"
        )
    return gym.make(name, **kwargs)


def space_to_plain(spec: Tree) -> dict[str, Any]:
    """The space of a spec in Minari's JSON."""
    if isinstance(spec, dict):
        return {"type": "Dict", "subspaces": {key: space_to_plain(leaf) for key, leaf in spec.items()}}
    if isinstance(spec, tuple):
        return {"type": "Tuple", "subspaces": [space_to_plain(leaf) for leaf in spec]}
    leaf: LeafSpec = spec
    if leaf.kind == "box":
        bounds = {name: leaf.bound(name).tolist() for name in ("low", "high")}
        return {"type": "Box", "dtype": leaf.dtype, "shape": list(leaf.shape), **bounds}
    if leaf.kind == "discrete":
        return {"type": "Discrete", "dtype": "int64", "start": leaf.start, "n": leaf.sizes[0]}
    if leaf.kind == "multi_binary":
        return {"type": "MultiBinary", "n": leaf.shape[0] if len(leaf.shape) == 1 else list(leaf.shape)}
    start = np.broadcast_to(np.asarray(leaf.start), leaf.size).reshape(leaf.shape)
    sizes = np.asarray(leaf.sizes).reshape(leaf.shape)
    return {"type": "MultiDiscrete", "dtype": leaf.dtype, "nvec": sizes.tolist(), "start": start.tolist()}


def _gym_space(plain: Mapping[str, Any]) -> spaces.Space[Any]:
    kind = plain["type"]
    if kind == "Dict":
        return spaces.Dict({key: _gym_space(below) for key, below in plain["subspaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([_gym_space(below) for below in plain["subspaces"]])
    if kind == "Box":
        low, high = (np.array(plain[name], plain["dtype"]) for name in ("low", "high"))
        return spaces.Box(low, high, tuple(plain["shape"]), plain["dtype"])
    if kind == "Discrete":
        return spaces.Discrete(plain["n"], start=plain["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(plain["nvec"], dtype=plain["dtype"], start=plain["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(plain["n"])
    if kind == "Text":
        return spaces.Text(plain["max_length"])
    raise ConfigError(
        f"a {kind} space has no array of fixed size; expected Box, Discrete, MultiDiscrete, MultiBinary, "
        "and Dict or Tuple of these"
    )
