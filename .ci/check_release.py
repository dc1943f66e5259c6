"""Checks before a release, for `make dist`: python .ci/check_release.py [FOLDER OF ARCHIVES]

Everything that names the version names the same one, and the description in each archive has no link or image that a package index
would not find. Without a folder the versions alone are checked.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = {
    "penstock/core/__init__.py": r'^VERSION = "([\d.]+)"',
    "CITATION.cff": r"^version: ([\d.]+)$",
    "CHANGELOG.md": r"^## ([\d.]+) ",
    "README.md": r"^Version ([\d.]+),",
    "docs/versions.md": r"^  version = \{([\d.]+)\},$",
}
"""Files that name the version, and where."""
DATED = {"CITATION.cff": r"^date-released: \d{4}-\d\d-\d\d$", "CHANGELOG.md": r"^## [\d.]+ \(\d{4}-\d\d-\d\d\)$"}
LINK = re.compile(r"(?:\]\(|\b(?:href|src)=[\"'])(?!https?://|#|mailto:)([^)\"'\s]+)")


def named(root: Path = ROOT) -> dict[str, str]:
    """The version by the file that names it; of the changelog that of its first heading."""
    found = {name: re.search(pattern, (root / name).read_text(), re.MULTILINE) for name, pattern in NAMED.items()}
    return {name: match[1] if match else "none" for name, match in found.items()}


def descriptions(folder: Path) -> Iterator[tuple[str, str]]:
    """The metadata of each archive, which ends with the description that an index shows."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                member = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
                assert member is not None
                yield path.name, member.read().decode()
        elif path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
                yield path.name, archive.read(name).decode()


def faults(folder: Path | None, root: Path = ROOT) -> Iterator[str]:
    versions = named(root)
    if len(set(versions.values())) > 1:
        yield f"versions differ: {', '.join(f'{name} {version}' for name, version in versions.items())}"
    if folder is None:
        return
    for name, pattern in DATED.items():
        if not re.search(pattern, (root / name).read_text(), re.MULTILINE):
            yield f"{name} has no date of release, as {'date-released: ' * name.endswith('cff')}2026-11-28"
    archives = dict(descriptions(folder))
    if [name.rpartition(".")[2] for name in archives] != ["whl", "gz"]:
        yield f"{folder} holds {', '.join(archives) or 'no archive'}; expected one wheel and one source archive"
    for name, text in archives.items():
        if f"\nVersion: {versions['penstock/core/__init__.py']}\n" not in text:
            yield f"{name} is of another version"
        if links := sorted(set(LINK.findall(text))):
            yield (
                f"{name} leads to {len(links)} files of the repository, such as {links[0]}; "
                "give its address as Repository in [project.urls] of pyproject.toml"
            )


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
    print("\n".join(found) or "no fault", file=sys.stderr if found else sys.stdout)
    sys.exit(bool(found))
