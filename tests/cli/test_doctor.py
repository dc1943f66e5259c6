from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.cli import doctor as command
from penstock.run import doctor


def test_help_loads_no_torch() -> None:
    code = "import sys\nfrom penstock.cli.main import main\ntry: main(['doctor', '--help'])\n" \
           "except SystemExit as e: assert not e.code\nassert 'torch' not in sys.modules"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: penstock doctor" in done.stdout


def test_the_command_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: 1)
    assert command.run([]) == 1
    with pytest.raises(SystemExit) as stopped:
        command.run(["--rows"])
    assert stopped.value.code == 2
