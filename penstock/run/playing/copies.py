"""Copies of environments in the middle of an episode, as bytes that are equal where their states are."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

import gymnasium

from penstock.core.errors import ConfigError, words_of


class EnvCopies:
    """Makes copies of an environment that this process has made; all of them share its spaces.

    Args:
        name: of the environment. instead: the cure where it cannot be copied.
    """

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead
        self._spaces: dict[int, Any] = {}

    def stored(self, env: Any) -> bytes:
        """The state of an environment, for `copy`. Raises ConfigError where pickle refuses."""
        out = io.BytesIO()
        try:
            _Pickler(out, self._spaces).dump(env)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._name} cannot be copied: {words_of(error)}; let pickle copy it (no lambdas, files or "
                f"handles in it), or {self._instead}"
            ) from error
        return out.getvalue()

    def copy(self, stored: bytes) -> Any:
        """An environment in this state."""
        return _Unpickler(stored, self._spaces).load()


class _Pickler(pickle.Pickler):
    """Pickles an environment's state, but not its spaces, which copies share.

    All members of objects derived from `EzPickle` are pickled; pickle itself keeps their constructor's arguments alone.
    """

    def __init__(self, file: io.BytesIO, spaces: dict[int, Any]) -> None:
        super().__init__(file, protocol=5)
        self._spaces = spaces

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, gymnasium.Space):
            return None
        self._spaces[id(obj)] = obj
        return id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if any(cls.__name__ == "EzPickle" for cls in type(obj).__mro__):
            return copyreg.__newobj__, (type(obj),), obj.__dict__, None, None, _set_members  # pyright: ignore
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Makes a copy from the bytes that a `_Pickler` of the same process has written."""

    def __init__(self, stored: bytes, spaces: dict[int, Any]) -> None:
        super().__init__(io.BytesIO(stored))
        self._spaces = spaces

    def persistent_load(self, pid: int) -> Any:
        return self._spaces[pid]


def _set_members(obj: Any, members: dict[str, Any]) -> None:
    obj.__dict__.update(members)
