"""Writes the pages of the site to build/docs, and checks a built one: python docs/site/stage.py [check]

Pages keep their folders, so that their links hold. Added are what links lead to and the repository shows by itself: the
scripts of examples/ and linked source files as pages, lists of folders, and the API by area from the docstrings.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import latex2mathml.converter

ROOT = Path(__file__).parents[2]
PAGES, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
COPIED = ("docs/*.md", "docs/notebooks/*.ipynb", "docs/images/*.svg", "docs/images/*.png", "*.md", "benchmarks/README.md",
          "benchmarks/results/*.md", "benchmarks/results/*.png")  # fmt: skip
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
AREAS = {
    "algorithms": ("penstock.algos",),
    "samplers": ("penstock.samplers",),
    "agents": ("penstock.agents", "penstock.learn"),
    "replay": ("penstock.replay",),
    "runs": ("penstock.run", "penstock.studies", "penstock.actors"),
    "data": ("penstock.core", "penstock.envs", "penstock.datasets", "penstock.ops"),
}
"""Pages of the API, and the packages whose public names each has."""
LANGUAGES = {".py": "python", ".c": "c", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}
MEMBERS = (
    "    options:",
    "      show_root_heading: false",
    "      show_root_toc_entry: false",
    "      heading_level: 3",
)
PRIME = "<mi>&#x02032;</mi>"
MENDED = (
    (rf"<msup>(<mi>[^<]*</mi>){PRIME}</msup>", rf"<mrow>\1{PRIME}</mrow>"),  # the sign is raised by itself
    (rf"<msubsup>(<mi>[^<]*</mi>)(<mi>[^<]*</mi>){PRIME}</msubsup>", rf"<msub><mrow>\1{PRIME}</mrow>\2</msub>"),
    (r"(<mi>log</mi>)(?=<m(i|sub)>)", r'\1<mspace width="0.17em"/>'),
    (r"(?<=>)\*(?=<)", "&#42;"),  # no emphasis of Markdown's
)
"""Patterns in MathML, and what stands in their place."""
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def public_names() -> dict[str, str]:
    """The module of each public name, as penstock/__init__.py has them."""
    text = (ROOT / "penstock" / "__init__.py").read_text()
    return dict(re.findall(r'^    "(\w+)": "(penstock[\w.]*)",$', text, re.MULTILINE))


def examples() -> dict[str, str]:
    """The text and the script below each heading of docs/reference.md, by the class in the heading."""
    parts = re.split(r"^## (\w+)$", (ROOT / "docs" / "reference.md").read_text(), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2])}


def area(module: str) -> str:
    return next(name for name, packages in AREAS.items() if module.startswith(packages))


def api(name: str) -> str:
    """The page of an area: each class or function; what docs/reference.md says of it stands before its members."""
    lines = [f"# API: {name}", ""]
    for public, module in sorted(public_names().items()):
        if area(module) == name:
            example = examples().get(public)
            if example is not None:
                lines += [
                    f"## {public} {{ #{module}.{public} }}",
                    "",
                    linked(example, ROOT / "docs", f"api/{name}.md"),
                    "",
                ]
            lines += [f"::: {module}.{public}", *(MEMBERS if example else ()), ""]
    return "\n".join(lines)


def page_of(path: Path) -> str:
    """Where the site shows a file or folder of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    if path.is_dir():
        return f"{name}/README.md" if (path / "README.md").exists() else f"{name}/index.md"
    if path.suffix == ".ipynb":
        return str(Path(name).with_suffix(".md"))
    return name if path.suffix in (".md", ".png", ".svg") else f"{name}.md"


def linked(text: str, folder: Path, page: str) -> str:
    """The text with its links to files of the repository as links from `page` of the site."""

    def moved(match: re.Match[str]) -> str:
        name, hash_, anchor = match[2].partition("#")
        there = (folder / name).resolve()
        if not name or "://" in name or not there.is_relative_to(ROOT) or not there.exists():  # code looks alike
            return match[0]
        up = "../" * page.count("/")
        return f"{match[1]}{up}{page_of(there)}{hash_}{anchor}{match[3]}"

    return LINK.sub(moved, text)


