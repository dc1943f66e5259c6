"""The one place in which Python processes get their command line."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from penstock.processes.python import module_command

PACKAGE = Path(__file__).parents[2] / "penstock"


def test_every_process_is_started_without_the_current_folder() -> None:
    """All command lines of Python are made by one module, with -P."""
    assert module_command("a.b", "c") == [sys.executable, "-P", "-m", "a.b", "c"]
    named = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "executable" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "executable")
        or (isinstance(node, ast.ImportFrom) and any(a.name == "executable" for a in node.names))
    ]
    assert set(named) == {"processes/python.py"}
