"""The search as ask and tell: which trial trains next and how far, and what follows from its score."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.core.config import check_fields
from penstock.core.errors import ConfigError
from penstock.run.files.inits import Given
from penstock.studies.proposals import check_suggest, propose
from penstock.studies.schedulers import Decision, make_scheduler
from penstock.studies.space import Space, grid_names, read_space
from penstock.studies.trial import Run, Trial

Mode = Literal["max", "min"]
GRID = "grid"
"""The `suggest` of a sweep, where trials are the points of the space."""


@dataclass(frozen=True)
class SearchSettings:
    """Settings that, with the scores, decide the trials of a search."""

    space: Mapping[str, Any]
    """The forms of the space by dotted path, as `read_space` takes them."""
    steps: int
    """Environment steps of a whole run."""
    batch: int = 1
    """Rows of the largest batch: milestones lie at least as far apart, since a run ends with a batch."""
    scheduler: str = "asha"
    trials: int = 16
    suggest: str = "tpe"
    """tpe, random, `module:NAME` of a function of a seed that returns an Optuna sampler, or grid: a sweep."""
    metric: str = "eval/mean_reward"
    mode: Mode = "max"
    """Whether a larger or a smaller score is better."""
    interval: int | None = None
    """Steps to the first rung of asha, or between the decisions of median and pbt; None: see `make_scheduler`."""
    eta: int = 3
    """Reduction factor of asha: one trial in `eta` continues from a rung."""
    seed: int = 0
    synchronous: bool = True
    """Asha decides complete rungs alone, so that the trials do not depend on timing."""
    init: Given = ""
    """The run whose parameters every trial starts from, or a policy of it, or one for each policy; "" for none."""
    measured: bool = False
    """Each run of a sweep takes the sampler that it measures as the fastest on its own CPUs: `--sampler auto`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.trials < 1 or self.steps < 1:
            raise ConfigError(f"--trials {self.trials}, --run.steps {self.steps}; expected 1 or more")
        if self.scheduler == "pbt" and self.trials < 2:
            raise ConfigError("--scheduler pbt with one trial; expected a population, e.g. --trials 8")
        if self.sweep and self.scheduler != "none":
            raise ConfigError(
                f"--scheduler {self.scheduler} in a sweep, whose runs all train to their end; use a search"
            )
        if not self.metric:
            raise ConfigError("--metric is empty; expected what a run logs, such as eval/mean_reward")

    @property
    def sweep(self) -> bool:
        """True for a grid of settings x seeds, False for a search."""
        return self.suggest == GRID


class Search:
    """Trials, asked for by `ask` and answered by `tell` or `fail`.

    Everything is decided from the trials alone: with the same trials and scores, the same follows.

        while (trial := search.ask()) is not None:
            search.tell(trial, score_of(trial.values, trial.goal))

    Args:
        valid: called with the settings of a new trial; raises ConfigError for those that contradict each other, and
            the trial counts as failed.
    """

    def __init__(self, settings: SearchSettings, valid: Callable[[Mapping[str, Any]], object] = lambda values: None):
        self.settings, self._valid = settings, valid
        self.space: Space = read_space(settings.space, settings.sweep)
        if not settings.sweep:
            check_suggest(settings.suggest)
        self.scheduler = make_scheduler(
            settings.scheduler,
            self.space,
            steps=settings.steps,
            batch=settings.batch,
            interval=settings.interval,
            eta=settings.eta,
            seed=settings.seed,
            synchronous=settings.synchronous,
        )
        points = grid_names(settings.space) if settings.sweep else {}
        self.trials = [
            Trial(number, values, Run(name), settings.steps) for number, (name, values) in enumerate(points.items())
        ]
        self.due: list[Decision] = []
        """Decisions already applied by `ask`, when a proposal failed at once; the caller must process and clear
        them."""

    def objective(self, score: float | None) -> float:
        """How good a score is: larger is better, -inf without one."""
        if score is None or not math.isfinite(score):
            return -math.inf
        return score if self.settings.mode == "max" else -score

    def ask(self) -> Trial | None:
        """The trial to train next, to its goal; None if none is to begin before another ends, or at all."""
        while not (waiting := [t for t in self.trials if t.state == "waiting"]):
            if len(self.trials) >= self.settings.trials:
                return None
            self._propose()
        trial = min(waiting, key=lambda t: (-t.goal, t.number))
        trial.state = "running"
        return trial

    def tell(self, trial: Trial, score: float | None, steps: int | None = None) -> list[Decision]:
        """Notes the score of a trial at its goal; returns the decisions that follow, which are carried out already.

        Args:
            score: of the metric; None or not finite counts as the worst. steps: that its run has taken; None: the goal.
        """
        trial.scores[trial.goal] = None if score is None or not math.isfinite(score) else float(score)
        trial.steps = trial.goal if steps is None else steps
        trial.state = "paused"
        return self.decide()

    def fail(self, trial: Trial, reason: str) -> list[Decision]:
        """Notes that a trial failed for good; returns the decisions that follow."""
        trial.state, trial.reason = "failed", reason
        return self.decide()

    def decide(self) -> list[Decision]:
        """Carries out and returns every decision that follows from the trials."""
        made: list[Decision] = []
        while found := self.scheduler.decide(self.trials, self.settings.trials, self.objective):
            for decision in found:
                self._carry_out(decision)
            made += found
        return made

    @property
    def over(self) -> bool:
        """True if every trial has ended."""
        began = len(self.trials) == self.settings.trials
        return began and all(t.state in ("finished", "pruned", "failed") for t in self.trials)

    @property
    def best(self) -> Trial | None:
        """The best trial of those that came farthest; None before the first score, and among several environments."""
        if self.settings.sweep and "env" in self.space:
            return None  # scores of different environments are no better or worse
        scored = [t for t in self.trials if self.objective(t.score) > -math.inf and t.state != "failed"]
        if not scored:
            return None
        farthest = max(max(t.scores) for t in scored)
        return max((t for t in scored if farthest in t.scores), key=lambda t: (self.objective(t.score), -t.number))

    def _propose(self) -> None:
        number = len(self.trials)
        # A population is spread over the space: what little its members have learned so far says nothing of it yet.
        suggest = self.settings.suggest
        suggest = "random" if self.settings.scheduler == "pbt" and suggest == "tpe" else suggest
        values, notes = propose(self.space, self.trials, self.objective, suggest, self.settings.seed)
        trial = Trial(number, values, Run(f"trial-{number:03d}"), self.scheduler.goals[0], notes=notes)
        self.trials.append(trial)
        try:
            self._valid(values)
        except ConfigError as error:
            trial.run.status = "failed"
            self.due += self.fail(trial, f"settings: {error}")

    def _carry_out(self, decision: Decision) -> None:
        trial = decision.trial
        if decision.goal is None:
            trial.state = "finished" if trial.goal == self.scheduler.goals[-1] else "pruned"
            return
        if decision.copy_of is not None and decision.values is not None:
            source = decision.copy_of
            generation = self.scheduler.goals.index(decision.goal)
            at = max(source.scores)
            trial.copies.append(
                {
                    "at": at,
                    "of": source.number,
                    "run": trial.run.name,
                    "values": dict(trial.values),
                    "score": trial.scores.get(at),
                }
            )
            trial.values = dict(decision.values)
            trial.run = Run(f"trial-{trial.number:03d}-{generation}", seconds=trial.run.seconds)
            trial.scores, trial.steps, trial.reason = {**source.scores}, source.steps, ""
        trial.goal, trial.state = decision.goal, "waiting"
