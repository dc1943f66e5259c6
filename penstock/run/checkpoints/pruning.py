"""Which checkpoints of a run stay, which keep their replay, and what becomes of what a dead process left."""

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
"""An array of a replay, or what a crash left of a manifest that was to forget it."""
_TEMPORARY = re.compile(r"\.tmp-\d+-(\d+)-[0-9a-f]+")


def prune(folder: Path, keep: int, keep_replays: int, newest: Path) -> None:
    """Removes good checkpoints beyond the `keep` newest, the best and `newest`, and older replays of those that stay."""
    good = [manifest for path in candidates(folder) if (manifest := good_manifest(path))]
    good.sort(key=lambda m: m.step, reverse=True)
    best = max(((m.score, m.step, m.path) for m in good if m.score is not None), default=None)
    kept = {newest, *(m.path for m in good[:keep]), *(best[2:] if best else ())}
    with_replay = [m.path for m in good if m.arrays and m.path != newest][: keep_replays - 1]
    for manifest in good:
        if manifest.path not in kept:
            remove(manifest.path)
        elif manifest.path != newest and manifest.path not in with_replay:
            _drop_replay(manifest)


def tidy(folder: Path) -> None:
    """Removes what a dead process left, and ends its replacement of a checkpoint one way or the other."""
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
    """The rename makes the removal one step: a crash within leaves a temporary, not half a checkpoint."""
    gone = temporary(path.parent, step_of(path))
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def candidates(folder: Path) -> list[Path]:
    """Everything in it that is named like a checkpoint."""
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


def temporary(folder: Path, step: int) -> Path:
    """A name that is no checkpoint's, and that says whose it is."""
    return folder / f".tmp-{step}-{os.getpid()}-{secrets.token_hex(4)}"


def broken_name(path: Path) -> Path:
    """Where a broken checkpoint is put aside."""
    return path.with_name(f"{path.name}.broken-{secrets.token_hex(4)}")


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _drop_replay(manifest: Manifest) -> None:
    """The manifest forgets the replay first: a crash after that leaves files that nothing names, and the next call removes them."""
    if manifest.arrays:
        write_atomic(manifest.path / MANIFEST, without_replay(manifest))
    elif not manifest.replay_dropped:
        return
    for path in manifest.path.iterdir():
        if _OF_REPLAY.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)
