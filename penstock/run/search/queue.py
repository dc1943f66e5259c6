"""A search in its directory: trials as runs of the launch queue, their scores, and search.json."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
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
from penstock.run.files.stored import CONFIG, config_bytes, read_config, undamaged
from penstock.run.files.trust import VARIABLE, is_trusted, remember
from penstock.run.launch.display import log_end, reason_of
from penstock.run.launch.sweep import LOGS, Run, has_checkpoint
from penstock.run.log import read_metrics
from penstock.run.search.fork import copy_parameters, fork_run
from penstock.run.search.schedulers import Decision
from penstock.run.search.search import Search, SearchSettings
from penstock.run.search.stored import ADVICE, BASE, FORMAT, INIT, SETTINGS, STATE, digest, read_state, settings_of
from penstock.run.search.trial import Trial, from_plain, run_from_plain, score_from_plain, to_plain

STEPS_METRIC = "time/total_timesteps"
"""The metric whose stop rule ends a run at a milestone."""
_TRANSIENT = (1, errors.EnvWorkerError.exit_code, errors.LearnerLostError.exit_code)
"""Exit codes after which another attempt may succeed: unknown, of the environment or a rank; as after a signal."""
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "free some space")


@dataclass
class Confirmation:
    """One run of the seed study of the best settings."""

    seed: int
    run: Run
    score: float | None = None
    of: str = ""
    """The run whose settings it trains, which were the best."""
    failures: int = 0
    """Attempts that failed and were begun again."""
    reason: str = ""
    """Why it failed."""


@dataclass
class SearchQueue:
    """The trials of a search as runs to launch; `save` after every change.

    Args:
        exp: the experiment of which each trial is a copy with other settings.
        spec: of its environment, as plain data.
        retries: attempts after the first that a trial has whose environment or process died.
        confirm: seeds of the study that follows the search, 0 for none.
    """

    folder: Path
    exp: Experiment
    spec: Mapping[str, Any]
    search: Search
    retries: int = 1
    confirm: int = 0
    confirmations: list[Confirmation] = field(default_factory=list[Confirmation])
    _cut_short: set[str] = field(default_factory=set[str])
    """Names of runs that were stopped, perhaps together with the search."""

    def experiment(self, values: Mapping[str, Any], run: Run | None = None) -> Experiment:
        """The experiment with these settings, in the directory of a run. Raises ConfigError if they contradict."""
        exp = override(self.exp, values)
        return exp if run is None else replace(exp, run=replace(exp.run, dir=str(self.run_dir(run))))

    def take(self) -> Run | None:
        """The run to begin or go on with: a trial's, and once the search is over those of the seed study."""
        while (trial := self.search.take()) is not None:
            due, self.search.due = self.search.due, []
            self.follow(due)
            if trial.state == "running" and not self._used_up(trial):
                return trial.run
            if trial.state == "running":
                self.follow(self.search.fail(trial, self._reason(trial.run)))
                self.save()
        if not self.search.over:
            return None
        self._plan_confirmation()
        for c in self.study:
            if c.run.status in ("waiting", "stopped"):
                if not self._used_up(c):
                    return c.run
                c.reason = self._reason(c.run)
                self.save()
        return None

    @property
    def study(self) -> list[Confirmation]:
        """The runs that confirm what is the best now; `--retry` may have found another one since others began."""
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
        init = [x for word in words_of(at_runs(given, list(map(str, self.init_dirs())))) for x in ("--init", word)]
        return ["train", "--config", str(self.folder / SETTINGS / run.name), *init, *stop, "--run.dir", str(run_dir)]

    def write_best(self, exp: Experiment) -> Path:
        """Writes the best settings as a config.json, for `penstock train --config`. Raises CheckpointError."""
        self._write_settings("best", exp)
        return self.folder / SETTINGS / "best" / CONFIG

    def started(self, run: Run) -> None:
        """Writes the settings of a new run, and search.json."""
        self.save()
        if not has_checkpoint(self.run_dir(run)):
            self._write_settings(run.name, self._experiment_of(run))

    def ended(self, run: Run) -> None:
        """Notes the score or the failure of a run; what follows from it is carried out and saved.

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
            trial.state = "waiting"  # in search.json, should the metric be unknown
            self.save()
            score, steps = self._score(self.run_dir(run))
            self.follow(self.search.tell(trial, score, steps))
        self.save()

    def follow(self, decisions: Sequence[Decision]) -> None:
        """Makes the runs that decisions ask for: copies of other members' states.

        A member whose explored settings contradict each other counts as failed.
        """
        for decision in decisions:
            if decision.copy_of is None:
                continue
            trial, source = decision.trial, self.run_dir(decision.copy_of.run)
            try:
                exp = self.experiment(trial.values, trial.run)
            except ConfigError as error:
                self.follow(self.search.fail(trial, f"settings: {error}"))
                continue
            if not (self.run_dir(trial.run) / CONFIG).is_file():  # else made before a kill, and not saved any more
                fork_run(source, self.run_dir(trial.run), exp, self.spec)

    def trial_of(self, run: Run) -> Trial | None:
        """The trial that a run belongs to, None for one of the seed study."""
        return next((t for t in self.search.trials if t.run is run), None)

    def save(self) -> None:
        """Writes search.json. Raises CheckpointError if the disk refuses."""
        plain = {
            "format": FORMAT,
            "settings": asdict(self.search.settings),
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
        """Writes all that a new search needs before its first trial, and remembers it as this user's own."""
        self.save()
        self._write_settings(BASE, self.exp)
        self.keep_init()
        remember(self.folder / STATE, digest(self.search.settings))

    def keep_init(self) -> None:
        """Copies the parameters that trials start from, so that the run which has them may go on or go away."""
        for source, target in zip(runs_of(self.search.settings.init), self.init_dirs()):
            if not (target / CONFIG).is_file():
                copy_parameters(Path(source), target)

    def init_dirs(self) -> list[Path]:
        """Where these copies are: one, or one for each policy."""
        given, folder = self.search.settings.init, self.folder / INIT
        return [folder / str(i) for i in range(len(given))] if isinstance(given, dict) else [folder] if given else []

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Goes on from the content of search.json: what ended unseen is noted, what was interrupted waits."""
        self.search.trials = [from_plain(item, self.search.space) for item in plain["trials"]]
        self._check_trials()
        best = self.search.best
        self.confirmations = [
            _confirmation(c, self.exp.run.seed, "" if best is None else best.run.name) for c in plain["confirm"]
        ]
        for c in self.confirmations:
            c.run.status = "stopped" if c.run.status == "running" else c.run.status
        self.follow(self.search.decide())
        for trial in self.search.trials:
            if trial.state == "waiting" and self._has_reached(trial):
                trial.run.status, trial.run.code = "finished", 0
                score, steps = self._score(self.run_dir(trial.run))
                self.follow(self.search.tell(trial, score, steps))
            elif trial.state == "waiting" and trial.run.status == "running":
                trial.run.status = "stopped"
        for c in self.confirmations:
            if c.run.status == "stopped" and self._stands_at(self.run_dir(c.run)) >= self.exp.run.steps:
                c.run.status, c.score = "finished", self._score(self.run_dir(c.run))[0]

    def retry(self, names: Sequence[str]) -> None:
        """Has trials and runs of the seed study that failed wait again, all ([]) or by name.

        Raises ConfigError for others.
        """
        failed = {t.run.name: t for t in self.search.trials if t.state == "failed" and t.run.attempts}
        study = {c.run.name: c for c in self.confirmations if c.run.status == "failed"}
        for name in names or (*failed, *study):
            if name in study:
                study[name].run.status, study[name].failures = "waiting", 0
                continue
            if name not in failed:
                known = (*failed, *study)
                raise ConfigError(f"--retry {name}: no such failed trial in {self.folder}; {nearest(name, known)}")
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
            raise CheckpointError(f"{self.folder} has no room: {self._reason(run)}; then: penstock tune {self.folder}")
        return (code < 0 or code in _TRANSIENT) and failures < self.retries

    def _reason(self, run: Run) -> str:
        said = log_end(self.log(run))
        return f"{reason_of(run)}: {said[-1] if said else 'it said nothing'}"

    def _used_up(self, item: Trial | Confirmation) -> bool:
        """True if a run was stopped, not with the search, which takes none after a signal, and has no attempt left."""
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

    def _plan_confirmation(self) -> None:
        best, known = self.search.best, {c.seed for c in self.study}
        for seed in range(self.exp.run.seed + 1, self.exp.run.seed + self.confirm + 1):
            if best is not None and seed not in known:
                taken = any(c.seed == seed for c in self.confirmations)
                name = f"{best.run.name}-s{seed}" if taken else f"best-s{seed}"
                self.confirmations.append(Confirmation(seed, Run(name, []), of=best.run.name))

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
            return self.experiment(trial.values, run)
        best = self.search.best
        assert best is not None
        exp = self.experiment(best.values, run)
        return override(exp, {"run.seed": next(c.seed for c in self.confirmations if c.run is run)})

    def _write_settings(self, name: str, exp: Experiment) -> None:
        folder = self.folder / SETTINGS / name
        config = config_bytes(settings_to_plain(exp), self.spec)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / CONFIG, config)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {folder / CONFIG}: {error.strerror or error}; choose another --dir"
            ) from error
        remember(folder / CONFIG, hashlib.sha256(config).hexdigest())

    def _has_reached(self, trial: Trial) -> bool:
        return trial.run.attempts > 0 and self._stands_at(self.run_dir(trial.run)) >= trial.goal

    def _stands_at(self, run_dir: Path) -> int:
        """Environment steps of a run that ended of itself, -1 of any other."""
        try:
            state = load_checkpoint(find_checkpoint(run_dir)).state["trainer"]
            return int(state["env_steps"]) if state["finished"] else -1
        except (CheckpointError, LookupError, TypeError, ValueError):
            return -1

    def _score(self, run_dir: Path) -> tuple[float | None, int]:
        """The metric in the last row of a run, None where it is not a number, and the row's step."""
        rows, metric = read_metrics(run_dir), self.search.settings.metric
        last = rows[-1] if rows else {"step": 0}
        if metric not in last:
            silent = metric.startswith("rollout/") and not last.get("rollout/episodes")  # no episode has ended yet
            if silent or any(score is not None for t in self.search.trials for score in t.scores.values()):
                return None, int(last["step"])  # others have it
            known = {name for name in last if "/" in name}
            raise ConfigError(
                f"--metric {metric}: {run_dir} does not report it at the end; {nearest(metric, known)}. "
                "No trial is scored yet by it, so the same command with another --metric goes on here"
            )
        value = last[metric]
        return (float(value) if math.isfinite(value) else None), int(last["step"])


