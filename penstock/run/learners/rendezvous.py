"""Where ranks meet: in a file that those of one machine share, or in Ray's own control service.

Nothing listens for a meeting that did not listen before.
"""

from __future__ import annotations

import functools
import importlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.learn.comm import meet, meet_by

MEET_TIMEOUT_S = 60.0
"""Longest wait of a rank that is ready for the others to meet it."""
_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.02


class FileMeeting(NamedTuple):
    """A meeting in a memfd, which is gone with the last rank, however that ends."""

    fd: int

    @classmethod
    def opened(cls) -> FileMeeting:
        """A new one."""
        return cls(os.memfd_create("penstock-meeting", os.MFD_CLOEXEC))

    def meet_as(self, rank: int, size: int) -> Callable[[str], Any]:
        """Callable that makes the process group of a backend for this rank, together with all other ranks."""
        return functools.partial(self._met, rank, size)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)

    def _met(self, rank: int, size: int, backend: str) -> Any:
        # Nobody knows when the last group of nccl has ended, so its file stays open.
        fd = os.dup(self.fd) if backend == "nccl" else self.fd
        return meet(f"/proc/self/fd/{fd}", rank, size, backend, MEET_TIMEOUT_S)


class RayMeeting(NamedTuple):
    """A meeting in the control service of a Ray cluster.

    Args:
        loopback: all ranks are of one machine, and need listen nowhere else.
    """

    name: str
    loopback: bool

    @classmethod
    def opened(cls, addresses: Sequence[str]) -> RayMeeting:
        """A new one, of ranks at these addresses."""
        return cls(secrets.token_hex(8), len(set(addresses)) == 1)

    def meet_as(self, rank: int, size: int) -> Callable[[str], Any]:
        """Callable that makes the process group of a backend for this rank, together with all other ranks."""
        return functools.partial(self._met, rank, size)

    def close(self) -> None:
        """Removes the files that the ranks wrote."""
        RayStore(self.name).forget()

    def _met(self, rank: int, size: int, backend: str) -> Any:
        host = _LOOPBACK if self.loopback else address_of()
        return meet_by(RayStore(self.name), rank, size, backend, MEET_TIMEOUT_S, host, "Ray")


def address_of() -> str:
    """The address of this machine in its Ray cluster."""
    return importlib.import_module("ray.util").get_node_ip_address()


class RayStore(Store):
    """A store of torch.distributed with its keys in the cluster's control service.

    Args:
        name: of the meeting; keys of several do not meet.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._timeout_s = name, 60.0
        self._kv: Any = importlib.import_module("ray.experimental.internal_kv")

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value."""
        data = value if isinstance(value, bytes) else value.encode()
        self._kv._internal_kv_put(self._key(key), data, overwrite=True)

    def get(self, key: str) -> bytes:
        """Waits for a key; returns its value."""
        self.wait([key])
        return self._kv._internal_kv_get(self._key(key))

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are there."""
        return all(self._kv._internal_kv_exists(self._key(key)) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for keys. Raises RuntimeError if they do not come in time."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"no {', '.join(keys)} within {seconds:g} s")
            time.sleep(_LOOK_S)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long `get` waits."""
        self._timeout_s = timeout.total_seconds()

    def forget(self) -> None:
        """Removes all keys of the meeting."""
        self._kv._internal_kv_del(self._key(""), del_by_prefix=True)

    def _key(self, key: str) -> bytes:
        return f"penstock/{self._name}/{key}".encode()
