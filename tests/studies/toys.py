"""Scores of a toy with a known optimum, and searches over it that cost milliseconds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import optuna

from penstock.studies.search import Search, SearchSettings
from penstock.studies.trial import from_plain, to_plain

GRID = {"algo.lr": [1e-4, 1e-3, 1e-2], "sampler.T": [32, 128]}
SPACE = {"algo.lr": "loguniform(1e-5, 1e-1)"}
STEPS = 27
Score = Callable[[Mapping[str, Any], int], float]


def score(values: Mapping[str, Any], goal: int) -> float:
    """Best at lr = 1e-3, where it is `goal`; less by a factor of e for each factor of ten beside it."""
    return goal * math.exp(-abs(math.log10(values["algo.lr"]) + 3))


def search(valid: Callable[[Mapping[str, Any]], object] = lambda values: None, **settings: Any) -> Search:
    given: dict[str, Any] = {"space": SPACE, "steps": STEPS, "scheduler": "none", "trials": 27, "suggest": "random"}
    return Search(SearchSettings(**{**given, **settings}), valid)


def trained(found: Search, of: Score = score, restored: bool = False, fails: Collection[int] = ()) -> int:
    """Carries a search out; returns the steps that it took.

    Args:
        restored: the search is thrown away after every event and made again from its JSON, a trial under way included.
        fails: numbers of the trials that fail before their first milestone.
    """
    steps = 0
    while (trial := found.ask()) is not None:
        if restored:
            copy = reloaded(found)
            assert [t.state for t in copy.trials].count("running") == 0
            found.__dict__.update(copy.__dict__)
            again = found.ask()
            assert again is not None
            assert again.number == trial.number
            trial = again
        steps += trial.goal - max(trial.scores, default=0)
        if trial.number in fails and not trial.scores:
            found.fail(trial, "learning broke down")
        else:
            found.tell(trial, of(trial.values, trial.goal))
    return steps


def reloaded(found: Search) -> Search:
    """The search after a kill and a restart."""
    plain = json.loads(json.dumps([to_plain(trial) for trial in found.trials]))
    copy = Search(found.settings)
    copy.trials = [from_plain(item, copy.space) for item in plain]
    copy.decide()
    return copy


def population(found: Search) -> dict[int, float]:
    """Carries out a search by PBT in which each step adds to a member's value what its settings are objective.

    Returns the value of each member at the end, by number.
    """
    values: dict[int, float] = {}
    while (trial := found.ask()) is not None:
        steps = trial.goal - max(trial.scores, default=0)
        values[trial.number] = values.get(trial.number, 0.0) + steps * score(trial.values, 1)
        before = dict(values)
        for decision in found.tell(trial, values[trial.number]):
            if decision.copy_of is not None:
                values[decision.trial.number] = before[decision.copy_of.number]
    return values


def quasi_random(seed: int) -> Any:
    """A sampler whose state Optuna keeps with the study."""
    return optuna.samplers.QMCSampler(seed=seed, warn_independent_sampling=False)


def estimator(seed: int) -> Any:
    """Optuna's own tpe, which a population too asks where it is named so."""
    return optuna.samplers.TPESampler(seed=seed)


def gaussian(seed: int) -> Any:
    """One that reads complete trials alone."""
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=10)


def genetic(seed: int) -> Any:
    """One that keeps the generation of each trial."""
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=4)


def grid(seed: int) -> Any:
    """One that goes by the number of the trial, in an order that must be the same for all."""
    return optuna.samplers.GridSampler(GRID, seed=0)


def strange(seed: int) -> Any:
    """One of another space."""
    return optuna.samplers.GridSampler({**GRID, "sampler.T": [64]}, seed=seed)


def text(seed: int) -> Any:
    """No sampler."""
    return str(seed)


def evolution(seed: int) -> Any:
    """One whose state is a pickle."""
    return optuna.samplers.CmaEsSampler(seed=seed)
