from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.run.launch.fakes import ROOT


def test_a_run_whose_launcher_is_gone_already_does_not_begin(tmp_path: Path) -> None:
    script = ROOT / "penstock" / "run" / "launch" / "child.py"
    command = [sys.executable, "-c", f"open({str(tmp_path / 'x')!r}, 'w')"]
    done = subprocess.run([sys.executable, "-I", "-S", str(script), "1", "", *command], timeout=200, check=False)
    assert done.returncode == 137
    assert not (tmp_path / "x").exists()
