"""`init` and `--init`: a run, a policy of one, or one for each policy, in both forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.run.files.inits import absolute, at_runs, of_words, read, runs_of, words_of

FORMS: list[tuple[Any, Any, list[str]]] = [
    ("x", "x", ["x"]),
    (Path("x"), "x", ["x"]),
    (("x", "b"), ("x", "b"), ["x:b"]),
    ({"a": "x", "c": (Path("y"), "b")}, {"a": ("x", ""), "c": ("y", "b")}, ["a=x", "c=y:b"]),
]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x", "y", "odd:b", "k=v"):
        (tmp_path / name).mkdir()


@pytest.mark.parametrize(("init", "given", "words"), FORMS)
def test_forms_and_words(init: Any, given: Any, words: list[str], tmp_path: Path) -> None:
    assert read(init) == given
    assert words_of(given) == words
    assert of_words(words) == given
    assert runs_of(given) == [word.removeprefix("a=").removeprefix("c=").removesuffix(":b") for word in words]
    assert runs_of(absolute(given)) == [str(tmp_path / run) for run in runs_of(given)]
    assert runs_of(at_runs(given, ["p", "q"])) == ["p", "q"][: len(words)]


def test_nothing() -> None:
    assert of_words([]) is None
    assert runs_of(None) == runs_of("") == words_of("") == []


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("odd:b", "odd:b"),  # folders come first, whatever they are called
        ("odd:b:c", ("odd:b", "c")),
        ("k=v", "k=v"),
        ("a=k=v", {"a": ("k=v", "")}),
        ("k=v:c", ("k=v", "c")),
        ("team=red=x", {"team=red": ("x", "")}),
        ("a=x:team:red", {"a": ("x", "team:red")}),
        ("./x", "./x"),
        ("nowhere", "nowhere"),  # whoever opens it says that it is no run
        ("a=nowhere:b", {"a": ("nowhere:b", "")}),
        ("some/where=x", "some/where=x"),
    ],
)
def test_words_that_may_be_read_in_two_ways(text: str, given: Any) -> None:
    assert of_words([text]) == given


@pytest.mark.parametrize("words", [["a=x", "y"], ["x", "y"], ["x:b", "c=y"]])
def test_a_run_without_its_policy_beside_others(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"beside others names no policy of this run.*--init a=runs/x"):
        of_words(words)


def test_a_policy_named_twice() -> None:
    with pytest.raises(ConfigError, match="--init a=y names that policy twice"):
        of_words(["a=x", "a=y"])


@pytest.mark.parametrize("init", [3, {}, {1: "x"}, {"a": 3}, ("x",), ("x", 1), {"a": ("x", "b", "c")}, ["x", "b", "c"]])
def test_what_is_none(init: Any) -> None:
    with pytest.raises(ConfigError, match=r"init=.*expected a run, 'runs/a'; a policy of it"):
        read(init)
