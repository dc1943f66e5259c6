"""Trials of a search: settings tried, the run that trains them, and their scores at each milestone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from penstock.run.launch.sweep import Run, Status
from penstock.run.search.space import Space, as_tuples

State = Literal["waiting", "running", "paused", "finished", "pruned", "failed"]


@dataclass
class Trial:
    """One point of the space, and how far it has come."""

    number: int
    values: dict[str, Any]
    """Settings by dotted path; of a member of PBT those it trains with now."""
    run: Run
    """Its run: name of the directory, attempts, seconds. Of a member of PBT the newest."""
    goal: int
    """The milestone, in environment steps, that it trains to, or has reached."""
    state: State = "waiting"
    """paused: at a milestone, undecided. pruned: ended there. finished: at the last one."""
    scores: dict[int, float | None] = field(default_factory=dict[int, "float | None"])
    """The metric at each milestone; None where it was no finite number."""
    steps: int = 0
    """Environment steps that the run has taken."""
    copies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Of a member of PBT, for each copy: `at` which milestone, `of` which trial; the run, values and score it left."""
    failures: int = 0
    """Attempts that failed and were begun again."""
    reason: str = ""
    """Why it failed."""
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the sampler that proposed it keeps; {} of most."""

    @property
    def score(self) -> float | None:
        """The newest score."""
        return self.scores[max(self.scores)] if self.scores else None


def to_plain(trial: Trial) -> dict[str, Any]:
    """A trial as JSON data."""
    return asdict(trial)


def from_plain(plain: Mapping[str, Any], space: Space) -> Trial:
    """The inverse of `to_plain`; one that ran when its launcher was killed waits.

    Raises ValueError or LookupError for data that no trial of this space is.
    """
    values = {str(path): as_tuples(value) for path, value in plain["values"].items()}
    if values.keys() != space.keys():
        raise ValueError(f"trial {plain['number']} has settings {sorted(values)}; the space has {sorted(space)}")
    for path, value in values.items():
        if not space[path].holds(value):
            raise ValueError(f"trial {plain['number']} has {path}={value!r}, which the space does not hold")
    number = int(plain["number"])
    own = rf"trial-{number:03d}(-\d+)?"
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


def score_from_plain(plain: Any) -> float | None:
    """A score from JSON data. Raises ValueError or TypeError for what is none."""
    return None if plain is None else float(plain)
