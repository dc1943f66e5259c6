"""Echo: a runner that shows what reached it, fails and dies as it is told."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

import penstock.actors.note as note


class Echo:
    def __init__(self, *args: Any, fail: bool = False) -> None:
        if fail or "fail" in args:
            raise ValueError(f"refused {args}")
        self.args, self.seen = args, []

    def given(self) -> Any:
        return self.args

    def echo(self, x: Any) -> Any:
        return x

    def note(self, x: Any) -> Any:
        self.seen.append(x)
        return list(self.seen)

    def total(self, data: Any, times: int) -> Any:
        """What a method sees of something that was put: its kind, and a sum that shows every byte."""
        parts = data if isinstance(data, list) else [data]
        fixed = all(isinstance(x, bytes) or not x.flags.writeable for x in parts)
        array = np.frombuffer(b"".join(parts), np.uint8)
        return [fixed, len(array), times * int(array.sum(dtype=np.int64))]

    def where(self) -> Any:
        return {"pid": os.getpid(), "nice": os.nice(0), "threads": os.environ.get("OMP_NUM_THREADS")}

    def deaf(self) -> bool:
        """True if Ctrl-C does not reach this process."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return signal.SIGINT in blocked or signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    def fail(self, text: str = "as told") -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError(text) from error

    def nothing_that_travels(self) -> Any:
        return threading.Lock()

    def write_and_sleep(self, number: int, s: float) -> int:
        note.write(number)
        time.sleep(s)
        return number

    def lent(self, fd: int, data: bytes) -> int:
        """Writes into a descriptor that was lent, and closes it; returns its number."""
        os.write(fd, data)
        os.close(fd)
        return fd

    def sleep(self, s: float) -> float:
        time.sleep(s)
        return s

    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def die(self, how: str) -> None:
        print("last words", file=sys.stderr, flush=True)
        if how == "exit":
            sys.exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crash":
            ctypes.string_at(0)
