"""Optuna's pictures of a search: history, trials as parallel coordinates, and how much each setting mattered."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.core.errors import MissingExtraError
from penstock.run.plots.looks import escaped, require_matplotlib
from penstock.studies.proposals import import_optuna, params_of, told_distributions
from penstock.studies.search import Search


def draw_search(folder: Path, search: Search) -> tuple[Path, ...]:
    """Draws history.png, coordinates.png and importances.png; returns the paths of those that there was data for.

    The history is of scores by trial, or by milestone where there are several. A disk that refuses, or matplotlib that
    is not installed, is a warning.
    """
    try:
        require_matplotlib()
    except MissingExtraError as error:
        warnings.warn(f"no pictures in {folder}: {error}", stacklevel=2)
        return ()
    from matplotlib import pyplot, rc_context

    optuna, drawn, metric = import_optuna(), list[Path](), escaped(search.settings.metric)
    draw = optuna.visualization.matplotlib
    study, goal = scored(search), _compared_at(search)
    pictures: list[tuple[str, Callable[[], Any]]] = []
    if study.trials and len(search.scheduler.goals) > 1:
        pictures.append(("history", lambda: draw.plot_intermediate_values(study)))
    elif study.trials:
        pictures.append(("history", lambda: draw.plot_optimization_history(study, target_name=metric)))
    if len(study.trials) > 1:
        pictures.append(("coordinates", lambda: draw.plot_parallel_coordinate(study, target_name=metric)))
    if len(search.space) > 1 and goal is not None and importances(search, goal):
        there, name = scored(search, goal), f"{metric} at {goal:,} steps"
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        pictures.append(
            ("importances", lambda: draw.plot_param_importances(there, evaluator=evaluator, target_name=name))
        )
    for name, plot in pictures:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with rc_context(), warnings.catch_warnings():  # Optuna sets a style for all that follows
                warnings.simplefilter("ignore")  # of experimental features, and of settings that are all equal
                axes = plot()
                if name == "history" and len(search.scheduler.goals) > 1:
                    axes.set(title="Scores at milestones", xlabel="Environment steps", ylabel=metric)
                figure: Any = axes.figure
                try:
                    figure.savefig(folder / f"{name}.png", dpi=160, bbox_inches="tight")
                finally:
                    pyplot.close(figure)
            drawn.append(folder / f"{name}.png")
        except OSError as error:
            warnings.warn(f"cannot draw {folder / name}.png: {error.strerror or error}", stacklevel=2)
    return tuple(drawn)


def importances(search: Search, goal: int) -> dict[str, float]:
    """The importance of each setting for the score at a milestone, largest first.

    PED-ANOVA (Watanabe, Bansal and Hutter 2023): how far the settings of good trials are spread otherwise than those
    of all. They add up to 1. {} of fewer than four scores, or of equal ones.
    """
    optuna, study = import_optuna(), scored(search, goal)
    if len(study.trials) < 4 or len({trial.value for trial in study.trials}) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return {path: float(x) for path, x in optuna.importance.get_param_importances(study, evaluator=evaluator).items()}


def scored(search: Search, goal: int | None = None) -> Any:
    """An Optuna study of the trials with a score, as complete: the newest one, or that at a milestone."""
    optuna, sign = import_optuna(), {"max": "maximize", "min": "minimize"}
    study = optuna.create_study(direction=sign[search.settings.mode])
    for trial in search.trials:
        score = trial.score if goal is None else trial.scores.get(goal)
        if search.objective(score) > -math.inf:
            found = optuna.trial.create_trial(
                value=score,
                params=params_of(trial, search.space),
                distributions=told_distributions(search.space),
                intermediate_values={at: x for at, x in trial.scores.items() if x is not None},
            )
            study.add_trial(found)
    return study


def _compared_at(search: Search) -> int | None:
    """The farthest milestone that half of the trials reached."""
    goals = search.scheduler.goals
    reached = [g for g in goals if 2 * sum(g in t.scores for t in search.trials) >= len(search.trials)]
    return reached[-1] if reached else None
