"""Specs of Gymnasium spaces: each space as a tree of `LeafSpec`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import Tree
from penstock.envs.conform.values import NOT_YOURS

_FITS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these"


def env_spec(env: Any) -> EnvSpec:
    """The spec of one slot of an environment; of a `gymnasium.vector.VectorEnv` the single spaces count.

    Raises:
        ConfigError: a space is missing or of a kind that has no fixed-size array; see `space_to_spec`.
    """
    prefix = "single_" if isinstance(env, gym.vector.VectorEnv) else ""
    return EnvSpec(
        obs=space_to_spec(_space_of(env, prefix + "observation_space"), "observation"),
        action=space_to_spec(_space_of(env, prefix + "action_space"), "action"),
    )


def space_to_spec(space: Any, where: str) -> Tree:
    """A space as a tree of `LeafSpec`: Dict becomes a dict, Tuple a tuple, everything else one leaf.

    Args:
        space: any `gymnasium.Space`.
        where: "observation" or "action"; opens the key path in messages.

    Raises:
        ConfigError: Text, Graph, Sequence, OneOf and other spaces without a fixed-size array, an empty container,
            or a Dict key that is not text.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        if not len(space.spaces):
            raise ConfigError(f"{where} space is an empty {type(space).__name__}; expected at least one entry")
        if isinstance(space, spaces.Tuple):
            return tuple(space_to_spec(below, f"{where}[{i}]") for i, below in enumerate(space.spaces))
        for key in space.spaces:
            if not isinstance(key, str):
                raise ConfigError(
                    f"{where} space has the key {key!r} ({type(key).__name__}); Dict keys must be text{NOT_YOURS}"
                )
        return {key: space_to_spec(below, f"{where}[{key!r}]") for key, below in space.spaces.items()}
    leaf = leaf_spec(space)
    if leaf is None:
        raise ConfigError(
            f"{where} space is {space!r}, which has no array of fixed size; expected {_FITS}: {_cure(space, where)}"
        )
    return leaf


def is_text(space: Any) -> bool:
    """True for a space whose elements are text: Text, and those that packages define, as MiniGrid does."""
    return np.dtype(getattr(space, "dtype", None)).kind == "U"


def _cure(space: Any, where: str) -> str:
    """The wrapper or setting that makes an unsupported space fit."""
    _, _, key = where.partition("['")
    key = key.removesuffix("']").replace("']['", "/")
    ways = [f"leave it out by env_drop=({key!r},) (--env-drop {key})"] if key and "[" not in key else []
    if where.startswith("action"):
        ways = []
    elif is_text(space):
        ways.append("show it as bytes by env_text=64 (--env-text 64)")
    if type(space).__module__.startswith("minigrid."):
        ways.append(
            "take the package's own wrapper, --wrappers minigrid.wrappers:ImgObsWrapper (the image alone) or "
            "minigrid.wrappers:FlatObsWrapper (image and text in one vector)"
        )
    return ", or ".join([*ways, "wrap the environment so that it shows one of these (pad what varies in length)"])


def leaf_spec(space: Any) -> LeafSpec | None:
    """The leaf of a Box, Discrete, MultiDiscrete or MultiBinary space; None for any other."""
    if isinstance(space, spaces.Box):
        return LeafSpec("box", space.shape, space.dtype.name, _bounds(space.low), _bounds(space.high))
    if isinstance(space, spaces.Discrete):
        return LeafSpec("discrete", (), "int64", sizes=(int(space.n),), start=int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        start = tuple(int(s) for s in space.start.ravel())
        sizes = tuple(int(n) for n in space.nvec.ravel())
        return LeafSpec("multi_discrete", space.shape, space.dtype.name, sizes=sizes, start=start)
    if isinstance(space, spaces.MultiBinary):
        return LeafSpec("multi_binary", space.shape, "int8")
    return None


def action_dtypes(space: Any) -> list[np.dtype[Any]]:
    """The dtype in which an environment takes each leaf of its action, in the order of `tree_leaves`.

    Specs and records keep the choices of a `Discrete` of any dtype as int64.
    """
    if isinstance(space, spaces.Dict):
        return [dtype for key in sorted(space.spaces) for dtype in action_dtypes(space.spaces[key])]
    if isinstance(space, spaces.Tuple):
        return [dtype for below in space.spaces for dtype in action_dtypes(below)]
    return [np.dtype(space.dtype)]


def _space_of(env: Any, name: str) -> Any:
    space = getattr(env, name, None)
    if not isinstance(space, gym.Space):
        raise ConfigError(f"{type(env).__name__}.{name} is {space!r}; expected a gymnasium space: set it in __init__")
    return space


def _bounds(bound: npt.NDArray[Any]) -> float | tuple[float, ...]:
    """One number if all elements agree, which keeps the spec of an image small; 0 for an empty array."""
    if bound.size == 0 or np.all(bound == bound.flat[0]):
        return float(bound.flat[0]) if bound.size else 0.0
    return tuple(float(v) for v in bound.flat)
