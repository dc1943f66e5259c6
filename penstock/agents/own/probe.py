"""One trial of a module of a user's own: shapes, dtype, finite numbers, and one answer in acting and in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.agents.images import channel_axis
from penstock.core.errors import ConfigError
from penstock.core.spec import LeafSpec, describe
from penstock.core.tree import Tree, tree_leaves, tree_map

ROWS = 6
"""Rows of a trial; two of them are shown alone as well."""
_RTOL, _ATOL = 1e-3, 1e-5
_STEP = (5**0.5 - 1.0) / 2.0
"""Fraction by which one element of a trial lies above the one before, modulo 1: the golden ratio spreads them."""


def examples_of(spec: Tree, rows: int = ROWS) -> Tree:
    """Observations [rows, *O] of a spec, the same each time: nulls in row 0, then values spread over their range."""
    return tree_map(lambda leaf: _example(leaf, rows), spec)


def check_module(
    name: str, module: nn.Module, call: Callable[[Tree], Any], spec: Tree, shape: tuple[int | str, ...], axis: int = 0
) -> None:
    """Raises ConfigError, which begins with `name`, unless a module answers as samplers and losses need it to.

    Args:
        call: the answer to observations [N, *O] of `spec`.
        shape: of the answer without its axis of rows; a letter for any size.
        axis: that of the rows.
    """
    obs = examples_of(spec)
    modes = [(m, m.training) for m in module.modules()]
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    wanted = (*shape[:axis], ROWS, *shape[axis:])
    with torch.no_grad():
        try:
            found = call(obs)
            _check_form(name, found, wanted, spec)
            again, fewer = call(obs), call(tree_map(lambda x: x[-2:], obs))
            module.eval()
            acting = call(obs)
        except ConfigError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise ConfigError(
                f"{name} fails on {ROWS} observations of {describe(spec)}: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}; expected a forward of [N, *O] tensors as they are recorded (a "
                f"Dict: a mapping of them){_of_images(spec)}"
            ) from error
        finally:
            for m, training in modes:
                m.training = training
            for buffer, before in kept:
                buffer.copy_(before)
    if _differ(found, acting) or _differ(found, again):
        layers = [f"{path} ({type(m).__name__})" for path, m in module.named_modules() if _has_modes(m)]
        seen = f", by its layers {', '.join(layers[:3])}" if layers else ""
        raise ConfigError(
            f"{name} answers otherwise in training than in acting{seen}; one module does both, and an action would be "
            "scored by another policy than the one that chose it: call self.eval() at the end of its __init__ (dropout "
            "then drops nothing, batch norm keeps its statistics), or use LayerNorm or GroupNorm"
        )
    if _differ(found.narrow(axis, ROWS - 2, 2), fewer):
        raise ConfigError(
            f"{name} answers otherwise to a row when other rows stand beside it, as batch norm does; expected each row "
            "by itself, since batches of samplers and of training differ: use LayerNorm or GroupNorm"
        )


def _of_images(spec: Tree) -> str:
    """The line that turns a recorded image into the input of a Conv2d; "" without one."""
    images: list[LeafSpec] = [x for x in tree_leaves(spec) if x.kind == "box" and len(x.shape) == 3]
    lines: set[str] = set()
    for leaf in images:
        turned = ".permute(0, 3, 1, 2)" if channel_axis(leaf.shape, "auto") == "last" else ""
        lines.add(f"x{turned}{'.float() / 255' if leaf.dtype == 'uint8' else ''}")
    return f"; for a Conv2d: x = {min(lines)}" if lines - {"x"} else ""


def _check_form(name: str, found: Any, wanted: tuple[int | str, ...], spec: Tree) -> None:
    """Raises ConfigError unless an answer is a float32 tensor of this shape with finite numbers."""
    known = [x for x in wanted if isinstance(x, int)]
    if (
        not isinstance(found, Tensor)
        or found.ndim != len(wanted)
        or [n for n, x in zip(found.shape, wanted) if isinstance(x, int)] != known
    ):
        seen = f"shape {list(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
        raise ConfigError(
            f"{name} returned {seen} for {ROWS} observations of {describe(spec)}; expected a tensor "
            f"[{', '.join(map(str, wanted))}]"
        )
    if found.dtype is not torch.float32:
        raise ConfigError(f"{name} returned {found.dtype}; expected torch.float32: end its forward in .float()")
    if not bool(found.isfinite().all()):
        what = "NaN" if bool(found.isnan().any()) else "inf"
        raise ConfigError(
            f"{name} returned {what} for observations within their bounds; expected finite numbers: look for a "
            "division by 0, a log of 0, or damaged weights"
        )


def _example(leaf: LeafSpec, rows: int) -> Tensor:
    fraction = (np.arange(rows * leaf.size).reshape(rows, *leaf.shape) * _STEP) % 1.0
    if leaf.kind == "box":
        low, high = leaf.first_range()
        values = low + fraction * (high - low)
    elif leaf.kind == "multi_binary":
        values = fraction > 0.5
    else:
        values = np.asarray(leaf.start).reshape(-1) + fraction.reshape(rows, -1) * np.asarray(leaf.sizes)
        values = np.floor(values).reshape(rows, *leaf.shape)
    values = values.astype(leaf.dtype)
    values[0] = leaf.null()
    return torch.from_numpy(values)


def _differ(a: Tensor, b: Any) -> bool:
    return not isinstance(b, Tensor) or a.shape != b.shape or not torch.allclose(a, b, _RTOL, _ATOL)


def _has_modes(module: nn.Module) -> bool:
    """True for a layer that computes otherwise in training."""
    kinds = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)  # pyright: ignore
    return isinstance(module, kinds) and module.training
