"""Lock on a run directory, one learner at a time; the kernel releases it when the holder dies."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import warnings
from pathlib import Path
from types import TracebackType

import psutil

from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.files import NO_SURPRISE, read_stored, require_plain_tree

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_AT = 1 << 30
"""Offset of the byte that Windows locks, behind the text: a locked byte can be read by its holder alone."""


class RunLock:
    """Context manager that holds `run_dir/.lock`; the file stays, only the lock on it counts.

    Raises on entry:
        ConfigError: another learner, or this one a second time, uses the directory; the message names its pid.
        CheckpointError: the lock file cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = Path(run_dir) / ".lock"
        self._fd: int | None = None

    def __enter__(self) -> RunLock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            require_plain_tree(self._path.parent, [self._path.name])
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_SURPRISE, 0o666)
        except OSError as error:
            raise CheckpointError(
                f"cannot lock the run directory: {self._path}: {error.strerror}; choose a directory that can be written"
            ) from error
        try:
            if (names := os.fstat(fd).st_nlink) > 1:
                raise CheckpointError(
                    f"{self._path} is a file that has {names} names, of which another may be anywhere; nothing was "
                    "written: remove it"
                )
            self._lock(fd)
            if os.read(fd, 1) not in (b"", b"{"):
                raise CheckpointError(f"{self._path} holds something else than a lock; nothing was written: remove it")
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except OSError as error:
            os.close(fd)
            raise CheckpointError(f"cannot write {self._path}: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        os.ftruncate(fd, 0)
        if sys.platform == "win32":
            os.lseek(fd, _AT, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
        else:
            # A forked child shares the lock through its copy of the descriptor: closing ours would not free it.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def _lock(self, fd: int) -> None:
        try:
            if sys.platform == "win32":
                os.lseek(fd, _AT, os.SEEK_SET)
                msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
                os.lseek(fd, 0, os.SEEK_SET)
            else:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # PermissionError: msvcrt's
            raise ConfigError(
                f"{self._path.parent} is in use by {_holder(fd)}; stop that process first, or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            warnings.warn(
                f"{self._path}: this file system has no locks ({error.strerror}); "
                "nothing stops a second learner from using the run directory",
                stacklevel=3,
            )


def is_training(run_dir: Path) -> bool | None:
    """True if a process trains in a directory, False if the last one ended without letting go, None if none does.

    The lock itself is left alone: a look must not keep a learner from starting. Of a process of another machine, and
    where processes cannot be looked at, this is what it wrote.
    """
    try:
        text = json.loads(read_stored(run_dir / ".lock", run_dir, 4096))
        pid, host = text["pid"], text["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return host != socket.gethostname() or (isinstance(pid, int) and pid > 0 and psutil.pid_exists(pid))


def _holder(fd: int) -> str:
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        text = json.loads(os.read(fd, 4096))
        return f"pid {text['pid']} on {text['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