def open_search(folder: Path, trust: bool = False, **given: Any) -> SearchQueue:
    """The search of a directory, to go on with.

    Args:
        trust: the search may be a stranger's, whose code is imported and called. given: `retries` and `confirm`.

    Raises:
        CheckpointError: there is none, it is damaged, or it is not trusted.
    """
    plain = read_state(folder)
    file = folder / STATE
    with undamaged(file, ADVICE):
        settings = settings_of(plain)
        if trust:
            remember(file, digest(settings))
        elif not is_trusted(file, digest(settings)):
            raise CheckpointError(
                f"{legible(file)} is no search that you began here, and it would execute trials of its own choice. If "
                f"you know who wrote it: --trust, which is needed once, or {VARIABLE}={legible(folder.absolute())}; "
                "see docs/security.md"
            )
        config = read_config(folder / SETTINGS / BASE, trust)
        queue = make_queue(folder, config.to_resume(), specs_to_plain(config.spec), settings, **given)
        queue.restore(plain)
        queue.keep_init()
        for copy in queue.init_dirs() if trust else ():
            read_config(copy, trust)
    return queue


def make_queue(
    folder: Path, exp: Experiment, spec: Mapping[str, Any], settings: SearchSettings, **given: Any
) -> SearchQueue:
    """A search with no trial yet; nothing is written."""
    return SearchQueue(folder, exp, spec, Search(settings, lambda values: override(exp, values)), **given)


def _confirmation(plain: Mapping[str, Any], first: int, best: str) -> Confirmation:
    """A run of the seed study from JSON data. Raises ValueError or LookupError for what is none."""
    seed = plain["seed"]
    if type(seed) is not int or seed <= first:
        raise ValueError(f"a confirmation with seed {seed!r}; that of the search is {first}")
    run = run_from_plain(plain["run"], rf"(best|trial-\d{{3,}}(-\d+)?)-s{seed}")
    score = score_from_plain(plain["score"])
    of, failures, reason = plain.get("of", best), int(plain.get("failures", 0)), str(plain.get("reason", ""))
    return Confirmation(seed, run, score, of, failures, reason)
