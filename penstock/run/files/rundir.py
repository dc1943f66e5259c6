"""The run directory: its name, its protection from overwriting, and the files written before a run begins."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch

from penstock.core import VERSION
from penstock.core.config import to_plain
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.files import require_name, write_atomic
from penstock.core.spec import specs_to_plain
from penstock.native.library import TORCH, VARIABLE, kernel, why
from penstock.run.experiment import Experiment
from penstock.run.files.stored_experiment import CONFIG, META, config_bytes, read_json
from penstock.run.files.trust import remember

if TYPE_CHECKING:  # it writes the settings too
    from penstock.run.trainer import Trainer


def free_run_dir(exp: Experiment) -> Path:
    """The directory of a run that is to begin. Raises ConfigError if it is not empty: nothing is ever overwritten."""
    if exp.run.dir is not None:
        path = Path(exp.run.dir)
    else:
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in exp.env_config.name)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-s{exp.run.seed}"
        path = _unused(Path("runs") / name / exp.algo_name / stamp)
    check_free(path)
    return path


def _unused(path: Path) -> Path:
    """The path, or with the first number behind its name by which nothing stands there."""
    numbered = (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


def check_free(path: Path) -> None:
    """Raises ConfigError if a directory is not empty, or its name is not UTF-8."""
    require_name(path, "run directory")
    try:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run directory {path} is a file; nothing in it was touched. Choose another run.dir")
        if path.exists() and any(p.name != ".lock" for p in path.iterdir()):
            raise ConfigError(
                f"run directory {path} is not empty; nothing in it was touched. Go on with it by `penstock "
                f"resume {path}` (ps.resume), or choose another run.dir"
            )
    except OSError as error:
        raise CheckpointError(
            f"cannot read run directory {path}: {error.strerror or error}; choose another run.dir"
        ) from error


def make_run_dir(path: Path, given: bool) -> Path:
    """Makes the run directory; one that was not given, and is taken by now, gets a number. Raises CheckpointError."""
    try:
        while True:
            try:
                path.mkdir(parents=True, exist_ok=given)
                return path
            except FileExistsError:
                if given:
                    raise
                path = _unused(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot make run directory {path}: {error.strerror or error}; choose another run.dir"
        ) from error


def _fingerprint() -> dict[str, Any]:
    """Versions, processor and threads, on which equal bits depend besides the settings."""
    return {
        "versions": {
            "penstock": VERSION,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "gymnasium": gymnasium.__version__,
            "python": platform.python_version(),
        },
        "kernel": kernel(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def require_same_kernel(run_dir: Path) -> None:
    """Raises ConfigError if a run began with another kernel for dense layers than computes here; see `penstock.native`.

    Runs without a record began with torch's.
    """
    try:
        began: Any = read_json(run_dir / META).get("kernel", TORCH)
    except CheckpointError:
        return  # it is no part of the state, and `changes_since` says so
    if began != (here := kernel()):
        set_ = f"set the environment variable {VARIABLE}={0 if began == TORCH else 1}"
        cure = f"{set_} to go on as it began" + ("" if began == TORCH else f" (here: {why()})")
        raise ConfigError(
            f"{run_dir} began with kernel {str(began)[:20]!r}, and here computes {here!r}, so that the resumed run "
            f"would not be the same; {cure}. To go on regardless, start anew from its networks: --init {run_dir}"
        )


def changes_since(run_dir: Path) -> list[str]:
    """Versions, processor and threads that have changed since the run began, so that the last bits may differ."""
    now = _fingerprint()
    try:
        before: dict[str, Any] = read_json(run_dir / META)
    except CheckpointError:
        return [f"{META} cannot be read"]
    old, new = before.get("versions", {}), now["versions"]
    changed = [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]
    return changed + [
        f"{k} {before.get(k)} -> {now[k]}" for k in ("cpu_capability", "threads") if before.get(k) != now[k]
    ]


def write_config(trainer: Trainer) -> dict[str, Any]:
    """Writes config.json, from which a run is resumed and loaded, and meta.json with machine, versions and command.

    Returns the experiment as it is written.

    The run is trusted from then on, as it is this user's own.
    """
    exp, run_dir = trainer.begun.exp, trainer.run_dir
    assert run_dir is not None
    plain = to_plain(exp)
    config = config_bytes(plain, specs_to_plain(trainer.plan.specs))
    meta = {
        "env": exp.env_config.name,
        "algo": exp.algo_name,
        "seed": exp.run.seed,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "git": _git(),
        **_fingerprint(),
        "env_reproducible": trainer.plan.report.reproducible,
    }
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(run_dir / CONFIG, config)
        write_atomic(run_dir / META, (json.dumps(meta, indent=1) + "\n").encode())
    except OSError as error:
        raise CheckpointError(f"cannot write into run directory {run_dir}: {error.strerror or error}") from error
    remember(run_dir / CONFIG, hashlib.sha256(config).hexdigest())
    return plain


def _git() -> str | None:
    """The commit of the current folder, `-dirty` if files differ from it.

    Runs no code of a foreign repository: git would call its file monitor, its filters for files that may have changed,
    and the transport of its remote for missing objects.
    """
    quiet, env = ["git", "-c", "core.fsmonitor=false"], {**os.environ, "GIT_ALLOW_PROTOCOL": "none"}
    asked: list[str] = []
    try:
        for command in (
            ["config", "--includes", "--local", "--get-regexp", r"^(filter|include|includeif|submodule|extensions)\."],
            ["describe", "--always"],
        ):
            dirty = ["--dirty"] if asked == [""] else []
            done = subprocess.run(
                [*quiet, *command, *dirty], capture_output=True, text=True, timeout=2.0, check=False, env=env
            )
            asked.append(done.stdout.strip())
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked[-1] or None
