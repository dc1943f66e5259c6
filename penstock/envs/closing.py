"""The end of an environment: an error in `close` is a warning everywhere, since what it returned before is kept."""

from __future__ import annotations

import warnings
from typing import Any


def close_env(env: Any, where: str) -> None:
    """Closes an environment; warns of an exception out of it.

    Args:
        where: start of the warning, such as "slot 3 of CartPole-v1".
    """
    try:
        env.close()
    except (Exception, SystemExit) as error:
        warnings.warn(
            f"{where} in close(): {type(error).__name__}: {error}; it is let go, and may hold on to what it had opened",
            stacklevel=2,
        )
