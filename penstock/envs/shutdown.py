"""Closing an environment: an error in `close` is a warning everywhere, since its earlier answers are kept."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

from penstock.core.errors import words_of

_OF_SLOT = re.compile(r"(?P<kind>(?:evaluation )?slot) (?P<slot>\d+)(?: and (?P<more>\d+) more)? (?P<where>of .*? in )")
_CLOSE = "close(): "


def close_env(env: Any, where: str) -> None:
    """Closes an environment; warns of an exception out of it.

    Args:
        where: start of the warning, such as "slot 3 of CartPole-v1".
    """
    warn_of_closing(try_close(env, where))


def try_close(env: Any, where: str) -> list[str]:
    """Closes an environment; returns the text for `warn_of_closing` in a list, which is empty if all went well."""
    try:
        env.close()
    except (Exception, SystemExit) as error:
        return [f"{where} in {_CLOSE}{words_of(error)}; it is let go, and may hold on to what it had opened"]
    return []


def is_of_closing(text: str) -> bool:
    """True if this is the text of a warning by `warn_of_closing`."""
    return f" in {_CLOSE}" in text


def warn_of_closing(texts: Iterable[str]) -> None:
    """Warns of environments that failed to close: once for all slots of a pool, with the first one's error."""
    first: dict[str, str] = {}
    more: dict[str, int] = {}
    for text in texts:
        found = _OF_SLOT.match(text)
        pool = text if found is None else f"{found['kind']} {found['where']}"
        more[pool] = more.get(pool, -1) + 1 + (0 if found is None else int(found["more"] or 0))
        first.setdefault(pool, text)
    for pool, text in first.items():
        found = _OF_SLOT.match(text)
        if found is not None and more[pool]:
            text = f"{found['kind']} {found['slot']} and {more[pool]} more {found['where']}{text[found.end() :]}"
        warnings.warn(text, stacklevel=1)  # always from here: Python shows the same text from the same place once
