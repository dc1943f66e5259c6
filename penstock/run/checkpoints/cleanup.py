"""Removal of old checkpoints, of old replays, and of files that a dead process left."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

import psutil

from penstock.core.files import write_atomic
from penstock.run.checkpoints.manifest import MANIFEST, Manifest, good_manifest, is_good, without_replay

REPLACED = ".replaced"
"""Suffix of a good checkpoint while a new one of the same step takes its name."""
_NAME = re.compile(r"(\d{12,})(?:\.replaced)?")
_OF_REPLAY = re.compile(rf"replay-\d{{3,}}\.npy|\.{re.escape(MANIFEST)}\.tmp-\d+")
"""An array of a replay, or the temporary file of a crash while a manifest was rewritten without it."""
_TEMPORARY = re.compile(r"\.tmp-\d+-(\d+)-[0-9a-f]+")


def prune(folder: Path, keep: int, keep_replays: int, newest: Path) -> None:
    """Removes good checkpoints beyond the `keep` newest, the best and `newest`, and older replays of the others.

    Those of a policy alone do not count among the newest, so that a run can always be resumed.
    """
    good = [manifest for path in candidates(folder) if (manifest := good_manifest(path))]
    good.sort(key=lambda m: m.step, reverse=True)
    best = max(((m.score, m.step, m.path) for m in good if m.score is not None), default=None)
    whole = [m.path for m in good if not m.policy_only]
    kept = {newest, *whole[:keep], *(best[2:] if best else ())}
    with_replay = [m.path for m in good if m.arrays and m.path != newest][: keep_replays - 1]
    for manifest in good:
        if manifest.path not in kept:
            remove(manifest.path)
        elif manifest.path != newest and manifest.path not in with_replay:
            _drop_replay(manifest)


def tidy(folder: Path) -> None:
    """Removes the temporary files of dead processes, and completes or undoes a replacement that one began."""
    for path in folder.iterdir():
        # Our own pid counts as dead: saves do not overlap, and a restarted container often has the same pid.
        match = _TEMPORARY.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not psutil.pid_exists(int(match[1]))):
            shutil.rmtree(path, ignore_errors=True)
    for aside in folder.glob(f"*{REPLACED}"):
        path = aside.with_suffix("")
        if is_good(path):
            remove(aside)
            continue
        if path.exists():
            os.rename(path, broken_name(path))
        os.rename(aside, path)


def remove(path: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a crash leaves a temporary and not half a checkpoint."""
    gone = temporary(path.parent, step_of(path))
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def candidates(folder: Path) -> list[Path]:
    """All directories in `folder` that are named like a checkpoint, good or broken."""
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


def temporary(folder: Path, step: int) -> Path:
    """A temporary name for a checkpoint of a step; it holds the pid of its process."""
    return folder / f".tmp-{step}-{os.getpid()}-{secrets.token_hex(4)}"


def broken_name(path: Path) -> Path:
    """The path to which a broken checkpoint is moved."""
    return path.with_name(f"{path.name}.broken-{secrets.token_hex(4)}")


def step_of(path: Path) -> int:
    """The step in a checkpoint's name, -1 if it has none."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _drop_replay(manifest: Manifest) -> None:
    """Removes a checkpoint's replay, from the manifest first: files that a crash then leaves go with the next call."""
    if manifest.arrays:
        write_atomic(manifest.path / MANIFEST, without_replay(manifest))
    elif not manifest.replay_dropped:
        return
    for path in manifest.path.iterdir():
        if _OF_REPLAY.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)
