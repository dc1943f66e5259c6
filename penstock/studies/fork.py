"""Runs made of others: the whole state with some settings of the algorithm changed, or the parameters alone."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.config import to_plain
from penstock.core.errors import CheckpointError
from penstock.core.files import fsync_dir, write_atomic
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from penstock.run.experiment import Experiment
from penstock.run.files.changes import FORKED
from penstock.run.files.rundir import check_free
from penstock.run.files.stored_experiment import CONFIG, META, config_bytes
from penstock.run.files.trust import is_trusted, remember
from penstock.run.log import CHANGES, EVALUATIONS, JSONL

_HISTORY = (META, JSONL, EVALUATIONS)


def fork_run(source: Path, target: Path, exp: Experiment, spec: Mapping[str, Any]) -> None:
    """Makes a run directory with the newest checkpoint and the metrics of another run; `resume` goes on with it.

    Networks, normalisers, optimizers, replay, schedules and open episodes are the other's; the settings are those of
    `exp`, which must fit that state: `Trainer.restore` raises CheckpointError for networks of other shapes. The
    directory is there whole or not at all.

    Args:
        spec: of the policies, as `specs_to_plain` returns it.

    Raises:
        CheckpointError: the other run has no good checkpoint, or the disk refuses. ConfigError: `target` holds
            something.
    """
    check_free(target)
    checkpoint = find_checkpoint(source, replay=True)
    config = config_bytes(to_plain(exp), spec)
    unnamed = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(unnamed, ignore_errors=True)
        shutil.copytree(checkpoint, unnamed / "checkpoints" / checkpoint.name)
        for name in _HISTORY:
            if (source / name).is_file():
                (unnamed / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, unnamed / name)
        write_atomic(unnamed / CONFIG, config)
        write_atomic(unnamed / CHANGES, FORKED)  # the settings are those of `exp`, not what the other changed
        os.rename(unnamed, target)
        fsync_dir(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot copy {source} to {target}: {error.strerror or error}; free some space"
        ) from error
    finally:
        shutil.rmtree(unnamed, ignore_errors=True)
    remember(target / CONFIG, hashlib.sha256(config).hexdigest())


def copy_parameters(source: Path, target: Path) -> None:
    """Makes a run directory that `load` opens, with the newest parameters of another run and nothing else of it.

    Raises:
        CheckpointError: the other run has no good checkpoint, or the disk refuses.
    """
    checkpoint = load_checkpoint(find_checkpoint(source))
    save_checkpoint(target, checkpoint.step, {}, checkpoint.policy)
    config = (source / CONFIG).read_bytes()
    write_atomic(target / CONFIG, config)
    digest = hashlib.sha256(config).hexdigest()
    if is_trusted(source / CONFIG, digest):  # else a part of it was judged, and the rest may be anything
        remember(target / CONFIG, digest)
