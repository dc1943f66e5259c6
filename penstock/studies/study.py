"""A study in its directory: trials as runs to launch, their scores, and study.json."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import penstock.core.errors as errors
from penstock.core.config import override, to_plain as settings_to_plain
from penstock.core.errors import CheckpointError, ConfigError, legible, nearest
from penstock.core.files import write_atomic
from penstock.core.spec import specs_to_plain
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.experiment import Experiment
from penstock.run.files.inits import at_runs, runs_of, words_of
from penstock.run.files.stored_experiment import CONFIG, as_checkpoint_error, config_bytes, read_config
from penstock.run.files.trust import VARIABLE, is_trusted, remember
from penstock.run.log import read_metrics
from penstock.studies.fork import copy_parameters, fork_run
from penstock.studies.logs import log_end, reason_of
from penstock.studies.proposals import optuna_version
from penstock.studies.schedulers import Decision
from penstock.studies.search import Search, SearchSettings
from penstock.studies.study_file import (
    ADVICE,
    BASE,
    FORMAT,
    INIT,
    SETTINGS,
    STATE,
    digest,
    names_of,
    read_state,
    settings_of,
    warn_of_another_optuna,
)
from penstock.studies.trial import (
    LOGS,
    Confirmation,
    Run,
    Trial,
    confirmation_from_plain,
    from_plain,
    has_checkpoint,
    to_plain,
)

STEPS_METRIC = "time/total_timesteps"
"""The metric of the stop rule that ends a run at a milestone."""
_TRANSIENT = (1, errors.EnvWorkerError.exit_code, errors.LearnerLostError.exit_code)
"""Exit codes of unknown, environment and rank failures. Another attempt may succeed, as it may after a signal."""
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "free some space")


@dataclass
class Study:
    """The trials of a sweep or a search as runs to launch; `save` after every change.

    Args:
        points: the experiment of each trial of a sweep, or the one of a search, whose trials are copies with other
            settings. Each comes with the specs of its environment, as plain data.
        retries: further attempts for a trial whose environment or process died.
        confirm: number of runs that repeat the best settings with other seeds at the end, 0 for none.
    """

    folder: Path
    points: Sequence[tuple[Experiment, Mapping[str, Any]]]
    search: Search
    retries: int = 1
    confirm: int = 0
    confirmations: list[Confirmation] = field(default_factory=list[Confirmation])
    _cut_short: set[str] = field(default_factory=set[str])
    """Names of runs that were stopped; the search may have been stopped with them."""
    _told_of_metric: bool = False

    @property
    def sweep(self) -> bool:
        """True for a sweep, False for a search."""
        return self.search.settings.sweep

    @property
    def line(self) -> str:
        """The command that continues the study."""
        return f"penstock {'launch' if self.sweep else 'tune'} {self.folder}"

    @property
    def exp(self) -> Experiment:
        """The experiment of a search; the first of a sweep."""
        return self.points[0][0]

    def experiment(self, trial: Trial, run: Run | None = None) -> Experiment:
        """The experiment of a trial, in the directory of a run. Raises ConfigError if its settings contradict."""
        exp = self.points[trial.number][0] if self.sweep else override(self.exp, trial.values)
        return exp if run is None else replace(exp, run=replace(exp.run, dir=str(self.run_dir(run))))

    def steps_of(self, trial: Trial) -> int:
        """The environment steps that a trial trains to next, or has trained to."""
        return self.points[trial.number][0].run.steps if self.sweep else trial.goal

    def ask(self) -> Run | None:
        """The next run to begin or continue: one of a trial; once all trials have ended, one that confirms the best.

        None if there is no such run, at least until another run has ended.
        """
        while (trial := self.search.ask()) is not None:
            due, self.search.due = self.search.due, []
            self.follow(due)
            if trial.state == "running" and not self._used_up(trial):
                return trial.run
            if trial.state == "running":
                self.follow(self.search.fail(trial, self._reason(trial.run)))
                self.save()
        if not self.search.over:
            return None
        self._plan_confirmations()
        for c in self.confirming:
            if c.run.status in ("waiting", "stopped"):
                if not self._used_up(c):
                    return c.run
                c.reason = self._reason(c.run)
                self.save()
        return None

    @property
    def confirming(self) -> list[Confirmation]:
        """The runs that confirm the present best; `--retry` may have changed the best since earlier ones began."""
        best = self.search.best
        return [c for c in self.confirmations if best is not None and c.of == best.run.name]

    def run_dir(self, run: Run) -> Path:
        """The directory of a run."""
        return self.folder / run.name

    def log(self, run: Run) -> Path:
        """The log of a run: the output of all attempts, one after the other."""
        return self.folder / LOGS / f"{run.name}.log"

    def command(self, run: Run) -> list[str]:
        """Arguments of `penstock` that train a run to its goal."""
        run_dir, trial, goals = self.run_dir(run), self.trial_of(run), self.search.scheduler.goals
        at = None if trial is None or trial.goal == goals[-1] else str(trial.goal)
        stop = [] if at is None else ["--run.stop", STEPS_METRIC, at]
        if has_checkpoint(run_dir):
            return ["resume", str(run_dir), *(stop or (["--run.stop={}"] if len(goals) > 1 else []))]
        given = self.search.settings.init
        more = [x for word in words_of(at_runs(given, list(map(str, self.init_dirs())))) for x in ("--init", word)]
        if self.search.settings.measured or (trial is not None and trial.values.get("sampler") == "auto"):
            more += ["--sampler", "auto"]
        return ["train", "--config", str(self.folder / SETTINGS / run.name), *more, *stop, "--run.dir", str(run_dir)]

    def write_best(self, exp: Experiment) -> Path:
        """Writes the best settings as a config.json, for `penstock train --config`. Raises CheckpointError."""
        best = self.search.best
        self._write_settings("best", exp, best)
        return self.folder / SETTINGS / "best" / CONFIG

    def started(self, run: Run) -> None:
        """Writes study.json, which then says that the run may have begun, and the settings of a new run."""
        self.save()
        if not has_checkpoint(self.run_dir(run)):
            self._write_settings(run.name, self._experiment_of(run), self.trial_of(run) or self.search.best)

    def ended(self, run: Run) -> None:
        """Notes the score or the failure of a run, carries out what follows from it, and saves.

        Raises ConfigError if the run does not report the metric.
        """
        trial = self.trial_of(run)
        if trial is None:
            self._confirmed(next(c for c in self.confirmations if c.run is run))
            self.save()
            return
        if run.status == "stopped":
            trial.state = "waiting"
            self._cut_short.add(run.name)
        elif run.status == "failed":
            self._failed(trial, run)
        else:
            trial.state = "waiting"  # saved first, as `_score` raises if the metric is unknown
            self.save()
            score, steps = self._score(self.run_dir(run))
            self.follow(self.search.tell(trial, score, steps))
        self.save()

    def follow(self, decisions: Sequence[Decision]) -> None:
        """Makes the runs that decisions ask for, each a copy of another member's state.

        A member whose explored settings contradict each other counts as failed.
        """
        for decision in decisions:
            if decision.copy_of is None:
                continue
            trial, source = decision.trial, self.run_dir(decision.copy_of.run)
            try:
                exp = self.experiment(trial, trial.run)
            except ConfigError as error:
                self.follow(self.search.fail(trial, f"settings: {error}"))
                continue
            if not (self.run_dir(trial.run) / CONFIG).is_file():  # a process killed before its save may have made it
                fork_run(source, self.run_dir(trial.run), exp, self.points[0][1])

    def trial_of(self, run: Run) -> Trial | None:
        """The trial that a run belongs to, None for one that confirms the best."""
        return next((t for t in self.search.trials if t.run is run), None)

    def save(self) -> None:
        """Writes study.json. Raises CheckpointError if the disk refuses."""
        plain = {
            "format": FORMAT,
            "settings": asdict(self.search.settings),
            "optuna": "" if self.sweep else optuna_version(),
            "trials": [to_plain(trial) for trial in self.search.trials],
            "confirm": [asdict(c) for c in self.confirmations],
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / STATE, json.dumps(plain, indent=1).encode() + b"\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.folder / STATE}: {error.strerror or error}; choose another --dir"
            ) from error

    def begin(self) -> None:
        """Writes all that a new study needs before its first trial, and remembers it as this user's own."""
        self.save()
        if not self.sweep:
            self._write_settings(BASE, self.exp, None)
        for trial in self.search.trials if self.sweep else ():
            if not (self.folder / SETTINGS / trial.run.name / CONFIG).is_file():
                self._write_settings(trial.run.name, self.experiment(trial, trial.run), trial)
        self.keep_init()
        remember(self.folder / STATE, digest(self.search.settings))

    def keep_init(self) -> None:
        """Copies the parameters that trials start from, so that their run may be continued or deleted."""
        for source, target in zip(runs_of(self.search.settings.init), self.init_dirs()):
            if not (target / CONFIG).is_file():
                copy_parameters(Path(source), target)

    def init_dirs(self) -> list[Path]:
        """The directories of `keep_init`'s copies: one, or one for each policy."""
        given, folder = self.search.settings.init, self.folder / INIT
        return [folder / str(i) for i in range(len(given))] if isinstance(given, dict) else [folder] if given else []

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Continues from the content of study.json: notes trials that ended unseen, and queues interrupted ones."""
        names = [t.run.name for t in self.search.trials] if self.sweep else [None] * len(plain["trials"])
        stored = zip(plain["trials"], names, strict=True)
        self.search.trials = [from_plain(item, self.search.space, name) for item, name in stored]
        self._check_trials()
        if not self.sweep and len(self.search.trials) < self.search.settings.trials:
            warn_of_another_optuna(self.folder, plain)
        best = self.search.best
        self.confirmations = [
            confirmation_from_plain(c, self.exp.run.seed, "" if best is None else best.run.name)
            for c in plain["confirm"]
        ]
        for c in self.confirmations:
            c.run.status = "stopped" if c.run.status == "running" else c.run.status
        self.follow(self.search.decide())
        for trial in self.search.trials:
            if trial.state == "waiting" and trial.run.attempts and self._has_ended(trial.run, trial.goal):
                trial.run.status, trial.run.code = "finished", 0
                score, steps = self._score(self.run_dir(trial.run))
                self.follow(self.search.tell(trial, score, steps))
            elif trial.state == "waiting" and trial.run.status == "running":
                trial.run.status = "stopped"
        for c in self.confirmations:
            if c.run.status == "stopped" and self._has_ended(c.run, self.exp.run.steps):
                c.run.status, c.score = "finished", self._score(self.run_dir(c.run))[0]

    def retry(self, names: Sequence[str]) -> None:
        """Queues failed runs again: those named, or all of them for [].

        Raises ConfigError for a name that is no failed run.
        """
        failed = {t.run.name: t for t in self.search.trials if t.state == "failed" and t.run.attempts}
        study = {c.run.name: c for c in self.confirmations if c.run.status == "failed"}
        for name in names or (*failed, *study):
            if name in study:
                study[name].run.status, study[name].failures = "waiting", 0
                continue
            if name not in failed:
                known = (*failed, *study)
                hint = nearest(name, known) if known else "none has failed; leave --retry out"
                raise ConfigError(f"--retry {name}: no such failed run in {self.folder}; {hint}")
            failed[name].state, failed[name].failures = "waiting", 0

    def _failed(self, trial: Trial, run: Run) -> None:
        if self._again(run, trial.failures):
            trial.failures += 1
            trial.state = "waiting"
            return
        self.follow(self.search.fail(trial, self._reason(run)))

    def _again(self, run: Run, failures: int) -> bool:
        """True if another attempt may succeed, and there is one left. Raises CheckpointError where the disk is full."""
        code = run.code or 0
        if code == CheckpointError.exit_code and any(text in self._reason(run) for text in _FULL):
            run.status = "stopped"
            self.save()
            raise CheckpointError(
                f"the disk of {self.folder} is full: {self._reason(run)}. To go on once there is room: {self.line}"
            )
        return (code < 0 or code in _TRANSIENT) and failures < self.retries

    def _reason(self, run: Run) -> str:
        said = log_end(self.log(run))
        return f"{reason_of(run)}: {said[-1] if said else 'it said nothing'}"

    def _used_up(self, item: Trial | Confirmation) -> bool:
        """True if a run was stopped and has no attempt left. If the search was stopped too, it takes no run at all."""
        run = item.run
        if run.name not in self._cut_short:
            return False
        self._cut_short.discard(run.name)
        if item.failures < self.retries:
            item.failures += 1
            return False
        run.status = "failed"
        return True

    def _confirmed(self, confirmation: Confirmation) -> None:
        run = confirmation.run
        if run.status == "finished":
            confirmation.score = self._score(self.run_dir(run))[0]
        elif run.status == "failed" and self._again(run, confirmation.failures):
            confirmation.failures += 1
            run.status = "waiting"
        elif run.status == "failed":
            confirmation.reason = self._reason(run)
        else:
            self._cut_short.add(run.name)

    def _plan_confirmations(self) -> None:
        best, known = self.search.best, {c.seed for c in self.confirming}
        for seed in range(self.exp.run.seed + 1, self.exp.run.seed + self.confirm + 1):
            if best is not None and seed not in known:
                taken = any(c.seed == seed for c in self.confirmations)
                name = f"{best.run.name}-s{seed}" if taken else f"best-s{seed}"
                self.confirmations.append(Confirmation(seed, Run(name), of=best.run.name))

    def _check_trials(self) -> None:
        """Raises ValueError for trials that this search does not have."""
        trials, goals = self.search.trials, self.search.scheduler.goals
        if [t.number for t in trials] != list(range(len(trials))) or len(trials) > self.search.settings.trials:
            raise ValueError(f"{len(trials)} trials; expected those from 0 to {self.search.settings.trials - 1}")
        for t in trials:
            if not {t.goal, *t.scores} <= {*goals}:
                raise ValueError(f"trial {t.number} with goal {t.goal}, scores {t.scores}; milestones are {goals}")
            ended = t.state in ("paused", "pruned", "finished")
            if (ended and t.goal not in t.scores) or (t.state == "finished" and t.goal != goals[-1]):
                raise ValueError(f"trial {t.number} is {t.state} at {t.goal} with scores {t.scores}")

    def _experiment_of(self, run: Run) -> Experiment:
        trial = self.trial_of(run)
        if trial is not None:
            return self.experiment(trial, run)
        best = self.search.best
        assert best is not None
        exp = self.experiment(best, run)
        return override(exp, {"run.seed": next(c.seed for c in self.confirmations if c.run is run)})

    def _write_settings(self, name: str, exp: Experiment, trial: Trial | None) -> None:
        folder = self.folder / SETTINGS / name
        spec = self.points[trial.number if self.sweep and trial is not None else 0][1]
        config = config_bytes(settings_to_plain(exp), spec)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / CONFIG, config)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {folder / CONFIG}: {error.strerror or error}; choose another --dir"
            ) from error
        remember(folder / CONFIG, hashlib.sha256(config).hexdigest())

    def _has_ended(self, run: Run, goal: int) -> bool:
        """True if a run ended by itself; in a search it must be at `goal`, as it may have ended at an earlier one."""
        try:
            state = load_checkpoint(find_checkpoint(self.run_dir(run))).state["trainer"]
            return bool(state["finished"]) and (self.sweep or int(state["env_steps"]) >= goal)
        except (CheckpointError, LookupError, TypeError, ValueError):
            return False

    def _score(self, run_dir: Path) -> tuple[float | None, int]:
        """The metric in the last row of a run, None where it is not a number, and the row's step."""
        rows, metric = read_metrics(run_dir), self.search.settings.metric
        last = rows[-1] if rows else {"step": 0}
        if metric not in last:
            silent = metric.startswith("rollout/") and not last.get("rollout/episodes")  # no episode has ended yet
            if silent or any(score is not None for t in self.search.trials for score in t.scores.values()):
                return None, int(last["step"])  # other runs report it
            hint = nearest(metric, {name for name in last if "/" in name})
            said = f"--metric {metric}: the last metrics of {run_dir} have none of this name; {hint}"
            if not self.sweep:
                more = "No trial has a score yet: the same command with another --metric continues this search"
                raise ConfigError(f"{said}. {more}")
            if rows and not self._told_of_metric:
                warnings.warn(f"{said}. A run that does not report it has no score", stacklevel=2)
            self._told_of_metric = True
            return None, int(last["step"])
        value = last[metric]
        return (float(value) if math.isfinite(value) else None), int(last["step"])


