"""Episodes of datasets, the protocol of a source of them, and checks against an environment's spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_paths, tree_structure

ENV = "env/"
"""Prefix of the info columns that the environment reported; the others are the agent's, such as `logp`."""


@dataclass(frozen=True)
class Episode:
    """L steps from a reset to an end, in arrays that the holder owns."""

    obs: Tree
    """[L+1, *O] in the environment's dtypes; row L is the observation that the last step led to."""
    action: Tree
    """[L, *A] as the agent chose it: boxes are not clipped to their bounds."""
    reward: npt.NDArray[np.float32]
    """[L] undiscounted, unclipped."""
    terminated: bool
    """The last step led to a terminal state."""
    truncated: bool
    """The episode was cut after the last step."""
    info: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])
    """[L, ...] columns: `env/KEY` is float32, NaN where a step did not report it; `logp` and others are the agent's."""

    def __len__(self) -> int:
        return len(self.reward)


class EpisodeSource(Protocol):
    """A dataset on disk in any format: whole episodes by number, each read when asked for."""

    name: str
    """Its path, for messages."""
    spec: EnvSpec
    """The spec of its observations and actions."""
    lengths: npt.NDArray[np.int64]
    """[E] steps of each episode."""
    info: Mapping[str, tuple[str, tuple[int, ...]]]
    """dtype and shape of one step of each info column."""

    @property
    def fingerprint(self) -> str:
        """Text that changes with the data, so that a resumed run notices."""
        ...

    def episode(self, i: int) -> Episode:
        """Episode `i` from 0, in arrays of its own. Raises ConfigError if the file is damaged."""
        ...

    def verify(self) -> None:
        """Reads everything once. Raises ConfigError that names the first damaged file or episode."""
        ...

    def close(self) -> None:
        """Closes its files. A second call does nothing."""
        ...


def check_episode(episode: Episode, spec: EnvSpec, where: str) -> None:
    """Checks structure, shapes, dtypes and end of an episode, and that its numbers are finite.

    Raises:
        ConfigError: the message begins with `where` and names the first leaf that is wrong.
    """
    L = len(episode)
    if L < 1:
        raise ConfigError(f"{where} has no step; expected at least one")
    if not (episode.terminated or episode.truncated):
        raise ConfigError(
            f"{where} has no end; expected terminated or truncated (truncated for one that was cut short)"
        )
    for name, tree, leaves, rows in (("obs", episode.obs, spec.obs, L + 1), ("action", episode.action, spec.action, L)):
        if tree_structure(tree) != tree_structure(leaves):
            raise ConfigError(f"{where}: {name} has the leaves {tree_paths(tree)}; expected {tree_paths(leaves)}")
        for path, x, leaf in zip(tree_paths(leaves), tree_leaves(tree), tree_leaves(leaves)):
            _check_leaf(np.asarray(x), leaf, rows, f"{where}: {name}{path}")
    if episode.reward.shape != (L,) or episode.reward.dtype != np.float32 or not np.isfinite(episode.reward).all():
        raise ConfigError(
            f"{where}: reward is {episode.reward.dtype}{list(episode.reward.shape)}; expected finite float32[{L}]"
        )
    for key, column in episode.info.items():
        if len(column) != L:
            raise ConfigError(f"{where}: info {key!r} has {len(column)} rows; expected {L}, one for each step")


def check_spec(found: EnvSpec, env: EnvSpec, dataset: str, env_name: str) -> None:
    """Raises ConfigError, naming the first leaf, if a dataset's spaces differ from the environment's."""
    for name, ours, theirs in (("obs", found.obs, env.obs), ("action", found.action, env.action)):
        if tree_structure(ours) != tree_structure(theirs):
            raise ConfigError(
                f"dataset {dataset} has other spaces than {env_name}: {name} has the leaves {tree_paths(ours)}, the "
                f"environment's are {tree_paths(theirs)}; use the environment (and wrappers) that it was recorded in"
            )
        for path, x, y in zip(tree_paths(ours), tree_leaves(ours), tree_leaves(theirs)):
            keys = [key for key in LeafSpec.__dataclass_fields__ if getattr(x, key) != getattr(y, key)]
            if keys:
                seen, expected = (getattr(leaf, keys[0]) for leaf in (x, y))
                raise ConfigError(
                    f"dataset {dataset} has other spaces than {env_name}: {keys[0]} of {name}{path} is {seen}, "
                    f"the environment's is {expected}; use the environment (and wrappers) that it was "
                    "recorded in"
                )


def clipped(action: Tree, spec: Tree) -> Tree:
    """Actions as passed to the environment: boxes clipped to their bounds, in the leaf's dtype."""

    def leaf_of(leaf: LeafSpec, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.clip(x, leaf.bound("low"), leaf.bound("high")).astype(leaf.dtype) if leaf.kind == "box" else x

    return tree_map(leaf_of, spec, action)


def _check_leaf(x: npt.NDArray[Any], leaf: LeafSpec, rows: int, where: str) -> None:
    if x.shape != (rows, *leaf.shape) or x.dtype != np.dtype(leaf.dtype):
        raise ConfigError(f"{where} is {x.dtype}{list(x.shape)}; expected {leaf.dtype}{[rows, *leaf.shape]}")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        row = int(np.argwhere(~np.isfinite(x))[0][0])
        raise ConfigError(f"{where}: row {row} holds NaN or infinity; expected finite numbers")
