"""What the displays of a queue and of a search share: a table that is redrawn in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_REDRAW_S = 0.5


class LiveTable(ABC):
    """A context manager that shows a table in a terminal, and leaves its last state there."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._slots: dict[str, int] = {}  # of each run that was started
        self._next = 0.0
        self._live: Live | None = None

    @abstractmethod
    def _table(self, running: Mapping[str, float]) -> Table:
        """The table now; `running`: seconds that each run has been at work, by name."""

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._table({}), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._table({}), refresh=True)
            self._live.stop()

    def note(self, text: str) -> None:
        """Prints a line above the table."""
        self._console.print(Text(text), soft_wrap=True)

    def refresh(self, running: Mapping[str, float]) -> None:
        """Redraws the table, at most twice a second."""
        now = time.monotonic()
        if self._live is not None and now >= self._next:
            self._live.update(self._table(running), refresh=True)
            self._next = now + _REDRAW_S