def drawn(text: str) -> str:
    """The text with its formulas, TeX between dollars, as MathML, which browsers draw without scripts or fonts of ours."""

    def formula(match: re.Match[str]) -> str:
        if match[1] is None:  # code
            return match[0]
        drawing = latex2mathml.converter.convert(match[1])
        for found, instead in MENDED:
            drawing = re.sub(found, instead, drawing)
        return f"<span>{drawing}</span>"  # which keeps it in its paragraph

    return re.sub(r"^```.*?^```|`[^`\n]*`|\$([^$\n]+)\$", formula, text, flags=re.DOTALL | re.MULTILINE)


def write(name: str, text: str) -> None:
    path = PAGES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def code_page(path: Path) -> str:
    """A file as a page; one of the package is left out of the search, which has its docstrings."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    head = "" if name.startswith("examples/") else HIDDEN
    return f"{head}# {path.name}\n\n`{name}`\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def notebook(path: Path, images: Path) -> str:
    """An executed notebook as Markdown; its pictures are written to `images`, the folder of the page."""
    images.mkdir(parents=True, exist_ok=True)
    parts: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{cell['id']}.png"
                (images / name).write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![Picture that the code above draws]({name})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def listing(folder: str) -> str:
    """A page that lists the files of a folder, each with its first line."""
    lines = [f"# {folder}", ""]
    files = [path for path in (ROOT / folder).iterdir() if path.suffix in (".py", ".md", ".sh", ".yaml")]
    for path in sorted(
        files, key=lambda p: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", p.name)]
    ):
        first = re.sub(r'^("""|#!?|# )', "", path.read_text().splitlines()[0]).strip(' "')
        lines.append(f"- [{path.name}]({Path(page_of(path)).name}): {first}")
    return "\n".join(lines) + "\n"


def stage() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    files: set[Path] = set()
    for path in sorted({path for pattern in COPIED for path in ROOT.glob(pattern)}):
        page = page_of(path)
        if path.suffix in (".md", ".ipynb"):
            text = path.read_text() if path.suffix == ".md" else notebook(path, (PAGES / page).parent)
            for _, name, _ in LINK.findall(text):
                there = (path.parent / name.partition("#")[0]).resolve()
                if there.is_file() and there.suffix not in (".md", ".ipynb", ".png", ".svg"):
                    files.add(there)
            write(page, drawn(linked(text, path.parent, page)))
        else:
            (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, PAGES / page)
    for path in sorted(files | set(ROOT.glob("examples/*.py"))):
        write(page_of(path), code_page(path))
    for folder in ("examples", "examples/cluster", "benchmarks/results"):
        if not (PAGES / folder / "README.md").exists():
            write(f"{folder}/index.md", listing(folder))
    for name in AREAS:
        write(f"api/{name}.md", api(name))
    shutil.copyfile(Path(__file__).with_name("site.css"), PAGES / "site.css")


class Page(HTMLParser):
    """What a page of the site leads to, what it loads, and the places in it that links may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.loaded, self.places = list[str](), list[str](), {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given.get("href", ""))
        elif "src" in given:
            self.loaded.append(given["src"])


def faults() -> Iterator[str]:
    """Dead links of the built site, images without a text, and what pages and styles would load from other hosts."""
    pages = {path: Page(path.read_text()) for path in SITE.rglob("*.html")}
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            url = urlsplit(link)
            there = (path.parent / unquote(url.path)).resolve() if url.path else path
            there = there / "index.html" if there.is_dir() else there
            if url.scheme or url.netloc:
                if link in page.loaded and url.scheme != "data":
                    yield f"{path.relative_to(SITE)} loads {link}"
            elif path.name != "404.html" and not (there.is_file() and fits(pages.get(there), unquote(url.fragment))):
                yield f"{path.relative_to(SITE)} leads to {link}, which is not there"
    for style in SITE.rglob("*.css"):
        for url in re.findall(r"url\(['\"]?(https?:[^)'\"]*)", style.read_text()):
            yield f"{style.relative_to(SITE)} loads {url}"


def fits(page: Page | None, place: str) -> bool:
    return page is None or place in page.places


def check() -> int:
    found = sorted(set(faults()))
    print("\n".join(found))
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE}, {len(found)} faults")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(check() if sys.argv[1:] == ["check"] else stage())
