"""LentStore: a store of torch.distributed that is given back when ranks have met."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]


class LentStore(Store):
    """Passes on to another store until `give_back`, which lets go of it.

    A process group holds its store until garbage is collected. A FileStore then writes to its path once more, where
    another file may lie by then, and reads there for ever. Gloo asks its store in its constructor only.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store: Any = store

    def give_back(self) -> None:
        """Lets go of the store, which ends here and now if nobody else holds it."""
        self._store = None

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Waits for a key; returns its value."""
        return self._store.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are there."""
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for keys. Raises RuntimeError if they do not come in time."""
        self._store.wait(list(keys), *([] if timeout is None else [timeout]))

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long `get` waits."""
        self._store.set_timeout(timeout)
