"""The one codec of state, for files and between processes: JSON plus the bytes of arrays. Decoding runs no code.

A value is read back exactly as written, types included, or is refused. Accepted are None, bools, ints, floats, text,
bytes, numpy scalars and arrays, sample batches, and lists, tuples and dicts of these. Two exceptions: a subclass of
dict comes back as dict, and NaN without its payload. An `Extension` adds one type that is kept as an array.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.batch import MultiAgentBatch, SampleBatch

_HEAD = struct.Struct("<Q")
_ALIGNMENT = 8
_KINDS = "biufcSU"
"""Kinds of numpy's dtypes. Objects are left out: their bytes are addresses, and a forged address would be followed."""
_MOST_BITS = 1 << 13
"""Most bits of an int: Python reads no decimal number of more than 4,300 digits."""
_Path = tuple[Any, ...]
"""The keys that lead to a value, the innermost first: (key, (key, ...)); formatted only if something is refused."""


class Extension(NamedTuple):
    """A type that is stored as an array."""

    to_array: Callable[[Any], tuple[Any, npt.NDArray[Any]] | None]
    """Returns plain data and a contiguous array, which may share the value's memory; None for other types."""
    from_array: Callable[[Any, npt.NDArray[Any]], Any]
    """Inverse of `to_array`; the value owns its array. Raises ValueError, TypeError or RuntimeError on malformed
    data."""


class Packed(NamedTuple):
    """A value as text and bytes."""

    text: bytes
    """JSON in ASCII, with the place of each array in the bytes."""
    parts: list[bytes | memoryview]
    """The bytes in order. They share memory with the value: write them before it changes."""
    size: int
    """Sum of their lengths."""


def pack(value: Any, name: str = "value", extension: Extension | None = None) -> Packed:
    """A value as JSON and bytes.

    Raises:
        TypeError: it holds another type, such as an array of objects; says where, beginning with `name`.
    """
    writer = _Writer(name, extension)
    text = json.dumps(writer.plain(value, ()), allow_nan=False, separators=(",", ":")).encode()
    return Packed(text, writer.parts, writer.size)


def unpack(text: bytes, data: npt.NDArray[np.uint8], extension: Extension | None = None) -> Any:
    """Inverse of `pack`; `data` is [n] uint8, and arrays are copied from it.

    Raises:
        ValueError, TypeError, LookupError, RuntimeError, RecursionError: `pack` did not write these. Arrays never take
            more memory than `data` has.
    """
    reader = _Reader(data, extension)
    try:
        return reader.value(json.loads(text))
    except (AttributeError, OverflowError, SyntaxError) as error:
        raise ValueError(f"this is no value as penstock writes them: {error}") from error


def encode(value: Any, name: str = "value", extension: Extension | None = None) -> bytes:
    """The result of `pack` in one piece. Raises TypeError."""
    text, parts, _ = pack(value, name, extension)
    return b"".join([_HEAD.pack(len(text)), text, b" " * (-(len(text) + _HEAD.size) % _ALIGNMENT), *parts])


def decode(data: bytes | mmap.mmap, extension: Extension | None = None) -> Any:
    """Inverse of `encode`, of bytes or a mapped file; errors as in `unpack`."""
    if len(data) < _HEAD.size:
        raise ValueError(f"{len(data)} bytes are no value; expected {_HEAD.size} or more")
    (length,) = _HEAD.unpack_from(data)
    start = _HEAD.size + length
    rest = memoryview(data)[start + (-start % _ALIGNMENT) :]
    return unpack(data[_HEAD.size : start], np.frombuffer(rest, np.uint8), extension)


def _is_plain_array(value: Any) -> bool:
    """True for a numpy scalar or array; False for array subclasses that hold more, such as a mask."""
    return isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap)


