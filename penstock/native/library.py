"""The library that kernel.c was built into, if it is there and this processor runs it."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

VARIABLE = "PENSTOCK_NATIVE"
"""Environment variable: 0 turns the library off, also in all processes that are started, so that torch and numpy
compute everything; avx512, avx2, neon or scalar choose instructions, for tests."""
VERSION = 3
"""Version of the order in which sums are made; libraries of one version give equal bits."""
_FUNCTIONS = 6
"""Version of what kernel.c can compute."""
TORCH = "torch"
"""Name of what computes without the library."""


_ADDRESS, _COUNT, _SIZE, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_double
_ARGUMENTS: dict[str, list[Any]] = {
    "forward": [_ADDRESS, _SIZE, _COUNT, *([_ADDRESS] * 3), _COUNT, _COUNT, _COUNT, *([_ADDRESS] * 3)],
    "last": [_ADDRESS, _SIZE, _COUNT, _ADDRESS, _ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS],
    "backward": [
        *(_ADDRESS, _SIZE, _COUNT, _ADDRESS, _ADDRESS, _COUNT, _COUNT, _COUNT),
        *([_ADDRESS] * 10),
    ],
    "layer_norm": [_ADDRESS, _SIZE, _COUNT, *([_ADDRESS] * 5)],
    "layer_norm_back": [_ADDRESS, _SIZE, _COUNT, *([_ADDRESS] * 6)],
    "apply": [_COUNT, _ADDRESS, _SIZE, _ADDRESS],
    "squares": [_COUNT, _ADDRESS, _ADDRESS, _ADDRESS],
    "adam": [_COUNT, *([_ADDRESS] * 6), *([_DOUBLE] * 5), _COUNT],
    "rmsprop": [_COUNT, *([_ADDRESS] * 4), *([_DOUBLE] * 4)],
    "tree_set": [_COUNT, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS],
    "tree_find": [_COUNT, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS],
    "orthonormal": [_ADDRESS, _SIZE, _SIZE],
    "log_softmax": [_ADDRESS, _SIZE, _COUNT, _ADDRESS],
    "categorical": [_ADDRESS, _SIZE, _COUNT, _ADDRESS, _ADDRESS, ctypes.c_int64, _ADDRESS, _ADDRESS],
    "gaussian": [_ADDRESS, _SIZE, _COUNT, *([_ADDRESS] * 4), _COUNT, _ADDRESS, _ADDRESS],
    "control": [_ADDRESS, _SIZE, _COUNT, _COUNT, ctypes.c_float, *([_ADDRESS] * 4)],
    "act": [_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS],
}
"""The arguments of each function of kernel.c; none returns anything."""


def kernel() -> str:
    """What computes dense layers here: `native 1`, or `torch`. Processes of one run must agree."""
    return TORCH if found is None else f"native {VERSION}"


def why() -> str:
    """The instructions that the library uses, or why there is none, for people."""
    return loaded()[1]


@functools.cache
def loaded() -> tuple[Any, str]:
    """The library or None, and its instructions or why there is none."""
    asked = os.environ.get(VARIABLE, "1")
    if asked == "0":
        return None, f"{VARIABLE}=0 turns it off"
    file = Path(__file__).with_name("_kernel.so")
    if not file.exists():
        return None, "it was not built: the installation found no C compiler"
    try:
        library = ctypes.CDLL(str(file))
        if library.version() != _FUNCTIONS:
            return None, f"{file.name} was built from another version: install penstock again"
        library.choose.restype = ctypes.c_char_p
        chosen = library.choose(("" if asked in ("", "1") else asked).encode())
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
    except (OSError, AttributeError) as error:
        return None, f"{file.name} cannot be loaded, install penstock again: {error}"
    if chosen is None:
        return None, f"this processor lacks {'fused multiply-add' if asked in ('', '1') else asked}"
    return library, chosen.decode()


found = loaded()[0]
"""The library, or None without one; looked up once, where a process begins."""
