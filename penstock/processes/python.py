"""Command lines and environment variables of the Python processes that penstock starts; all of them are made here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import penstock.core.errors as errors

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment variables of a process whose libraries use one thread."""


def module_command(module: str, *args: str) -> list[str]:
    """`python -P -m MODULE ARGS`. With -P the current folder is no place for modules: a torch.py in it is not torch."""
    return [sys.executable, "-P", "-m", module, *args]


def child_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables, by default those of this process, by which a child finds the penstock that runs here."""
    parent = str(Path(errors.__file__).parent.parent.parent)
    path = os.pathsep.join([parent, *filter(None, [variables.get("PYTHONPATH")])])
    return {**variables, "PYTHONPATH": path}


def one_thread_environment() -> dict[str, str]:
    """The same, for a process whose libraries use one thread."""
    return {**child_environment(), **ONE_THREAD}
