"""Settings as TOML, which Python reads and does not write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_table(name: str, entries: Mapping[str, Any]) -> list[str]:
    """The lines of one table; tables within it are written in line. None is the text "none", which `override` reads."""
    return [f"[{json.dumps(name, ensure_ascii=False)}]", *(f"{_key(key)} = {_value(v)}" for key, v in entries.items())]


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(key))} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if value is None:
        return '"none"'
    text = json.dumps(str(value), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # which JSON lets stand and TOML does not
