"""Scripts that end their own children, for tests of what becomes of a process that starts some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def said_by(code: str, folder: Path, *args: str) -> str:
    """What a script prints, which has the package of these tests and one thread."""
    path = os.pathsep.join([str(folder), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *args], cwd=folder, env=env, capture_output=True, text=True,
        timeout=150,
    )  # fmt: skip
    return done.stdout + done.stderr


CHILDREN = """
import os, signal, sys, threading, time
import psutil
import penstock as ps

def children(part):
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if part in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            pass
    return found
"""