def open_study(folder: Path, trust: bool = False, **given: Any) -> Study:
    """The study of a directory, to go on with.

    Args:
        trust: allow importing and calling code that the study names. given: `retries` and `confirm`.

    Raises:
        CheckpointError: there is none, it is damaged, or it is not trusted.
    """
    plain = read_state(folder)
    file = folder / STATE
    with as_checkpoint_error(file, ADVICE):
        settings = settings_of(plain)
        if trust:
            remember(file, digest(settings))
        elif not is_trusted(file, digest(settings)):
            raise CheckpointError(
                f"{legible(file)} is no study that you began here, and its runs would be executed. If you "
                f"trust whoever wrote it, give --trust once, or set {VARIABLE}={legible(folder.absolute())}; see "
                "docs/security.md"
            )
        configs = [read_config(folder / SETTINGS / name, trust) for name in names_of(settings)]
        exps = [config.to_resume() for config in configs]
        exps = [replace(exp, run=replace(exp.run, dir=None)) for exp in exps]
        points = [(exp, specs_to_plain(config.spec)) for exp, config in zip(exps, configs)]
        study = make_study(folder, points, settings, **given)
        study.restore(plain)
        study.keep_init()
        for copy in study.init_dirs() if trust else ():
            read_config(copy, trust)
    return study


def make_study(
    folder: Path, points: Sequence[tuple[Experiment, Mapping[str, Any]]], settings: SearchSettings, **given: Any
) -> Study:
    """A new study in which no trial has begun; writes nothing. See `Study` for the arguments."""
    return Study(folder, points, Search(settings, lambda values: override(points[0][0], values)), **given)
