"""Tables of the documentation that repeat what code says are held against it."""

from __future__ import annotations

import ast
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from penstock.run.experiment import RunConfig

DOCS = Path(__file__).parent.parent / "docs"


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return lines[2:]


def default(field: Any) -> Any:
    return field.default_factory() if field.default is MISSING else field.default


def test_the_table_of_run_config_has_its_fields_and_their_defaults() -> None:
    shown = {row[0].strip("`"): row[1] for row in table("runs.md", "RunConfig")}
    expected = {field.name: default(field) for field in fields(RunConfig)}
    assert {name: ast.literal_eval(re.sub(r"(?<=\d),(?=\d)", "", text)) for name, text in shown.items()} == expected
