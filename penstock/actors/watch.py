"""How an actor of Ray is watched while a call of it hangs: by a task on its node that reads its memory and signals it.

Threads of the actor could not answer while native code holds the interpreter, and would move its calls out of the main
thread.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
from typing import Any

import numpy as np

import penstock.actors.note as note
from penstock.processes.stacks import stacks_of


def watched(cls: type) -> type:
    """The class, with instances (one a process) that write note and stacks where a task on their node reads them."""

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


def seen(pid: int, note_fd: int, crash: int, stacks: bool) -> tuple[list[int], str]:
    """The words of the note of a process of this machine, and with `stacks` where its threads are now."""
    with open(f"/proc/{pid}/fd/{note_fd}", "rb") as file:
        words = np.frombuffer(file.read(note.WORDS * 8), np.int64).tolist()
    return words, stacks_of(pid, f"/proc/{pid}/fd/{crash}") if stacks else ""
