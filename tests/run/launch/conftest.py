from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.launch.fakes import FAKE


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder from which `python -P -m penstock` is the fake; gives the directory of a sweep."""
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "__init__.py").touch()
    (tmp_path / "penstock" / "__main__.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the working folder is not searched
    return Path("sweep")
