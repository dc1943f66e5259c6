"""Runs of an earlier format are refused in one line, which names the commit that goes on with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.errors import CheckpointError
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.files.stored_experiment import FORMAT, read_config
from tests.run.files.forging import openers

OLD = Path(__file__).parent.parent / "data" / "runs-0.1.0" / "ppo-lstm"
REFUSED = r"config\.json is of a run of format 1; this penstock reads format 2: go on with penstock at commit 6849b51$"


def test_a_run_of_format_1_is_refused(tmp_path: Path) -> None:
    for how, opener in openers(shutil.copytree(OLD, tmp_path / "run"), tmp_path).items():
        if how not in ("plot", "replay"):
            with pytest.raises(CheckpointError, match=REFUSED):
                opener()
    with pytest.raises(CheckpointError, match=REFUSED):  # whoever wrote it
        ps.load(tmp_path / "run", trust=True)
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json is of a run of format 1; .*commit 6849b51"):
        find_checkpoint(tmp_path / "run")


def test_a_run_has_its_format(run: Path) -> None:
    file = run / "config.json"
    content = json.loads(file.read_text())
    assert content["format"] == json.loads((find_checkpoint(run) / "MANIFEST.json").read_text())["format"] == FORMAT
    for found, said in (
        (FORMAT + 1, "install a newer one"),
        ("2", "of format 2;"),
        (None, "format 1;"),
        (1, "format 1;"),
    ):
        file.write_text(json.dumps({**content, "format": found}))
        with pytest.raises(CheckpointError, match=rf"config\.json .*{said}"):
            read_config(run, trust=True)
