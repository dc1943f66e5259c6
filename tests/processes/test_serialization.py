"""Objects on their way to a child, and the versions that both ends must share."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.processes.serialization import require_same_versions, ship, unship, versions


def test_an_object_arrives_with_the_path_that_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "gone")])
    data, own = ship({"a": (1, None)}, "it"), list(sys.path)
    sys.path[:] = sys.path[:-2]
    assert unship(memoryview(data)) == {"a": (1, None)} and sys.path == own
    sys.path[:] = sys.path[:-2]
    assert unship(data, elsewhere=True) == {"a": (1, None)}
    assert sys.path == own[:-1], "of another machine's path what exists here"
    sys.path[:] = before = ["x"]
    assert unship(ship([3], "it", path=False)) == [3] and sys.path == before


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the thing cannot be sent: TypeError: .*lock.*; make files") as raised:
        ship({"env": threading.Lock()}, "the thing cannot be sent")
    assert isinstance(raised.value.__cause__, TypeError)


def test_other_versions_are_refused_by_name() -> None:
    own = versions(["numpy"])
    assert list(own) == ["python", "penstock", "kernel", "numpy"]
    require_same_versions("runner 1", "there", own, ["numpy"])
    with pytest.raises(
        ConfigError, match=rf"runner 1 on there has numpy 1\.0 \(here {own['numpy']}\); install the same"
    ):
        require_same_versions("runner 1", "there", {**own, "numpy": "1.0"}, ["numpy"])
