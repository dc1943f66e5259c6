"""Small checkpoints, and damage to them."""

from __future__ import annotations

import json
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


def rewrite(path: Path, state: Any) -> None:
    """A checkpoint whose manifest is true of another state.pt, as an attacker would make it."""
    from penstock.core.files import HashedFile
    from penstock.run.checkpoints.manifest import manifest_bytes

    entry = json.loads((path / "MANIFEST.json").read_text())["files"]["policy.safetensors"]
    (path / "state.pt").unlink()
    with HashedFile(path / "state.pt") as file:
        torch.save(state, file)  # type: ignore[arg-type]
    (path / "MANIFEST.json").write_bytes(manifest_bytes(1, None, {"state.pt": file.entry, "policy.safetensors": entry}))
