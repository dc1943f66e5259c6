"""A search in its directory: trials as runs of the launch queue, their scores, and search.json."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.core.config import override, to_plain as settings_to_plain
from penstock.core.errors import CheckpointError, ConfigError, nearest
from penstock.core.files import write_atomic
from penstock.core.spec import specs_to_plain
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.experiment import Experiment
from penstock.run.files.stored import CONFIG, config_bytes, read_config, read_json, require_plain_run, undamaged
from penstock.run.files.trust import VARIABLE, is_trusted, remember
from penstock.run.launch.display import log_end, reason_of
from penstock.run.launch.sweep import LOGS, Run, has_checkpoint
from penstock.run.log import read_metrics
from penstock.run.search.fork import fork_run
from penstock.run.search.schedulers import Decision
from penstock.run.search.search import Search, SearchSettings
from penstock.run.search.space import as_tuples
from penstock.run.search.trial import Trial, from_plain, to_plain

STATE, SETTINGS, BASE = "search.json", "settings", "base"
STEPS_METRIC = "time/total_timesteps"
"""The metric whose stop rule ends a run at a milestone."""
_FORMAT = 1
_TRANSIENT = (1, 3)
"""Exit codes after which another attempt may succeed: of the environment, or unknown; as after a signal."""


@dataclass
class Confirmation:
    """One run of the seed study of the best settings."""

    seed: int
    run: Run
    score: float | None = None


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

    def experiment(self, values: Mapping[str, Any], run: Run | None = None) -> Experiment:
        """The experiment with these settings, in the directory of a run. Raises ConfigError if they contradict."""
        exp = override(self.exp, values)
        return exp if run is None else replace(exp, run=replace(exp.run, dir=str(self.run_dir(run))))

    def take(self) -> Run | None:
        """The run to begin or go on with: a trial's, and once the search is over those of the seed study."""
        trial = self.search.take()
        if trial is not None:
            return trial.run
        if not self.search.over:
            return None
        self._plan_confirmation()
        return next((c.run for c in self.confirmations if c.run.status in ("waiting", "stopped")), None)

    def run_dir(self, run: Run) -> Path:
        """The directory of a run."""
        return self.folder / run.name

    def log(self, run: Run) -> Path:
        """The log of a run: the output of all attempts, one after the other."""
        return self.folder / LOGS / f"{run.name}.log"

    def command(self, run: Run) -> list[str]:
        """Arguments of `python -m penstock` that train a run to its goal."""
        run_dir, trial, goals = self.run_dir(run), self.trial_of(run), self.search.scheduler.goals
        at = None if trial is None or trial.goal == goals[-1] else str(trial.goal)
        stop = [] if at is None else ["--run.stop", STEPS_METRIC, at]
        if has_checkpoint(run_dir):
            return ["resume", str(run_dir), *(stop or (["--run.stop={}"] if len(goals) > 1 else []))]
        return ["train", "--config", str(self.folder / SETTINGS / run.name), *stop, "--run.dir", str(run_dir)]

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
            confirmation = next(c for c in self.confirmations if c.run is run)
            if run.status == "finished":
                confirmation.score = self._score(self.run_dir(run))[0]
            self.save()
            return
        if run.status == "stopped":
            trial.state = "waiting"
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
                fork_run(source, self.run_dir(trial.run), exp)

    def trial_of(self, run: Run) -> Trial | None:
        """The trial that a run belongs to, None for one of the seed study."""
        return next((t for t in self.search.trials if t.run is run), None)

    def save(self) -> None:
        """Writes search.json. Raises CheckpointError if the disk refuses."""
        plain = {
            "format": _FORMAT,
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
        remember(self.folder / STATE, digest(self.search.settings))

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Goes on from the content of search.json: what ended unseen is noted, what was interrupted waits."""
        self.search.trials = [from_plain(item, self.search.space) for item in plain["trials"]]
        self.confirmations = [Confirmation(c["seed"], Run(**c["run"]), c["score"]) for c in plain["confirm"]]
        if [t.number for t in self.search.trials] != list(range(len(self.search.trials))):
            raise ValueError("trials are missing")
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
        """Has trials that failed wait again, all ([]) or by name. Raises ConfigError for others."""
        failed = {t.run.name: t for t in self.search.trials if t.state == "failed" and t.run.attempts}
        for name in names or failed:
            if name not in failed:
                raise ConfigError(f"--retry {name}: no such failed trial in {self.folder}; {nearest(name, failed)}")
            failed[name].state, failed[name].failures = "waiting", 0

    def _failed(self, trial: Trial, run: Run) -> None:
        code = run.code or 0
        if (code < 0 or code in _TRANSIENT) and trial.failures < self.retries:
            trial.failures += 1
            trial.state = "waiting"
            return
        said = log_end(self.log(run))
        self.follow(self.search.fail(trial, f"{reason_of(run)}: {said[-1] if said else 'it said nothing'}"))

    def _plan_confirmation(self) -> None:
        best, seed = self.search.best, self.exp.run.seed
        for k in range(len(self.confirmations) + 1, self.confirm + 1):
            if best is not None:
                self.confirmations.append(Confirmation(seed + k, Run(f"best-s{seed + k}", [])))

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
            if metric.startswith("rollout/") and not last.get("rollout/episodes"):
                return None, int(last["step"])  # no episode has ended yet
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
    with undamaged(file):
        settings = settings_of(plain)
        if trust:
            remember(file, digest(settings))
        elif not is_trusted(file, digest(settings)):
            raise CheckpointError(
                f"{file} is no search that you began here, and it would execute trials of its own choice. If you know "
                f"who wrote it: --trust, which is needed once, or {VARIABLE}={folder.absolute()}; see docs/security.md"
            )
        config = read_config(folder / SETTINGS / BASE, trust)
        queue = make_queue(folder, config.to_resume(), specs_to_plain(config.spec), settings, **given)
        queue.restore(plain)
    return queue


def make_queue(
    folder: Path, exp: Experiment, spec: Mapping[str, Any], settings: SearchSettings, **given: Any
) -> SearchQueue:
    """A search with no trial yet; nothing is written."""
    return SearchQueue(folder, exp, spec, Search(settings, lambda values: override(exp, values)), **given)


def read_state(folder: Path) -> dict[str, Any]:
    """The content of search.json. Raises CheckpointError if there is none, or it is of another format."""
    file = folder / STATE
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no {STATE}; begin with penstock tune ALGO --env ID --dir {folder} ...")
    require_plain_run(folder, (STATE, LOGS, SETTINGS))
    plain = read_json(file)
    if plain.get("format") != _FORMAT:
        raise CheckpointError(f"{file} has format {plain.get('format')}; this penstock reads {_FORMAT}")
    return plain


def settings_of(plain: Mapping[str, Any]) -> SearchSettings:
    """The settings in the content of search.json."""
    given: dict[str, Any] = dict(plain["settings"])
    given["space"] = {path: as_tuples(form) for path, form in given["space"].items()}
    return SearchSettings(**given)


def digest(settings: SearchSettings) -> str:
    """sha256 of all that decides which settings a trial may have."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()


def require_same(folder: Path, plain: Mapping[str, Any], settings: SearchSettings, exp: Experiment) -> None:
    """Raises ConfigError that names the difference between the search of a directory and another one."""
    before, now = settings_of(plain), settings
    differ = [name for name in asdict(now) if _plain(getattr(before, name)) != _plain(getattr(now, name))]
    if not any(trial["scores"] for trial in plain["trials"]):
        differ = [name for name in differ if name not in ("metric", "mode")]
    stored = read_json(folder / SETTINGS / BASE / CONFIG)["experiment"]
    ours = json.loads(json.dumps(settings_to_plain(exp)))
    what = [f"{name} was {getattr(before, name)!r} and is {getattr(now, name)!r}" for name in differ]
    what += [f"{where} was {a!r} and is {b!r}" for where, a, b in _differences(stored, ours)]
    if what:
        raise ConfigError(
            f"{folder} holds another search: {what[0]}. Choose another --dir, or go on with what is there by "
            f"`penstock tune {folder}`"
        )


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _differences(a: Any, b: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """The leaves in which two plain experiments differ, by dotted path."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            found
            for key in dict.fromkeys((*a, *b))
            for found in _differences(a.get(key), b.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [] if a == b else [(where, a, b)]
