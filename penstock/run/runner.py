"""The visible loop over a Trainer: train, log, evaluate, checkpoint, stop. Also resume, load and the result."""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
import torch

import penstock
from penstock.core.config import from_plain, override, to_plain
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import EnvSpec, describe
from penstock.learn.algorithm import ResultDict
from penstock.learn.policy import Policy
from penstock.run.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.experiment import Experiment
from penstock.run.files import write_atomic
from penstock.run.lock import RunLock
from penstock.run.log import MetricsLog
from penstock.run.progress import Progress, print_summary
from penstock.run.trainer import Trainer
from penstock.samplers.episodes import Episodes

CONFIG, META = "config.json", "meta.json"


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    episodes: Episodes
    """The last 100 training episodes."""
    metrics: ResultDict
    """Those of the last iteration, and of the last evaluation."""
    policy: Policy
    """`policy.agent` is the torch module; `policy.predict` acts."""
    run_dir: Path
    env_steps: int
    stopped_by: str
    """"steps", "stop rule", or the name of a signal."""


def train(exp: Experiment, init: str | Path | None = None) -> Result:
    """Carries out an experiment in a new run directory.

    Args:
        init: a run to take networks and normalisers from.

    Raises:
        ConfigError: settings contradict each other, or the run directory holds something already.
        EnvWorkerError: an environment failed. CheckpointError: the run directory cannot be written.
    """
    run_dir = _free_run_dir(exp)
    parameters = load(init).agent.state_dict() if init is not None else None
    with Trainer(exp, run_dir, parameters) as trainer:
        _make_run_dir(run_dir)
        with RunLock(run_dir):
            _write_config(trainer)
            return Runner(trainer).run()


def resume(
    run_dir: str | Path, changes: Mapping[str, Any] | None = None, *, env: Any = None, agent: Any = None
) -> Result:
    """Goes on with a run from its newest good checkpoint, as if it had never stopped.

    Args:
        changes: of `run.*` settings only, e.g. {"run.steps": 400_000} to extend a finished run.
        env, agent: the environment or agent function again, where it could not be stored (a lambda).

    Raises:
        CheckpointError: nothing good to go on from. ConfigError: changes that would make it another experiment.
    """
    run_dir = Path(run_dir)
    refused = [key for key in changes or {} if not key.startswith("run.") or key in ("run.seed", "run.dir")]
    if refused:
        raise ConfigError(f"resume cannot change {', '.join(refused)}: it goes on with the same experiment. Only run.* "
                          f"settings may change, not seed or dir; for anything else start anew with init={str(run_dir)!r} "
                          "(--init)")  # fmt: skip
    exp = override(read_experiment(run_dir, env, agent), dict(changes or {}))
    exp = replace(exp, run=replace(exp.run, dir=str(run_dir)))
    with RunLock(run_dir):
        checkpoint = load_checkpoint(find_checkpoint(run_dir))
        with Trainer(exp, run_dir) as trainer:
            trainer.restore(checkpoint)
            if changes:
                _write_config(trainer)
            return Runner(trainer, resumed=True).run()


def load(run_dir: str | Path, which: str = "last", *, agent: Any = None, device: str = "cpu") -> Policy:
    """The policy of a run, without its environment: `load("runs/a").predict(obs)`.

    Args:
        which: "last", "best" by evaluation, or the step of a checkpoint.
        agent: the agent function again, where it could not be stored (a lambda).
    """
    run_dir = Path(run_dir)
    stored = _read_json(run_dir / CONFIG)
    exp = stored["experiment"]
    algo = from_plain(exp["algo"] if agent is None else {k: v for k, v in exp["algo"].items() if k != "agent"})
    algo = replace(algo, agent=agent) if agent is not None else algo
    policy: Policy = algo.build(EnvSpec.from_plain(stored["spec"]), seed=exp["run"]["seed"], device=device)
    policy.load_parameters(load_checkpoint(find_checkpoint(run_dir, which)).policy)
    return policy


