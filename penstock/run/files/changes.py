"""Changes to a run's settings as it goes: which may change, and the journal from which a resumed run repeats them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.config import from_plain, keys_at, override, to_plain, unstorable
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.files import unshare
from penstock.run.checkpoints.checkpoint import Checkpoint
from penstock.run.experiment import Experiment
from penstock.run.files.foreign import foreign, refusal
from penstock.run.files.trust import is_trusted, remember
from penstock.run.log import CHANGES, cut_rows, read_rows

FORKED = b'{"step": 0, "forked": true}\n'
"""First row of the journal of a run that was made of another one's checkpoint."""
RUN_SETTINGS = (
    "steps", "stop", "eval_interval", "eval_episodes", "eval_max_steps", "checkpoint_interval", "keep", "keep_replays",
    "log_interval", "video_interval",
)  # fmt: skip
"""Settings of `run` that may change."""


def changed(exp: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """The experiment with other values of settings that may change in a run.

    Raises:
        ConfigError: an unknown path, a value out of range, or a setting that determines networks, optimizers, replay or
            slots.
    """
    if not isinstance(changes, Mapping) or not changes or not all(isinstance(path, str) for path in changes):
        raise ConfigError(f"changes {changes!r:.60}; expected settings by path, e.g. {{'algo.lr': 1e-4}}")
    found = override(exp, changes)
    for path in changes:
        _require_movable(exp, path)
    if lost := [path for path in changes if unstorable(to_plain(at(found, path)))]:
        raise ConfigError(
            f"{lost[0]}={changes[lost[0]]!r} cannot be stored, so that a resumed run could not make the change again; "
            "give a function of a module, as module:function"
        )
    return found


def _require_movable(exp: Experiment, path: str) -> None:
    part, _, rest = path.partition(".")
    if part == "run" and rest.partition(".")[0] in RUN_SETTINGS:
        return
    holder: Any = exp.algo
    keys = rest.split(".") if part == "algo" and rest else []
    while keys:
        key, *keys = keys_at(holder, keys)
        if key in getattr(type(holder), "fixed", ()):
            break
        holder = at(holder, key)
        if holder is None and keys:  # a part that the run does not have
            break
    else:
        if part == "algo" and not dataclasses.is_dataclass(holder) and not isinstance(holder, Mapping):
            return
    may = f"of run {', '.join(RUN_SETTINGS)}"
    if part != "run":
        may = "of algo step sizes, coefficients, discount, minibatches, replay ratio, targets and exploration"
    raise ConfigError(
        f"{path} cannot change while a run goes on, as networks, optimizers, replay or slots depend on it; what can is "
        f"{may}. For anything else start anew from its networks: init=RUN (--init)"
    )


def at(settings: Any, path: str, *default: Any) -> Any:
    """The setting at a dotted path; `default` if there is none, else KeyError."""
    keys = path.split(".")
    while keys:
        key, *keys = keys_at(settings, keys)
        if isinstance(settings, Mapping) and key not in settings and default:
            return default[0]
        settings = settings[key] if isinstance(settings, Mapping) else getattr(settings, key)
    return settings


def without_weights(settings: Any) -> Any:
    """The settings without the files that encoders start from, which a policy in training does not need any more."""
    if isinstance(settings, Mapping):
        before = dict(settings)
    elif dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        before = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    else:
        return settings
    after = {name: None if name == "encoder_weights" else without_weights(x) for name, x in before.items()}
    found = {name: x for name, x in after.items() if x is not before[name]}
    if not found:
        return settings
    return after if isinstance(settings, Mapping) else dataclasses.replace(settings, **found)


def write_change(run_dir: Path, step: int, row: Mapping[str, Any]) -> None:
    """Appends a row to a run's journal and flushes it to disk. Raises CheckpointError if that fails."""
    path, full = run_dir / CHANGES, {"step": step, **row}
    try:
        unshare(path)
        with path.open("ab") as file:
            file.write(json.dumps(full).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"the change was not made, as it cannot be written to {path}: {error.strerror or error}; free some space"
        ) from error
    if _names_code(full):
        remember(path, _digest([full]))


def require_own_journal(run_dir: Path, trust: bool = False) -> None:
    """Raises CheckpointError if a journal has rows that name code, and that no process of this user wrote.

    Args:
        trust: the user vouches for them, from now on.
    """
    path = run_dir / CHANGES
    rows = [row for row in _settings_rows(run_dir) if _names_code(row)]
    if trust:
        for row in rows:
            remember(path, _digest([row]))
    elif strange := [row["set"] for row in rows if not is_trusted(path, _digest([row]))]:
        raise CheckpointError(
            f"{refusal(path, foreign(strange))}It was written elsewhere, or changed since. If you know who wrote it: "
            "--trust (trust=True); see docs/security.md"
        )


def journaled(run_dir: Path | None) -> dict[str, Any]:
    """What a checkpoint keeps of the journal: the number of rows that set something, and their digest."""
    rows = [] if run_dir is None else _settings_rows(run_dir)
    return {"rows": len(rows), "sha256": _digest(rows)}


def require_whole_journal(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if rows that a checkpoint was written after are gone or others."""
    kept = checkpoint.state["trainer"].get("changes", {"rows": 0, "sha256": ""})
    count, digest = kept["rows"], kept["sha256"]
    forked = read_changes(run_dir, 0)[:1] == [json.loads(FORKED)]
    if count and not forked and _digest(_settings_rows(run_dir)[:count]) != digest:
        raise CheckpointError(
            f"{run_dir / CHANGES} is damaged or gone: {checkpoint.path} was written after {count} changes of settings, "
            "which the journal does not hold as they were; put it back, or start anew from the networks: "
            f"--init {run_dir}"
        )


def _settings_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_changes(run_dir, math.inf) if "set" in row]


def _names_code(row: Mapping[str, Any]) -> bool:
    return bool(foreign([row.get("set")]))


def _digest(rows: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def known_steps(checkpoint: Checkpoint) -> int:
    """The environment steps up to which a run resumed from a checkpoint keeps its rows.

    An iteration whose evaluation was cut short is evaluated, handed out and logged again.
    """
    state = checkpoint.state["trainer"]
    return state["env_steps"] - bool(state["pending"])


def plain_changes(run_dir: Path, step: int, cut: bool = False) -> dict[str, Any]:
    """The settings changed up to a step, by path, as JSON data; the last change of a setting counts.

    Args:
        cut: remove rows of later steps, as a resumed run repeats these changes.
    """
    rows = cut_rows(run_dir / CHANGES, step) if cut else read_changes(run_dir, step)
    found: dict[str, Any] = {}
    for path, value in (item for row in rows for item in row.get("set", {}).items()):
        for known in [x for x in found if x == path or x.startswith(f"{path}.")]:
            del found[known]  # the later one is made last
        found[path] = value
    return found


def settings_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Metrics `settings/PATH` of changed settings by path; those that are no numbers have none."""
    return {f"settings/{path}": float(x) for path, x in values.items() if isinstance(x, (int, float))}


def read_changes(run_dir: Path, step: float) -> list[dict[str, Any]]:
    """The rows of a run's journal up to a step."""
    return [row for row in read_rows(run_dir / CHANGES) if row["step"] <= step]


def with_changes(exp: Experiment, plain: Mapping[str, Any]) -> Experiment:
    """The experiment with a journal's changes. Raises ConfigError for those that `changed` refuses."""
    return changed(exp, {path: from_plain(value) for path, value in plain.items()}) if plain else exp
