"""The commands of docs/command-line.md run one after the other in one folder, as a reader types them."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.short import Cli

PAGE = Path(__file__).parent.parent.parent / "docs" / "command-line.md"
SHORT = {"train": "700", "resume": "2800"}
"""Steps of a run, in place of those of the line."""
LACKING = {"push": (2, "no token") if find_spec("huggingface_hub") else (2, "pip install 'penstock[hub]'")}
if not find_spec("imageio_ffmpeg"):
    LACKING["enjoy"] = 2, "pip install 'penstock[video]'"
"""Code and words of commands that lack a token or an extra here; tests/run/sharing and test_show.py have what they need."""


def commands() -> list[list[str]]:
    """The words after `penstock` of each line of the list; two spaces and more stand before its remark."""
    block = PAGE.read_text().partition("```\n")[2].partition("```")[0]
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
def test_the_commands_of_the_page_work_in_the_order_in_which_they_stand(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = commands()
    wanted = {"train", "eval", "resume", "plot", "view", "export", "record", "replay", "doctor"}
    assert {words[0] for words in found} >= wanted
    for words in found:
        if words[0] == "view":  # until Ctrl-C: test_view.py
            continue
        said = cli(*shortened(words))
        code, text = LACKING.get(words[0], (0, ""))
        assert (said.code, text in said.err) == (code, True), f"penstock {shlex.join(shortened(words))}\n{said.both}"
    assert (tmp_path / "curves.png").stat().st_size > 1000