class _Writer:
    def __init__(self, name: str, extension: Extension | None) -> None:
        self.parts: list[bytes | memoryview] = []
        self.size = 0
        self._name, self._extension = name, extension

    def plain(self, value: Any, path: _Path) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str or (kind is int and value.bit_length() <= _MOST_BITS):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, dict):
            if any(type(key) is not str for key in value):
                items = value.items()
                return {"$items": [[self.plain(k, (k, path)), self.plain(v, (k, path))] for k, v in items]}
            return {key if key[:1] != "$" else f"${key}": self.plain(v, (key, path)) for key, v in value.items()}
        if kind is list:
            return [self.plain(item, (i, path)) for i, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.plain(item, (i, path)) for i, item in enumerate(value)]}
        if kind is bytes:
            return {"$bytes": [self._put(np.frombuffer(value, np.uint8)), len(value)]}
        if _is_plain_array(value) and value.dtype.kind in _KINDS:
            tag, array = "$array" if isinstance(value, np.ndarray) else "$scalar", np.asarray(value)
            return {tag: [array.dtype.str, list(array.shape), self._put(np.ascontiguousarray(array))]}
        if isinstance(value, SampleBatch):
            held = {f.name: getattr(value, f.name) for f in fields(value)}
            if value.final is None:  # as batches were written before there was one
                del held["final"]
            return {"$batch": {name: self.plain(x, (name, path)) for name, x in held.items()}}
        if isinstance(value, MultiAgentBatch):
            return {"$batches": [self.plain(dict(value), path), value.env_steps, value.environments]}
        if self._extension is not None and (found := self._extension.to_array(value)) is not None:
            return {"$own": [self.plain(found[0], path), self.plain(found[1], path)]}
        raise TypeError(
            f"{self._where(path)} is {kind.__module__}.{kind.__qualname__} {value!r:.60}, which can be neither stored "
            "nor sent; expected dict, list, tuple, numpy array or scalar, int, float, str, bytes, bool or None"
        )

    def _put(self, array: npt.NDArray[Any]) -> int:
        """Appends the bytes of a contiguous array; returns their offset in the joined parts."""
        at = self.size
        if array.nbytes:
            self.parts.append(array.reshape(-1).view(np.uint8).data)
            self.parts.append(b" " * (-array.nbytes % _ALIGNMENT))
            self.size += array.nbytes + -array.nbytes % _ALIGNMENT
        return at

    def _where(self, path: _Path) -> str:
        text = ""
        while path:
            key, path = path
            text = f"[{key!r}]{text}"
        return self._name + text


class _Reader:
    def __init__(self, data: npt.NDArray[np.uint8], extension: Extension | None) -> None:
        if data.dtype != np.uint8 or data.ndim != 1:
            raise ValueError(f"the bytes are an array {data.dtype}{list(data.shape)}; expected one axis of uint8")
        self._data, self._left, self._extension = data, len(data), extension

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        tag = next(iter(plain), "")
        if tag[:1] != "$" or tag[1:2] == "$":
            return {key[1:] if key[:2] == "$$" else key: self.value(item) for key, item in plain.items()}
        found = plain[tag]
        match tag:
            case "$array":
                return self._array(*found)
            case "$scalar":
                return self._array(*found)[()]
            case "$bytes":
                return self._array("|u1", [found[1]], found[0]).tobytes()
            case "$float":
                return float(found)
            case "$tuple":
                return tuple(self.value(item) for item in found)
            case "$items":
                return {self.value(key): self.value(item) for key, item in found}
            case "$batch":
                return SampleBatch(**{name: self.value(item) for name, item in found.items()})
            case "$batches":
                return MultiAgentBatch(self.value(found[0]), *found[1:])
            case "$own" if self._extension is not None:
                return self._extension.from_array(*(self.value(item) for item in found))
            case _:
                raise ValueError(f"{tag!r} is no type of value")

    def _array(self, name: str, shape: list[int], at: int) -> npt.NDArray[Any]:
        """A copy of the array at an offset. All together are no larger than the data, so that none is there twice."""
        dtype = np.dtype(str(name))
        size = math.prod(shape) * dtype.itemsize
        if dtype.kind not in _KINDS or not dtype.itemsize or min(shape, default=0) < 0:  # numpy turns size 0 into 1
            raise ValueError(f"an array of dtype {dtype}, shape {shape} is not allowed")
        self._left -= size
        if self._left < 0 or not 0 <= at <= len(self._data) - size:
            raise ValueError(
                f"an array {dtype}{shape} takes {size:,} bytes from byte {at:,} on; expected arrays that fit into the "
                f"{len(self._data):,} bytes of data together"
            )
        array = np.empty(shape, dtype)
        if size:
            array.reshape(-1).view(np.uint8)[...] = self._data[at : at + size]
        return array
