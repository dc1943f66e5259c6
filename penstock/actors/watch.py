"""How an actor of Ray is watched while a call of it hangs: by a task on its node that reads its memory and signals it.

Threads of the actor could not answer while native code holds the interpreter, and would move its calls out of the main
thread.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import time
from typing import Any

import numpy as np

import penstock.actors.note as note

_CRASH_BYTES = 1 << 16
_STACKS_S, _STEP_S = 2.0, 0.05


def watched(cls: type) -> type:
    """The class, whose instances note and write stacks where a task on their node finds them; one for a process."""

    def __init__(self: Any, *args: Any) -> None:
        note_fd, crash = note.opened()[0], os.memfd_create("penstock-crash", os.MFD_CLOEXEC)
        note.take(os.dup(note_fd))
        faulthandler.register(signal.SIGUSR2, crash, all_threads=True)
        self._watch = note_fd, crash
        cls.__init__(self, *args)

    def watch_place(self: Any) -> tuple[str, int, int, int]:
        context: Any = importlib.import_module("ray").get_runtime_context()
        return (context.get_node_id(), os.getpid(), *self._watch)

    return type(cls.__name__, (cls,), {"__init__": __init__, "watch_place": watch_place, "__module__": cls.__module__})


def read_words(pid: int, note_fd: int, crash: int) -> list[int]:
    """The words of the note of a process of this machine."""
    with open(f"/proc/{pid}/fd/{note_fd}", "rb") as file:
        return np.frombuffer(file.read(note.WORDS * 8), np.int64).tolist()


def read_stacks(pid: int, note_fd: int, crash: int) -> str:
    """The stacks of a process of this machine; "" if it does not come to write them."""
    path = f"/proc/{pid}/fd/{crash}"
    start = size = os.stat(path).st_size
    os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + _STACKS_S
    while time.monotonic() < until:
        time.sleep(_STEP_S)
        before, size = size, os.stat(path).st_size
        if size > start and size == before:
            break
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(_CRASH_BYTES).decode(errors="replace").strip()


def read_both(pid: int, note_fd: int, crash: int) -> tuple[list[int], str]:
    """Words and stacks of a process of this machine."""
    return read_words(pid, note_fd, crash), read_stacks(pid, note_fd, crash)
