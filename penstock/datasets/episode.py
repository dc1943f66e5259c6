"""Episodes of datasets, the protocol of a source of them, and checks against an environment's spaces."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.spec import MASK_KEY, EnvSpec, LeafSpec
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_paths, tree_structure
from penstock.envs.contract import Checks, describe_violation, value_limits

ENV = "env/"
"""Prefix of the info columns that the environment reported; the others are the agent's, such as `logp`."""

_MASKLESS = ", or without its masks, as the data is, by env_mask='' (--env-mask '')"


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

    def verify(self, checks: Checks = "sampled") -> None:
        """Reads everything once. Raises ConfigError that names the first damaged file, or episode and row.

        Args:
            checks: of values, as in `EnvConfig.checks`: observations outside their space are a warning, once, with
                `sampled`, errors with `always`, and not checked otherwise.
        """
        ...

    def close(self) -> None:
        """Closes its files. A second call does nothing."""
        ...


def check_episode(episode: Episode, spec: EnvSpec, where: str) -> None:
    """Checks structure, shapes, dtypes and end of an episode, that its numbers are finite, and its choices legal.

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
    check_choices(episode, spec, where)
    if episode.reward.shape != (L,) or episode.reward.dtype != np.float32 or not np.isfinite(episode.reward).all():
        raise ConfigError(
            f"{where}: reward is {episode.reward.dtype}{list(episode.reward.shape)}; expected finite float32[{L}]"
        )
    for key, column in episode.info.items():
        if len(column) != L:
            raise ConfigError(f"{where}: info {key!r} has {len(column)} rows; expected {L}, one for each step")


def check_choices(episode: Episode, spec: EnvSpec, where: str) -> None:
    """Raises ConfigError, with the row, for the first action that its space or its mask does not have."""
    mask = episode.obs.get(MASK_KEY) if isinstance(episode.obs, dict) else None
    found = illegal_choice(tree_leaves(episode.action), None if mask is None else mask[:-1], spec)
    if found is not None:
        raise ConfigError(f"{where}, row {found[0]}: {found[1]}")


def illegal_choice(
    action: Sequence[npt.NDArray[Any]], mask: npt.NDArray[Any] | None, spec: EnvSpec
) -> tuple[int, str] | None:
    """Row and message of the first of N actions that its space or its mask does not have; boxes may be clipped later.

    Args:
        action: leaves [N, *A]. mask: [N, choices], nonzero for a legal choice, of the observations acted on.
    """
    leaves: list[LeafSpec] = tree_leaves(spec.action)
    for path, x, leaf in zip(tree_paths(spec.action), action, leaves):
        if leaf.kind != "box" and (row := first_outside(x, leaf)) is not None:
            return row, f"{_outside(x[row], leaf, f'action{path}')}; correct the data, or use the space that it is of"
    if mask is None or len(leaves) != 1 or sum(leaves[0].sizes) != math.prod(mask.shape[1:]):
        return None
    chosen = action[0].reshape(len(mask), -1).astype(np.int64) - np.ravel(leaves[0].start)
    for i, (size, stop) in enumerate(zip(leaves[0].sizes, np.cumsum(leaves[0].sizes))):
        legal = mask.reshape(len(mask), -1)[:, stop - size : stop] != 0
        bad = legal.any(1) & ~np.take_along_axis(legal, chosen[:, i : i + 1], 1)[:, 0]
        if bad.any():
            row = int(np.argmax(bad))
            return row, (
                f"action: got {action[0][row]}, which obs[{MASK_KEY!r}] forbids; expected a legal choice, of "
                f"{(np.flatnonzero(legal[row]) + np.ravel(leaves[0].start)[i % np.size(leaves[0].start)]).tolist()}"
            )
    return None


def obs_outside(obs: Sequence[npt.NDArray[Any]], spec: EnvSpec) -> tuple[int, str] | None:
    """Row and message of the first of N observations, as leaves [N, *O], that lies outside its space."""
    for path, x, leaf in zip(tree_paths(spec.obs), obs, tree_leaves(spec.obs)):
        if (row := first_outside(x, leaf)) is not None:
            return row, _outside(x[row], leaf, f"obs{path}")
    return None


def first_outside(x: npt.NDArray[Any], leaf: LeafSpec) -> int | None:
    """The first row of an array [N, *shape] that holds a value outside its space; None if none does."""
    _, low, high = value_limits(leaf)
    bad = np.zeros(len(x), bool)
    for bound, wrong in ((low, np.less), (high, np.greater)):
        if bound is not None and len(x):
            bad |= wrong(x, bound).reshape(len(x), -1).any(1)
    return int(np.argmax(bad)) if bad.any() else None


def _outside(value: Any, leaf: LeafSpec, where: str) -> str:
    return str(describe_violation(value, leaf, where)).partition("; ")[0]


def say_outside(message: str, checks: Checks) -> None:
    """Raises or warns, as `checks` says, for an observation outside its space."""
    if checks == "always":
        raise ConfigError(message)
    warnings.warn(
        f"{message}. Training goes on with the value as it is; env_checks='always' makes it an error", stacklevel=4
    )


def check_spec(found: EnvSpec, env: EnvSpec, what: str, env_name: str) -> None:
    """Raises ConfigError, naming the first leaf, if the spaces of `what`, a dataset's, are not the environment's."""
    for name, ours, theirs in (("obs", found.obs, env.obs), ("action", found.action, env.action)):
        if tree_structure(ours) != tree_structure(theirs):
            raise ConfigError(
                f"{what} has other spaces than {env_name}: {name} has the leaves {tree_paths(ours)}, the "
                f"environment's are {tree_paths(theirs)}; use the environment (and wrappers) that it was recorded in"
                f"{_MASKLESS if isinstance(theirs, dict) and MASK_KEY in theirs else ''}"
            )
        for path, x, y in zip(tree_paths(ours), tree_leaves(ours), tree_leaves(theirs)):
            keys = [key for key in LeafSpec.__dataclass_fields__ if getattr(x, key) != getattr(y, key)]
            if keys:
                seen, expected = (getattr(leaf, keys[0]) for leaf in (x, y))
                raise ConfigError(
                    f"{what} has other spaces than {env_name}: {keys[0]} of {name}{path} is {seen}, "
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
