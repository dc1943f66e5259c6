"""The library that kernel.c was built into, if it is there and this processor runs it."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

VARIABLE = "PENSTOCK_NATIVE"
"""Environment variable: 1 turns the library on, also in all processes that are started; avx512, avx2, neon or scalar
choose instructions besides, for tests. Without it, or with 0, torch and numpy compute everything."""
VERSION = 2
"""Version of the order in which sums are made; libraries of one version give equal bits."""
TORCH = "torch"
"""Name of what computes without the library."""


def kernel() -> str:
    """What computes dense layers here: `native 1`, or `torch`. Processes of one run must agree."""
    return TORCH if found is None else f"native {VERSION}"


def why() -> str:
    """The instructions that the library uses, or why there is none, for people."""
    return loaded()[1]


@functools.cache
def loaded() -> tuple[Any, str]:
    """The library or None, and its instructions or why there is none."""
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "0"):
        return None, f"{VARIABLE}=1 turns the native kernel on"
    files = sorted(Path(__file__).parent.glob("_kernel*.so"))
    if not files:
        return None, "it was not built: the installation found no C compiler"
    try:
        library = ctypes.CDLL(str(files[0]))
        library.choose.restype = ctypes.c_char_p
        chosen = library.choose(("" if asked == "1" else asked).encode())
    except (OSError, AttributeError) as error:
        return None, f"{files[0].name} cannot be loaded: {error}"
    if chosen is None:
        return None, f"this processor lacks {'fused multiply-add' if asked == '1' else asked}"
    address, count, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    library.forward.argtypes = [address, size, count, address, address, address, count, count, count, address]
    library.backward.argtypes = [
        *(address, size, count, address, address, count, count, count, address),
        *(address, address, address, address, address, address),
    ]
    library.apply.argtypes = [count, address, size, address]
    library.squares.argtypes = [count, address, address, address]
    library.adam.argtypes = [count, *([address] * 6), *([ctypes.c_double] * 5), count]
    library.rmsprop.argtypes = [count, *([address] * 4), *([ctypes.c_double] * 4)]
    library.orthonormal.argtypes = [address, size, size]
    library.log_softmax.argtypes = [address, size, count, address]
    library.categorical.argtypes = [address, size, count, address, address, ctypes.c_int64, address, address]
    library.gaussian.argtypes = [address, size, count, *([address] * 4), count, address, address]
    library.control.argtypes = [address, size, count, count, ctypes.c_float, *([address] * 4)]
    for function in (
        "forward",
        "backward",
        "apply",
        "orthonormal",
        "log_softmax",
        "categorical",
        "gaussian",
        "control",
    ):
        library[function].restype = None
    return library, chosen.decode()


found = loaded()[0]
"""The library, or None without one; looked up once, where a process begins."""
