"""Specs of observations, actions and batches: kinds, shapes, dtypes and bounds, storable as JSON."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.tree import Tree, tree_leaves, tree_map

Kind = Literal["box", "discrete", "multi_discrete", "multi_binary"]

_LARGEST = 1 << 28
"""Most elements of a stored observation or action."""
_DTYPES = {np.dtype(code).name for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"}
_UNLIMITED = 1e36
"""A bound of a box from which it is as good as none: some deviations beyond, float32 overflows."""

SHARED = "shared"
"""The id of the one policy of a plain algorithm, which plays all agents of an environment."""
MASK_KEY = "action_mask"
"""Key of a Dict observation under which a mask of the discrete choices stands, nonzero for a legal one."""
STATE_KEY = "state"
"""Key of a Dict observation under which the state of all agents of an environment stands, for critics and mixers."""


MOST_SLOTS = 1 << 24
"""Slots of all samplers of a run, at most: a ladder of epsilon has a number for each."""


@dataclass(frozen=True)
class Share:
    """The slots of one sampler among those of all samplers of a run.

    Raises:
        ConfigError: a number is none of slots.
    """

    first_slot: int = 0
    """Number of its first slot, by which noise, environment seeds and messages go."""
    total_slots: int | None = None
    """Number of slots of all samplers, which an epsilon ladder spans; None: this share ends with the last slot."""

    def __post_init__(self) -> None:
        for name in ("first_slot", "total_slots"):
            number = getattr(self, name)
            if number is None and name == "total_slots":
                continue
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or not 0 <= number <= MOST_SLOTS:
                raise ConfigError(f"Share({name}={number!r}); expected a whole number from 0 to {MOST_SLOTS:,}")
            object.__setattr__(self, name, int(number))

    def part(self, start: int, slots: int) -> Share:
        """The share that begins at slot `start` of this one, which has at least `slots` slots."""
        return Share(self.first_slot + start, max(self.total_slots or 0, self.first_slot + slots))


WHOLE = Share()
"""The share of a sampler that has all slots."""


class BatchSpec(NamedTuple):
    """The leading dimensions of a batch: T time steps of B slots."""

    T: int
    B: int

    @property
    def size(self) -> int:
        """Rows in a batch, T * B; only its valid rows count as environment steps."""
        return self.T * self.B


@dataclass(frozen=True)
class LeafSpec:
    """One array of an observation or action."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    low: float | tuple[float, ...] = -math.inf
    """Lower bound of a box: one number, or one for each element in C order."""
    high: float | tuple[float, ...] = math.inf
    """Upper bound of a box, like `low`."""
    sizes: tuple[int, ...] = ()
    """Number of choices: one for `discrete`, one for each element of `multi_discrete`, in C order."""
    start: int | tuple[int, ...] = 0
    """Smallest value of a `discrete` leaf, or of each element of a `multi_discrete` one."""

    @property
    def size(self) -> int:
        """Elements in the array, 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def is_image(self) -> bool:
        """True for a uint8 box of three axes, [C, H, W] or [H, W, C]: an image of any size."""
        return self.kind == "box" and len(self.shape) == 3 and self.dtype == "uint8"

    def bound(self, name: Literal["low", "high"]) -> npt.NDArray[np.float64]:
        """`low` or `high` of a box as a float64 array of the leaf's shape."""
        value: Any = self.low if name == "low" else self.high
        return np.broadcast_to(np.asarray(value, np.float64).reshape(self.shape if np.ndim(value) else ()), self.shape)

    def limits(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Lower and upper bounds as `bound`, infinite where they are as good as none: 1e36, or a float's largest."""
        dtype = np.dtype(self.dtype)
        most = min(_UNLIMITED, float(np.finfo(dtype).max)) if dtype.kind == "f" else _UNLIMITED
        low, high = self.bound("low"), self.bound("high")
        return np.where(low > -most, low, -np.inf), np.where(high < most, high, np.inf)

    def first_range(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Ends of the range that policies start in: the bounds, 2 units beside a single bound, [-1, 1] without any."""
        low, high = self.limits()
        has_low, has_high = np.isfinite(low), np.isfinite(high)
        lower = np.where(has_low, low, np.where(has_high, high - 2.0, -1.0))
        return lower, np.where(has_high, high, np.where(has_low, low + 2.0, 1.0))

    @property
    def bounded(self) -> bool:
        """True if every element has two bounds; see `limits`."""
        return all(bool(np.isfinite(bound).all()) for bound in self.limits())

    def null(self) -> npt.NDArray[Any]:
        """The value that stands for "no action": the smallest choice of a discrete leaf, 0 of any other."""
        start = np.asarray(self.start if self.kind in ("discrete", "multi_discrete") else 0)
        return np.broadcast_to(start.reshape(self.shape if start.ndim else ()), self.shape).astype(self.dtype)


@dataclass(frozen=True)
class EnvSpec:
    """The observation and the action of one slot, each a tree of `LeafSpec`."""

    obs: Tree
    action: Tree
    agents: int = 1
    """Slots that one environment owns; more than one for a multi-agent environment."""

    @functools.cached_property
    def null_action(self) -> Tree:
        """`LeafSpec.null` of every leaf of the action."""
        return tree_map(lambda leaf: leaf.null(), self.action)

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts only; `from_plain` brings the spec back."""
        return {"obs": _tree_to_plain(self.obs), "action": _tree_to_plain(self.action), "agents": self.agents}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> EnvSpec:
        """Inverse of `to_plain`. Raises ConfigError on anything that `to_plain` does not write."""
        return EnvSpec(_tree_from_plain(plain["obs"]), _tree_from_plain(plain["action"]), int(plain["agents"]))


Specs: TypeAlias = EnvSpec | Mapping[str, EnvSpec]
"""The spec of an environment of one agent, or of each policy by its id."""


def specs_to_plain(specs: Specs) -> dict[str, Any]:
    """Like `EnvSpec.to_plain`; for several policies {"policies": {id: spec}}."""
    if isinstance(specs, EnvSpec):
        return specs.to_plain()
    return {"policies": {name: spec.to_plain() for name, spec in specs.items()}}


def specs_from_plain(plain: Mapping[str, Any]) -> Specs:
    """Inverse of `specs_to_plain`. Raises ConfigError on data that it does not write."""
    if "policies" not in plain:
        return EnvSpec.from_plain(plain)
    return {str(name): EnvSpec.from_plain(spec) for name, spec in plain["policies"].items()}


def choices(action: Any, size: int | None = None) -> list[tuple[int, ...]]:
    """Sizes of the parts of a mask, by leaf: 2 for each element of a `multi_binary` (off, on), none for a box.

    Args:
        size: elements of a mask, which may leave out every `multi_binary`.
    """
    leaves: list[LeafSpec] = tree_leaves(action)
    plain = [leaf.sizes for leaf in leaves]
    if size is not None and size == sum(map(sum, plain)):
        return plain
    return [(2,) * leaf.size if leaf.kind == "multi_binary" else leaf.sizes for leaf in leaves]


def moved_channels(seen: Sequence[int], expected: Sequence[int], before: str) -> str:
    """The numpy call that brings images of one shape into the other, behind a text; "" if that is not the difference.

    Args:
        seen: shape of an image, or of several along further axes in front. expected: shape of an image.
    """
    a, b, c = seen[-3:] if len(seen) >= len(expected) >= 3 else (0, 0, 0)
    wanted = [*expected[-3:]]
    ends = "-1, -3" if wanted == [c, a, b] else "-3, -1"
    found = wanted in ([c, a, b], [b, c, a]) and wanted != [a, b, c]
    return f"{before}np.moveaxis(obs, {ends})" if found else ""


def describe(tree: Tree) -> str:
    """A short text for messages: `box[4] float32`, or its leaves in braces."""
    parts = [
        f"{leaf.kind}{list(leaf.shape) if leaf.shape else f'({leaf.sizes[0]})' if leaf.sizes else ''} {leaf.dtype}"
        for leaf in tree_leaves(tree)
    ]
    return parts[0] if len(parts) == 1 else "{" + ", ".join(parts) + "}"


def allocate(tree: Tree, *leading: int) -> Tree:
    """Zeroed arrays [*leading, *shape] for every leaf spec of the tree; the caller owns them."""
    return tree_map(lambda leaf: np.zeros((*leading, *leaf.shape), dtype=leaf.dtype), tree)


def _tree_to_plain(tree: Tree) -> Any:
    if isinstance(tree, LeafSpec):
        return {
            "leaf": [
                tree.kind,
                list(tree.shape),
                tree.dtype,
                plain_numbers(tree.low),
                plain_numbers(tree.high),
                list(tree.sizes),
                plain_numbers(tree.start),
            ]
        }
    if isinstance(tree, dict):
        return {"dict": {key: _tree_to_plain(value) for key, value in tree.items()}}
    return {"tuple": [_tree_to_plain(value) for value in tree]}


def _tree_from_plain(plain: Any) -> Tree:
    match plain:
        case {"leaf": [kind, shape, dtype, low, high, sizes, start]}:
            leaf = LeafSpec(
                kind,
                tuple(shape),
                dtype,
                _from_numbers(low),
                _from_numbers(high),
                tuple(sizes),
                tuple(start) if isinstance(start, list) else start,
            )
            _check_stored(leaf, plain)
            return leaf
        case {"dict": items}:
            return {key: _tree_from_plain(value) for key, value in items.items()}
        case {"tuple": items}:
            return tuple(_tree_from_plain(value) for value in items)
        case _:
            raise ConfigError(
                f"not a stored spec: {plain!r}; expected a leaf, dict or tuple as EnvSpec.to_plain writes"
            )


def _check_stored(leaf: LeafSpec, plain: Any) -> None:
    """Raises ConfigError for a leaf that no environment has, before arrays of its size are made."""
    counts: tuple[Any, ...] = (*leaf.shape, *leaf.sizes)
    whole = all(type(n) is int and n >= 0 for n in counts)
    if (
        leaf.kind not in get_args(Kind)
        or not whole
        or leaf.dtype not in _DTYPES
        or leaf.size > _LARGEST
        or any(isinstance(x, tuple) and len(x) != leaf.size for x in (leaf.low, leaf.high, leaf.start))
    ):
        raise ConfigError(f"not a stored spec: {str(plain)[:200]}; expected a leaf as EnvSpec.to_plain writes it")


def plain_numbers(value: Any) -> Any:
    """Infinity is not JSON: infinite bounds are stored as strings."""
    if isinstance(value, tuple):
        return [plain_numbers(v) for v in value]
    return value if isinstance(value, int) or math.isfinite(value) else str(value)


def _from_numbers(value: Any) -> Any:
    return tuple(_from_numbers(v) for v in value) if isinstance(value, list) else float(value)
