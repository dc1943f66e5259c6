"""The pages of the site: those that are written for it hold together, and formulas, links and the API are in them."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

import penstock as ps
from tests.parsed import ROOT

DOCS = [name for name in ("zensical", "mkdocstrings", "latex2mathml") if importlib.util.find_spec(name) is None]
needs_tools = pytest.mark.skipif(bool(DOCS), reason=f"not installed: {', '.join(DOCS)} (make docs)")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
CONFIG = (ROOT / "mkdocs.yml").read_text()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("stage", ROOT / "docs" / "site" / "stage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAGES", tmp_path / "docs")
    monkeypatch.setattr(module, "SITE", tmp_path / "site")
    return module


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r": ((?:docs/|benchmarks/)?[\w-]+\.md)$", CONFIG, re.MULTILINE)
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert len(listed) == len(set(listed))
    assert {page for page in listed if page.startswith("docs/")} == pages


def test_every_area_of_the_api_is_in_the_navigation() -> None:
    text = (ROOT / "docs" / "site" / "stage.py").read_text()
    areas = re.findall(r'^    "(\w+)": \("penstock\.', text, re.MULTILINE)
    assert len(areas) > 4 and re.findall(r": api/(\w+)\.md", CONFIG) == areas


@needs_tools
def test_pages_lead_to_pages_and_the_api_has_every_public_name_and_example(stage: ModuleType) -> None:
    stage.stage()
    pages = {path.relative_to(stage.PAGES).as_posix(): path for path in stage.PAGES.rglob("*.md")}
    dead = [
        f"{name}: {link}"
        for name, path in pages.items()
        if not name.startswith(("examples/", "penstock/"))
        for link in re.findall(r"\]\(([^)\s#]+\.(?:md|png|svg))[^)]*\)", path.read_text())
        if "://" not in link and not (path.parent / link).exists()
    ]
    assert not dead
    text = "\n".join(path.read_text() for name, path in pages.items() if name.startswith("api/"))
    public = {name for name in ps.__all__ if name not in ("__version__", "ops")}
    assert {line.rpartition(".")[2] for line in re.findall(r"^::: (.*)$", text, re.MULTILINE)} == public
    assert text.count("\nimport penstock as ps\n") == len(stage.examples()) == 15


@needs_tools
def test_formulas_are_drawn_and_code_is_left_alone(stage: ModuleType) -> None:
    text = stage.drawn("So $Q'_k(s, a^*)$ and `$HOME`.\n\n```sh\necho $A $B\n```\n")
    assert text.count("<math") == 1 and "`$HOME`" in text and "echo $A $B" in text
    assert "<msub><mrow><mi>Q</mi><mi>&#x02032;</mi></mrow><mi>k</mi></msub>" in text


@needs_tools
def test_the_check_names_dead_links_and_other_hosts(stage: ModuleType) -> None:
    stage.SITE.mkdir()
    (stage.SITE / "b.html").write_text('<h2 id="here"></h2><a href="https://example.org">elsewhere</a>')
    (stage.SITE / "a.html").write_text(
        '<a href="b.html#here"></a><a href="b.html#there"></a><a href="c.html"></a>'
        '<script src="https://cdn.example.org/x.js"></script>'
    )
    (stage.SITE / "s.css").write_text("@font-face { src: url(https://fonts.example.org/f.woff2) }")
    assert sorted(stage.faults()) == [
        "a.html leads to b.html#there, which is not there",
        "a.html leads to c.html, which is not there",
        "a.html loads https://cdn.example.org/x.js",
        "s.css loads https://fonts.example.org/f.woff2",
    ]
    assert stage.check() == 1


@needs_tools
@pytest.mark.slow
def test_the_site_is_built_without_dead_links(tmp_path: Path) -> None:
    for name in (
        "docs",
        "examples",
        "benchmarks",
        "penstock",
        "mkdocs.yml",
        "CITATION.cff",
        *(p.name for p in ROOT.glob("*.md")),
    ):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copyfile(ROOT / name, tmp_path / name)
    script = [sys.executable, "docs/site/stage.py"]
    for command in (script, [sys.executable, "-m", "zensical", "build"], [*script, "check"]):
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-2000:]
    assert " 0 faults" in ended.stdout
    site = tmp_path / "build" / "site"
    assert (site / "search.json").stat().st_size > 100_000
    if CHROMIUM is not None:
        for page in ("index.html", "docs/dqn.html", "api/runs.html"):
            assert not said_by_browser(site, page, tmp_path / "browser")


def said_by_browser(site: Path, page: str, folder: Path) -> list[str]:
    """What Chromium complains of, such as what a page asks of a host: there is none but this one."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
        words += ["--virtual-time-budget=5000", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
        words += ["--enable-logging=stderr", f"http://127.0.0.1:{server.server_port}/{page}"]
        done = subprocess.run([str(CHROMIUM), *words], capture_output=True, text=True, timeout=90)
        server.shutdown()
    assert "<h1" in done.stdout
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]
