from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parsed import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_what_needs_no_workers_works_without_the_calls_of_linux(system: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.off_linux", system, str(tmp_path)]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    *printed, last = ended.stdout.splitlines()
    found = json.loads(last)
    refused = f"ConfigError: worker processes need Linux 5.3 or newer; this is {system}: use SerialSampler"
    assert found.pop("cpu").startswith(refused) and found.pop("runners").startswith(refused)
    assert f"sampler: serial; worker processes need Linux 5.3 or newer; this is {system}" in printed
    assert "ppo is in use by pid" in found.pop("locked")
    assert not [text for text in found.pop("warnings") if "checked in this process" in text]
    assert found == dict.fromkeys(found, True)
    assert len(found) == 12
