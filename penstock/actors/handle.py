"""Handle: a runner as its callers hold it where it is no actor of Ray's; it is called in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Handle:
    """A runner: `handle.method.remote(*args)` sends a call, as to an actor of Ray.

    Args:
        name: the runner's, for messages.
        send: takes this handle, the name of a method and its arguments; returns the call.
    """

    def __init__(self, name: str, send: Callable[..., Any]) -> None:
        self._name, self._send = name, send

    def __getattr__(self, method: str) -> Method:
        if method.startswith("_"):  # copy, pickle and the like ask for members that no runner has
            raise AttributeError(method)
        return Method(self, method)

    def __repr__(self) -> str:
        return f"<{self._name}>"


class Method:
    """One method of a runner."""

    def __init__(self, handle: Handle, method: str) -> None:
        self._handle, self._method = handle, method

    def remote(self, *args: Any) -> Any:
        """Sends a call; returns a reference to its result."""
        return self._handle._send(self._handle, self._method, *args)  # pyright: ignore[reportPrivateUsage]
