"""MANIFEST.json, the sizes and sha256 of a checkpoint's files, and the verification of both."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.errors import CheckpointError
from penstock.core.files import open_stored, read_stored, require_inside
from penstock.run.files.stored_experiment import FORMAT, require_format

MANIFEST, STATE, STATE_ARRAYS, POLICY = "MANIFEST.json", "state.json", "state.npy", "policy.safetensors"
_ALWAYS = {STATE, STATE_ARRAYS, POLICY}
_MAX_MANIFEST_BYTES = 1 << 20
ARRAY_FILE = "replay-{:03d}.npy"
_ARRAY = re.compile(r"replay-\d{3,}\.npy")
_Signature = tuple[tuple[str, int, int, int], ...]
_SEEN_GOOD: dict[Path, _Signature] = {}
"""Checkpoints that this process has read in full, with the `stat` of their files then."""


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json in the checkpoint directory `path`."""

    path: Path
    step: int
    score: float | None
    """The mean return in evaluation, by which `best` is chosen; None if there was none."""
    files: Mapping[str, Mapping[str, Any]]
    """By file: `size` in bytes, `sha256`, and of a replay's array its `name`."""
    versions: Mapping[str, str]
    """Versions of the packages that wrote it."""
    replay_dropped: bool = False
    """True if its replay was removed; the policy is whole."""
    policy_only: bool = False
    """True if it never held more than a policy that an evaluation found best; nothing can be resumed from it."""

    @property
    def arrays(self) -> dict[str, Path]:
        """The file of each array of the replay, by the array's name."""
        return {entry["name"]: self.path / file for file, entry in self.files.items() if _ARRAY.fullmatch(file)}


def manifest_bytes(
    step: int,
    score: float | None,
    files: Mapping[str, Mapping[str, Any]],
    versions: Mapping[str, str] | None = None,
    *,
    replay_dropped: bool = False,
    policy_only: bool = False,
) -> bytes:
    """The canonical text of a manifest; it holds a hash of itself, so that a flipped bit in it is found too.

    Args:
        versions: None for those of this process.
    """
    return _canonical(
        {
            "format": FORMAT,
            "step": int(step),
            "score": float(score) if score is not None and math.isfinite(score) else None,
            "files": files,
            "versions": _versions() if versions is None else versions,
            **({"replay_dropped": True} if replay_dropped else {}),
            **({"policy_only": True} if policy_only else {}),
        }
    )


def without_replay(manifest: Manifest) -> bytes:
    """The text of a manifest without the replay's files."""
    files = {name: entry for name, entry in manifest.files.items() if not _ARRAY.fullmatch(name)}
    return manifest_bytes(manifest.step, manifest.score, files, manifest.versions, replay_dropped=True)


def with_score(manifest: Manifest, score: float) -> bytes:
    """The text of a manifest with another score."""
    dropped, alone = manifest.replay_dropped, manifest.policy_only
    return manifest_bytes(
        manifest.step, score, manifest.files, manifest.versions, replay_dropped=dropped, policy_only=alone
    )


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest in a checkpoint directory and checks its own hash, not the files that it names.

    Raises CheckpointError that names the file and the damage.
    """
    file = path / MANIFEST
    try:
        require_inside(path, path.parent)
        text = read_stored(file, path, _MAX_MANIFEST_BYTES)
        content = json.loads(text)
        own = _canonical({k: v for k, v in content.items() if k != "sha256"}) if isinstance(content, dict) else b""
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing; expected a checkpoint directory such as RUN/checkpoints/000000050000"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: not JSON ({error})") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise CheckpointError(f"{file} is damaged: it has no format number")
    require_format(file, content["format"])
    if own != text:
        raise CheckpointError(f"{file} is damaged: its text and its own sha256 differ")
    match content:
        case {"step": int(step), "score": float() | None as score, "files": {**files}} if _are_ours(files):
            told = "replay_dropped" in content, "policy_only" in content
            return Manifest(path, step, score, files, content.get("versions", {}), *told)
        case _:
            raise CheckpointError(
                f"{file} was not written by penstock: expected a step, a score and the files {sorted(_ALWAYS)}"
            )


def verify(path: Path, *, replay: bool = True) -> Manifest:
    """Reads every file of a checkpoint and checks its sha256; returns the manifest. Raises CheckpointError.

    Args:
        replay: read the replay's arrays too, which takes a second for every GB. Those that this process has read
            before, and that look unchanged, are not read again.
    """
    manifest = read_manifest(path)
    before = _signature(path)
    seen = _SEEN_GOOD.get(path) == before
    for name, expected in manifest.files.items():
        if not _ARRAY.fullmatch(name) or (replay and not seen):
            _verify_file(path / name, expected)
    if replay:
        if path not in _SEEN_GOOD:
            for gone in [other for other in _SEEN_GOOD if not other.exists()]:  # one for every checkpoint of a long run
                del _SEEN_GOOD[gone]
        _SEEN_GOOD[path] = before
    return manifest


def _verify_file(file: Path, expected: Mapping[str, Any]) -> None:
    try:
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"{file} is {'not a plain file' if file.exists() else 'missing'}")
        with open_stored(file, file.parent) as stream:
            if (size := os.fstat(stream.fileno()).st_size) != expected.get("size"):
                raise CheckpointError(f"{file} has {size} bytes; its manifest says {expected.get('size')}")
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if digest != expected.get("sha256"):
        raise CheckpointError(
            f"{file} is damaged: its sha256 is {digest[:12]}, its manifest says {str(expected.get('sha256'))[:12]}"
        )


def is_good(path: Path) -> bool:
    """True if `path` is a checkpoint that `verify` accepts."""
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def good_manifest(path: Path) -> Manifest | None:
    """The manifest of a good checkpoint, else None; files verified before and unchanged since are not read again.

    For pruning: reading every kept replay back at every save would take longer than the save.
    """
    try:
        if _SEEN_GOOD.get(path) == _signature(path):
            return read_manifest(path)
        return verify(path)
    except CheckpointError:
        return None


def _are_ours(files: Mapping[str, Any]) -> bool:
    """True if these are the files of every checkpoint and, besides them, only named arrays in this directory."""
    return (
        set(files) >= _ALWAYS
        and all(isinstance(entry, dict) for entry in files.values())
        and all(_ARRAY.fullmatch(name) and isinstance(files[name].get("name"), str) for name in set(files) - _ALWAYS)
    )


def _signature(path: Path) -> _Signature:
    """Name, inode, size and time of every file. Raises CheckpointError if one of them vanishes meanwhile."""
    try:
        stats = [(x.name, x.stat()) for x in sorted(path.iterdir())]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)


def _canonical(content: Mapping[str, Any]) -> bytes:
    body = json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _versions() -> dict[str, str]:
    try:
        penstock = metadata.version("penstock")
    except metadata.PackageNotFoundError:
        penstock = "source tree"
    return {
        "penstock": penstock,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
