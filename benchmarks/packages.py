"""Smoke test of the wheel and the source archive in a clean environment of each Python at hand.

    python benchmarks/packages.py [--torch torch==2.13.0+cpu] [--out FOLDER]

Both are built by pip, each Python from 3.11 gets a new virtual environment, and there the wheel is installed with the
versions of constraints.txt and used from another folder: commands, training, resume, `ps.load`. Where pip finds no
wheel of torch for a Python, it is used without torch, as far as that goes, and the row says so.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = ["numpy", "gymnasium", "optree", "rich", "psutil", "safetensors", "cloudpickle", "matplotlib"]
COMMANDS = [
    ["--version"],
    ["--help"],
    ["train", "--help"],
    ["train", "ppo", "--help"],
    ["algos"],
    ["envs", "--help"],
    ["runs", "--help"],
    ["plot", "--help"],
    ["view", "--help"],
    ["completion", "bash"],
]
TRAINED = [
    ["train", "ppo", "--env", "CartPole-v1", "--preset", "none", "--run.steps", "2000", "--run.dir", "a"],
    ["train", "ppo", "--env", "CartPole-v1", "--preset", "none", "--run.steps", "2000", "--run.dir", "b",
     "--sampler", "cpu", "--sampler.workers", "2"],
    ["resume", "a", "--run.steps", "4000"],
    ["eval", "a", "--episodes", "2"],
    ["plot", "a", "b", "--out", "x.png"],
    ["plot", "a", "b", "--table", "md"],
    ["runs", "."],
]  # fmt: skip
NATIVE = "from penstock.native.library import found, why; assert found is not None, why(); print(why())"
MODULES = (
    "import compileall, penstock, sys; sys.exit(not compileall.compile_dir(penstock.__path__[0], quiet=1, force=1))"
)


def called(line: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        list(map(str, line)), cwd=cwd, capture_output=True, text=True, timeout=900, env=variables, check=False
    )


def must(line: Sequence[str | Path], cwd: Path) -> str:
    ended = called(line, cwd)
    if ended.returncode:
        raise SystemExit(f"{' '.join(map(str, line))}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def pythons() -> dict[str, Path]:
    """The interpreters from 3.11 on PATH and of pyenv, by version."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    files = [file for folder in folders for file in sorted(folder.glob("python3*"))]
    files += sorted((Path.home() / ".pyenv" / "versions").glob("*/bin/python3"))
    found: dict[str, Path] = {}
    for file in files:
        if re.fullmatch(r"python3(\.\d+)?", file.name):
            said = called([file, "-c", "import sys, venv, ensurepip; print('%d.%d.%d' % sys.version_info[:3])"], ROOT)
            version = said.stdout.strip()
            if said.returncode == 0 and tuple(map(int, version.split(".")))[:2] >= (3, 11):
                found.setdefault(version, file)
    return found


def row_of(version: str, python: Path, wheel: Path, torch: str, work: Path) -> str:
    must([python, "-m", "venv", work / version], work)
    own = work / version / "bin"
    pip = [own / "python", "-m", "pip", "--disable-pip-version-check"]
    has_torch = called([*pip, "install", "-q", "--no-deps", "--only-binary", ":all:", torch], work).returncode == 0
    constraints = ["-c", ROOT / "constraints.txt"]
    if has_torch:
        must([*pip, "install", "-q", *constraints, torch, f"{wheel}[plot]"], work)
    else:
        must([*pip, "install", "-q", "--only-binary", ":all:", *WITHOUT_TORCH], work)
        must([*pip, "install", "-q", "--no-deps", wheel], work)
    folder = work / f"{version}-runs"
    folder.mkdir()
    commands = COMMANDS + (TRAINED if has_torch else [])
    for words in commands:
        must([own / "penstock", *words], folder)
    kernel = must([own / "python", "-c", NATIVE], folder).strip()
    must([own / "python", "-W", "error", "-c", MODULES], folder)
    if has_torch:
        must([own / "python", "-c", "import penstock as ps; ps.load('a').predict([0.0] * 4)"], folder)
    said = "trains, resumes, acts, plots" if has_torch else f"no wheel of {torch} for it: commands without torch"
    return f"| {version} | {len(commands)} | {kernel} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Smoke test of wheel and source archive.")
    parser.add_argument("--torch", default="torch==2.13.0+cpu", help="torch as pip installs it")
    parser.add_argument("--out", type=Path, default=None, help="folder that keeps the wheel")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        out = args.out or work / "dist"
        must([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, ROOT], work)
        (wheel,) = out.glob("penstock-*.whl")
        print(
            f"{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB\n\n| Python | commands | kernel | used |\n|---|---|---|---|"
        )
        for version, python in sorted(pythons().items()):
            print(row_of(version, python, wheel.resolve(), args.torch, work), flush=True)


if __name__ == "__main__":
    main()
