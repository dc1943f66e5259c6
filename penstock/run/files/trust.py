"""Trust in a stored file that names code: said by the user, by PENSTOCK_TRUST, or on this user's own list.

The list is `$XDG_STATE_HOME/penstock/trusted`, by default below ~/.local/state: a line for each file, its sha256 and
where it was. It is believed only if nobody else could have written it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import warnings
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.files import NO_SURPRISE

VARIABLE = "PENSTOCK_TRUST"
"""Directories, separated as in PATH, below which every run is trusted."""
_LINE = re.compile(rb"([0-9a-f]{64})(?: .*)?")
_MAX_BYTES = 256 << 20
_said: set[str] = set()


def list_path() -> Path:
    """The file of the list. Raises OSError where the user has no home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        # A relative one is to be ignored (XDG Base Directory Specification 0.8).
        state = state if state.is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from error
    return state / "penstock" / "trusted"


def is_trusted(path: Path, digest: str) -> bool:
    """True if a file of this sha256 is on the list, or lies below a directory of PENSTOCK_TRUST."""
    return below_trusted(path) or is_listed(digest)


def below_trusted(path: Path) -> bool:
    """True below a directory of PENSTOCK_TRUST. Raises ConfigError if that names a relative one."""
    folders = [Path(text) for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    relative = [folder for folder in folders if not folder.is_absolute()]
    if relative:
        raise ConfigError(f"{VARIABLE} names {str(relative[0])!r}; expected absolute directories, e.g. /runs")
    real = path.resolve()
    return any(real.is_relative_to(folder.resolve()) for folder in folders)


def is_listed(digest: str) -> bool:
    """True if a file of this sha256 is on the list; one that others could write counts as empty, with a warning."""
    try:
        path = list_path()
        fd = os.open(path, os.O_RDONLY | NO_SURPRISE)
    except OSError:
        return False
    try:
        if (why := _not_ours(path.parent.stat(), os.fstat(fd))) is not None:
            _say_once(f"{path} is not believed: {why}; runs of your own need --trust until it is removed or mended")
            return False
        with open(fd, "rb", closefd=False) as file:
            lines = file.read(_MAX_BYTES).split(b"\n")
    finally:
        os.close(fd)
    return any(match[1] == digest.encode() for line in lines if (match := _LINE.fullmatch(line)))


def remember(path: Path, digest: str) -> None:
    """Adds a file to the list; where that cannot be written, a warning says so once and all goes on."""
    if is_listed(digest):
        return
    try:
        listed = list_path()
        listed.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(listed, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_SURPRISE, 0o600)
        try:
            if (why := _not_ours(listed.parent.stat(), os.fstat(fd))) is not None:
                raise PermissionError(errno.EPERM, why)
            # One write in append mode, so that runs which begin together do not mix. The newline comes first, in case
            # a full disk cut an earlier line.
            line = f"\n{digest} {path.resolve()}".encode(errors="surrogateescape")
            os.write(fd, line[:1] + line[1:].replace(b"\n", b"?"))
        finally:
            os.close(fd)
    except OSError as error:
        if not below_trusted(path):
            _say_once(
                f"the list of runs that you trust cannot be written ({error}); if this run names code of your own, "
                f"opening it will need --trust (trust=True), or {VARIABLE}=DIR of its directory: docs/security.md"
            )


def _not_ours(folder: os.stat_result, file: os.stat_result) -> str | None:
    """The reason why others may have written a list; None if this user alone could."""
    if os.name == "nt":
        return None
    for what, found in (("its directory", folder), ("it", file)):
        if found.st_uid != os.geteuid():
            return f"{what} belongs to user {found.st_uid}, and this is user {os.geteuid()}"
        if found.st_mode & 0o022:
            return f"{what} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    if not stat.S_ISREG(file.st_mode) or file.st_nlink != 1:
        return "it is not a plain file"
    return None


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=3)
