"""Arrays in memory that processes share, an anonymous file (memfd) that ends with the last of them."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.machine import free_memory
from penstock.core.tree import Tree, tree_leaves, tree_map

_ALIGNMENT = 64
"""Bytes of a cache line: two leaves, which two processes may write, never share one."""


@dataclass(frozen=True)
class Place:
    """The position of one leaf in shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


def places(tree: Tree) -> tuple[Tree, int]:
    """A tree of `Place` for the arrays of `tree`, one after the other, and the number of bytes in all.

    Overlapping views of one array would each get memory of their own: pass the array, and take views again.
    """
    end = 0

    def place(x: Any) -> Place:
        nonlocal end
        at = end
        end = at + -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        return Place(at, x.shape, x.dtype.str)

    return tree_map(place, tree), max(end, _ALIGNMENT)


def open_memory(name: str) -> int:
    """The descriptor of an empty anonymous file; processes that inherit it see the size it gets later."""
    return os.memfd_create(f"penstock-{name}", os.MFD_CLOEXEC)


def share(fd: int, tree: Tree, what: str) -> tuple[Tree, Tree]:
    """Copies arrays into shared memory; returns the tree of their places and the tree of the arrays there.

    Args:
        what: the arrays' name in messages.

    Raises:
        ConfigError: there is too little memory; checked before any is taken.
    """
    where, size = places(tree)
    free = free_memory()
    if size > free:
        raise ConfigError(
            f"{what} needs {size:,} bytes of shared memory, and {free:,} are free; use T or B smaller by a factor "
            f"of {size / max(free, 1):.1f}, or smaller observations"
        )
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise ConfigError(
            f"{what} needs {size:,} bytes of shared memory: {error.strerror}; use a smaller T or B"
        ) from None
    there = view(fd, where)
    for x, y in zip(tree_leaves(there), tree_leaves(tree)):
        x[...] = y
    return where, there


def view(fd: int, where: Tree) -> Tree:
    """The arrays at these places, in this process; they outlive `fd`."""
    memory = mmap.mmap(fd, 0)
    return tree_map(
        lambda p: np.frombuffer(memory, np.dtype(p.dtype), _count(p.shape), p.offset).reshape(p.shape), where
    )


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
