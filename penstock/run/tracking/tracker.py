"""The Protocol of trackers, and the ones that a name stands for."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.core.config import import_object
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.protocols import members, require_call, require_members

TRACKERS = {
    "tensorboard": "penstock.run.tracking.on_tensorboard:TensorBoard",
    "wandb": "penstock.run.tracking.on_wandb:WeightsAndBiases",
    "mlflow": "penstock.run.tracking.on_mlflow:MLflow",
    "trackio": "penstock.run.tracking.on_trackio:Trackio",
}
"""Each is the name of the package that it needs, and of the extra that installs it."""
_PAGE = "docs/trackers.md"


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is told of."""

    run_dir: Path
    id: str
    """12 hexadecimal digits, the same after a resume: by it a tracker finds what it has shown before."""
    name: str
    """For people, e.g. "ppo CartPole-v1 20261128-120000-s0"."""
    settings: Mapping[str, str | float | bool | None]
    """Every setting by its path, e.g. {"algo.lr": 0.0003}; a list is text."""
    versions: Mapping[str, Any]
    """The content of meta.json: command, host, git state and versions."""
    sent_step: int
    """Environment steps of the newest row that was sent before; -1 if none was."""


class Tracker(Protocol):
    """Shows a run elsewhere. All calls come from one thread, which is not the run's.

    A call that raises is repeated later, by a new tracker, from `start` on; a row counts as sent once `write` returns.
    Made without arguments.
    """

    def start(self, run: TrackedRun) -> None:
        """Begins, or goes on with, the tracked run of `run.id`."""
        ...

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Takes a row of metrics, names as in metrics.jsonl, all finite; `step` counts environment steps.

        Rows come in the order of metrics.jsonl. One of an evaluation beside training has the step of its policy, which
        may be smaller than that of the row before.
        """
        ...

    def artifact(self, path: Path, kind: str) -> None:
        """Takes a file of the run: of kind "settings", "versions", "video" or "policy"."""
        ...

    def close(self) -> None:
        """Ends the tracked run for now; what it has taken is safe when this returns."""
        ...


def check_names(names: Iterable[str]) -> None:
    """Raises ConfigError for names that are neither known nor `module:NAME`, or given twice. Imports nothing."""
    names = tuple(names)
    for name in names:
        if name not in TRACKERS and ":" not in name:
            raise ConfigError(
                f"run.trackers names {name!r}; expected {', '.join(TRACKERS)}, or your own as module:NAME"
            )
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"run.trackers names {twice[0]!r} twice; leave one out")


def check_trackers(names: Iterable[str]) -> None:
    """Raises, before anything is made, for trackers that cannot be made.

    Raises:
        MissingExtraError: the package of one is not installed. ConfigError: a `module:NAME` cannot be imported, or
            called without arguments, or is a class that lacks a member of Tracker, or whose member takes others.
    """
    for name in names:
        if name in TRACKERS:
            if not is_installed(name):
                raise MissingExtraError(name, name)
            continue
        found = import_object(name)
        require_call(f"run.trackers {name}", found, returns=f"a tracker; see {_PAGE}")
        if isinstance(found, type):
            require_members(found, Tracker, _PAGE)
            for method in members(Tracker):
                if inspect.isfunction(own := inspect.getattr_static(found, method)):
                    asked = inspect.signature(getattr(Tracker, method)).parameters
                    require_call(f"{name}.{method}", own, *asked, returns=f"None; see {_PAGE}")


def is_installed(package: str) -> bool:
    """True if a package can be found; it is not imported."""
    return importlib.util.find_spec(package) is not None


def make_tracker(name: str) -> Tracker:
    """A tracker by its name. It imports what that needs, which takes up to some seconds.

    Raises ConfigError if a function of the user's own returned something else.
    """
    tracker = import_object(TRACKERS.get(name, name))()
    require_members(tracker, Tracker, _PAGE)
    return tracker
