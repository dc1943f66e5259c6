"""The notebooks: kept as they were executed, small, and able to run again."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parsed import ROOT
from tests.test_examples import anchors

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TOOLS = all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def shown(path: Path) -> str:
    """All that the cells of a notebook printed."""
    return "".join("".join(out.get("text", ())) for cell in cells(path, "code") for out in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_in_order_and_is_small(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [
        out for cell in code for out in cell["outputs"] if out["output_type"] == "error" or out.get("name") == "stderr"
    ]
    assert "Traceback" not in shown(path)
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    for cell in cells(path, "markdown"):
        for link in re.findall(r"\]\(([^)\s]+)\)", "".join(cell["source"])):
            name, _, anchor = link.partition("#")
            assert (path.parent / name).exists(), link
            assert not anchor or anchor in anchors(path.parent / name), link


@pytest.mark.examples
@pytest.mark.skipif(not TOOLS, reason="not installed: nbclient, ipykernel (make docs)")
def test_notebooks_run(tmp_path: Path) -> None:
    """What they say of equal bits holds here too."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "execute.py"), str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not [path.name for path in tmp_path.glob("*.ipynb") if "Traceback" in shown(path)]
    assert "True" in shown(tmp_path / "first-run.ipynb")
    digests = [
        line.split()[0] for line in shown(tmp_path / "change-the-algorithm.ipynb").splitlines() if "Sampler" in line
    ]
    assert len(digests) == 3 and len(set(digests)) == 1
