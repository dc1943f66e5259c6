"""TOML files of settings: read with care, and judged unless they are this user's own."""

from __future__ import annotations

import functools
import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, legible
from penstock.run.files.foreign import below, foreign, refusal
from penstock.run.files.trust import VARIABLE, is_trusted, remember

_MOST_BYTES = 1 << 20
_DEEPEST = 50
"""Tables and lists within each other, at most."""
_DOTTED = re.compile(rb"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){%d}""" % _DEEPEST)
"""A key of more parts: tomllib takes time by their square."""


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The tables of a TOML file, and the sha256 of its bytes. Raises ConfigError that names it."""
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ConfigError(f"{legible(path)} has {size:,} bytes; expected settings, at most {_MOST_BYTES:,}")
        data = path.read_bytes()
        if _DOTTED.search(data):
            raise RecursionError
        tables = tomllib.loads(data.decode("utf-8-sig"))
        _require_shallow(tables)
        return tables, hashlib.sha256(data).hexdigest()
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"{legible(path)} is nested too deeply to be settings; take the brackets out") from error
    except (ValueError, LookupError, TypeError) as error:  # of tomllib, of bytes that are no text, of endless numbers
        raise ConfigError(f"{legible(path)} is not valid TOML: {error}; mend that line") from error
    except OSError as error:
        raise ConfigError(f"cannot read {legible(path)}: {error.strerror or error}") from error


def require_trust(path: Path, digest: str, settings: Mapping[str, Any], trust: bool) -> None:
    """Raises ConfigError if a file names code, and is neither this user's own nor trusted.

    Args:
        digest: sha256 of the file. settings: settings taken from it, by dotted path. trust: the user trusts it.
    """
    if trust:
        remember(path, digest)
    elif is_trusted(path, digest):
        return
    elif found := [text for where, value in settings.items() for text in foreign(value, _named(where), files=False)]:
        raise ConfigError(
            f"{refusal(path, found)}If it is yours, or you know who wrote it: --trust, which is needed once for what "
            f"it holds now, or {VARIABLE}={legible(path.absolute().parent)}; see docs/security.md"
        )


def _require_shallow(tables: Any) -> None:
    """Raises RecursionError if there are more tables and lists within each other than settings have."""
    level = [tables]
    for _ in range(_DEEPEST):
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level = [item for part in parts for item in part]
        if not level:
            return
    raise RecursionError


def _named(path: str) -> str:
    """A dotted path of which each part that is no plain word stands as its `repr`."""
    return functools.reduce(below, path.split("."), "")
