"""Pages for users of other libraries agree with the table of names by which the library answers them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import penstock as ps
from penstock.algos import ALGOS
from penstock.core.names.hints import foreign, meaning_of, owners, table

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("from-*.md"))
CLASSES = (ps.PPO, ps.DQN, ps.SAC, ps.TD3, ps.R2D1, ps.SerialSampler, ps.RunnerSampler, ps.RunConfig, ps.Experiment)
"""Settings classes to which a name may be given; what stands for it depends on the class."""
PATH = re.compile(r"\b(?:algo|sampler|run)(?:\.\w+)+")


def rows(page: Path) -> list[tuple[list[str], str]]:
    """The names in backticks and the answer of each row of the table under `## Names`."""
    section = page.read_text().partition("\n## Names\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([\w.]+)`", there), here) for there, here in cells]


def answers(name: str) -> set[str]:
    """The words of which one has to be in an answer for this name: last names of settings, or classes; {} for unknown."""
    known: set[str] = set()
    if name in table()["algorithms"]:
        path = meaning_of(table()["algorithms"][name]).path
        return {ALGOS[path].rpartition(":")[2]} if path else set()
    if name in table()["names"]:
        return set(re.findall(r"ps\.(\w+)", table()["names"][name]))
    for cls in CLASSES:
        meaning = foreign(name, [cls])
        known |= {meaning.path.rpartition(".")[2]} if meaning and meaning.path else set()
    return known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_are_answered_as_the_library_answers_them(page: Path) -> None:
    found = rows(page)
    assert len(found) > 20
    wrong = {}
    for names, here in found:
        for name in names:
            expected = answers(name)
            if expected and not any(re.search(rf"\b{word}\b", here) for word in expected):
                wrong[name] = f"{here}; expected one of {sorted(expected)}"
    assert not wrong
    assert sum(bool(answers(name)) for names, _ in found for name in names) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_answers_are_settings_and_public_names(page: Path) -> None:
    text = " ".join(here for _, here in rows(page)).replace("sampler.inner.", "sampler.")
    missing = [path for path in PATH.findall(text) if not settings_at(path)]
    missing += [name for name in re.findall(r"\bps\.(\w+)", page.read_text()) if name not in ps.__all__]
    assert not missing


def settings_at(path: str) -> bool:
    """True if a class of ours has the setting; `run.envs` is an attribute of a live run."""
    at, _, name = path.rpartition(".")
    return path == "run.envs.call" or at in owners(name)
