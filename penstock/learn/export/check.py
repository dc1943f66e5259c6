"""Check of an exported policy: its actions over drawn observations, and over sequences, are those of `predict`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError
from penstock.core.spec import MASK_KEY, EnvSpec, LeafSpec, choices
from penstock.core.tree import Tree, tree_leaves, tree_names, tree_structure, tree_unflatten
from penstock.learn.export.graph import Port
from penstock.learn.predict import predict

Array: TypeAlias = np.ndarray[Any, Any]
Execute: TypeAlias = Callable[[list[Array]], Sequence[Array]]
"""Outputs of an exported graph for its inputs, both in the order of its ports."""

OBSERVATIONS, STEPS = 1_000, 50
TOLERANCE = 1e-5
"""Largest difference between two elements of a box; relative where the element is larger than 1."""
_BATCHES = (1, 2, 7, 20, 970)
_FAR = 1e6
"""A bound from which a box is drawn from like one without."""
_STARTS = 0.05
_NUDGES, _NUDGE = 8, 1e-6


@dataclass
class Agreement:
    """The comparison of an exported policy with `predict`."""

    observations: int = 0
    steps: int = 1
    """Length of the sequences."""
    difference: float = 0.0
    """Largest difference of a box."""
    ties: int = 0
    """Rows in which rounding decides: `predict` itself chooses so, or moves as far, with parameters changed by 1e-6."""


@dataclass(frozen=True)
class Acting:
    """The policy that an export must equal: an agent on the CPU, its spec, and the observation that it sees."""

    agent: Agent
    spec: EnvSpec
    seen: Tree
    """Spec of the observation without what only critics see."""

    def predict(self, agent: Agent, obs: Tree, state: Tree, reward: Array, starts: Any) -> Any:
        """Actions and new state, None without memory, of this agent or of another for the spec."""
        found = predict(agent, self.spec, obs, state, reward, None, starts)
        return found if agent.initial_state(1) is not None else (found, None)


def check(acting: Acting, ports: Sequence[Port], execute: Execute, seed: int = 0) -> Agreement:
    """Acts on drawn observations, with memory in sequences, in batches of several sizes.

    Args:
        ports: inputs of the graph.

    Raises:
        ConfigError: an action differs by more than the tolerance, a choice at all, where rounding does not decide.
    """
    rng, found = np.random.default_rng(seed), Agreement()
    draw = _Draw(acting, rng)
    if not any(port.name == "first" for port in ports):
        for n in _BATCHES:
            _Sequence(acting, ports, execute, n, found).step(draw, np.ones(n, bool))
        return found
    found.steps = STEPS
    rows = OBSERVATIONS // STEPS
    sequence, single = (_Sequence(acting, ports, execute, n, found) for n in (rows, 1))
    for t in range(STEPS):
        sequence.step(draw, np.full(rows, t == 0) | (rng.random(rows) < _STARTS))
    for t in range(2):
        single.step(draw, np.full(1, t == 0))
    return found


class _Draw:
    """Observations from the spaces; of normalised boxes half are like those seen in training."""

    def __init__(self, acting: Acting, rng: np.random.Generator) -> None:
        self.rng, self._acting = rng, acting
        preparation = acting.agent.preparation
        self._seen: dict[int, tuple[Array, Array]] = {}
        if (normalizer := preparation.normalizer) is not None:
            moments = dict(zip(tree_names(preparation.obs, "obs"), normalizer.moments))
            for i, name in enumerate(tree_names(acting.seen, "obs")):
                if name in moments and len(moments[name].mean):
                    self._seen[i] = moments[name].mean.numpy(), moments[name].var.sqrt().numpy()

    def obs(self, n: int) -> Tree:
        """A tree of [n, *O]."""
        leaves = [self._leaf(leaf, n, self._seen.get(i)) for i, leaf in enumerate(tree_leaves(self._acting.seen))]
        obs = tree_unflatten(tree_structure(self._acting.seen), leaves)
        if isinstance(self._acting.seen, dict) and MASK_KEY in self._acting.seen:
            obs[MASK_KEY] = self._mask(self._acting.seen[MASK_KEY], n)
        return obs

    def _leaf(self, leaf: LeafSpec, n: int, seen: tuple[Array, Array] | None) -> Array:
        shape = (n, *leaf.shape)
        if leaf.kind != "box":
            start, sizes = np.reshape(leaf.start, -1), np.asarray(leaf.sizes or 2)
            flat = start + self.rng.integers(0, sizes, (n, leaf.size))
            return flat.reshape(shape).astype(leaf.dtype)
        low, high = leaf.limits()
        low, high = np.where(low > -_FAR, low, -np.inf), np.where(high < _FAR, high, np.inf)
        spread = self.rng.normal(size=shape)
        middle = np.where(np.isfinite(low), low, np.where(np.isfinite(high), high, 0.0))
        x = np.clip(middle + spread, low, high)
        both = np.broadcast_to(np.isfinite(low) & np.isfinite(high), shape)
        top = high + (np.dtype(leaf.dtype).kind != "f")
        x = np.where(both, self.rng.uniform(np.where(both, low, 0.0), np.where(both, top, 1.0), shape), x)
        if seen is not None:
            mean, deviation = (part.reshape(leaf.shape) for part in seen)
            like_seen = np.clip(mean + deviation * spread, low, high)
            x = np.where(np.arange(n).reshape(-1, *[1] * len(leaf.shape)) % 2, x, like_seen)
        return (x if np.dtype(leaf.dtype).kind == "f" else np.clip(np.floor(x), low, high)).astype(leaf.dtype)

    def _mask(self, leaf: LeafSpec, n: int) -> Array:
        """Random masks that leave at least one choice to each part of the action."""
        groups = [size for sizes in choices(self._acting.spec.action, leaf.size) for size in sizes]
        mask = self.rng.random((n, leaf.size)) < 0.5
        if sum(groups) == leaf.size:
            at = np.cumsum([0, *groups[:-1]]) + self.rng.integers(0, groups, (n, len(groups)))
            np.put_along_axis(mask, at, True, 1)
        return mask.reshape(n, *leaf.shape).astype(leaf.dtype)


class _Sequence:
    """Steps of `n` rows by the graph and by `predict`, each with a state of its own."""

    def __init__(self, acting: Acting, ports: Sequence[Port], execute: Execute, n: int, found: Agreement) -> None:
        self._acting, self._ports, self._execute, self._found = acting, ports, execute, found
        states = [port for port in ports if port.name.startswith("state.")]
        self._state = [np.zeros((n, *port.shape), port.dtype) for port in states]
        self._carried: Tree = None
        self._follows = np.ones(n, bool)
        """Rows whose states are still of the same choices."""

    def step(self, draw: _Draw, first: Array) -> None:
        """One step; raises ConfigError if an action differs."""
        n, acting = len(first), self._acting
        obs, reward = draw.obs(n), draw.rng.normal(size=n).astype(np.float32)
        fed = {"first": first, "prev_reward": reward}
        rest = [fed[port.name] for port in self._ports[len(tree_leaves(obs)) + len(self._state) :]]
        try:
            got = self._execute([*tree_leaves(obs), *self._state, *rest])
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).strip()[:300]}"
            raise ConfigError(f"the exported policy fails on {n} rows: {said}; nothing was written") from error
        before, starts = self._carried, None if self._carried is None else first
        wanted, self._carried = acting.predict(acting.agent, obs, before, reward, starts)
        leaves: list[LeafSpec] = tree_leaves(acting.spec.action)
        self._state = list(got[len(leaves) :])
        self._follows |= first
        apart = [_distance(*x) for x in zip(leaves, got, tree_leaves(wanted))]
        fits = [x <= TOLERANCE for x in apart]
        wrong = ~np.all(fits, 0) & self._follows
        for k in range(_NUDGES if wrong.any() else 0):
            other, _ = acting.predict(_nudged(acting.agent, k), obs, before, reward, starts)
            for i, (leaf, x, y, z) in enumerate(zip(leaves, got, tree_leaves(wanted), tree_leaves(other))):
                fits[i] |= _distance(leaf, x, z) == 0 if _is_exact(leaf) else apart[i] <= _distance(leaf, z, y)
        tied = wrong & np.all(fits, 0)
        wrong &= ~tied
        self._found.ties += int(tied.sum())
        boxes = [x for leaf, x in zip(leaves, apart) if not _is_exact(leaf)]
        self._found.difference = max(
            [self._found.difference, *(float(x[self._follows].max(initial=0.0)) for x in boxes)]
        )
        self._follows &= ~tied
        self._found.observations += n
        if wrong.any():
            raise ConfigError(_said(acting.spec, got, tree_leaves(wanted), int(wrong.argmax()), int(wrong.sum()), n))


def _is_exact(leaf: LeafSpec) -> bool:
    return leaf.kind != "box" or np.dtype(leaf.dtype).kind != "f"


def _distance(leaf: LeafSpec, got: Array, wanted: Any) -> Array:
    """[n], how far each row of two actions is apart: of boxes the largest element, of choices 1 where they differ.

    The difference of an element larger than 1 is relative to it. Rows of another shape or dtype are 1 apart.
    """
    n = len(got)
    if got.shape != np.shape(wanted) or got.dtype != np.dtype(leaf.dtype):
        return np.ones(n)
    if _is_exact(leaf):
        return (got != wanted).reshape(n, -1).any(1).astype(np.float64)
    x, y = got.astype(np.float64), np.asarray(wanted, np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(x - y) / np.maximum(1.0, np.abs(y))
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    return np.where(same, 0.0, np.nan_to_num(apart, nan=np.inf)).reshape(n, -1).max(1)


def _nudged(agent: Agent, seed: int) -> Agent:
    other, generator = copy.deepcopy(agent), torch.Generator().manual_seed(seed)
    for p in other.parameters():
        p.data.mul_(1.0 + _NUDGE * torch.randn(p.shape, generator=generator))
    return other


def _said(spec: EnvSpec, got: Sequence[Array], wanted: Sequence[Any], row: int, wrong: int, n: int) -> str:
    pairs = "; ".join(f"{np.asarray(x)[row]} where predict returns {np.asarray(y)[row]}" for x, y in zip(got, wanted))
    return (
        f"the exported policy differs from predict in {wrong} of {n} rows: {pairs:.300}; nothing was written. Is there "
        "a module that draws random numbers, changes itself when it acts, or branches on values?"
    )
