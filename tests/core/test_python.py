"""Modules that texts name, and the one place in which Python processes get their command line."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from penstock.core.python import module_command, modules_named, script_command, search_here

PACKAGE = Path(__file__).parents[2] / "penstock"


def test_modules_that_texts_name() -> None:
    typed = ["--env", "my_env:Env", "--algo.agent=pkg.sub:make", "reward=a.b:c", "x,y:z", {"imports": ["one.two"]}]
    assert modules_named(typed) == {"my_env", "pkg", "a", "y", "one"}
    assert modules_named({"env.imports": ("one.two", 3), "algo": {"class": "mine:Algo", "lr": 3}}) == {
        "one",
        "3",
        "mine",
    }
    for other in ("CartPole-v1", "http://x:y", "10.0.0.1:6379", "host:6379", "cuda:0", "runs/a:b", "pettingzoo:f/n", 7):
        assert not modules_named(other)


def test_a_folder_that_is_gone_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    search_here(["not_there", "no identifier"])
    assert "" not in sys.path


def test_every_process_is_started_without_the_current_folder() -> None:
    """All command lines of Python are made by one module, with -P or with -I, which implies it."""
    assert module_command("a.b", "c") == [sys.executable, "-P", "-m", "a.b", "c"]
    assert script_command("x.py", "c") == [sys.executable, "-I", "-S", "x.py", "c"]
    named = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "executable" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "executable")
        or (isinstance(node, ast.ImportFrom) and any(a.name == "executable" for a in node.names))
    ]
    assert set(named) == {"core/python.py"}
