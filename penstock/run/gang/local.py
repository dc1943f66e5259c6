"""LocalRanks: the other ranks as processes of this machine, which meet and count in shared memory."""

from __future__ import annotations

import mmap
import os
import select
import weakref
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.learn.comm import meet
from penstock.processes.limits import require_linux
from penstock.run.experiment import Experiment
from penstock.run.gang.process import RankProcess
from penstock.run.gang.ranks import MEET_TIMEOUT_S


class LocalRanks:
    """Processes of ranks 1 and up; they end with this one, however that ends."""

    def __init__(self, exp: Experiment, init: dict[str, Any] | None) -> None:
        require_linux()
        self._size = exp.run.learners
        meeting = os.memfd_create("penstock-meeting", os.MFD_CLOEXEC)  # gone with the last rank, however it ends
        self._meeting = meeting
        alive = list(os.pipe2(os.O_CLOEXEC))
        shared = os.memfd_create("penstock-progress", os.MFD_CLOEXEC)
        os.ftruncate(shared, self._size * 8)
        self._progress = progress_in(shared, self._size)
        self.handles: list[RankProcess] = []
        self._finalizer = weakref.finalize(self, _abandon, self.handles, [*alive, meeting])
        boot = {"size": self._size, "meeting": _path(meeting), "progress": shared}
        payload = without_display(exp), init
        try:
            for rank in range(1, self._size):
                self.handles.append(RankProcess(rank, boot, payload, [shared, meeting], alive[0], self._progress))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(shared)

    def wait(self, timeout_s: float) -> None:
        """Returns once one that is not ready has said something or ended."""
        poll = select.poll()
        for rank in self.handles:
            if not rank.said_ready:
                rank.register(poll)
        poll.poll(int(timeout_s * 1e3))

    def meet(self, backend: str) -> Any:
        """The process group of ranks that have met by the file."""
        # Nobody knows when the last group of nccl has ended, so its file stays open.
        fd = os.dup(self._meeting) if backend == "nccl" else self._meeting
        return meet(_path(fd), 0, self._size, backend, MEET_TIMEOUT_S)

    def entering(self, number: int) -> None:
        """Notes the number where all ranks could read it."""
        self._progress[0] = number

    def close(self) -> None:
        """Kills what is left."""
        self._finalizer()


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def progress_in(fd: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[size] int64 in shared memory: of each rank the number of its last collective."""
    return np.frombuffer(mmap.mmap(fd, size * 8), np.int64)


def without_display(exp: Experiment) -> Experiment:
    """The experiment as other ranks than 0 have it."""
    return replace(exp, run=replace(exp.run, progress="off", trace=None, each=None))


def _abandon(ranks: list[RankProcess], fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    for rank in ranks:
        rank.end(0.0)
