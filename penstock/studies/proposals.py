"""Proposals: the settings of the next trial, by one of Optuna's samplers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from penstock.core.config import import_object
from penstock.core.errors import ConfigError, MissingExtraError, nearest
from penstock.core.noise import Purpose, generator
from penstock.studies.schedulers import Objective
from penstock.studies.space import Dimension, Space
from penstock.studies.trial import Trial

SuggestName = Literal["tpe", "random"]
"""Tree-structured Parzen estimator (Bergstra et al. 2011), or independent draws."""
_OWN = "expected a function of a seed that returns an Optuna sampler"


class Proposal(NamedTuple):
    """The settings of a trial, and the data that its sampler stores with it."""

    values: dict[str, Any]
    """By path."""
    notes: dict[str, Any]
    """Attributes that samplers such as NSGA-II and quasi-random ones keep of `trial` and `study`, as JSON data."""


def check_suggest(suggest: str) -> None:
    """Raises ConfigError for what returns no Optuna sampler, MissingExtraError where Optuna is not installed."""
    if ":" not in suggest and suggest not in get_args(SuggestName):
        raise ConfigError(
            f"--suggest {suggest}; {nearest(suggest, get_args(SuggestName))}, or module:NAME of a function of a seed "
            "that returns an Optuna sampler"
        )
    _sampler(suggest, 0)


def propose(space: Space, trials: Sequence[Trial], objective: Objective, suggest: str, seed: int) -> Proposal:
    """The proposal for the trial after these.

    A function of its arguments: Optuna is asked anew each time, by a study of the trials in memory and a sampler
    seeded by (seed, number of the trial). Trials that ended early count as pruned ones do, by their last milestone and
    then by the score there; those that failed, or have no score at their last milestone, are the worst of all.

    Raises:
        ConfigError: a user's sampler fails, or keeps data that a search cannot store.
    """
    optuna = import_optuna()
    number = len(trials)
    own_seed = int(generator(seed, Purpose.SEARCH, number).integers(2**31))
    sampler = _sampler(suggest, own_seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = told_distributions(space)
    worst = None if isinstance(sampler, optuna.samplers.TPESampler) else _worst(trials, objective)
    study.add_trials([_told(trial, space, distributions, objective, worst) for trial in trials])
    storage, study_id = study._storage, study._study_id
    for name, note in _plain(trials[-1].notes.get("study", {}) if trials else {}, suggest).items():
        storage.set_study_system_attr(study_id, name, note)
    try:
        asked = study.ask(distributions)
    except Exception as error:
        if ":" not in suggest:
            raise
        raise ConfigError(
            f"--suggest {suggest}: its sampler failed on trial {number}, {type(error).__name__}: {error}; it is asked "
            f"for {', '.join(f'{path} of {found}' for path, found in distributions.items())}"
        ) from error
    kept = {"trial": storage.get_trial_system_attrs(asked._trial_id), "study": storage.get_study_system_attrs(study_id)}
    notes = {name: _plain(found, suggest) for name, found in kept.items() if found}
    return Proposal({path: _chosen(dimension, asked.params[path]) for path, dimension in space.items()}, notes)


def import_optuna() -> Any:
    """Optuna, quiet. Raises MissingExtraError."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError("optuna", "tune") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _sampler(suggest: str, seed: int) -> Any:
    optuna = import_optuna()
    if ":" in suggest:
        function = import_object(suggest)
        try:
            found = function(seed)
        except TypeError as error:
            raise ConfigError(f"--suggest {suggest} cannot be called with a seed: {error}; {_OWN}") from error
        if not isinstance(found, optuna.samplers.BaseSampler):
            raise ConfigError(f"--suggest {suggest} returned {found!r:.80} ({type(found).__name__}); {_OWN}")
        if isinstance(found, optuna.samplers.CmaEsSampler):
            raise _pickles(suggest)
        return found
    if suggest == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed)


def _pickles(suggest: str) -> ConfigError:
    return ConfigError(
        f"--suggest {suggest}: CmaEsSampler keeps its state as a pickle, and a search stores none; use tpe, or "
        "optuna.samplers.GPSampler"
    )


def _plain(notes: Mapping[str, Any], suggest: str) -> dict[str, Any]:
    """Attributes as they come back from JSON. Raises ConfigError for pickles and for what JSON cannot hold."""
    if any(name.startswith(("cma:", "sepcma:", "cmawm:")) for name in notes):
        raise _pickles(suggest)
    try:
        return json.loads(json.dumps(dict(notes)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--suggest {suggest} keeps attributes that are no JSON: {error}") from error


def _numbered(dimension: Dimension) -> bool:
    """True for choices that Optuna knows by their numbers, since it takes no tuples."""
    return any(isinstance(x, tuple) for x in dimension.choices)


def _distribution(dimension: Dimension) -> Any:
    distributions = import_optuna().distributions
    if dimension.kind == "choice":
        choices = dimension.choices
        return distributions.CategoricalDistribution(range(len(choices)) if _numbered(dimension) else choices)
    low, high = dimension.ends()
    if dimension.whole:
        return distributions.IntDistribution(low, high, log=dimension.log)
    return distributions.FloatDistribution(low, high, log=dimension.log)


def _chosen(dimension: Dimension, value: Any) -> Any:
    return dimension.choices[value] if dimension.kind == "choice" and _numbered(dimension) else value


def optuna_version() -> str:
    """The version of Optuna, which decides what its samplers propose."""
    return str(import_optuna().__version__)


def told_distributions(space: Space) -> dict[str, Any]:
    """The space as Optuna knows it."""
    return {path: _distribution(dimension) for path, dimension in space.items()}


def params_of(trial: Trial, space: Space) -> dict[str, Any]:
    """The settings of a trial as Optuna knows them."""
    return {path: _known_as(dimension, trial.values[path]) for path, dimension in space.items()}


def _known_as(dimension: Dimension, value: Any) -> Any:
    if dimension.kind != "choice" or not _numbered(dimension):
        return value
    return next(i for i, x in enumerate(dimension.choices) if x == value and type(x) is type(value))


def _worst(trials: Sequence[Trial], objective: Objective) -> float:
    """The worst score of a finished trial, 0 before there is one."""
    finished = [objective(t.score) for t in trials if t.state == "finished"]
    return min((x for x in finished if x > -math.inf), default=0.0)


def _told(trial: Trial, space: Space, distributions: dict[str, Any], objective: Objective, worst: float | None) -> Any:
    """A trial as Optuna knows it.

    No sampler reads trials that Optuna calls failed. TPE ranks pruned ones without a value below all others, by their
    state alone; most other samplers read complete ones only.

    Args:
        worst: the score with which a failed trial is complete; None: it is pruned.
    """
    optuna = import_optuna()
    states, value, between = optuna.trial.TrialState, None, dict[int, float]()
    if trial.state == "failed" or (trial.scores and objective(trial.score) == -math.inf):
        state, value = (states.PRUNED, None) if worst is None else (states.COMPLETE, worst)
    elif trial.state == "finished":
        state, value = states.COMPLETE, objective(trial.score)
    elif not trial.scores:
        state = states.FAIL  # nothing is known of it yet
    else:
        state, between = states.PRUNED, {goal: objective(score) for goal, score in trial.scores.items()}
        between = {goal: score for goal, score in between.items() if score > -math.inf}
    return optuna.trial.create_trial(
        state=state,
        value=value,
        params=params_of(trial, space),
        distributions=distributions,
        intermediate_values=between,
        system_attrs=_plain(trial.notes.get("trial", {}), f"of trial {trial.number}"),
    )
