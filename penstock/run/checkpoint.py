"""Checkpoints that are whole or absent: how one is written, found again and pruned.

`run_dir/checkpoints/000000050000/` holds state.pt, policy.safetensors, the arrays of a replay as replay-*.npy, and
MANIFEST.json with the size and sha256 of each. A checkpoint is written under a temporary name, forced to disk, renamed, read back, and only then are older
ones removed, so a crash at any moment leaves the last good one.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import safetensors.torch
import torch
from torch import Tensor

from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.files import HashedFile, fsync_dir, write_array
from penstock.run.lock import RunLock
from penstock.run.manifest import MANIFEST, POLICY, STATE, good_manifest, is_good, manifest_bytes, read_manifest, verify
from penstock.run.plain import from_plain, plain_bytes, to_plain

__all__ = ["Checkpoint", "RunLock", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

_REPLACED = ".replaced"
"""Suffix of a good checkpoint while a new one of the same step takes its name."""
_NAME = re.compile(r"(\d{12,})(?:\.replaced)?")
_TEMPORARY = re.compile(r"\.tmp-\d+-(\d+)-[0-9a-f]+")
_NAMES = "arrays"
"""Key in state.pt of the arrays' names, in the order of their files."""
_ARRAY_FILE = "replay-{:03d}.npy"
_MARGIN_BYTES = 1 << 20
"""Free space asked for beyond the tensors: names, the zip's and the file system's own needs."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on from a step."""

    path: Path
    step: int
    state: dict[str, Any]
    """As given to `save_checkpoint`: arrays are numpy again, tensors are on the CPU."""
    policy: dict[str, Tensor]
    arrays: dict[str, np.ndarray[Any, Any]]
    """As given to `save_checkpoint`; views of the files, read as they are used."""


def save_checkpoint(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    policy: Mapping[str, Tensor],
    arrays: Mapping[str, np.ndarray[Any, Any]] | None = None,
    *,
    keep: int = 3,
    score: float | None = None,
) -> Path:
    """The directory of a new checkpoint that was read back and is good; older ones beyond `keep` are gone.

    Kept are the `keep` newest good ones by step, the one of highest `score`, this one, and whatever is broken. One
    writer at a time: hold a `RunLock`.

    Raises:
        CheckpointError: `state` holds something that is no tensor, array or plain value (names where), or the disk is
            full or refuses (names the path and the cause); the checkpoints that were there stay.
    """
    if keep < 1 or step < 0:
        raise ConfigError(f"keep={keep}, step={step}; expected keep >= 1 and step >= 0")
    large = dict(arrays or {})
    plain = to_plain({**state, _NAMES: list(large)})
    weights = _weights(policy)
    folder = Path(run_dir) / "checkpoints"
    temporary = _temporary(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        _check_space(folder, plain_bytes(plain) + plain_bytes(weights) + sum(x.nbytes for x in large.values()))
        _write(temporary, step, plain, weights, large, score)
        path = _commit(temporary, folder / f"{step:012d}")
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint of step {step} in {folder}: {error.strerror or error}; "
                              "older checkpoints are untouched") from error  # fmt: skip
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    try:
        _prune(folder, keep, path)
    except OSError as error:
        warnings.warn(f"{path} is written, but an older checkpoint could not be removed: {error}", stacklevel=2)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory, its files checked against their sha256 before they are parsed.

    Raises CheckpointError that names the file and what is wrong with it.
    """
    manifest = verify(Path(path))
    file = manifest.path / STATE
    try:
        state = from_plain(torch.load(file, map_location="cpu", weights_only=True))
        file = manifest.path / POLICY
        policy = safetensors.torch.load_file(file)
        arrays: dict[str, Any] = {}
        for i, name in enumerate(state.pop(_NAMES, [])):
            file = manifest.path / _ARRAY_FILE.format(i)
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # whatever the parsers raise, the caller needs the file's name
        raise CheckpointError(
            f"{file} is as it was written, but torch {torch.__version__} cannot read it: {error}"
        ) from error
    return Checkpoint(manifest.path, manifest.step, state, policy, arrays)


def find_checkpoint(run_dir: Path, which: str = "last") -> Path:
    """The newest good checkpoint of a run, the `best` by score, or the one of a step given as text.

    A broken one on the way is named in a warning and passed over. `best` is `last` in a run without scores. Raises
    CheckpointError if none is good; lists what is there.
    """
    if which not in ("last", "best") and not which.isdecimal():
        raise ConfigError(f"checkpoint {which!r} is not known; expected 'last', 'best' or a step such as '50000'")
    folder = Path(run_dir) / "checkpoints"
    found = _candidates(folder)
    readable, broken = [], []
    for path in found:
        try:
            readable.append(read_manifest(path))
        except CheckpointError as error:
            broken.append((_step(path), str(error)))
    if which.isdecimal():
        readable = [manifest for manifest in readable if manifest.step == int(which)]
        broken = [(step, message) for step, message in broken if step == int(which)]
    readable.sort(key=lambda m: (m.step, m.path.suffix != _REPLACED), reverse=True)
    if which == "best":
        readable.sort(key=lambda m: -math.inf if m.score is None else m.score, reverse=True)
    for manifest in readable:
        try:
            verify(manifest.path)
        except CheckpointError as error:
            broken.append((manifest.step, str(error)))
            continue
        for step, message in broken:
            if which == "best" or step >= manifest.step:
                warnings.warn(f"passed over a broken checkpoint: {message}; using {manifest.path}", stacklevel=2)
        return manifest.path
    what = f"good checkpoint of step {which}" if which.isdecimal() else "good checkpoint"
    names = ", ".join(sorted(path.name for path in found)) or "nothing"
    raise CheckpointError("; ".join([f"no {what} in {folder}, which holds {names}", *(m for _, m in broken)]))


def _weights(policy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own: safetensors refuses tensors that share any."""
    for name, value in policy.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"policy[{name!r}] is a {type(value).__name__}; expected a str with a tensor")
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in policy.items()}


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN_BYTES:
        raise CheckpointError(f"{folder} has {free / 1e6:.1f} MB free and a checkpoint needs "
                              f"{(needed + _MARGIN_BYTES) / 1e6:.1f} MB; free some space or keep fewer")  # fmt: skip


