"""Trials of a study: settings tried, the run that trains them, and their scores at each milestone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.studies.space import Space, as_tuples

LOGS = "logs"
PROMPT = "$ python -m penstock "
"""Start of the first line of each attempt in a log; the command follows."""
Status = Literal["waiting", "running", "stopped", "finished", "failed"]
State = Literal["waiting", "running", "paused", "finished", "pruned", "failed"]


@dataclass
class Run:
    """One run of a study and its state."""

    name: str
    """Name of its directory, such as `trial-003`, or `lr=1e-3_s1` in a sweep."""
    status: Status = "waiting"
    """`running` in the file of a killed launcher means interrupted; `stopped` means ended by a signal."""
    code: int | None = None
    """Exit code of the last attempt, negative for the signal that killed it."""
    attempts: int = 0
    seconds: float = 0.0
    """Duration of all attempts that ended."""


@dataclass
class Trial:
    """One point of the space, and how far it has come."""

    number: int
    values: dict[str, Any]
    """Settings by dotted path; of a member of PBT those it trains with now."""
    run: Run
    """Its run: name of the directory, attempts, seconds. For a member of PBT the newest run."""
    goal: int
    """The milestone, in environment steps, that it trains to, or has reached."""
    state: State = "waiting"
    """paused: at a milestone, undecided. pruned: ended there. finished: at the last one."""
    scores: dict[int, float | None] = field(default_factory=dict[int, "float | None"])
    """The metric at each milestone; None where it was no finite number."""
    steps: int = 0
    """Environment steps that the run has taken."""
    copies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Copies by a member of PBT: `at` which milestone, `of` which trial; the run, values and score before it."""
    failures: int = 0
    """Attempts that failed and were begun again."""
    reason: str = ""
    """Why it failed."""
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Data that the proposing sampler stores; {} for most."""

    @property
    def score(self) -> float | None:
        """The newest score."""
        return self.scores[max(self.scores)] if self.scores else None


@dataclass
class Confirmation:
    """One run of the best settings with another seed."""

    seed: int
    run: Run
    score: float | None = None
    of: str = ""
    """The run with the best settings, which this run trains."""
    failures: int = 0
    """Attempts that failed and were begun again."""
    reason: str = ""
    """Why it failed."""


def to_plain(trial: Trial) -> dict[str, Any]:
    """A trial as JSON data."""
    return asdict(trial)


def from_plain(plain: Mapping[str, Any], space: Space, name: str | None = None) -> Trial:
    """Inverse of `to_plain`; one that ran when its launcher was killed waits.

    Args:
        name: of its run in a sweep; None: of a search, which numbers them.

    Raises ValueError or LookupError for data that no trial of this space is.
    """
    values = {str(path): as_tuples(value) for path, value in plain["values"].items()}
    if values.keys() != space.keys():
        raise ValueError(f"trial {plain['number']} has settings {sorted(values)}; the space has {sorted(space)}")
    for path, value in values.items():
        if not space[path].holds(value):
            raise ValueError(f"trial {plain['number']} has {path}={value!r}, which the space does not hold")
    number = int(plain["number"])
    own = rf"trial-{number:03d}(-\d+)?" if name is None else re.escape(name)
    if plain["state"] not in get_args(State):
        raise ValueError(f"state {plain['state']!r} of trial {number}")
    for copy in plain["copies"]:
        score = copy["score"]
        if not re.fullmatch(own, copy["run"]) or not (score is None or type(score) in (int, float)):
            raise ValueError(f"trial {number} left {copy['run']!r} with {score!r}")
        _ = int(copy["of"]), int(copy["at"])
    return Trial(
        number=number,
        values=values,
        run=run_from_plain(plain["run"], own),
        goal=int(plain["goal"]),
        state="waiting" if plain["state"] == "running" else plain["state"],
        scores={int(goal): score_from_plain(score) for goal, score in plain["scores"].items()},
        steps=int(plain["steps"]),
        copies=[dict(copy) for copy in plain["copies"]],
        failures=int(plain["failures"]),
        reason=str(plain["reason"]),
        notes={str(name): dict(found) for name, found in plain.get("notes", {}).items()},
    )


def run_from_plain(plain: Mapping[str, Any], name: str) -> Run:
    """A run from JSON data, in a directory whose name matches `name`: its directory may be removed, its log written.

    Raises ValueError or TypeError for anything else.
    """
    run = Run(**plain)
    if not re.fullmatch(name, run.name) or run.status not in get_args(Status):
        raise ValueError(f"run {run.name!r}, which is {run.status!r}")
    counts = type(run.attempts) is int and type(run.seconds) in (int, float) and math.isfinite(run.seconds)
    if not counts or not (run.code is None or type(run.code) is int):
        raise ValueError(f"run {run.name!r} with attempts {run.attempts!r}, seconds {run.seconds!r}, code {run.code!r}")
    return run


def confirmation_from_plain(plain: Mapping[str, Any], first: int, best: str) -> Confirmation:
    """A run that confirms the best, from JSON data. Raises ValueError or LookupError on invalid data."""
    seed = plain["seed"]
    if type(seed) is not int or seed <= first:
        raise ValueError(f"a confirmation with seed {seed!r}; that of the search is {first}")
    run = run_from_plain(plain["run"], rf"(best|trial-\d{{3,}}(-\d+)?|{re.escape(best)})-s{seed}")
    score = score_from_plain(plain["score"])
    of, failures, reason = plain.get("of", best), int(plain.get("failures", 0)), str(plain.get("reason", ""))
    return Confirmation(seed, run, score, of, failures, reason)


def score_from_plain(plain: Any) -> float | None:
    """A score from JSON data. Raises ValueError or TypeError on invalid data."""
    return None if plain is None else float(plain)


def has_checkpoint(run_dir: Path) -> bool:
    """True if a run has a checkpoint, whole or broken: `resume` names a broken one, the launcher removes none."""
    folder = run_dir / "checkpoints"
    return folder.is_dir() and any(path.name[0].isdigit() for path in folder.iterdir())
