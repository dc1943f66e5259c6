"""TensorBoard: event files in the run directory, by torch's SummaryWriter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from penstock.run.tracking.tracker import TrackedRun


class TensorBoard:
    """Writes events into the run directory itself: `tensorboard --logdir runs`.

    The other files lie beside them; only settings and versions are shown, as text.
    """

    def start(self, run: TrackedRun) -> None:
        # Of events that a killed process had written and not noted, TensorBoard shows the later ones.
        self._writer = SummaryWriter(str(run.run_dir), purge_step=run.sent_step + 1)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def artifact(self, path: Path, kind: str) -> None:
        if path.suffix == ".json":
            text = path.read_text(encoding="utf-8")
            self._writer.add_text(kind, "\n".join(f"    {line}" for line in text.splitlines()))
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