def _write(
    temporary: Path, step: int, plain: Any, weights: dict[str, Tensor], arrays: dict[str, Any], score: float | None
) -> None:
    os.mkdir(temporary)
    with HashedFile(temporary / STATE) as state_file:
        torch.save(plain, state_file)  # pyright: ignore[reportArgumentType]
    with HashedFile(temporary / POLICY) as policy_file:
        policy_file.write(safetensors.torch.save(weights))
    files = {STATE: state_file.entry, POLICY: policy_file.entry}
    for i, x in enumerate(arrays.values()):
        with HashedFile(temporary / _ARRAY_FILE.format(i)) as file:
            write_array(file, x)
        files[_ARRAY_FILE.format(i)] = file.entry
    with HashedFile(temporary / MANIFEST) as manifest_file:
        manifest_file.write(manifest_bytes(step, score, files))
    fsync_dir(temporary)


def _commit(temporary: Path, path: Path) -> Path:
    """Gives the checkpoint its name and reads it back; one that had the name is put aside until the new one is good."""
    aside = path.with_name(path.name + _REPLACED)
    if path.exists():
        os.rename(path, aside if is_good(path) else _broken_name(path))
    try:
        os.rename(temporary, path)
        fsync_dir(path.parent)
        verify(path)
    except BaseException:
        if path.exists():
            os.rename(path, temporary)
        if aside.exists():
            os.rename(aside, path)
        raise
    if aside.exists():
        _remove(aside)
    return path


def _prune(folder: Path, keep: int, newest: Path) -> None:
    good = [manifest for path in _candidates(folder) if (manifest := good_manifest(path))]
    good.sort(key=lambda m: m.step, reverse=True)
    best = max(((m.score, m.step, m.path) for m in good if m.score is not None), default=None)
    kept = {newest, *(m.path for m in good[:keep]), *(best[2:] if best else ())}
    for manifest in good:
        if manifest.path not in kept:
            _remove(manifest.path)


def _tidy(folder: Path) -> None:
    """Removes what a dead process left, and ends its replacement of a checkpoint one way or the other."""
    for path in folder.iterdir():
        # Our own pid counts as dead: saves do not overlap, and a restarted container often has the same pid.
        match = _TEMPORARY.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not psutil.pid_exists(int(match[1]))):
            shutil.rmtree(path, ignore_errors=True)
    for aside in folder.glob(f"*{_REPLACED}"):
        path = aside.with_suffix("")
        if is_good(path):
            _remove(aside)
            continue
        if path.exists():
            os.rename(path, _broken_name(path))
        os.rename(aside, path)


def _remove(path: Path) -> None:
    """The rename makes the removal one step: a crash within leaves a temporary, not half a checkpoint."""
    temporary = _temporary(path.parent, _step(path))
    os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def _candidates(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


def _temporary(folder: Path, step: int) -> Path:
    return folder / f".tmp-{step}-{os.getpid()}-{secrets.token_hex(4)}"


def _broken_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.broken-{secrets.token_hex(4)}")


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1
