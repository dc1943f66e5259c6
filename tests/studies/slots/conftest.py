from __future__ import annotations

from pathlib import Path

import pytest

from tests.studies.slots.fakes import FAKE, stand_in


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder from which runs are the fake; gives the directory of a sweep."""
    stand_in(FAKE, tmp_path, monkeypatch)
    return Path("sweep")
