"""Modules that texts name, and when the current folder is searched for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.run.files.modules import modules_named, search_here


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
