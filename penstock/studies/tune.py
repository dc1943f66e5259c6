"""`tune` and `launch`: a study from settings to its result, for the library and the command line."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.core.config import override
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.files import require_name
from penstock.core.limits import require_whole
from penstock.core.machine import read_machine
from penstock.core.spec import specs_from_plain, specs_to_plain
from penstock.run.checkpoints.load import load
from penstock.run.checkpoints.start import read_start
from penstock.run.entry import check_code
from penstock.run.experiment import Experiment
from penstock.run.files.inits import Init, absolute, read, words_of
from penstock.run.files.lock import RunLock
from penstock.run.files.stored_experiment import as_checkpoint_error
from penstock.run.files.supplied_arguments import require_storable
from penstock.run.plan import Plan
from penstock.studies.display import StudyDisplay
from penstock.studies.pictures import draw_search
from penstock.studies.report import FoundTrial, StudyResult, has_word, number, write_preset
from penstock.studies.search import GRID, Mode, SearchSettings
from penstock.studies.slots.launcher import Display, Launcher
from penstock.studies.slots.slots import check_backend, make_slots
from penstock.studies.space import (
    SEED,
    check_explored,
    check_init,
    check_space,
    grid_names,
    grid_values,
    read_paths,
    read_space,
)
from penstock.studies.study import Study, make_study, open_study
from penstock.studies.study_file import ADVICE, STATE, read_state, require_same, settings_of

FIXED = {
    **dict.fromkeys((SEED, "seeds"), "it is set for each run; use --seeds"),
    "run.dir": "it is set for each run; use --dir",
    **dict.fromkeys(("init", "trust", "config"), "it is the same for all runs; leave it out of the grid"),
}
"""Settings that a grid does not vary, and the cure."""


def tune(
    exp: Experiment,
    space: Mapping[str, Any],
    *,
    scheduler: str = "asha",
    trials: int = 16,
    parallel: int = 1,
    metric: str | None = None,
    mode: Mode = "max",
    suggest: str = "tpe",
    interval: int | None = None,
    eta: int = 3,
    retries: int = 1,
    confirm: int = 0,
    dir: str | Path | None = None,
    backend: str = "processes",
    address: str = "local",
    cpus: float = 1.0,
    init: Init | None = None,
    trust: bool = False,
) -> StudyResult:
    """Searches for settings: each trial is a run of the experiment, in a process of its own.

    With the same arguments it continues an interrupted search. All trials have the seed of the experiment, which seeds
    the proposals too: with `parallel=1` the trials, their scores and the best are a function of the arguments.

    Args:
        space: the range or choices of each setting by dotted path: {"algo.lr": "loguniform(1e-5, 1e-2)", "sampler.T":
            "choice(32, 128)"}; also uniform, int and logint, or a list of choices.
        scheduler: asha, median, pbt, or none (every trial trains to its end).
        trials: how many. parallel: at a time, each on CPUs of its own.
        metric: the score, of the last row of metrics; None for eval/mean_reward, or rollout/ep_rew_mean without
            evaluations. mode: whether it should be large ("max") or small ("min").
        suggest: tpe, random, or `module:NAME` of a function of a seed that returns an Optuna sampler.
        interval: environment steps to the first rung of asha, or between the decisions of median and pbt.
        eta: one in this many trials continues from a rung of asha.
        retries: attempts after the first of a trial whose environment or process died.
        confirm: runs of the best settings from the start, with seeds of their own.
        dir: directory of all runs; None for runs/ENV/ALGO/search-TIME.
        backend: where trials execute: `processes` of this machine, or on a cluster of `ray`, whose nodes all see `dir`.
        address: of that cluster, as in `RunnerSampler`. cpus: that Ray counts for each trial.
        init: a run that gives every trial its initial networks and normalisers, or by policy, as in `train`. trust: see
            `load`.

    Raises:
        ConfigError: a space or settings that contradict; the directory holds something else; a metric that no run has.
        CheckpointError: the directory cannot be written.
    """
    check_backend(backend, address, cpus, parallel)
    require_whole(0, retries=retries, confirm=confirm)
    exp = prepared(exp)
    settings = search_settings(
        exp, space, scheduler, trials, metric, mode, suggest, interval, eta, synchronous=parallel == 1, init=init
    )
    with locked_study([exp], settings, directory(exp, dir), trust, retries=retries, confirm=confirm) as study:
        return execute(study, parallel, backend=backend, address=address, cpus=cpus)


def launch(
    exp: Experiment,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    parallel: int | None = None,
    metric: str | None = None,
    mode: Mode = "max",
    retries: int = 0,
    dir: str | Path | None = None,
    backend: str = "processes",
    address: str = "local",
    cpus: float = 1.0,
    init: Init | None = None,
    trust: bool = False,
) -> StudyResult:
    """Trains every combination of a grid of settings with every seed: a sweep, each run in a process of its own.

    With the same arguments it continues an interrupted sweep.

    Args:
        grid: values of each setting that varies, by dotted path: {"algo.lr": [1e-3, 3e-4], "sampler.B": [8, 16]}.
        seeds: one run of each combination for each; None for that of the experiment.
        parallel: at a time, each on CPUs of its own; None: as many as keep the cores busy.
        metric, mode, retries, dir, backend, address, cpus, init, trust: as in `tune`; a run that does not report the
            metric has no score.

    Raises:
        ConfigError: settings that contradict; the directory holds something else.
        CheckpointError: the directory cannot be written.
    """
    check_backend(backend, address, cpus, parallel)
    require_whole(0, retries=retries)
    grid = read_paths(grid or {}, "--grid", "[1e-3, 3e-4]")
    check_grid(grid)
    exp = prepared(exp, sweep=True)
    space = {path: grid_values(path, values) for path, values in grid.items()}
    space[SEED] = (exp.run.seed,) if seeds is None else grid_values(SEED, seeds)
    read_space(space, grid=True)
    exps = [override(exp, point) for point in grid_names(space).values()]
    settings = sweep_settings(exps, space, metric, mode, init)
    with locked_study(exps, settings, directory(exps[0], dir, "sweep"), trust, retries=retries) as study:
        return execute(study, parallel, backend=backend, address=address, cpus=cpus)


def prepared(exp: Experiment, sweep: bool = False) -> Experiment:
    """The experiment as trials have it: quiet, without a directory, in a search with a sampler. Raises ConfigError."""
    if not isinstance(exp, Experiment):
        raise ConfigError(
            f"exp={exp!r:.60} ({type(exp).__name__}); expected an Experiment: ps.Experiment(env, ps.PPO())"
        )
    if exp.run.stop and not sweep:
        raise ConfigError(
            f"run.stop={dict(exp.run.stop)} in a search, whose trials are compared after equal steps; leave it out: "
            "the scheduler ends those that are not worth going on with"
        )
    require_storable(exp, "each trial is a process of its own")
    sampler = exp.sampler_settings
    if exp.sampler == "auto":  # which each run of a sweep measures on its own CPUs
        sampler = "auto" if sweep else Plan.of(exp).exp.sampler
    quiet = "plain" if exp.run.progress in ("auto", "live") else exp.run.progress
    return replace(exp, sampler=sampler, run=replace(exp.run, dir=None, progress=quiet))


def search_settings(
    exp: Experiment,
    space: Mapping[str, Any],
    scheduler: str,
    trials: int,
    metric: str | None,
    mode: Mode,
    suggest: str,
    interval: int | None,
    eta: int,
    synchronous: bool,
    init: Init | None = None,
) -> SearchSettings:
    """The settings of a search, checked against its experiment. Raises ConfigError."""
    if metric is None:
        metric = _usual_metric(exp)
    elif str(metric).startswith("eval/") and not exp.run.eval_episodes:
        raise ConfigError(
            f"--metric {metric} with run.eval_episodes=0: no trial would have it; set eval_episodes, usually 20, or "
            "use --metric rollout/ep_rew_mean"
        )
    found = read_space(space)
    check_space(found, exp)
    spec = exp.sampler_settings.spec
    rows = max(found["sampler.T"].ends()) if "sampler.T" in found else spec.T
    slots = max(found["sampler.B"].ends()) if "sampler.B" in found else spec.B
    return SearchSettings(
        space=space,
        steps=exp.run.steps,
        batch=rows * slots,
        scheduler=scheduler,
        trials=trials,
        suggest=suggest,
        metric=metric,
        mode=mode,
        interval=interval,
        eta=eta,
        seed=exp.run.seed,
        synchronous=synchronous,
        init="" if init is None else absolute(read(init)),
    )


def sweep_settings(
    exps: Sequence[Experiment],
    space: Mapping[str, Sequence[Any]],
    metric: str | None = None,
    mode: Mode = "max",
    init: Init | None = None,
    measured: bool = False,
) -> SearchSettings:
    """The settings of a sweep of these experiments, which are the points of its space. Raises ConfigError."""
    first = exps[0].run
    return SearchSettings(
        space={path: tuple(values) for path, values in space.items()},
        steps=max(exp.run.steps for exp in exps),
        scheduler="none",
        trials=len(exps),
        suggest=GRID,
        metric=metric or _usual_metric(exps[0]),
        mode=mode,
        seed=first.seed,
        init="" if init is None else absolute(read(init)),
        measured=measured,
    )


def _usual_metric(exp: Experiment) -> str:
    """The score of a run for which none is named."""
    return "eval/mean_reward" if exp.run.eval_episodes else "rollout/ep_rew_mean"


def check_grid(paths: Iterable[str]) -> None:
    """Raises ConfigError for a setting that a grid does not vary."""
    for path in paths:
        if path in FIXED:
            raise ConfigError(f"--grid {path}: {FIXED[path]}")


def directory(exp: Experiment, given: str | Path | None, kind: str = "search") -> Path:
    """The directory of a search: the one given, or a new one named after the time."""
    if given is not None:
        if not isinstance(given, (str, os.PathLike)):
            raise ConfigError(f"dir={given!r:.60} ({type(given).__name__}); expected a path, such as 'runs/{kind}'")
        return Path(given)
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in exp.env_config.name)
    return Path("runs") / name / exp.algo_name / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextlib.contextmanager
def locked_study(
    exps: Sequence[Experiment], settings: SearchSettings, folder: Path, trust: bool = False, **given: Any
) -> Generator[Study]:
    """The study of these settings in its directory, begun or gone on with; the directory is locked meanwhile.

    Args:
        exps: that of a search, or those of a sweep.
        trust: the run that trials start from may be a stranger's.

    Raises:
        ConfigError: the directory holds another study, or something else. CheckpointError: it cannot be written, or
            the parameters to start from do not suit.
    """
    if os.path.exists(folder / STATE):  # False, not an error, for what can be no name
        with RunLock(folder):
            plain = read_state(folder)
            with as_checkpoint_error(folder / STATE, ADVICE):
                # Whether rungs wait until they are complete was settled when the search began.
                settings = replace(settings, synchronous=settings_of(plain).synchronous)
                require_same(folder, plain, settings, exps)
                study = make_study(folder, _with_specs(exps), settings, **given)
                study.restore(plain)
            study.begin()  # again: it may have been killed while it began, or have another metric now
            yield study
        return
    _require_empty(folder)
    for exp in exps:
        check_code(exp)
    points = _with_specs(exps)
    study = make_study(folder, points, settings, **given)
    spec = specs_from_plain(points[0][1])
    if settings.scheduler == "pbt":
        check_explored(study.search.space, exps[0], spec)
    if settings.init:
        start = read_start(settings.init, exps[0].algo, functools.partial(load, trust=trust))
        varied = {} if settings.sweep else study.search.space
        check_init(varied, exps[0], spec, start, words_of(settings.init))
    with RunLock(folder):
        _require_empty(folder)  # again: another study may have come and gone meanwhile
        study.begin()
        yield study


def _with_specs(exps: Sequence[Experiment]) -> list[tuple[Experiment, dict[str, Any]]]:
    """Each experiment with the specs of its environment, which is checked once."""
    specs: dict[str, dict[str, Any]] = {}
    for exp in exps:
        if (env := repr(exp.env_config)) not in specs:
            specs[env] = specs_to_plain(Plan.with_usual_sampler(exp).specs)
    return [(exp, specs[repr(exp.env_config)]) for exp in exps]


def _require_empty(folder: Path) -> None:
    """Raises ConfigError if a directory for a new study holds something, CheckpointError if it cannot be read."""
    require_name(folder, "directory")
    try:
        if folder.exists() and (not folder.is_dir() or any(path.name != ".lock" for path in folder.iterdir())):
            missing = "another study has begun in it" if (folder / STATE).exists() else f"holds no {STATE}"
            raise ConfigError(f"{folder} is not empty and {missing}; nothing in it was touched. Choose another --dir")
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror or error}; choose another --dir") from error


@contextlib.contextmanager
def resume_study(folder: Path, trust: bool = False, **given: Any) -> Generator[Study]:
    """The study of a directory; see `open_study`."""
    read_state(folder)
    with RunLock(folder):
        yield open_study(folder, trust, **given)


def usual_parallel(study: Study) -> int:
    """Runs at a time where none are asked for: of a sweep as many as keep the cores busy, of a search one."""
    if not study.sweep:
        return 1
    cores = max(exp.sampler_settings.cores for exp, _ in study.points)
    left = sum(t.state in ("waiting", "running") for t in study.search.trials)
    return max(1, min(read_machine().busy_cores // cores, left))


def execute(
    study: Study, parallel: int | None = None, display: Display | None = None, trust: bool = False, **where: Any
) -> StudyResult:
    """Trains trials until the study is over or a signal stops it; writes preset and pictures; returns the result.

    Args:
        trust: allow importing and calling code that an interrupted run of the directory names.
        where: `backend`, `address` and `cpus` as in `tune`.
    """
    with contextlib.ExitStack() as stack:
        slots = make_slots(where.pop("backend", "processes"), parallel or usual_parallel(study), **where)
        stack.callback(slots.close)
        console = Console(quiet=True) if study.exp.run.progress == "off" else None
        shown = display or stack.enter_context(StudyDisplay(study, console))
        stopped = Launcher(study, slots, shown, trust).work()
    study.save()
    return result_of(study, stopped)


def result_of(study: Study, stopped: int | None = None) -> StudyResult:
    """The result of a study so far; its preset and pictures are written. Raises CheckpointError."""
    import signal

    search, best = study.search, study.search.best
    found = tuple(
        FoundTrial(t.number, dict(t.values), t.state, t.score, dict(t.scores), t.steps, study.run_dir(t.run), t.reason)
        for t in search.trials
    )
    exp = preset = None
    if best is not None:
        exp = study.experiment(best)
        why = (
            f"Found by penstock {'launch' if study.sweep else f'tune, {search.settings.scheduler}'} with "
            f"{search.settings.trials} trials: "
            f"{search.settings.metric} {number(best.score)} at {best.steps:,} steps ({best.run.name})."
        )
        preset = write_preset(study.folder, exp, why, search.settings.init) if has_word(exp) else study.write_best(exp)
    return StudyResult(
        trials=found,
        best=None if best is None else found[best.number],
        experiment=exp,
        metric=search.settings.metric,
        folder=study.folder,
        preset=preset,
        pictures=() if study.sweep else draw_search(study.folder / "plots", search),
        confirmed={c.seed: c.score for c in study.confirming},
        stopped_by="trials" if stopped is None else signal.Signals(stopped).name,
    )