class Runner:
    """The loop of `train` and `resume`, for people who want to see or change it."""

    def __init__(self, trainer: Trainer, resumed: bool = False) -> None:
        if trainer.run_dir is None:
            raise ConfigError("Runner needs a Trainer with a run directory; pass run_dir=Path('runs/a') to Trainer")
        self.trainer, self.run_dir, self.resumed = trainer, trainer.run_dir, resumed
        self._signal: int | None = None
        self._lost_checkpoints = 0

    def run(self) -> Result:
        """Trains until the steps, the stop rule or a signal; the run directory then holds everything.

        The first Ctrl-C or SIGTERM finishes the iteration, writes a checkpoint and exits with 130 or 143 (an
        interactive session gets the result so far); the second kills.
        """
        trainer, config = self.trainer, self.trainer.exp.run
        log = MetricsLog(self.run_dir, trainer.env_steps if self.resumed else None, config.tensorboard)
        title = f"{trainer.exp.algo_name.upper()} on {trainer.exp.env_config.name}"
        progress = Progress(config.steps, config.progress, title)
        started, first_step = time.monotonic(), trainer.env_steps
        metrics: ResultDict = {}
        evaluation: ResultDict = {}
        stopped_by = "steps"
        try:
            with self._signals():
                progress.note(self._headline())
                if self.resumed and trainer.sampler.cut_slots:
                    metrics["resume/cut_slots"] = float(len(trainer.sampler.cut_slots))
                    progress.note(f"{len(trainer.sampler.cut_slots)} of {trainer.sampler.batch_spec.B} slots could not be "
                                  "brought back and start a new episode")  # fmt: skip
                while trainer.env_steps < config.steps and self._signal is None:
                    before = trainer.env_steps
                    metrics = trainer.train()
                    if _crossed(config.eval_interval, before, trainer.env_steps):
                        evaluation, episodes = trainer.evaluate()
                        self._record_evaluation(episodes, evaluation)
                        metrics |= evaluation
                    log.write(trainer.env_steps, metrics)
                    progress.update(trainer.env_steps, metrics)
                    done = trainer.reached(metrics)
                    score = metrics.get("eval/mean_reward")
                    if _crossed(config.checkpoint_interval, before, trainer.env_steps) or _is_best(trainer, score):
                        self._checkpoint(progress, score)
                    if done:
                        stopped_by = "stop rule"
                        break
                if self._signal is None and config.eval_episodes and "eval/mean_reward" not in metrics:
                    evaluation, episodes = trainer.evaluate()
                    self._record_evaluation(episodes, evaluation)
                    log.write(trainer.env_steps, evaluation)
                    progress.update(trainer.env_steps, evaluation)
                path = trainer.save(evaluation.get("eval/mean_reward"))
        finally:
            progress.close()
            log.close()
        if self._signal is not None:
            stopped_by = signal.Signals(self._signal).name
        result = Result(
            trainer.recent, {**evaluation, **metrics}, trainer.policy, self.run_dir, trainer.env_steps, stopped_by
        )
        if config.progress != "off":
            took = time.monotonic() - started
            self._summary(title, result, path, took, (trainer.env_steps - first_step) / max(took, 1e-9))
        if self._signal is not None and not _interactive():
            raise SystemExit(128 + self._signal)
        return result

    def _checkpoint(self, progress: Progress, score: float | None) -> None:
        """A checkpoint that cannot be written (a full disk, say) never stops training; the next one tries again."""
        try:
            self.trainer.save(score)
        except CheckpointError as error:
            self._lost_checkpoints += 1
            progress.note(f"checkpoint not written: {error}")

    def _record_evaluation(self, episodes: Episodes, metrics: ResultDict) -> None:
        path = self.run_dir / "eval" / "evaluations.jsonl"
        row = {"step": self.trainer.env_steps, **metrics, "returns": episodes.return_.tolist(),
               "lengths": episodes.length.tolist()}  # fmt: skip
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            warnings.warn(f"evaluation not written to {path}: {error}", stacklevel=2)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal is not None:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _headline(self) -> str:
        trainer = self.trainer
        T, B = trainer.sampler.batch_spec
        minibatch = trainer.policy.minibatch
        parts = 1 if minibatch is None else max(round(T * B / minibatch), 1)
        count = sum(p.numel() for p in trainer.policy.agent.parameters())
        return (f"{trainer.exp.algo_name} on {trainer.exp.env_config.name}: observation {describe(trainer.report.spec.obs)}, "
                f"action {describe(trainer.report.spec.action)}; {count:,} parameters; {B} slots x {T} steps = {B * T:,} rows "
                f"a batch, {trainer.policy.epochs * parts} updates each; seed {trainer.exp.run.seed}; {self.run_dir}")  # fmt: skip

    def _summary(self, title: str, result: Result, checkpoint: Path, took: float, rate: float) -> None:
        metrics, run = result.metrics, self.run_dir
        rows = {
            "stopped by": result.stopped_by,
            "environment steps": f"{result.env_steps:,} ({took:,.1f} s, {rate:,.0f} a second)",
            "return, last episodes": f"{result.episodes.mean_return:,.1f} over {len(result.episodes)}",
        }
        if "eval/mean_reward" in metrics:
            rows["return, evaluation"] = f"{metrics['eval/mean_reward']:,.1f} +- {metrics.get('eval/std_reward', 0.0):,.1f}"
        if self.trainer.policy.skipped:
            rows["updates skipped"] = f"{self.trainer.policy.skipped} of {self.trainer.policy.updates} (not finite)"
        if self._lost_checkpoints:
            rows["checkpoints lost"] = str(self._lost_checkpoints)
        rows["run directory"] = str(run)
        rows["checkpoint"] = str(checkpoint)
        rows["next"] = f"penstock eval {run}   penstock plot {run}   penstock resume {run} --run.steps {2 * result.env_steps}"
        print_summary(title, rows)


