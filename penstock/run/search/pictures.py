"""Pictures of a search: history, parallel coordinates, importances."""

from __future__ import annotations

from pathlib import Path

from penstock.run.search.search import Search


def draw_search(folder: Path, search: Search) -> tuple[Path, ...]:
    return ()
