"""Acting in one call of the native kernel: a network of plain layers on flat observations, and a head.

The agent's own `act` computes the same bits by more calls (dense.py, heads.py); this is for rows of a batch, which are
served in their place, and for `predict`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor

from penstock.native import dense, library

Head: TypeAlias = Literal["categorical", "gaussian", "squashed", "point", "control", "greedy"]
_HEADS: dict[Head, int] = {"categorical": 0, "gaussian": 1, "squashed": 2, "point": 3, "control": 4, "greedy": 5}
_POINTER = ctypes.c_void_p
_FLOAT32, _INT64 = np.dtype(np.float32), np.dtype(np.int64)


class _Plan(ctypes.Structure):
    """`struct Acting` of kernel.c."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("head", "layers", "activation", "n")),
        *((name, _POINTER) for name in ("width", "parameter", "mean", "scale")),
        ("clip", ctypes.c_double),
        *((name, _POINTER) for name in ("log_std", "center", "half")),
        ("start", ctypes.c_int64),
        ("spread", ctypes.c_float),
        ("epsilon", _POINTER),
        ("epsilons", ctypes.c_long),
        ("norm", _POINTER),
        ("evaluates", ctypes.c_int),
        ("evaluated", ctypes.c_float),
    ]


class Acting:
    """How an agent acts, with its parameters of the moment, where they lie.

    Args:
        weights: weight and bias of each layer in turn, which fit (`dense.fit`); no activation after the last.
        norms: gain and shift in turn of the LayerNorm before each activation, which fit too (`dense.norms_fit`).
        n: choices, or elements of a box. given: numbers and tensors by their names in `struct Acting`, float32 [n], and
            float64 [inputs] of a normaliser.
    """

    def __init__(
        self, weights: Sequence[Tensor], norms: Sequence[Tensor], activation: str, head: Head, n: int, **given: Any
    ) -> None:
        layers = len(weights) // 2
        widths = dense.as_ints((weights[0].shape[1], *[w.shape[0] for w in weights[::2]]))
        parameters = dense.addresses(weights)
        numbers = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in given.items()}
        at = ctypes.addressof(widths), ctypes.addressof(parameters)
        of_norms = dense.addresses(norms)
        if norms:
            numbers["norm"] = ctypes.addressof(of_norms)
        plan = _Plan(_HEADS[head], layers, dense.ACTIVATIONS[activation], n, *at, **numbers)
        self._held = plan, widths, parameters, weights, of_norms, norms, given  # the kernel reads all of these
        self._at = ctypes.addressof(plan)
        self._inputs, self._noise = widths[0], {"categorical": 1, "greedy": 3}.get(head, n)
        chooses = head in ("categorical", "greedy")
        self.dtype = _INT64 if chooses else _FLOAT32
        """The dtype that arrays of actions must have."""
        self._size, self._has_logp = 1 if chooses else n, head in ("categorical", "gaussian", "squashed")

    def rows(self, obs: Any, action: Any, logp: Any, noise: Any) -> Callable[[int], None] | None:
        """A function that acts for row t: reads obs[t] and noise[t], and writes action[t] and logp[t].

        Args:
            obs: [T, n, inputs] float32. action: [T, n, *A]. logp: [T, n] float32, unread by heads without. noise:
                [T, n, numbers] float32; None: without noise.

        Returns:
            None where the arrays are others, or n rows do not lie one after another.
        """
        n = obs.shape[1] if isinstance(obs, np.ndarray) and obs.ndim > 1 else -1
        if (
            not _lies(obs, _FLOAT32, n, self._inputs)
            or not _lies(action, self.dtype, n, self._size)
            or (self._has_logp and not _lies(logp, _FLOAT32, n, 1))
            or not (noise is None or _lies(noise, _FLOAT32, n, self._noise))
        ):
            return None
        act = library.found.act
        (x, dx), (u, du), (a, da), (p, dp) = map(_rows_at, (obs, noise, action, logp))

        def serve(t: int) -> None:
            act(self._at, x + t * dx, n, u + t * du, a + t * da, p + t * dp)

        return serve

    def once(self, obs: Any, noise: Any, shape: tuple[int, ...]) -> Any:
        """Actions [n, *shape] for observations [n, inputs] and noise [n, numbers] or None, as `rows` has them."""
        n = len(obs)
        action, logp = np.empty((n, *shape), self.dtype), np.empty(n, np.float32)
        (x, _), (u, _), (a, _), (p, _) = map(_rows_at, (obs, noise, action, logp))
        library.found.act(self._at, x, n, u, a, p)
        return action


def _lies(x: Any, dtype: Any, n: int, size: int) -> bool:
    """True for an array [T, n, ...] of n rows of `size` numbers, one after another."""
    if type(x) is not np.ndarray or x.dtype != dtype or x.shape[1:2] != (n,):
        return False
    row = x[:1]  # numpy's flag asks for no strides of dimensions of one or none
    return row.flags.c_contiguous and math.prod(row.shape[2:]) == size


def _rows_at(x: Any) -> tuple[int, int]:
    """Where row 0 of an array lies and the bytes to the next; 0 of None."""
    return (0, 0) if x is None else (x.__array_interface__["data"][0], x.strides[0])
