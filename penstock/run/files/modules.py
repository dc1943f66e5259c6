"""Modules that words and files name, and their place: the current folder, if they lie nowhere else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_NAMED = re.compile(r"(?<![\w.:/\\-])([A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*:(?=[A-Za-z_])")
"""`module:NAME`, wherever it stands in a text; no URL, no HOST:PORT, no device."""


def modules_named(plain: Any) -> set[str]:
    """The first parts of all modules that texts name as `module:NAME`, or that stand in lists of `imports`.

    Args:
        plain: a text, or texts in nested lists and mappings.
    """
    if isinstance(plain, str):
        return set(_NAMED.findall(plain)) - {"pettingzoo", "envpool"}
    if isinstance(plain, Mapping):
        imports = {str(key): item for key, item in plain.items() if str(key).rpartition(".")[2] == "imports"}
        words = [word for item in imports.values() if isinstance(item, (list, tuple)) for word in item]
        return {str(word).partition(".")[0] for word in words}.union(*map(modules_named, plain.values()))
    return set[str]().union(*map(modules_named, plain)) if isinstance(plain, (list, tuple)) else set()


def search_here(modules: Iterable[str]) -> None:
    """Has the current folder searched too, after all others, if one of these modules lies in it and nowhere else.

    So no file there stands in for an installed package, nor for one that an installed package asks for in vain.

    Args:
        modules: names of modules or packages without a dot.
    """
    if "" in sys.path:
        return
    for module in modules:
        if module.isidentifier() and module not in sys.modules and importlib.util.find_spec(module) is None:
            try:
                here = os.getcwd()
            except FileNotFoundError:  # it was removed
                return
            if importlib.machinery.PathFinder.find_spec(module, [here]) is not None:
                sys.path.append("")
                return
