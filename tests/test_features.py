"""The table of features: what shows a row of ours exists, and every cell of another library has its source."""

from __future__ import annotations

import re

import penstock as ps
from penstock.algos import ALGOS
from penstock.cli.main import COMMANDS
from penstock.cli.settings import train_parser
from penstock.cli.values import located
from tests.parsed import ROOT

PAGE = (ROOT / "docs" / "features.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| [^|]+ \| (yes|part|no)\b", line)
]


def shown_by(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[9]) if len(row) > 9 else []


def missing(evidence: str) -> bool:
    """True if a test, a file, or a command with its algorithm and option is not there."""
    if not evidence.startswith("penstock "):
        path, _, name = evidence.partition("::")
        file = ROOT / path
        return not file.is_file() or (bool(name) and f"\ndef {name}(" not in file.read_text())
    _, command, *words = evidence.split()
    if command not in COMMANDS:
        return True
    if command != "train":
        return not all(
            re.search(rf'"{word}"', (ROOT / "penstock" / "cli" / f"{command}.py").read_text()) for word in words
        )
    options = [word for word in words if word.startswith("--")]
    algos = [word for word in words if not word.startswith("--")]
    return not (all(algo in ALGOS for algo in algos) and all(map(is_option, options)))


def is_option(option: str) -> bool:
    parsed = {text for action in train_parser()._actions for text in action.option_strings}  # pyright: ignore[reportPrivateUsage]
    samplers = (ps.CpuSampler(), ps.AsyncSampler(), ps.RunnerSampler())
    return option in parsed or any(located(ps.Experiment("x", ps.PPO(), sampler), option) for sampler in samplers)


def test_every_row_of_ours_is_shown_by_a_test_or_a_command() -> None:
    assert len(ROWS) > 60
    bare = [row[0] for row in ROWS if not row[1].startswith("no") and not shown_by(row)]
    assert not bare
    absent = {evidence for row in ROWS for evidence in shown_by(row) if missing(evidence)}
    assert not absent, absent


def test_every_cell_of_theirs_has_a_source_at_a_fixed_version() -> None:
    sources = dict(re.findall(r"^\[(\w+)\]: (\S+)$", PAGE, re.MULTILINE))
    used: set[str] = set()
    for row in ROWS:
        cells = [re.fullmatch(r"\[(yes|part|no)\]\[(\w+)\]", cell) for cell in row[2:9]]
        assert len(cells) == 7 and all(cells), row
        used |= {cell[2] for cell in cells if cell}
    assert used == sources.keys()
    version = r"https://github\.com/[\w-]+/[\w-]+/(blob|tree)/([0-9a-f]{40}|ray-2\.60\.0|v0\.14\.1)/\S+"
    assert not [url for url in sources.values() if not re.fullmatch(version, url)]
