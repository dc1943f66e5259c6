"""The memory or files of a replay's arrays, and its tensors, reserved only if there is room for all of them."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from penstock.core.errors import ConfigError
from penstock.core.machine import free_memory
from penstock.replay.columns import Array, DeviceMemory, Plan

_SHARE = 0.9
"""Share of free memory that a replay may take, as a run needs more than the arrays."""


def planned_bytes(plan: Plan) -> int:
    """Bytes of all arrays of a plan."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in plan.values())


def gigabytes(count: int) -> str:
    """For people: `7.07 GB`, `28,240 GB`."""
    return f"{count / 1e9:,.0f} GB" if count >= 1e11 else f"{count / 1e9:.3g} GB"


def reserve(
    plan: Plan,
    folder: Path | None,
    rows: int,
    spare_rows: int,
    memory: DeviceMemory | None = None,
    there: Collection[str] = (),
) -> dict[str, Any]:
    """Zeroed arrays by name: in memory, allocated on first write, or in files, allocated now.

    The files have no names, so they are gone with the process however it ends, and runs that share a folder do not
    share files.

    Args:
        folder: None for memory. rows: of all slots, for messages. spare_rows: rows of a ring beyond its capacity.
        there: names of those that are tensors in `memory`.

    Raises:
        ConfigError: there is less room; says how much there is, and which capacity fits.
    """
    left = None if memory is None else memory.free
    away = 0 if left is None else planned_bytes({name: plan[name] for name in there})
    instead = ", replay.device='cpu' with replay.dir" if there else ", replay.dir or replay.deduplicate_frames"
    if folder is None:
        free, what = free_memory(), "memory"
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free, what, instead = psutil.disk_usage(os.fspath(folder)).free, f"space in {folder}", ""
        except OSError as error:
            raise ConfigError(
                f"replay.dir={os.fspath(folder)!r}: {error}; name a directory that can be written"
            ) from error
    parts = [(planned_bytes(plan) - away, free, what, instead)]
    if memory is not None and left is not None:
        parts.append((away, left, f"the memory of {memory.device}", ", replay.device='cpu'"))
    seen = advice = ""
    for needed, free, what, instead in parts:
        per_row = needed / rows
        fits = int(free * _SHARE / per_row) - spare_rows
        advice = (f"use replay.capacity <= {fits}" if fits > 0 else "free some") + instead
        seen = (
            f"replay of {rows:,} rows x {per_row:,.0f} B needs {gigabytes(needed)}; free is {gigabytes(free)} of {what}"
        )
        if needed > free:
            raise ConfigError(f"{seen}; {advice}")
    try:
        return {
            name: _array(folder, shape, dtype) if memory is None or name not in there else memory.zeros(shape, dtype)
            for name, (shape, dtype) in plan.items()
        }
    except (MemoryError, OSError) as error:
        raise ConfigError(f"{seen}, and yet: {error}; {advice}") from error


def _array(folder: Path | None, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    if folder is None:
        return np.zeros(shape, dtype)
    size = max(1, math.prod(shape) * dtype.itemsize)
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # elsewhere numpy makes the file as long, and `reserve` has looked for room
            # Taken now: a disk that fills up under a mapped file kills the process.
            os.posix_fallocate(file.fileno(), 0, size)
        return np.memmap(file, dtype, "r+", shape=shape)
