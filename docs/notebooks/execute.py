"""Runs the notebooks of this folder and keeps what they showed: python docs/notebooks/execute.py [FOLDER]

With FOLDER the executed notebooks go there, and those here stay as they are. Needs the extra `docs`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def execute(notebook: Path, out: Path) -> None:
    """Runs every cell in a fresh kernel and a fresh folder; a cell that raises ends it. Times are not kept."""
    cells = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            cells, timeout=240, kernel_name="python3", record_timing=False, resources={"metadata": {"path": folder}}
        )
        client.execute()
    cells.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(cells, out / notebook.name)


def main() -> None:
    out = Path(sys.argv[1]) if sys.argv[1:] else HERE
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for `!penstock`
    for notebook in sorted(HERE.glob("*.ipynb")):
        execute(notebook, out)
        print(out / notebook.name)


if __name__ == "__main__":
    main()
