"""Observations of others as their space has them: containers and their keys, and in them every array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gymnasium import spaces

from penstock.envs.conform.values import conform_leaf
from penstock.envs.spaces import leaf_spec


def conform_space(space: Any) -> Any:
    """The space with text for the keys of Dicts."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({str(key): conform_space(below) for key, below in space.spaces.items()})
    return spaces.Tuple(map(conform_space, space.spaces)) if isinstance(space, spaces.Tuple) else space


def conformer(space: Any) -> Callable[[Any], Any]:
    """A function from an observation of this kind to one of `conform_space`, in new memory.

    Mappings and lists count as dicts and tuples. Leaves that `conform_leaf` cannot cast stay unchanged.
    """
    if isinstance(space, spaces.Dict):
        by_key = {str(key): conformer(below) for key, below in space.spaces.items()}

        def of_dict(obs: Any) -> Any:
            if not isinstance(obs, Mapping):
                return obs
            given = {str(key): below for key, below in obs.items()}
            return {key: by_key[key](below) if key in by_key else below for key, below in given.items()}

        return of_dict
    if isinstance(space, spaces.Tuple):
        parts = [conformer(below) for below in space.spaces]

        def of_tuple(obs: Any) -> Any:
            if not isinstance(obs, (tuple, list)) or len(obs) != len(parts):
                return obs
            return tuple(part(below) for part, below in zip(parts, obs))

        return of_tuple
    leaf = leaf_spec(space)
    return (lambda obs: obs) if leaf is None else (lambda obs: conform_leaf(obs, leaf))
