"""Schedulers decide which trials continue at a milestone; stateless functions of the trials.

So a search that is killed and restored decides as it would have. Each `decide` returns the decisions that follow from
the known scores, [] if it must wait until another trial reaches its goal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args

from penstock.core.errors import ConfigError, nearest
from penstock.core.noise import Purpose, generator
from penstock.studies.space import Space
from penstock.studies.trial import Trial

SchedulerName = Literal["none", "asha", "median", "pbt"]
Objective = Callable[["float | None"], float]
"""How good a score is: larger is better, -inf without one."""
_RUNGS = 4
_EARLY = 4
"""Trials that a median needs."""


@dataclass(frozen=True)
class Decision:
    """The next action of a trial."""

    trial: Trial
    goal: int | None
    """The next milestone; None: it ends here."""
    copy_of: Trial | None = None
    """The trial with the state that it continues from."""
    values: dict[str, Any] | None = None
    """The settings that it then has."""


class Scheduler(Protocol):
    """Milestones and decisions; settings alone, as a frozen dataclass."""

    name: ClassVar[SchedulerName]

    @property
    def goals(self) -> tuple[int, ...]:
        """Milestones in environment steps, the last of which ends the run."""
        ...

    def decide(self, trials: Sequence[Trial], total: int, objective: Objective) -> list[Decision]:
        """Decisions on paused trials, of which the search is to begin `total`."""
        ...


@dataclass(frozen=True)
class NoScheduler:
    """Every trial trains to its end."""

    name: ClassVar[SchedulerName] = "none"
    goals: tuple[int, ...]

    def decide(self, trials: Sequence[Trial], total: int, objective: Objective) -> list[Decision]:
        """Ends every trial that has reached the only goal."""
        return _finished(trials, self.goals[-1])


@dataclass(frozen=True)
class Asha:
    """Successive halving: of the trials at a rung the best 1/eta go on (Li et al. 2020, algorithm 2).

    A rung is complete when no further trial can reach it; then at least one goes on. Before that the best 1/eta of
    those that have arrived go on at once, unless `synchronous`: then no rung is decided before it is complete, which
    is successive halving as Jamieson and Talwalkar 2016 have it.
    """

    name: ClassVar[SchedulerName] = "asha"
    goals: tuple[int, ...]
    eta: int
    synchronous: bool

    def decide(self, trials: Sequence[Trial], total: int, objective: Objective) -> list[Decision]:
        """Promotions of the first rung that has any, or the ends of trials that no rung will promote."""
        complete = len(trials) == total
        for goal, following in zip(self.goals, self.goals[1:]):
            entered = [t for t in trials if t.goal >= goal]
            arrived = [t for t in entered if goal in t.scores or t.state == "failed"]
            complete = complete and len(arrived) == len(entered)
            if self.synchronous and not complete:
                return _finished(trials, self.goals[-1])
            ranked = sorted(arrived, key=lambda t: (-objective(t.scores.get(goal)), t.number))
            quota = max(len(arrived) // self.eta, int(complete))
            best = [t for t in ranked[:quota] if objective(t.scores.get(goal)) > -math.inf]
            if chosen := [t for t in best if _waits_at(t, goal)]:
                return [Decision(t, following) for t in sorted(chosen, key=lambda t: t.number)]
            if complete and (rest := [t for t in ranked if _waits_at(t, goal)]):
                return [Decision(t, None) for t in rest]
        return _finished(trials, self.goals[-1])


@dataclass(frozen=True)
class Median:
    """A trial ends where its best score is below the median of the others' running averages (Golovin et al. 2017).

    The averages are over the scores up to the same milestone, of trials that have reached it; fewer than four of them
    end none.
    """

    name: ClassVar[SchedulerName] = "median"
    goals: tuple[int, ...]

    def decide(self, trials: Sequence[Trial], total: int, objective: Objective) -> list[Decision]:
        """A decision on each paused trial, at once."""
        return [Decision(t, self._following(t, trials, objective)) for t in trials if t.state == "paused"]

    def _following(self, trial: Trial, trials: Sequence[Trial], objective: Objective) -> int | None:
        if trial.goal == self.goals[-1]:
            return None
        others = [t for t in trials if t is not trial and trial.goal in t.scores]
        averages = [statistics.fmean(self._so_far(t, trial.goal, objective)) for t in others]
        if len(averages) >= _EARLY and max(self._so_far(trial, trial.goal, objective)) < statistics.median(averages):
            return None
        return self.goals[self.goals.index(trial.goal) + 1]

    def _so_far(self, trial: Trial, goal: int, objective: Objective) -> list[float]:
        return [objective(score) for at, score in trial.scores.items() if at <= goal]


@dataclass(frozen=True)
class Pbt:
    """Population based training (Jaderberg et al. 2017): bad members copy good ones and explore other settings.

    Nothing is decided before a generation is complete: then each of the worst `quantile`, and each member that failed,
    goes on from the state of one of the best, drawn at random, with settings near that one's. Without a score nobody is
    among the best; where they all have none, nobody is copied.
    """

    name: ClassVar[SchedulerName] = "pbt"
    goals: tuple[int, ...]
    space: Space
    seed: int
    quantile: float = 0.25

    def decide(self, trials: Sequence[Trial], total: int, objective: Objective) -> list[Decision]:
        """Every member's decision at the end of a generation, all at once."""
        alive = [t for t in trials if t.state != "failed"]
        goal = max((t.goal for t in trials), default=0)
        if len(trials) < total or not alive or not all(_waits_at(t, goal) for t in alive):
            return []
        if goal == self.goals[-1]:
            return _finished(trials, goal)
        generation = self.goals.index(goal)
        ranked = sorted(alive, key=lambda t: (-objective(t.scores.get(goal)), t.number))
        count = max(int(len(trials) * self.quantile), 1) if len(alive) > 1 else 0
        count = min(count, len(alive) // 2)
        best = [t for t in ranked[: max(count, 1)] if objective(t.scores.get(goal)) > -math.inf]
        bad = [*ranked[len(ranked) - count :], *(t for t in trials if t.state == "failed")] if best else []
        copying = {t.number for t in bad}
        following, decisions = self.goals[generation + 1], list[Decision]()
        for trial in trials if best else alive:
            if trial.number not in copying:
                decisions.append(Decision(trial, following))
                continue
            rng = generator(self.seed, Purpose.SEARCH, trial.number, generation + 1)
            source = best[int(rng.integers(len(best)))]
            values = {path: dimension.explored(source.values[path], rng) for path, dimension in self.space.items()}
            decisions.append(Decision(trial, following, source, values))
        return decisions


def make_scheduler(
    name: str, space: Space, *, steps: int, batch: int, interval: int | None, eta: int, seed: int, synchronous: bool
) -> Scheduler:
    """The scheduler of a name for runs of `steps` environment steps.

    Args:
        batch: rows of a batch: milestones lie at least as far apart.
        interval: the first rung of asha, default steps / eta^3; steps between the decisions of median, default a
            fifth, and between PBT's generations, default a tenth.
        eta: of asha. synchronous: asha decides complete rungs alone.

    Raises:
        ConfigError: an unknown name, or numbers that leave no milestone.
    """
    if name not in get_args(SchedulerName):
        raise ConfigError(f"--scheduler {name}; {nearest(name, get_args(SchedulerName))}")
    if name == "none":
        if interval is not None:
            raise ConfigError("--interval is for asha, median and pbt; leave it out, or choose a --scheduler")
        return NoScheduler((steps,))
    if eta < 2:
        raise ConfigError(f"--eta {eta}; expected 2 or more: of the trials at a rung 1/eta go on, usually 3 or 4")
    parts = {"asha": eta ** (_RUNGS - 1), "median": 5, "pbt": 10}[name]
    first = max(steps // parts, batch, 1) if interval is None else interval
    if steps < 2 * batch:
        raise ConfigError(
            f"--scheduler {name} for runs of {steps:,} steps in batches of {batch:,} rows; expected {2 * batch:,} "
            "steps or more, since a decision needs a whole batch before and after it: more --run.steps, smaller "
            "batches (--sampler.T, --sampler.B), or --scheduler none"
        )
    if not max(batch, 1) <= first <= steps - batch:
        raise ConfigError(
            f"--interval {first} for runs of {steps:,} steps in batches of {batch:,} rows; expected {max(batch, 1)} to "
            f"{steps - batch}: a decision needs a whole batch before and after it"
        )
    if name == "asha":
        goals = [first]
        while goals[-1] * eta**2 <= steps:  # so that the end of the run is at least eta times the rung before it
            goals.append(goals[-1] * eta)
        return Asha((*goals, steps), eta, synchronous)
    every = (*(range(first, steps - first + 1, first) or [first]), steps)
    return Median(every) if name == "median" else Pbt(every, space, seed)


def _waits_at(trial: Trial, goal: int) -> bool:
    return trial.state == "paused" and trial.goal == goal


def _finished(trials: Sequence[Trial], last: int) -> list[Decision]:
    return [Decision(t, None) for t in trials if _waits_at(t, last)]
