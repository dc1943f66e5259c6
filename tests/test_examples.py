from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parsed import code_lines

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINES = 25
STEPS = "1500"


def blocks() -> list[tuple[str, str]]:
    """Every ```python block, which is to run as it stands; what is not to run is fenced as something else."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 2
            found.append((f"{page.name}:{line}", match[1]))
    return found


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        there = page.parent / name if name else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_images_say_what_they_show(page: Path) -> None:
    texts = re.findall(r"!\[([^\]]*)\]", page.read_text())
    assert all(len(text.split()) > 3 for text in texts), texts


def test_pages_that_code_and_presets_name_exist() -> None:
    files = [path for path in (ROOT / "penstock").rglob("*") if path.suffix in {".py", ".toml"}]
    named = {(path, name) for path in files for name in re.findall(r"\bdocs/[\w-]+\.md", path.read_text())}
    assert len(named) > 30
    assert not [f"{path}: {name}" for path, name in named if not (ROOT / name).exists()]


def run(command: list[str], folder: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_is_short(path: Path) -> None:
    assert code_lines(path) <= MAX_LINES, f"{path.name} has {code_lines(path)} lines of code, at most {MAX_LINES}"


@pytest.mark.parametrize(
    ("where", "code"), [pytest.param(*b, id=b[0]) for b in blocks() if b[0].startswith("cookbook")]
)
def test_a_recipe_is_short(where: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(code)
    assert code_lines(tmp_path / "block.py") <= MAX_LINES


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_says_how_to_run_it(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python examples/{path.name}" in text or f"penstock train {path.stem}:" in text, text


def test_the_ladder_has_no_missing_rung() -> None:
    numbers = sorted(int(path.name.split("_")[0]) for path in SCRIPTS if path.name[0].isdigit())
    assert numbers == list(range(1, len(numbers) + 1))


def test_line_count_leaves_out_what_is_no_code(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        '"""Two\nlines."""\n\n# why\nx = [\n    1,\n]\n\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    )
    assert code_lines(path) == 6


def run_forked(zygote: Any, path: Path, folder: Path, *args: str) -> str:
    """As `python PATH ARGS`, without the seconds that `import torch` takes; its workers begin as users' do."""
    child = zygote.script(path, *args, cwd=folder)
    assert child.wait(280) == 0, child.output[-4000:]
    return child.output


@pytest.mark.examples
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_example_runs(path: Path, zygote: Any, tmp_path: Path) -> None:
    assert run_forked(zygote, path, tmp_path, STEPS).strip(), "it shows nothing"


@pytest.mark.examples
def test_the_first_example_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert run([sys.executable, str(SCRIPTS[0]), STEPS], tmp_path).strip()


@pytest.mark.examples
def test_the_algorithm_from_outside_runs_from_the_command_line(tmp_path: Path) -> None:
    command = [
        "train",
        "reinforce:Reinforce",
        "--env",
        "CartPole-v1",
        "--run.steps",
        STEPS,
        "--run.dir",
        str(tmp_path / "run"),
    ]
    run([sys.executable, "-m", "penstock", *command], ROOT / "examples")
    assert (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.examples
def test_the_steps_of_the_page_on_algorithms_are_an_algorithm(tmp_path: Path) -> None:
    """Its fragments in order, which `examples/reinforce.py` repeats, and the line that trains it."""
    text = (ROOT / "docs" / "writing-an-algorithm.md").read_text().partition("## From replay")[0]
    steps = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(steps) == 3
    last = f'print(ps.train(ps.Experiment("CartPole-v1", Reinforce(), run=ps.RunConfig(steps={STEPS}))).metrics)'
    head = "from dataclasses import dataclass\n\nimport penstock as ps\n"
    (tmp_path / "steps.py").write_text("\n".join([head, *steps, last]))
    assert "train/value_loss" in run([sys.executable, "steps.py"], tmp_path)


@pytest.mark.examples
@pytest.mark.parametrize(("where", "code"), [pytest.param(*block, id=block[0]) for block in blocks()])
def test_block_runs(where: str, code: str, zygote: Any, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(code)
    run_forked(zygote, tmp_path / "block.py", tmp_path)
