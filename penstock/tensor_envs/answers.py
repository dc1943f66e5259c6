"""The contract for answers of a batched environment of tensors: each function returns a violation as text, or None.

Types, shapes, dtypes and devices are checked in every step, without waiting for the device; values once a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.spec import LeafSpec
from penstock.core.tree import Tree, tree_leaves, tree_paths, tree_structure

FINAL = ("final_obs", "final_observation")
"""Names under which an info may have the last observations of episodes."""
_CAST = {"reward": ".float()", "terminated": ".bool()", "truncated": ".bool()"}
_DTYPES = (torch.float32, torch.bool, torch.bool)


class Answers:
    """The form required of every answer of one environment.

    Args:
        spec: of one slot's observation. num_envs: the leading dimension. device: of every tensor.
        same_step: the environment resets in the step of an end, and its info has the last observations of episodes.
    """

    def __init__(self, spec: Tree, num_envs: int, device: torch.device, same_step: bool = False) -> None:
        self.num_envs, self.device, self.same_step = num_envs, device, same_step
        self._flat = torch.Size((num_envs,))
        leaves: list[LeafSpec] = tree_leaves(spec)
        self._structure, self._alone = tree_structure(spec), isinstance(spec, LeafSpec)
        self._paths = tree_paths(spec)
        self._expected = [(torch.Size((num_envs, *leaf.shape)), dtype_of(leaf.dtype), device) for leaf in leaves]

    def describe_obs(self, obs: Tree) -> str | None:
        """The first way in which an observation breaks its spec."""
        alone = isinstance(obs, Tensor) and self._alone  # asked at every step
        if not alone and tree_structure(obs) != self._structure:
            return f"obs: its structure is {tree_structure(obs)}; expected {self._structure}, as the space is"
        for path, x, expected in zip(self._paths, [obs] if alone else tree_leaves(obs), self._expected):
            if not isinstance(x, Tensor) or (x.shape, x.dtype, x.device) != expected:
                return f"obs{path}: {self._difference(x, *expected)}"
        return None

    def describe_step(self, result: Any) -> str | None:
        """The first way in which a result of `step`, but for its observation, is none."""
        if not isinstance(result, tuple) or len(result) != 5:
            size = f" of {len(result)}" if isinstance(result, tuple) else ""
            hint = "; that is the old gym API: split done into terminated and truncated" if size == " of 4" else ""
            return f"got {type(result).__name__}{size}, expected (obs, reward, terminated, truncated, info){hint}"
        for name, dtype, x in zip(_CAST, _DTYPES, result[1:4]):
            if not isinstance(x, Tensor) or x.shape != self._flat or x.device != self.device:
                return f"{name}: {self._difference(x, self._flat, dtype, self.device)}"
            if x.dtype != dtype and not (name == "reward" and x.is_floating_point()):
                return f"{name}: got {_shown(x)}, expected dtype {_name(dtype)}; return {name}{_CAST[name]}"
        if not isinstance(result[4], Mapping):
            return f"info: got {type(result[4]).__name__}, expected a dict; return {{}} if there is nothing to say"
        for key in () if self.same_step else FINAL:
            if key in result[4]:
                return (
                    f"info[{key!r}]: it resets in the step of an end, and metadata['autoreset_mode'] says that it does "
                    "so in the next; expected AutoresetMode.SAME_STEP there"
                )
        return None

    def describe_final(self, final: Tree, obs: Tree) -> str | None:
        """Why these are not the last observations of episodes that ended in a step, which showed `obs`."""
        if message := self.describe_obs(final):
            return (
                f"info['final_obs'], {message}. Expected observations of all {self.num_envs} slots, of which those "
                "count whose episode ended: no list of some, no array of objects"
            )
        if any(x.data_ptr() == y.data_ptr() and x.numel() for x, y in zip(tree_leaves(final), tree_leaves(obs))):
            return (
                "info['final_obs'] is the observation after the reset, in the same memory; expected what the episode "
                "ended with: copy it (.clone()) before the reset"
            )
        return None

    def describe_info(self, key: str, x: Any) -> str | None:
        """Why a value of the info cannot be recorded."""
        if isinstance(x, Tensor) and x.shape == (self.num_envs,) and x.device == self.device and not x.is_complex():
            return None
        seen = _shown(x)
        return (
            f"info[{key!r}]: got {seen}, expected a tensor [{self.num_envs}] on {self.device}, a number for each slot"
        )

    def _difference(self, x: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
        expected = f"{_name(dtype)}{list(shape)} on {device}"
        if not isinstance(x, Tensor):
            return (
                f"got {_shown(x)}, expected a torch tensor {expected}, as env.device says: nothing is copied from the "
                "host; return a tensor, or leave `device` out of an environment of numpy arrays"
            )
        if x.device != device:
            hint = "keep every tensor on env.device: what moves would be copied at every step"
        elif x.shape != shape:
            hint = "nothing is broadcast: return a row for each of the num_envs slots, in the shape of the space"
            if shape[1:2] == shape[:1] and x.shape == shape[1:]:
                hint = "its single_observation_space is that of one slot, without num_envs: declare it so"
        else:
            hint = f"return x.to({dtype}), or declare the space so"
        return f"got {_shown(x)}, expected {expected}; {hint}"


def not_finite(x: Tensor) -> Tensor:
    """Where x [T, B, ...] is not finite, as bool [T, B]."""
    return ~torch.isfinite(x).flatten(2).all(-1) if x.ndim > 2 else ~torch.isfinite(x)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a numpy dtype's name. Raises ConfigError if torch has none."""
    try:
        return torch.from_numpy(np.empty(0, name)).dtype
    except TypeError as error:
        raise ConfigError(f"a space of dtype {name}, which no torch tensor has: {error}; declare another") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{_name(x.dtype)}{list(x.shape)} on {x.device}"
    if isinstance(x, np.ndarray):
        return f"a numpy array {x.dtype}{list(x.shape)}"
    return type(x).__name__
