"""Small checkpoints, and damage to them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.run.checkpoints.checkpoint import save_checkpoint

POLICY = {"w": torch.arange(6.0).reshape(2, 3)}


def save(run_dir: Path, step: int, **options: Any) -> Path:
    return save_checkpoint(run_dir, step, {"step": step, "x": torch.full((50,), float(step))}, POLICY, **options)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def flip(path: Path, offset: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def rewrite(path: Path, text: bytes) -> None:
    """A checkpoint whose manifest is true of another state.json, as an attacker would make it."""
    from penstock.core.files import write_new
    from penstock.run.checkpoints.manifest import manifest_bytes

    files = json.loads((path / "MANIFEST.json").read_text())["files"]
    (path / "state.json").unlink()
    files["state.json"] = write_new(path / "state.json", text)
    (path / "MANIFEST.json").write_bytes(manifest_bytes(1, None, files))


def crashes(
    root: Path, before: Callable[[Path], None], write: Callable[[Path], None], every: int
) -> Iterator[tuple[Path, bool]]:
    """Folders in which a process died at the nth call that changes the disk, half a write done first; then one that was through.

    Args:
        every: how many calls lie between two crashes.
    """
    for point in itertools.count(0, every):
        before(run := root / str(point))
        if not (pid := os.fork()):
            try:
                _die_at(point)
                write(run)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9)
        yield run, code == 0
        if code == 0:
            assert point > 15
            return


def _die_at(n: int) -> None:
    left = itertools.count(n, -1)

    def patched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            if not next(left):
                if name == "write":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])
                os._exit(9)
            return call(*args, **options)

        return wrapper

    for name in ("mkdir", "write", "fsync", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, patched(name, getattr(os, name)))
