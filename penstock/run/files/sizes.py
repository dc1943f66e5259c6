"""Sizes in the settings of a stranger's run, checked before anything of that size is allocated or started."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core.errors import CheckpointError
from penstock.core.machine import free_memory
from penstock.core.spec import EnvSpec
from penstock.core.tree import tree_leaves
from penstock.run.experiment import Experiment
from penstock.run.files.stored_experiment import StoredConfig

_SPARE_BYTES = 1 << 20
_SLOT_BYTES = 1 << 12
"""Least memory of an environment, in bytes."""
_PER_CORE = 64
"""Most processes or threads for a core."""
_CALLS, _CALLS_EACH = 2_000, 200
"""Operations of torch that building a policy may take, and those for each stored parameter besides."""
_COUNTED = {"arange", "linspace", "eye", "logspace"}
"""Functions of torch whose size is a number, not a list."""


@contextlib.contextmanager
def limit_tensor_size(parameters: Mapping[str, torch.Tensor], path: Path) -> Generator[None]:
    """Refuses networks larger than the parameters that are stored: in the block CheckpointError is raised for tensors
    of more elements than all of them have bytes, and for many more operations than so few take to be made.
    """
    stored_bytes = sum(x.nbytes for x in parameters.values())
    with _Limit(stored_bytes + _SPARE_BYTES, _CALLS + _CALLS_EACH * len(parameters), path):
        yield


class _Limit(TorchDispatchMode):
    def __init__(self, limit: int, calls: int, path: Path) -> None:
        super().__init__()
        self._limit, self._calls, self._path = limit, calls, path

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._calls -= 1
        if self._calls < 0:
            raise CheckpointError(
                f"{self._path} asks for networks of far more parts than the parameters that are stored; net was "
                "changed: copy it again"
            )
        named = func.overloadpacket.__name__ in _COUNTED
        for value in args:
            shape = value if isinstance(value, (list, tuple)) else [value] if named else []
            if shape and all(isinstance(n, int) for n in shape) and math.prod(shape) > self._limit:
                raise CheckpointError(
                    f"{self._path} asks for a tensor {list(shape)} of more elements than all stored parameters have "
                    f"bytes ({self._limit:,}); net or spec were changed: copy it again"
                )
        return func(*args, **(kwargs or {}))


def check_batch(exp: Experiment, stored: StoredConfig, pending: Any = None) -> None:
    """Raises CheckpointError if a batch and its environments do not fit into memory.

    Args:
        pending: an evaluation that a checkpoint says is under way.
    """
    T, B = exp.sampler_settings.spec
    specs = [stored.spec] if isinstance(stored.spec, EnvSpec) else stored.spec.values()
    leaves = [(leaf, spec.agents) for spec in specs for leaf in tree_leaves((spec.obs, spec.action))]
    row = sum(leaf.size * np.dtype(leaf.dtype).itemsize * agents for leaf, agents in leaves)
    free, depth = free_memory(), exp.sampler_settings.depth
    store = exp.sampler_settings.object_store_mb
    slots = min(exp.run.eval_slots, exp.run.eval_episodes)
    if pending is not None:
        slots = max(slots, min(pending["slots"], pending["episodes"]))
    for what, size in (
        (f"sampler.T={T}, B={B}, depth={depth} need", B * ((depth + 1) * T * row + _SLOT_BYTES)),
        (f"run.eval_slots={slots} need", slots * (row + _SLOT_BYTES)),
        (f"sampler.object_store_mb={store} is", store * 1e6),
    ):
        if size > free:
            raise CheckpointError(f"{stored.path}: {what} {size / 1e9:,.1f} GB; free is {free / 1e9:,.1f} GB")


def check_processes(exp: Experiment, stored: StoredConfig) -> None:
    """Raises CheckpointError if more processes or threads are asked for than this machine can run."""
    settings = exp.sampler_settings
    playing = settings.inner or settings
    most = _PER_CORE * (os.cpu_count() or 1)
    counts = {
        "sampler.runners": settings.runners,
        "sampler.workers": max(settings.runners, 1) * playing.workers,
        "sampler.groups": playing.groups,
        "algo.replay.shards": max(
            getattr(getattr(algo, "replay", None), "shards", 0)
            for algo in getattr(exp.algo, "algos", {"": exp.algo}).values()
        ),
        "run.learner_threads": exp.run.learner_threads,
        "run.learners": exp.run.learners,
        "run.eval_workers": exp.run.eval_workers,
    }
    for name, value in counts.items():
        if isinstance(value, int) and value > most:
            raise CheckpointError(f"{stored.path}: {name}={value:,}; expected at most {most:,} on this machine")
