"""`tune`: a search from settings to its result, for the library and the command line."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.core.config import to_plain
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.files import require_name
from penstock.core.spec import specs_to_plain
from penstock.run.checkpoints.start import read_start
from penstock.run.entry import load
from penstock.run.experiment import Experiment
from penstock.run.files.inits import Init, absolute, read, words_of
from penstock.run.files.lock import RunLock
from penstock.run.files.stored import undamaged
from penstock.run.launch.launcher import Display, Launcher
from penstock.run.launch.slots import check_backend, make_slots
from penstock.run.plan import Plan
from penstock.run.search.display import SearchDisplay
from penstock.run.search.pictures import draw_search
from penstock.run.search.queue import SearchQueue, make_queue, open_search
from penstock.run.search.report import FoundTrial, SearchResult, has_word, number, write_preset
from penstock.run.search.search import Mode, SearchSettings
from penstock.run.search.space import check_explored, check_init, check_space, read_space
from penstock.run.search.stored import ADVICE, STATE, read_state, require_same, settings_of


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
) -> SearchResult:
    """Searches for settings: each trial is a run of the experiment, in a process of its own.

    With the same arguments it goes on with what was interrupted. All trials have the seed of the experiment, which
    seeds the proposals too: with `parallel=1` the trials, their scores and the best are a function of the arguments.

    Args:
        space: the range or choices of each setting by dotted path: {"algo.lr": "loguniform(1e-5, 1e-2)", "sampler.T":
            "choice(32, 128)"}; also uniform, int and logint, or a list of choices.
        scheduler: asha, median, pbt, or none (every trial trains to its end).
        trials: how many. parallel: at a time, each on CPUs of its own.
        metric: the score, of the last row of metrics; None for eval/mean_reward, or rollout/ep_rew_mean without
            evaluations. mode: whether it should be large ("max") or small ("min").
        suggest: tpe, random, or `module:NAME` of a function of a seed that returns an Optuna sampler.
        interval: environment steps to the first rung of asha, or between the decisions of median and pbt.
        eta: one in so many trials goes on from a rung of asha.
        retries: attempts after the first of a trial whose environment or process died.
        confirm: runs of the best settings from the start, with seeds of their own.
        dir: directory of all runs; None for runs/ENV/ALGO/search-TIME.
        backend: where trials execute: `processes` of this machine, or on a cluster of `ray`, whose nodes all see `dir`.
        address: of that cluster, as of `RunnerSampler`. cpus: that Ray counts for each trial.
        init: a run whose networks and normalisers every trial starts from, or by policy, as of `train`. trust: see
            `load`.

    Raises:
        ConfigError: a space or settings that contradict; the directory holds something else; a metric that no run has.
        CheckpointError: the directory cannot be written.
    """
    check_backend(backend, address, cpus)
    exp = prepared(exp)
    settings = search_settings(
        exp, space, scheduler, trials, metric, mode, suggest, interval, eta, synchronous=parallel == 1, init=init
    )
    with opened(exp, settings, directory(exp, dir), trust, retries=retries, confirm=confirm) as queue:
        return execute(queue, parallel, backend=backend, address=address, cpus=cpus)


def prepared(exp: Experiment) -> Experiment:
    """The experiment as trials have it: with a sampler, quiet, without a directory. Raises ConfigError."""
    if not isinstance(exp, Experiment):
        raise ConfigError(f"{exp!r:.60} ({type(exp).__name__}); expected an experiment: ps.Experiment(env, ps.PPO())")
    if exp.run.stop:
        raise ConfigError(
            f"run.stop={dict(exp.run.stop)} in a search, whose trials are compared after equal steps; leave it out: "
            "the scheduler ends those that are not worth going on with"
        )
    if (lost := _unstorable(to_plain(exp))) is not None:
        raise ConfigError(
            f"{lost} cannot be stored, and each trial is a process of its own; move it to the top of a module that "
            "can be imported, or name it module:qualname"
        )
    sampler = Plan.of(exp).exp.sampler if exp.sampler == "auto" else exp.sampler_settings
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
    evaluated = exp.run.eval_episodes > 0
    if metric is None:
        metric = "eval/mean_reward" if evaluated else "rollout/ep_rew_mean"
    elif metric.startswith("eval/") and not evaluated:
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


def directory(exp: Experiment, given: str | Path | None) -> Path:
    """The directory of a search: the one given, or a new one named after the time."""
    if given is not None:
        return Path(given)
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in exp.env_config.name)
    return Path("runs") / name / exp.algo_name / f"search-{time.strftime('%Y%m%d-%H%M%S')}"


@contextlib.contextmanager
def opened(
    exp: Experiment, settings: SearchSettings, folder: Path, trust: bool = False, **given: Any
) -> Generator[SearchQueue]:
    """The search of these settings in its directory, begun or gone on with; the directory is locked meanwhile.

    Args:
        trust: the run that trials start from may be a stranger's.

    Raises:
        ConfigError: the directory holds another search, or something else. CheckpointError: it cannot be written, or
            the parameters to start from do not suit.
    """
    if os.path.exists(folder / STATE):  # False, not an error, for what can be no name
        with RunLock(folder):
            plain = read_state(folder)
            with undamaged(folder / STATE, ADVICE):
                # Whether rungs wait until they are complete was settled when the search began.
                settings = replace(settings, synchronous=settings_of(plain).synchronous)
                require_same(folder, plain, settings, exp)
                queue = make_queue(folder, exp, specs_to_plain(Plan.of(exp).specs), settings, **given)
                queue.restore(plain)
            queue.begin()  # again: it may have been killed while it began, or have another metric now
            yield queue
        return
    _require_empty(folder)
    spec = Plan.of(exp).specs
    queue = make_queue(folder, exp, specs_to_plain(spec), settings, **given)
    if settings.scheduler == "pbt":
        check_explored(queue.search.space, exp, spec)
    if settings.init:
        start = read_start(settings.init, exp.algo, functools.partial(load, trust=trust))
        check_init(queue.search.space, exp, spec, start, words_of(settings.init))
    with RunLock(folder):
        _require_empty(folder)  # again: another search may have come and gone meanwhile
        queue.begin()
        yield queue


def _require_empty(folder: Path) -> None:
    """Raises ConfigError if a directory for a new search holds something, CheckpointError if it cannot be read."""
    require_name(folder, "directory")
    try:
        if folder.exists() and (not folder.is_dir() or any(path.name != ".lock" for path in folder.iterdir())):
            missing = "another search has begun in it" if (folder / STATE).exists() else f"holds no {STATE}"
            raise ConfigError(f"{folder} is not empty and {missing}; nothing in it was touched. Choose another --dir")
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror or error}; choose another --dir") from error


@contextlib.contextmanager
def reopened(folder: Path, trust: bool = False, **given: Any) -> Generator[SearchQueue]:
    """The search of a directory; see `open_search`."""
    read_state(folder)
    with RunLock(folder):
        yield open_search(folder, trust, **given)


def execute(queue: SearchQueue, parallel: int, display: Display | None = None, **where: Any) -> SearchResult:
    """Trains trials until the search is over or a signal stops it; writes preset and pictures; returns the result.

    Args:
        where: `backend`, `address` and `cpus` as of `tune`.
    """
    with contextlib.ExitStack() as stack:
        slots = make_slots(where.pop("backend", "processes"), parallel, **where)
        stack.callback(slots.close)
        console = Console(quiet=True) if queue.exp.run.progress == "off" else None
        shown = display or stack.enter_context(SearchDisplay(queue, console))
        stopped = Launcher(queue, slots, shown).work()
    queue.save()
    return result_of(queue, stopped)


def result_of(queue: SearchQueue, stopped: int | None = None) -> SearchResult:
    """The result of a search so far; its preset and pictures are written. Raises CheckpointError."""
    import signal

    search, best = queue.search, queue.search.best
    found = tuple(
        FoundTrial(t.number, dict(t.values), t.state, t.score, dict(t.scores), t.steps, queue.run_dir(t.run), t.reason)
        for t in search.trials
    )
    exp = preset = None
    if best is not None:
        exp = queue.experiment(best.values)
        why = (
            f"Found by penstock tune, {search.settings.scheduler} with {search.settings.trials} trials: "
            f"{search.settings.metric} {number(best.score)} at {best.steps:,} steps ({best.run.name})."
        )
        preset = write_preset(queue.folder, exp, why, search.settings.init) if has_word(exp) else queue.write_best(exp)
    return SearchResult(
        trials=found,
        best=None if best is None else found[best.number],
        experiment=exp,
        metric=search.settings.metric,
        folder=queue.folder,
        preset=preset,
        pictures=draw_search(queue.folder / "plots", search),
        confirmed={c.seed: c.score for c in queue.study},
        stopped_by="trials" if stopped is None else signal.Signals(stopped).name,
    )


def _unstorable(plain: Any) -> str | None:
    """What of a plain experiment was not stored."""
    if isinstance(plain, Mapping):
        if "unstorable" in plain:
            return str(plain["unstorable"])
        if "class" in plain and plain["class"] is None:
            return "a class that cannot be imported"
        return next((lost for item in plain.values() if (lost := _unstorable(item)) is not None), None)
    if isinstance(plain, list):
        return next((lost for item in plain if (lost := _unstorable(item)) is not None), None)
    return None
