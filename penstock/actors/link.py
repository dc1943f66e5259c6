"""Packets between a runner's process and its owner: short ones in a local socket, long ones in a memfd beside it."""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.processes.descriptors import write_all

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_HEAD = struct.Struct("<QQ?")
"""Number of the call, bytes of the body, and whether they lie in the first descriptor."""
_INLINE_BYTES = 32 << 10
MAX_FDS = 250
"""Linux lets a message carry 253."""


class Packet(NamedTuple):
    """A call or an answer."""

    number: int
    body: bytes | mmap.mmap
    fds: list[int]
    """Descriptors that travel with it; the receiver closes them."""


class SharedBytes:
    """Bytes in a sealed memfd, which every process that is sent it maps; freed when the last one lets go.

    Args:
        parts: arrays [n] uint8, copied one after the other.
    """

    def __init__(self, parts: Sequence[np.ndarray[Any, Any]]) -> None:
        self.fd = _sealed("penstock-put", parts)
        weakref.finalize(self, os.close, self.fd)


def _sealed(name: str, parts: Sequence[Any]) -> int:
    """A memfd that holds these bytes one after the other and never changes, so that to map it is safe."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        at = 0
        for part in parts:
            write_all(fd, part, at)
            at += len(part)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd
    except BaseException:
        os.close(fd)
        raise


class LentDescriptor(NamedTuple):
    """A descriptor as an argument of calls: the receiver has its own for the same open file, and closes it."""

    fd: int


Argument = SharedBytes | LentDescriptor


class DescriptorPlace(NamedTuple):
    """Stands for an `Argument` among those of a call: which descriptor of its packet it is."""

    which: int
    lent: bool = False


def placed(args: Sequence[Any], fds: Sequence[int]) -> list[Any]:
    """The arguments of a call, with the values of their placeholders: bytes [n] uint8, or a descriptor."""
    found = [x for x in args if isinstance(x, DescriptorPlace)]
    real = {x.which: fds[x.which] if x.lent else mapped(fds[x.which]) for x in found}
    return [real[x.which] if isinstance(x, DescriptorPlace) else x for x in args]


def mapped(fd: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a `SharedBytes`, read-only, [n] uint8; the descriptor is closed."""
    try:
        size = os.fstat(fd).st_size
        return np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b"", np.uint8)
    finally:
        os.close(fd)


def send(link: socket.socket, number: int, body: bytes, fds: Sequence[int] = ()) -> None:
    """Sends a packet whole, or raises BlockingIOError where the link is full and does not wait."""
    long = len(body) > _INLINE_BYTES
    beside = _sealed("penstock-packet", [body]) if long else -1
    try:
        parts = [_HEAD.pack(number, len(body), long), b"" if long else body]
        socket.send_fds(link, parts, [*([beside] if long else []), *fds])
    finally:
        if long:
            os.close(beside)


def receive(link: socket.socket) -> Packet | None:
    """Returns the next packet; None where the other end is closed.

    Raises:
        BlockingIOError: there is none yet. ConnectionError: the other end does not keep to the rules.
    """
    room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    data, extra, _, _ = link.recvmsg(_HEAD.size + _INLINE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    fds = array.array("i")
    for _, _, numbers in extra:
        fds.frombytes(numbers[: len(numbers) - len(numbers) % fds.itemsize])
    number, size, long = _HEAD.unpack_from(data)
    if not long:
        return Packet(number, data[_HEAD.size :], list(fds))
    try:
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:  # to read it could be a bus error here
            raise ConnectionError("a packet that its sender can still change")
        return Packet(number, mmap.mmap(fds[0], size, prot=mmap.PROT_READ), list(fds[1:]))
    finally:
        os.close(fds[0])
