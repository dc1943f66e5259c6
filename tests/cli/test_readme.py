"""The commands of README.md run one after the other in one folder, as a reader types them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.short import Cli

README = Path(__file__).parent.parent.parent / "README.md"
SHORT = {"train": "700", "resume": "2800"}
"""Steps of a run, in place of those of the line."""


def commands() -> list[list[str]]:
    """The words after `penstock` of each line of the list; two spaces and more stand before its remark."""
    block = README.read_text().partition("## The command line")[2].partition("```\n")[2].partition("```")[0]
    return [shlex.split(re.split(" {2,}", line)[0])[1:] for line in block.splitlines()]


def shortened(words: list[str]) -> list[str]:
    if words[0] not in SHORT or "--help" in words:
        return words
    if "--run.steps" in words:
        at = words.index("--run.steps")
        words = words[:at] + words[at + 2 :]
    return [*words, "--run.steps", SHORT[words[0]], "--run.eval-episodes", "1"]


@pytest.mark.examples
@pytest.mark.usefixtures("drawn")
def test_the_commands_of_the_readme_work_in_the_order_in_which_they_stand(cli: Cli, tmp_path: Path) -> None:
    found = commands()
    wanted = {"train", "eval", "resume", "plot", "view", "export", "record", "replay", "doctor"}
    assert {words[0] for words in found} >= wanted
    for words in found:
        if words[0] == "view":  # until Ctrl-C: test_view.py
            continue
        said = cli(*shortened(words))
        assert said.code == 0, f"penstock {shlex.join(shortened(words))}\n{said.both}"
    assert (tmp_path / "curves.png").stat().st_size > 1000
