"""TOML files of settings: read with care, and judged unless they are this user's own."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, legible
from penstock.run.files.foreign import foreign, refusal
from penstock.run.files.trust import VARIABLE, is_trusted, remember


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The tables of a TOML file, and the sha256 of its bytes. Raises ConfigError that names it."""
    try:
        data = path.read_bytes()
        return tomllib.loads(data.decode()), hashlib.sha256(data).hexdigest()
    except RecursionError as error:
        raise ConfigError(f"{legible(path)} is nested too deeply to be settings; take the brackets out") from error
    except (ValueError, LookupError, TypeError) as error:  # of tomllib, of bytes that are no text, of endless numbers
        raise ConfigError(f"{legible(path)} is not valid TOML: {error}; mend that line") from error
    except OSError as error:
        raise ConfigError(f"cannot read {legible(path)}: {error.strerror or error}") from error


def require_trust(path: Path, digest: str, settings: Mapping[str, Any], trust: bool) -> None:
    """Raises ConfigError if a file names code, and is neither this user's own nor one that the user vouches for.

    Args:
        digest: sha256 of the file. settings: what is taken from it, by dotted path. trust: the user vouches for it.
    """
    if trust:
        remember(path, digest)
    elif is_trusted(path, digest):
        return
    elif found := [text for where, value in settings.items() for text in foreign(value, where, files=False)]:
        raise ConfigError(
            f"{refusal(path, found)}If it is yours, or you know who wrote it: --trust, which is needed once for what "
            f"it holds now, or {VARIABLE}={legible(path.absolute().parent)}; see docs/security.md"
        )
