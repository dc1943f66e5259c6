"""The answers of worker processes as bytes: JSON, then arrays. Reading them runs no code, unlike unpickling."""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import fields
from typing import Any

import numpy as np

from penstock.core.batch import MultiAgentBatch, SampleBatch

_HEAD = struct.Struct("<Q")
_ALIGNMENT = 8


def encode(value: Any) -> bytes:
    """The bytes of nested dicts, lists, tuples, numbers, text, bytes, None, arrays and sample batches.

    Raises:
        TypeError: there is anything else, such as an array of objects.
    """
    parts: list[bytes] = []
    text = json.dumps(_plain(value, parts)).encode()
    return b"".join([_HEAD.pack(len(text)), text, b" " * (-(len(text) + _HEAD.size) % _ALIGNMENT), *parts])


def decode(data: bytes | mmap.mmap) -> Any:
    """The inverse of `encode`, of bytes or a mapped file; arrays are copies, and tuples stay tuples."""
    (length,) = _HEAD.unpack_from(data)
    start = _HEAD.size + length
    return _value(json.loads(data[_HEAD.size : start]), memoryview(data)[start + (-start % _ALIGNMENT) :])


def _plain(value: Any, parts: list[bytes]) -> Any:
    if isinstance(value, SampleBatch):
        return {"$batch": {f.name: _plain(getattr(value, f.name), parts) for f in fields(value)}}
    if isinstance(value, MultiAgentBatch):
        return {"$batches": [_plain(dict(value), parts), value.env_steps, value.environments]}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise TypeError(f"an array of dtype {value.dtype} cannot be sent; numbers and bools can")
        return {"$array": [value.dtype.str, list(value.shape), _put(np.ascontiguousarray(value).tobytes(), parts)]}
    if isinstance(value, np.generic):
        return _plain(np.asarray(value), parts) | {"$scalar": True}
    if isinstance(value, bytes):
        return {"$bytes": [_put(value, parts), len(value)]}
    if isinstance(value, dict):
        if any(not isinstance(key, str) for key in value):
            return {"$items": [[_plain(k, parts), _plain(v, parts)] for k, v in value.items()]}
        return {key if key[:1] != "$" else f"${key}": _plain(item, parts) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [_plain(item, parts) for item in value]}
    if isinstance(value, list):
        return [_plain(item, parts) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be sent; arrays, numbers, text, bytes, dicts and lists can")


def _put(raw: bytes, parts: list[bytes]) -> int:
    """Where in the joined parts these bytes will lie."""
    at = sum(map(len, parts))
    parts.append(raw + b" " * (-len(raw) % _ALIGNMENT))
    return at


def _value(plain: Any, arrays: memoryview) -> Any:
    if isinstance(plain, list):
        return [_value(item, arrays) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$array" in plain:
        name, shape, at = plain["$array"]
        dtype = np.dtype(name)
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(arrays, dtype, count, at).reshape(shape).copy()
        return array[()] if plain.get("$scalar") else array
    if "$bytes" in plain:
        at, size = plain["$bytes"]
        return bytes(arrays[at : at + size])
    if "$batch" in plain:
        return SampleBatch(**{name: _value(item, arrays) for name, item in plain["$batch"].items()})
    if "$batches" in plain:
        batches, env_steps, environments = plain["$batches"]
        return MultiAgentBatch(_value(batches, arrays), env_steps, environments)
    if "$items" in plain:
        return {_value(key, arrays): _value(item, arrays) for key, item in plain["$items"]}
    if "$tuple" in plain:
        return tuple(_value(item, arrays) for item in plain["$tuple"])
    return {key[1:] if key[:2] == "$$" else key: _value(item, arrays) for key, item in plain.items()}
