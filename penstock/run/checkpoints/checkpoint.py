"""Checkpoints, whole or absent: writing, finding and loading them.

`run_dir/checkpoints/000000050000/` holds state.json and the bytes of its arrays as state.npy, policy.safetensors, the
arrays of a replay as replay-*.npy, and MANIFEST.json with the size and sha256 of each. A checkpoint is written under a
temporary name, forced to disk, renamed and read back, and only then are older ones removed, so a crash at any moment
leaves the last good one.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

from penstock.agents.parameters import copies_on_cpu
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.files import HashedFile, fsync_dir, read_stored, require_inside, write_atomic, write_new
from penstock.core.wire import Packed
from penstock.run.checkpoints.arrays import map_array, write_array, write_bytes
from penstock.run.checkpoints.cleanup import REPLACED, broken_name, candidates, prune, remove, step_of, temporary, tidy
from penstock.run.checkpoints.manifest import (
    ARRAY_FILE,
    MANIFEST,
    POLICY,
    STATE,
    STATE_ARRAYS,
    good_manifest,
    is_good,
    manifest_bytes,
    read_manifest,
    verify,
    with_score,
)
from penstock.run.checkpoints.state_codec import pack, unpack

_MARGIN_BYTES = 1 << 20
"""Free space asked for beyond the tensors: names, headers and the file system's own needs."""
_MOST_TEXT = 1 << 30
"""Bytes of state.json."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at a step, as it was saved."""

    path: Path
    step: int
    state: dict[str, Any]
    """The state given to `save_checkpoint`; tensors are on the CPU."""
    policy: dict[str, Tensor]
    array_files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """The file of each array of the replay, by name; empty if the replay was not asked for."""

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays given to `save_checkpoint`, memory-mapped. The file of a pruned checkpoint stays on disk until
        its array is released. Raises CheckpointError that names the file.
        """
        found: dict[str, np.ndarray[Any, Any]] = {}
        for name, file in self.array_files.items():
            try:
                found[name] = map_array(file)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file} cannot be read as an array: {error}") from error
        return found


def save_checkpoint(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    policy: Mapping[str, Tensor],
    arrays: Mapping[str, np.ndarray[Any, Any]] | None = None,
    *,
    keep: int = 3,
    keep_replays: int = 2,
    score: float | None = None,
    policy_only: bool = False,
) -> Path:
    """Writes a checkpoint, reads it back, removes older ones beyond `keep`; returns its directory.

    Kept are the `keep` newest good ones by step, the one of highest `score`, this one, and all broken ones; `arrays`
    are kept of this one and the newest others, `keep_replays` in all. One writer at a time: hold a `RunLock`.

    Args:
        policy_only: it is there for its policy, and no run is resumed from it.

    Raises:
        CheckpointError: `state` holds something that is no tensor, array or plain value (names where), or the disk is
            full or refuses (names the path and the cause); the checkpoints that were there stay.
    """
    if keep < 1 or keep_replays < 1 or step < 0:
        raise ConfigError(f"keep={keep}, keep_replays={keep_replays}, step={step}; expected keep >= 1 and step >= 0")
    large = dict(arrays or {})
    packed = pack(state)
    weights = _weights(policy)
    folder = Path(run_dir) / "checkpoints"
    unnamed = temporary(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tidy(folder)
        small = len(packed.text) + packed.size + sum(x.nbytes for x in weights.values())
        _check_space(folder, small, sum(x.nbytes for x in large.values()))
        _write(unnamed, step, packed, weights, large, score, policy_only)
        path = _commit(unnamed, folder / f"{step:012d}")
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {step} in {folder}: {error.strerror or error}; "
            "older checkpoints are untouched"
        ) from error
    finally:
        shutil.rmtree(unnamed, ignore_errors=True)
    try:
        prune(folder, keep, keep_replays, path)
    except OSError as error:
        warnings.warn(f"{path} is written, but an older checkpoint could not be removed: {error}", stacklevel=2)
    return path


def save_evaluated(
    run_dir: Path, step: int, policy: Mapping[str, Tensor], score: float, *, keep: int = 3, keep_replays: int = 2
) -> Path:
    """Keeps the policy of an earlier step as the best so far, by the score of its evaluation; returns its directory.

    A good checkpoint of that step takes the score; where there is none, one of the policy alone is written. Arguments
    and errors as in `save_checkpoint`.
    """
    path = Path(run_dir) / "checkpoints" / f"{step:012d}"
    manifest = good_manifest(path) if path.is_dir() else None
    if manifest is None:
        return save_checkpoint(
            run_dir, step, {}, policy, keep=keep, keep_replays=keep_replays, score=score, policy_only=True
        )
    try:
        write_atomic(path / MANIFEST, with_score(manifest, score))
    except OSError as error:
        raise CheckpointError(f"cannot write the score into {path / MANIFEST}: {error.strerror or error}") from error
    return path


def load_checkpoint(path: Path, *, replay: bool = False) -> Checkpoint:
    """Loads the checkpoint in a directory; its files are checked against their sha256 before they are parsed.

    Args:
        replay: also check and return the arrays of its replay, which only resuming needs.

    Raises CheckpointError that names the file and the damage.
    """
    manifest = verify(Path(path), replay=replay)
    file = manifest.path / STATE
    try:
        state = unpack(read_stored(file, manifest.path, _MOST_TEXT), map_array(manifest.path / STATE_ARRAYS))
        file = manifest.path / POLICY
        policy = safetensors.torch.load_file(file)
    except Exception as error:  # parsers may raise anything, and the caller needs the file's name
        raise CheckpointError(f"{file} is as its manifest says, but cannot be read: {error}") from error
    return Checkpoint(manifest.path, manifest.step, state, policy, manifest.arrays if replay else {})


def find_checkpoint(run_dir: Path, which: str = "last", *, replay: bool = False) -> Path:
    """The path of the newest good checkpoint of a run, of the `best` by score, or of a step given as text.

    Broken ones are skipped with a warning that names them. `best` is `last` in a run without scores. Raises
    CheckpointError if none is good; lists what is there.

    Args:
        replay: accept only a checkpoint with its replay, if it had one, present and good.
    """
    which = str(which)  # a step may come as a number
    if which not in ("last", "best") and not which.isdecimal():
        raise ConfigError(f"checkpoint {which!r} is not known; expected 'last', 'best' or a step such as '50000'")
    folder = Path(run_dir) / "checkpoints"
    try:
        require_inside(folder, Path(run_dir))
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}; a run may itself be a link, but none leads out") from error
    found = candidates(folder)
    readable, broken = [], []
    for path in found:
        try:
            readable.append(read_manifest(path))
        except CheckpointError as error:
            broken.append((step_of(path), str(error)))
    if which.isdecimal():
        readable = [manifest for manifest in readable if manifest.step == int(which)]
        broken = [(step, message) for step, message in broken if step == int(which)]
    readable = [manifest for manifest in readable if not (replay and manifest.policy_only)]
    readable.sort(key=lambda m: (m.step, m.path.suffix != REPLACED), reverse=True)
    if which == "best":
        readable.sort(key=lambda m: -math.inf if m.score is None else m.score, reverse=True)
    for manifest in readable:
        try:
            if replay and manifest.replay_dropped:
                raise CheckpointError(
                    f"the replay of {manifest.path} is gone, as the run keeps that of its newest "
                    "checkpoints only (run.keep_replays)"
                )
            verify(manifest.path, replay=replay)
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
    """Copies of the tensors. Raises CheckpointError if something else is among them."""
    for name, value in policy.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"policy[{name!r}] is a {type(value).__name__}; expected a str with a tensor")
    return copies_on_cpu(policy)


def _check_space(folder: Path, small: int, replay: int) -> None:
    free, needed = shutil.disk_usage(folder).free, small + replay + _MARGIN_BYTES
    if free < needed:
        of_replay = (
            f", of which the replay {replay / 1e6:.1f} MB (run.keep_replays says how many stay)" if replay else ""
        )
        raise CheckpointError(
            f"{folder} has {free / 1e6:.1f} MB free and a checkpoint needs {needed / 1e6:.1f} MB{of_replay}; "
            "free some space or keep fewer"
        )


def _write(
    folder: Path,
    step: int,
    packed: Packed,
    weights: dict[str, Tensor],
    arrays: dict[str, Any],
    score: float | None,
    policy_only: bool,
) -> None:
    os.mkdir(folder)
    files: dict[str, Mapping[str, Any]] = {STATE: write_new(folder / STATE, packed.text)}
    with HashedFile(folder / STATE_ARRAYS) as file:
        write_bytes(file, packed.parts, packed.size)
    files[STATE_ARRAYS] = file.entry
    files[POLICY] = write_new(folder / POLICY, safetensors.torch.save(weights))
    for i, (name, x) in enumerate(arrays.items()):
        with HashedFile(folder / ARRAY_FILE.format(i)) as file:
            write_array(file, x)
        files[ARRAY_FILE.format(i)] = {**file.entry, "name": name}
    write_new(folder / MANIFEST, manifest_bytes(step, score, files, policy_only=policy_only))
    fsync_dir(folder)


def _commit(unnamed: Path, path: Path) -> Path:
    """Renames the new checkpoint and reads it back; an older one of that name is put aside until it is good."""
    aside = path.with_name(path.name + REPLACED)
    if path.exists():
        os.rename(path, aside if is_good(path) else broken_name(path))
    try:
        os.rename(unnamed, path)
        fsync_dir(path.parent)
        verify(path)
    except BaseException:
        if path.exists():
            os.rename(path, unnamed)
        if aside.exists():
            os.rename(aside, path)
        raise
    if aside.exists():
        remove(aside)
    return path