def _crossed(interval: int, before: int, after: int) -> bool:
    """True if a multiple of `interval` lies in (before, after]: no state to keep, so a resumed run agrees."""
    return interval > 0 and after // interval > before // interval


def _is_best(trainer: Trainer, score: float | None) -> bool:
    return score is not None and score >= trainer.best_score


def _interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _free_run_dir(exp: Experiment) -> Path:
    """The run directory to be; ConfigError if it holds something, so that nothing is ever overwritten."""
    if exp.run.dir is not None:
        path = Path(exp.run.dir)
    else:
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in exp.env_config.name)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-s{exp.run.seed}"
        path = Path("runs") / name / exp.algo_name / stamp
        path = next(p for i in itertools.count(2) for p in (path, path.with_name(f"{stamp}-{i}")) if not p.exists())
    try:
        if path.exists() and (not path.is_dir() or any(p.name != ".lock" for p in path.iterdir())):
            raise ConfigError(f"run directory {path} is not empty; nothing in it was touched. Go on with it by `penstock "
                              f"resume {path}` (ps.resume), or choose another run.dir")  # fmt: skip
    except OSError as error:
        raise CheckpointError(f"cannot read run directory {path}: {error.strerror or error}; choose another run.dir") from error
    return path


def _make_run_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make run directory {path}: {error.strerror or error}; choose another run.dir") from error


def _write_config(trainer: Trainer) -> None:
    exp, run_dir = trainer.exp, trainer.run_dir
    assert run_dir is not None
    config = {"experiment": to_plain(exp), "spec": trainer.report.spec.to_plain()}
    meta = {
        "env": exp.env_config.name,
        "algo": exp.algo_name,
        "seed": exp.run.seed,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "git": _git(),
        "versions": {"penstock": penstock.__version__, "torch": torch.__version__, "numpy": np.__version__,
                     "gymnasium": gymnasium.__version__, "python": platform.python_version()},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "env_reproducible": trainer.report.reproducible,
    }  # fmt: skip
    try:
        write_atomic(run_dir / CONFIG, (json.dumps(config, indent=1) + "\n").encode())
        write_atomic(run_dir / META, (json.dumps(meta, indent=1) + "\n").encode())
    except OSError as error:
        raise CheckpointError(f"cannot write into run directory {run_dir}: {error.strerror or error}") from error


def read_experiment(run_dir: Path, env: Any = None, agent: Any = None) -> Experiment:
    """The experiment that a run directory holds; `env` and `agent` replace what could not be stored."""
    plain = _read_json(run_dir / CONFIG)["experiment"]
    if env is not None:
        plain = {**plain, "env": ""}
    if agent is not None:
        plain = {**plain, "algo": {k: v for k, v in plain["algo"].items() if k != "agent"}}
    try:
        exp: Experiment = from_plain(plain)
    except ConfigError as error:
        raise ConfigError(f"{run_dir / CONFIG}: {error} to ps.resume(run_dir, env=..., agent=...)") from error
    exp = exp if env is None else replace(exp, env=env)
    return exp if agent is None else replace(exp, algo=replace(exp.algo, agent=agent))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path.parent} is no run directory: cannot read {path.name} ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; copy it from another run of the same settings") from error


def _git() -> str | None:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
