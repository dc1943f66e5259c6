"""The page of Protocols has all of them, with their members, and what implements each has them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.core.protocols import members

PACKAGE = Path(penstock.__file__).parent
PAGE = PACKAGE.parent / "docs" / "protocols.md"
LINK = re.compile(r"\[[`*]*(\w+)[`*]*\]\(\.\./penstock/([\w/]+)\.py\)")


def rows() -> Iterator[tuple[str, type, set[str], list[Any]]]:
    """Of each row of the page the name, the Protocol, its members in words, and its implementations."""
    for line in PAGE.read_text().splitlines():
        cells = line.split(" | ")
        if len(cells) != 4 or not LINK.search(cells[0]):
            continue
        ((name, module),) = LINK.findall(cells[0])
        here = [getattr(_module(where), cls) for cls, where in LINK.findall(cells[3])]
        yield name, getattr(_module(module), name), set(re.findall(r"`(\w+)`", cells[2])), here


def _module(path: str) -> Any:
    return importlib.import_module(f"penstock.{path.replace('/', '.')}")


ROWS = {name: (protocol, words, here) for name, protocol, words, here in rows()}


def test_every_protocol_has_a_row() -> None:
    written = {
        found
        for path in PACKAGE.rglob("*.py")
        for found in re.findall(r"^class (\w+)\((?:.*, )?Protocol(?:\[.*\])?\):", path.read_text(), re.MULTILINE)
    }
    assert written == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_members_and_what_has_them(name: str) -> None:
    protocol, words, here = ROWS[name]
    inherited = {x for base in protocol.__bases__ if getattr(base, "_is_protocol", False) for x in members(base)}
    assert words == {*members(protocol)} - inherited
    for cls in here:
        methods = [member for member, text in members(protocol).items() if not text.startswith(f"{member}:")]
        lacking = [method for method in methods if not callable(getattr(cls, method, None))]
        assert not lacking, f"{cls.__name__} has no {lacking}"
