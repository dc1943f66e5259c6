from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import penstock as ps
from tests.parsed import ROOT

BUILD = "import setuptools.build_meta as backend; backend.build_sdist('dist'); backend.build_wheel('dist')"
NOT_SHIPPED = {".gitignore"}
OF_THE_WHEEL = {
    "penstock/py.typed", "penstock/presets/ppo.toml", "penstock/core/names/foreign.toml", "penstock/native/_kernel.so",
    "penstock/native/kernel.c", "penstock/view/page/index.html", "penstock/view/page/uPlot.iife.min.js",
    "penstock/view/page/uPlot.min.css",
}  # fmt: skip
FOR_METADATA = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "penstock/core/__init__.py",
    "penstock/view/page/uPlot-LICENSE.txt",
)
METADATA = "import setuptools.build_meta as backend; print(backend.prepare_metadata_for_build_wheel('.'))"
LICENCES = {"LICENSE", "penstock/view/page/uPlot-LICENSE.txt"}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    if listed.returncode:
        pytest.skip("no git checkout, which says what belongs to an archive")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def built(source: Path, umask: int) -> dict[str, str]:
    """Builds both archives in a folder; returns the sha256 of each by its ending."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "SOURCE_DATE_EPOCH")}
    line = [sys.executable, "-c", BUILD]
    ended = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=200, env=variables, umask=umask)
    assert ended.returncode == 0, ended.stderr
    return {file.suffix: hashlib.sha256(file.read_bytes()).hexdigest() for file in (source / "dist").iterdir()}


@pytest.mark.slow
def test_archives_are_whole_and_have_one_digest(tmp_path: Path) -> None:
    names = tracked()
    for folder, mode in (("one", 0o644), ("another", 0o600)):
        for name in names:
            copy = tmp_path / folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
            copy.chmod(mode)
    digests = built(tmp_path / "one", 0o022)
    assert digests.keys() == {".gz", ".whl"}
    assert built(tmp_path / "another", 0o077) == digests
    (source,) = (tmp_path / "one" / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert set(names) - inside == NOT_SHIPPED
    assert {name for name in inside if name.endswith((".so", ".pyc"))} == set()
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (library,) = (tmp_path / "one" / "build").glob("lib*")
    left = unpacked / "build" / library.name / "penstock" / "gone.py"  # as an earlier build leaves it
    left.parent.mkdir(parents=True)
    left.touch()
    assert built(unpacked, 0o022)[".whl"] == digests[".whl"]
    (wheel,) = (tmp_path / "one" / "dist").glob("*.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"] and not wheel.stem.endswith("any")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    modules = {name for name in names if name.startswith("penstock/") and name.endswith(".py")}
    assert inside >= modules | OF_THE_WHEEL
    assert {name.partition("/licenses/")[2] for name in inside if "/licenses/" in name} == LICENCES
    line = [sys.executable, "-P", "-c", "from penstock.native.library import found, why; assert found, why()"]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    assert subprocess.run(line, cwd=tmp_path, timeout=60, env=variables, check=False).returncode == 0


@pytest.mark.slow
def test_without_a_compiler_it_is_built_all_the_same_and_says_what_that_costs(tmp_path: Path) -> None:
    for name in tracked():
        if name.startswith("penstock/") or name in FOR_METADATA:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"CC": "false"}
    line = [sys.executable, "-c", "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=variables)
    assert ended.returncode == 0 and "penstock: the native kernel was not built" in ended.stderr
    assert "1.7 times as long" in ended.stderr and "--no-cache-dir" in ended.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "penstock/native/_kernel.so" not in archive.namelist()


@pytest.mark.parametrize("address", [None, "https://example.org/me/penstock"])
def test_the_readme_of_a_package_leads_to_the_files_of_its_version(address: str | None, tmp_path: Path) -> None:
    for name in FOR_METADATA:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    if address is not None:
        with (tmp_path / "pyproject.toml").open("a") as file:
            file.write(f'\n[project.urls]\nRepository = "{address}"\n')
    ended = subprocess.run([sys.executable, "-c", METADATA], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", text.partition("# penstock")[2])
    assert len(links) > 40 and "Description-Content-Type: text/markdown" in text
    for image, link in links:
        kind = "raw" if image else "blob"
        assert link.startswith(
            f"{address}/{kind}/v{ps.__version__}/" if address else ("docs/", "benchmarks/", "examples", "C")
        )
        path = link.removeprefix(f"{address}/{kind}/v{ps.__version__}/").partition("#")[0]
        assert (ROOT / path).exists()


def checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_release", ROOT / ".ci" / "check_release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_that_names_the_version_names_the_same_one() -> None:
    assert set(checks().named().values()) == {ps.__version__}


def test_the_check_of_a_release_names_what_an_index_would_not_find(tmp_path: Path) -> None:
    """Links out of both archives, images in HTML, another version and what has no date."""
    text = "Name: penstock\nVersion: {}\n\n# penstock\n\n[a](https://x.org) [b](#b) {}\n"
    with zipfile.ZipFile(tmp_path / "p-1-py3-none-linux.whl", "w") as wheel:
        wheel.writestr("p-1.dist-info/METADATA", text.format("9.9.9", "![c](docs/c.png)"))
    with tarfile.open(tmp_path / "p-1.tar.gz", "w:gz") as source:
        entry = tarfile.TarInfo("p-1/PKG-INFO")
        content = text.format(ps.__version__, '<img src="c.png">').encode()
        entry.size = len(content)
        source.addfile(entry, io.BytesIO(content))
    said = list(checks().faults(tmp_path))
    found = [fault for fault in said if fault.startswith("p-1")]
    assert [fault.split(";")[0] for fault in found] == [
        "p-1-py3-none-linux.whl is of another version",
        "p-1-py3-none-linux.whl leads to 1 files of the repository, such as docs/c.png",
        "p-1.tar.gz leads to 1 files of the repository, such as c.png",
    ]
    assert {fault.split()[0] for fault in said} - {"p-1-py3-none-linux.whl", "p-1.tar.gz"} <= {
        "CITATION.cff",
        "CHANGELOG.md",
    }
