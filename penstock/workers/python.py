"""Command lines of the Python processes that penstock starts; all of them are made here."""

from __future__ import annotations

import sys


def module_command(module: str, *args: str) -> list[str]:
    """`python -P -m MODULE ARGS`. With -P the current folder is no place for modules: a torch.py in it is not torch."""
    return [sys.executable, "-P", "-m", module, *args]


def script_command(path: str, *args: str) -> list[str]:
    """`python -I -S PATH ARGS`: without site packages, which starts in milliseconds; -I implies -P."""
    return [sys.executable, "-I", "-S", path, *args]
