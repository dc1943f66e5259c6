from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.main import main
from tests.cli.short import QUIET, Cli
from tests.run.replays.recorded import recorded

__all__ = ["cli", "recorded", "trained"]


@pytest.fixture
def drawn() -> None:
    """Runs of the test end with their picture; those of other tests do not, which saves 0.2 s of each."""


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Cli:
    """Runs a command in this process and in an empty folder; gives code, out and err."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("penstock.cli.train.draw_curve", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*argv: str) -> SimpleNamespace:
        capsys.readouterr()
        try:
            code: Any = main(list(argv))
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, both=out + err)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "ppo", "--env", "CartPole-v1", *QUIET, "--run.dir", str(run)]) == 0
    return run
