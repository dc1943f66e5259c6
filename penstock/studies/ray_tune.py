"""Ray Tune's view of an experiment: a function trainable with metrics, and with checkpoints that are runs."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.core.config import override
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.spec import specs_to_plain
from penstock.run.experiment import Experiment
from penstock.run.files.stored_experiment import CONFIG, read_json
from penstock.run.loop import Iteration, Run
from penstock.run.presets import flat_settings
from penstock.studies.fork import fork_run

ENV_STEPS = "env_steps"
"""Name of the environment steps so far in a report; `time_attr` of Tune's schedulers."""
_REPORTS = 20


def trainable(
    exp: Experiment, *, report_interval: int | None = None, checkpoint_every: int = 1
) -> Callable[[Mapping[str, Any]], None]:
    """An experiment as a function for `ray.tune.Tuner`: `Tuner(trainable(exp), param_space={"algo.lr": ...})`.

    Each trial is a run in the trial's folder, with the settings that Tune chose, by dotted path or in nested dicts. A
    report has the run's metrics and `env_steps`. A checkpoint is a directory that is a run itself: `ps.load` opens it.
    A trial that is given another's checkpoint, as PBT does, goes on from its whole state with its own settings.

    Args:
        report_interval: environment steps between reports; None: a twentieth of the run.
        checkpoint_every: reports between checkpoints; the last one has one too. PBT and `Tuner.restore` go on from
            them.

    Raises:
        ConfigError: the experiment names a directory; a trial raises it for a setting that is none.
    """
    if exp.run.dir is not None:
        raise ConfigError(f"run.dir={exp.run.dir!r}, and every trial has a directory of its own; leave it out")
    interval = max(exp.run.steps // _REPORTS, 1) if report_interval is None else report_interval
    if interval < 1 or checkpoint_every < 1:
        raise ConfigError(
            f"report_interval={report_interval}, checkpoint_every={checkpoint_every}; expected 1 or more of each"
        )

    def train(config: Mapping[str, Any]) -> None:
        tune = _tune()
        folder = Path(tune.get_context().get_trial_dir())
        run_dir = next(path for k in itertools.count() if not (path := folder / f"run-{k}").exists())
        settled = replace(exp, sampler=exp.sampler or exp.sampler_settings)
        one = override(settled, {**flat_settings(config), "run.dir": str(run_dir)})
        start, reports = tune.get_checkpoint(), itertools.count(1)
        if start is not None:
            with start.as_directory() as stored:
                fork_run(Path(stored), run_dir, one, read_json(Path(stored) / CONFIG)["spec"])
        with Run(one) if start is None else Run.resume(run_dir, trust=True) as run:
            before = run.trainer.env_steps
            for it in run:
                last = it.env_steps >= one.run.steps or run.trainer.reached(it.metrics)
                if last or it.env_steps // interval > before // interval:
                    _report(tune, it, one, last or next(reports) % checkpoint_every == 0)
                before = it.env_steps

    return train


def _report(tune: Any, it: Iteration, exp: Experiment, checkpoint: bool) -> None:
    metrics = {**it.metrics, ENV_STEPS: it.env_steps}
    if not checkpoint:
        tune.report(metrics)
        return
    it.run.save()
    with tempfile.TemporaryDirectory() as folder:
        fork_run(it.run.run_dir, Path(folder) / "run", exp, specs_to_plain(it.run.trainer.plan.specs))
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(Path(folder) / "run"))


def _tune() -> Any:
    try:
        from ray import tune  # with pandas, pyarrow and pydantic, which Ray alone does without
    except ImportError as error:
        raise MissingExtraError("ray.tune", "ray-tune") from error
    return tune
