from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.parsed import ROOT

BUILD = "import setuptools.build_meta as backend; backend.build_sdist('dist'); backend.build_wheel('dist')"
NOT_SHIPPED = {".gitignore"}
OF_THE_WHEEL = {
    "penstock/py.typed", "penstock/presets/ppo.toml", "penstock/core/names/foreign.toml", "penstock/native/_kernel.so",
    "penstock/native/kernel.c", "penstock/view/page/index.html", "penstock/view/page/uPlot.iife.min.js",
    "penstock/view/page/uPlot.min.css",
}  # fmt: skip
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
