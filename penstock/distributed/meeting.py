"""The place where ranks on Ray meet: Ray's own control service, so that nothing else listens for it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_LOOK_S = 0.02


class RayStore(Store):
    """A store of torch.distributed whose keys lie in the cluster's control service.

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
