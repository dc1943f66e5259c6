"""Files that survive a crash, written whole and renamed into place; and files of others, opened with care."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import unicodedata
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from types import TracebackType

from penstock.core.errors import ConfigError

_CHUNK_BYTES = 1 << 20
_LONGEST_NAME = 255
"""Bytes."""
_TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Unicode's characters that turn the direction of writing."""
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of copy_file_range where the two file systems, or a sandbox, do not support it."""
NO_SURPRISE = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""Flags with which a file of others is opened: no link at its end, no wait for the other end of a FIFO."""


class HashedFile:
    """A new file that is hashed as it is written; `close` forces it to disk."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of `data`."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._size += len(view)
        done = 0
        while done < len(view):
            done += os.write(self._fd, view[done:])

    def write_from(self, fd: int, offset: int, count: int) -> None:
        """Appends `count` bytes of another file, copied by the kernel; for the hash they pass through memory."""
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, count)))
        while count:
            size = os.preadv(fd, [buffer[:count]], offset)
            self._hash.update(buffer[:size])
            self._size += size
            self._copy(fd, offset, buffer[:size])
            if not size:
                raise OSError(errno.EIO, "the mapped file is shorter than its array")
            offset, count = offset + size, count - size

    def _copy(self, fd: int, offset: int, data: memoryview) -> None:
        done = 0
        try:
            while done < len(data):
                copied = os.copy_file_range(fd, self._fd, len(data) - done, offset + done)
                if not copied:
                    break
                done += copied
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
        while done < len(data):
            done += os.write(self._fd, data[done:])

    @property
    def entry(self) -> dict[str, int | str]:
        """`size` and `sha256` of the data that should be in the file, to compare when it is read back."""
        return {"size": self._size, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        """Forces the file to disk."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            os.close(self._fd)


def fsync_dir(path: Path) -> None:
    """Forces the names in a directory to disk; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new(path: Path, data: bytes) -> dict[str, int | str]:
    """Writes a new file and forces it to disk; returns its size and sha256."""
    with HashedFile(path) as file:
        file.write(data)
    return file.entry


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a file by `data`; at any moment, even after a crash, it is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        write_new(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def unshare(path: Path) -> None:
    """Gives a file that has other names too, which hard links are, an inode of its own: it will be written in place.

    Raises OSError if it cannot be read or the disk refuses.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        write_atomic(path, path.read_bytes())


def require_name(path: Path, what: str) -> None:
    """Raises ConfigError if nothing can be written at a path and read by all libraries: it is not UTF-8, or no name.

    Control characters are refused too: paths are printed, and a terminal would obey them.
    """
    try:
        longest = max(len(part.encode()) for part in path.absolute().parts)
    except UnicodeEncodeError:
        raise ConfigError(
            f"{what} {str(path)!r} is not UTF-8, and what is written there could not be read; rename the folder, or "
            "choose another"
        ) from None
    if has_controls(path) or longest > _LONGEST_NAME:
        raise ConfigError(f"{what} {str(path)!r:.300} can be no name of a folder; choose another")


def has_controls(path: Path) -> bool:
    """True for a path with terminal control characters: escapes and the like, or writing directions."""
    return any(unicodedata.category(c) == "Cc" or unicodedata.bidirectional(c) in _TURNS for c in str(path.absolute()))


def open_stored(path: Path, folder: Path) -> BufferedReader:
    """A plain file in a folder that others may have written, opened for reading.

    Raises:
        OSError: it cannot be read, is no plain file (a FIFO would block, a device may act), or lies outside `folder`
            because of a link or `..`; the folder itself may be a link.
    """
    require_inside(path, folder)
    real = os.path.realpath(path)
    _require_plain(os.stat(real), path)  # before it is opened, which alone can block or act
    fd = os.open(real, os.O_RDONLY | NO_SURPRISE)
    try:
        _require_plain(os.fstat(fd), path)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_stored(path: Path, folder: Path, limit: int = 64 << 20) -> bytes:
    """The content of a plain file of at most `limit` bytes; see `open_stored`."""
    with open_stored(path, folder) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; expected at most {limit:,}")
        return file.read(limit)


def require_inside(path: Path, folder: Path) -> None:
    """Raises OSError if a path leaves a folder, by a link or by `..`; the folder itself may be a link."""
    real, home = os.path.realpath(path), os.path.realpath(folder)
    if os.path.commonpath([real, home]) != home:
        raise OSError(errno.ELOOP, f"it leads out of {folder}, to {real}")


def require_plain_tree(folder: Path, names: Iterable[str]) -> None:
    """Raises OSError, with its `filename`, if one of these names in a folder, or something below one, is neither a
    folder nor a plain file, or leads out of the folder.
    """
    for name in names:
        waiting = [folder / name]
        while waiting:
            path = waiting.pop()
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                continue
            try:
                if stat.S_ISLNK(found.st_mode):
                    require_inside(path, folder)
                elif stat.S_ISDIR(found.st_mode):
                    waiting += path.iterdir()
                else:
                    _require_plain(found, path)
            except OSError as error:
                error.filename = str(path)
                raise


def _require_plain(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
        what = kinds.get(stat.S_IFMT(found.st_mode), "a device")
        raise OSError(errno.EINVAL, f"it is {what}, not a plain file", str(path))
