"""Builds the native kernel where there is a C compiler; without one, penstock computes by torch and numpy alone.

The kernel is a plain shared library, opened by ctypes, so one wheel of a platform serves every Python. Wheels and
source archives have one sha256 however often they are built: all times in them are SOURCE_DATE_EPOCH.
"""

import gzip
import os
import re
import shutil
import sys
import tarfile
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-g0"]
EPOCH = int(os.environ.setdefault("SOURCE_DATE_EPOCH", "1767225600"))
ROOT = Path(__file__).parent
WITHOUT = """
penstock: the native kernel was not built, for want of a C compiler that works (the message above says which was tried). All works
without it, by torch and numpy: sampling of small networks takes about 1.7 times as long, and a run is bound to one kind of
processor. To have it: install a compiler (apt-get install gcc, xcode-select --install), then install penstock again with
--no-cache-dir --force-reinstall --no-deps. `penstock doctor` says whether it is there.
"""


def readme() -> str:
    """README.md for a package index: its links lead to this version's files in the repository.

    They stay as they are as long as pyproject.toml has no `[project.urls]` with a `Repository`.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository")
    if address is None:
        return text
    version = re.findall(r'^VERSION = "(.*)"', (ROOT / "penstock/core/__init__.py").read_text(), re.MULTILINE)[0]
    return re.sub(
        r"(!?)(\[[^]]*\]\()(?!\w+:|#)",
        lambda link: f"{link[0]}{address}/{'raw' if link[1] else 'blob'}/v{version}/",
        text,
    )


class PlainLibrary(build_ext):
    """Names the library without the version of Python that built it, and says what it costs to be without it."""

    def run(self) -> None:
        super().run()
        if not all(map(os.path.exists, self.get_outputs())):
            print(WITHOUT, file=sys.stderr)

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', os.sep)}.so"


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3 of this platform, without the masks of the machine that builds it."""

    def run(self) -> None:
        shutil.rmtree(self.get_finalized_command("build").build_base, ignore_errors=True)  # files of an earlier state
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]

    def write_wheelfile(self, wheelfile_base: str, *args: str) -> None:  # the last file before all are packed
        super().write_wheelfile(wheelfile_base, *args)
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)


class SortedArchive(sdist):
    """A source archive without the times, owners and masks of the machine that makes it."""

    def make_archive(self, base_name: str, format: str, root_dir=None, base_dir=None, owner=None, group=None) -> str:
        def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = EPOCH, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        path = Path(f"{base_name}.tar.gz")
        with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=EPOCH) as packed:
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
                archive.add(base_dir, filter=plain)
        return str(path)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension("penstock.native._kernel", ["penstock/native/kernel.c"], extra_compile_args=FLAGS, optional=True)
    ],
    cmdclass={"build_ext": PlainLibrary, "bdist_wheel": PlatformWheel, "sdist": SortedArchive},
)
