"""Sending of a run that is over to trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.run.files.lock import RunLock
from penstock.run.files.stored_experiment import read_config
from penstock.run.tracking.sender import Sender, finish
from penstock.run.tracking.tracker import check_names, check_trackers

_MOST_S, _START_S = 3600.0, 60.0


def send_run(run_dir: Path, names: Sequence[str], say: Callable[[str], None], trust: bool = False) -> bool:
    """Sends trackers what they lack of a run that nothing trains now; True if they got all, else `say` tells.

    Args:
        names: as `run.trackers`; without any those of the run. trust: allow importing a `module:NAME` of the run.

    Raises:
        CheckpointError: no run. ConfigError: no trackers, or one that cannot be made; a process trains the run.
    """
    stored = read_config(run_dir, trust)
    names = tuple(names) or stored.trackers()
    if not names:
        raise ConfigError(f"{run_dir} was trained without run.trackers; name some: --trackers wandb")
    check_names(names)
    check_trackers(names)
    with RunLock(run_dir):
        return finish([Sender(run_dir, name) for name in names], say, _MOST_S, _START_S)
