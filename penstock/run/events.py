"""Scalars as TensorBoard events, written where the run is: no thread, no queue, nothing held back."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.run.files import Appender

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")


class EventLog:
    """An event file for each process that writes, begun at its first `write`.

    TensorBoard's own EventFileWriter starts a thread, which a later fork would copy the locks of, and which prints a
    traceback when the disk is full. Its RecordWriter, used here, has the format without the thread.

    Args:
        resume_step: events of later steps, in the files that are there, are to be forgotten by whoever reads them
            (what SummaryWriter calls `purge_step`, which is the first step to forget).
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        self._dir = run_dir
        self._resume_step = resume_step
        self._file: Appender | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event that holds every metric. Raises OSError if the disk refuses, ImportError without tensorboard."""
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        if self._file is None:
            self._open()
        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Closes the event file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        path = self._dir / f"events.out.tfevents.{self._stamp():010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = Appender(path)
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if self._resume_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=self._resume_step + 1, session_log=start))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def _stamp(self) -> int:
        """Seconds, but later than every event file here: TensorBoard reads them in the order of their names."""
        stamps = [int(match[1]) for path in self._dir.iterdir() if (match := _NAME.fullmatch(path.name))]
        return max([int(time.time()), *(stamp + 1 for stamp in stamps)])
