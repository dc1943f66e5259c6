"""The visible loop over a Trainer: train, log, evaluate, checkpoint, stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.machine import counted
from penstock.core.spec import describe
from penstock.learn.algorithm import ResultDict
from penstock.learn.minibatch import part_count
from penstock.learn.policy import Policy
from penstock.run.log import MetricsLog, cut_rows
from penstock.run.progress import Progress, print_summary
from penstock.run.rundir import changes_since
from penstock.run.signals import die_of, ending_signals, handling
from penstock.run.trainer import Trainer
from penstock.samplers.episodes import Episodes

EVALUATIONS = "eval/evaluations.jsonl"


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    episodes: Episodes
    """The last 100 training episodes."""
    metrics: ResultDict
    """Metrics of the last iteration and of the last evaluation."""
    policy: Policy
    """The trained policy: `policy.agent` is the torch module, `policy.predict` acts."""
    run_dir: Path
    env_steps: int
    stopped_by: str
    """"steps", "stop rule", or the name of a signal."""
    checkpoint: Path | None
    """The last checkpoint; None if it could not be written."""


class Runner:
    """The loop of `train` and `resume`, in the open for those who want to change it."""

    def __init__(self, trainer: Trainer, resumed: bool = False) -> None:
        if trainer.run_dir is None:
            raise ConfigError("Runner needs a Trainer with a run directory; pass run_dir=Path('runs/a') to Trainer")
        self.trainer, self.run_dir, self.resumed = trainer, trainer.run_dir, resumed
        self._signal: int | None = None
        self._lost_checkpoints = 0

    def run(self) -> Result:
        """Trains until the steps, the stop rule or a signal end it; the run directory then holds everything.

        The first Ctrl-C or SIGTERM finishes the iteration, writes a checkpoint and exits with 130 or 143 (an
        interactive session gets the result so far); the second kills.
        """
        trainer, config = self.trainer, self.trainer.exp.run
        # What a pending iteration has logged already is cut as well: it is evaluated and logged again.
        known_steps = trainer.env_steps - bool(trainer.pending)
        log = MetricsLog(self.run_dir, known_steps if self.resumed else None, config.tensorboard)
        if self.resumed:
            cut_rows(self.run_dir / EVALUATIONS, known_steps)  # the resumed run repeats those after the checkpoint
        title = f"{type(trainer.exp.algo).__name__} on {trainer.exp.env_config.name}"
        progress = Progress(config.steps, config.progress, title)
        started, first_step = time.monotonic(), trainer.env_steps
        metrics: ResultDict = {}
        evaluation: ResultDict = {}
        unlogged: ResultDict = {}
        stopped_by = "steps"
        try:
            with handling(ending_signals(), self._note):
                progress.note(self._headline())
                if not trainer.report.reproducible:
                    self._say(
                        progress,
                        "the environment does not repeat itself from a seed and actions: a resumed run starts new "
                        "episodes",
                    )
                if self.resumed and (changed := changes_since(self.run_dir)):
                    self._say(progress, f"since the run began: {', '.join(changed)}; the last bits may differ")
                if self.resumed and trainer.sampler.cut_slots:
                    unlogged["resume/cut_slots"] = float(len(trainer.sampler.cut_slots))
                    self._say(
                        progress,
                        f"{len(trainer.sampler.cut_slots)} of {trainer.sampler.batch_spec.B} slots could not "
                        "be brought back and start a new episode",
                    )
                while (trainer.pending or trainer.env_steps < config.steps) and self._signal is None:
                    before, best = trainer.env_steps, trainer.best_score
                    interrupted, trainer.pending = trainer.pending, {}
                    metrics = (interrupted or trainer.train()) | unlogged
                    done = trainer.reached(metrics) or trainer.env_steps >= config.steps
                    due = done or interrupted or _crossed(config.eval_interval, before, trainer.env_steps)
                    if due and config.eval_episodes:
                        if done:  # so that nothing is lost if the last evaluation is cut short
                            trainer.pending = metrics
                            self._checkpoint(progress, None)
                            trainer.pending = {}
                        evaluation = self._evaluate()
                        if self._signal is not None and not evaluation:
                            trainer.pending = metrics  # evaluated and logged when the run is resumed
                            break
                        metrics |= evaluation
                        done = done or trainer.reached(metrics)
                    logged = done or "eval/mean_reward" in metrics
                    if logged or not config.log_interval or _crossed(config.log_interval, before, trainer.env_steps):
                        log.write(trainer.env_steps, metrics)
                        unlogged = {}
                    progress.update(trainer.env_steps, metrics)
                    if done:
                        stopped_by = "stop rule" if trainer.reached(metrics) else "steps"
                        break
                    if _crossed(config.checkpoint_interval, before, trainer.env_steps) or trainer.best_score > best:
                        self._checkpoint(progress, metrics.get("eval/mean_reward"))
                over = stopped_by == "stop rule" or trainer.env_steps >= config.steps
                trainer.finished = over and not trainer.pending
                path = self._checkpoint(progress, metrics.get("eval/mean_reward"))
        finally:
            progress.close()
            log.close()
        if self._signal is not None:
            stopped_by = signal.Signals(self._signal).name
        result = Result(
            trainer.recent, {**evaluation, **metrics}, trainer.policy, self.run_dir, trainer.env_steps, stopped_by, path
        )
        if config.progress != "off":
            took = time.monotonic() - started
            self._summary(title, result, took, (trainer.env_steps - first_step) / max(took, 1e-9))
        if self._signal is not None and not _interactive():
            raise SystemExit(128 + self._signal)
        return result

    def _checkpoint(self, progress: Progress, score: float | None) -> Path | None:
        """Saves a checkpoint; one that cannot be written (a full disk, say) returns None and never stops training."""
        try:
            return self.trainer.save(score)
        except CheckpointError as error:
            self._lost_checkpoints += 1
            self._say(progress, f"checkpoint not written: {error}")
            return None

    def _say(self, progress: Progress, text: str) -> None:
        """Shows a message in the display, or as a warning where there is none."""
        if self.trainer.exp.run.progress == "off":
            warnings.warn(text, stacklevel=2)
        else:
            progress.note(text)

    def _evaluate(self) -> ResultDict:
        """Evaluates, appends to eval/evaluations.jsonl and returns the metrics, {} if a signal cut it short."""
        metrics, episodes = self.trainer.evaluate(give_up=lambda: self._signal is not None)
        if self._signal is not None and not metrics:
            return {}
        row = {
            "step": self.trainer.env_steps,
            **metrics,
            "returns": episodes.return_.tolist(),
            "lengths": episodes.length.tolist(),
        }
        path = self.run_dir / EVALUATIONS
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            warnings.warn(f"evaluation not written to {path}: {error}", stacklevel=2)
        return metrics

    def _note(self, number: int) -> None:
        """Notes the first signal; the second ends the process."""
        if self._signal is not None:
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h")  # the live display has hidden the cursor
            die_of(number)
        self._signal = number
        if self.trainer.exp.run.progress != "off":
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: finishing this iteration and saving; once more ends it at once\n".encode())

    def _headline(self) -> str:
        trainer = self.trainer
        policy, spec = trainer.policy, trainer.report.spec
        T, B = trainer.sampler.batch_spec
        count = sum(p.numel() for p in policy.agent.parameters())
        if policy.replay_schedule is not None:
            trained_on = f"; {policy.replay_schedule.describe()}"
            if policy.replay_schedule.learning_starts >= trainer.exp.run.steps:
                trained_on += f", which is never in the {trainer.exp.run.steps:,} steps of this run"
        else:
            parts = part_count(T, B, policy.minibatch, columns=policy.recurrent)
            trained_on = f", {counted(policy.epochs * parts, 'update')} each"
        return (
            f"{trainer.exp.algo_name} on {trainer.exp.env_config.name}: observation {describe(spec.obs)}, action "
            f"{describe(spec.action)}; {count:,} parameters; {counted(B, 'slot')} x {counted(T, 'step')} = "
            f"{counted(B * T, 'row')} a batch{trained_on}; seed {trainer.exp.run.seed}; {self.run_dir}"
        )

    def _summary(self, title: str, result: Result, took: float, rate: float) -> None:
        metrics, run = result.metrics, self.run_dir
        rows = {
            "stopped by": result.stopped_by,
            "environment steps": f"{result.env_steps:,} ({took:,.1f} s, {rate:,.0f} a second)",
        }
        if len(result.episodes):
            rows["return, last episodes"] = f"{result.episodes.mean_return:,.1f} over {len(result.episodes)}"
        if "eval/mean_reward" in metrics:
            rows["return, evaluation"] = (
                f"{metrics['eval/mean_reward']:,.1f} +- {metrics.get('eval/std_reward', 0.0):,.1f}"
            )
        if self.trainer.policy.skipped:
            rows["updates skipped"] = f"{self.trainer.policy.skipped} of {self.trainer.policy.updates} (not finite)"
        faults = {
            name.removeprefix("faults/"): n
            for name, n in self.trainer.sampler.metrics().items()
            if name.startswith("faults/")
        }
        if faults:
            rows["faults"] = ", ".join(f"{n:,.0f} {name.replace('_', ' ')}" for name, n in faults.items())
        if self._lost_checkpoints:
            rows["checkpoints lost"] = str(self._lost_checkpoints)
        rows["run directory"] = str(run)
        rows["checkpoint"] = str(result.checkpoint or "not written")
        hints = [f"penstock eval {run}", f"penstock plot {run}"]
        if self._signal is not None:
            hints.append(f"penstock resume {run}")
        elif result.stopped_by == "steps":
            hints.append(f"penstock resume {run} --run.steps {2 * result.env_steps}")
        rows["next"] = "\n".join(hints)
        print_summary(title, rows)


def _crossed(interval: int, before: int, after: int) -> bool:
    """True if a multiple of `interval` lies in (before, after]; without state, so that a resumed run agrees."""
    return interval > 0 and after // interval > before // interval


def _interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
