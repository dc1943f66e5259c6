"""The list of planted bugs keeps up with the code: each can still be planted, and names tests that are there."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COLLECT = ("--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "")
FILE = Path(__file__).parent.parent / "benchmarks" / "mutations.py"


@pytest.fixture(scope="module")
def listed() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("mutations_under_test", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_bug_can_be_planted(listed: Any) -> None:
    assert [problem for m in listed.MUTATIONS if (problem := listed.stale(m))] == []


@pytest.mark.slow
def test_every_selection_of_tests_selects_some(listed: Any) -> None:
    """That the files are there every bug was asked above."""
    root = FILE.parent.parent
    selections = [[*COLLECT, *shlex.split(tests)] for tests in sorted({m.tests for m in listed.MUTATIONS})]
    code = f"import pytest; print('found', [int(pytest.main(arguments)) for arguments in {selections}])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == f"found {[0] * len(selections)}", done.stdout + done.stderr


def test_there_are_many_and_none_twice(listed: Any) -> None:
    assert len({(m.file, m.new, m.old) for m in listed.MUTATIONS}) == len(listed.MUTATIONS) >= 25
    assert len({m.what for m in listed.MUTATIONS}) == len(listed.MUTATIONS)
    assert all(m.old != m.new for m in listed.MUTATIONS)


def test_the_report_names_what_survived(listed: Any) -> None:
    first, second = listed.MUTATIONS[:2]
    text = listed.report([(first, "tests/a.py::test_b[x|y]", 1.0), (second, "", 2.0)])
    assert "1 of 2 were found" in text
    assert f"| {first.what} | `{first.file}` | `a.py::test_b[x/y]` |" in text
    assert f"| {second.what} | `{second.file}` | **nothing** |" in text
