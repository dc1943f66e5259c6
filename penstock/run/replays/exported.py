"""Verification of an exported replay, and its summary."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.files import open_stored
from penstock.run.replays.export import ABOUT, FORMAT

_CHUNK_BYTES = 1 << 24
_MAX_ABOUT_BYTES = 1 << 26
_AGAIN = "copy it again, or export it anew"

Opener = Callable[[str], IO[bytes]]


def exported(path: Path) -> tuple[dict[str, str], list[tuple[str, str, str, str]]] | None:
    """Reads and verifies an export: its summary, and name, dtype, shape and bytes of each array; None if it is none.

    Raises:
        ConfigError: it was not written by `export`. CheckpointError: it is damaged; names the array.
    """
    try:
        if path.is_dir():
            # about.json comes last, so an export without it was never whole, or has lost it.
            if not (path / ABOUT).is_file() and not (path / "row.npy").is_file():
                return None
            return _read(path, lambda name: open_stored(path / name, path))
        if not path.is_file() or not (path.suffix == ".npz" or zipfile.is_zipfile(path)):
            return None
        with zipfile.ZipFile(path) as file:
            if path.suffix != ".npz" and ABOUT not in file.namelist():  # such as the state.pt of a checkpoint
                return None
            return _read(path, file.open)
    except (ConfigError, CheckpointError):
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is damaged or was cut short, as the index at its end cannot be read ({error}); {_AGAIN}"
        ) from error
    except Exception as error:  # whatever the parsers raise, the caller needs the file's name
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}); {_AGAIN}") from error


def _read(path: Path, opener: Opener) -> tuple[dict[str, str], list[tuple[str, str, str, str]]]:
    try:
        with opener(ABOUT) as file:
            about: Any = json.loads(file.read(_MAX_ABOUT_BYTES))
    except (KeyError, FileNotFoundError):
        raise ConfigError(
            f"{path} holds no {ABOUT}, which every exported replay has; if it was one, {_AGAIN}"
        ) from None
    seen = about.get("format") if isinstance(about, dict) else None
    if seen != FORMAT:
        raise ConfigError(f"{path} is no exported replay: its format is {seen!r}, expected {FORMAT!r}")
    table: list[tuple[str, str, str, str]] = []
    for name, entry in sorted(about["fields"].items()):
        _check(path, name, entry, opener)
        table.append((name, np.dtype(entry["dtype"]).name, str(entry["shape"]), f"{entry['bytes']:,}"))
    return {"format": FORMAT, **about["summary"]}, table


def _check(path: Path, name: str, entry: dict[str, Any], opener: Opener) -> None:
    """Reads an array. Raises CheckpointError if it differs from the array that was written."""
    digest, size, head = hashlib.sha256(), 0, b""
    most = int(entry["bytes"]) + _CHUNK_BYTES  # more would be another array: a packed one may be of any size
    where = f"{path} is damaged: {name}.npy"
    try:
        with opener(f"{name}.npy") as file:
            while size <= most and (chunk := file.read(_CHUNK_BYTES)):
                head = head or chunk
                digest.update(chunk)
                size += len(chunk)
        stream = io.BytesIO(head)
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    except (KeyError, FileNotFoundError):
        raise CheckpointError(f"{where} is missing; {_AGAIN}") from None
    except Exception as error:  # of zipfile's readers, numpy's parser or the disk
        raise CheckpointError(f"{where} cannot be read: {error}; {_AGAIN}") from error
    expected = (tuple(entry["shape"]), np.dtype(entry["dtype"]))
    if (shape, dtype) != expected:
        raise CheckpointError(f"{where} is {dtype}{list(shape)}, expected {expected[1]}{list(expected[0])}; {_AGAIN}")
    if size != (whole := stream.tell() + entry["bytes"]):
        raise CheckpointError(f"{where} has {size:,} bytes, expected {whole:,}: it was cut short or added to; {_AGAIN}")
    if digest.hexdigest() != entry["sha256"]:
        raise CheckpointError(
            f"{where} has sha256 {digest.hexdigest()[:12]}, expected {entry['sha256'][:12]}; {_AGAIN}"
        )
