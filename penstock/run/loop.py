"""The loop of a run: train, evaluate, hand over, log, checkpoint, stop; `train` and `resume` run it with no body."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from penstock.core.config import import_object, to_plain
from penstock.core.errors import CheckpointError, ConfigError, LearnerLostError, PenstockError, depth_of_user
from penstock.envs.seats import PolicyMap
from penstock.learn.algorithm import AgentFn, ResultDict
from penstock.learn.policy_set import LoadedPolicy
from penstock.run.entry import new_run, resumed_run
from penstock.run.experiment import Experiment
from penstock.run.files.changes import at, changed, plain_changes, settings_metrics, write_change
from penstock.run.files.inits import Init
from penstock.run.files.stored_experiment import Supplied
from penstock.run.iteration import Iteration, PendingIteration
from penstock.run.learners.group import LearnerGroup, Restarts
from penstock.run.log import EVALUATIONS, TAKEN_AT, MetricsLog, cut_rows, log_evaluation
from penstock.run.playing.show import film_policy
from penstock.run.progress import Progress, print_summary
from penstock.run.result import STOPPED, Result, headline, remarks, summary, title
from penstock.run.signals import die_of, ending_signals, handling, tell
from penstock.run.tracking.sender import Sender, finish
from penstock.run.trainer import Trainer
from penstock.samplers.episodes import Episodes
from penstock.samplers.trackers.envs import Called, Envs

S = TypeVar("S")


def train(exp: Experiment, init: Init | None = None, *, trust: bool = False) -> Result:
    """Trains an experiment in a new run directory: `Run(exp, init)` with an empty body.

    Args:
        init: a run, or runs by policy id, for the initial networks and normalisers. trust: import code that they name.

    Raises:
        ConfigError: settings contradict each other, or the run directory holds something already.
        EnvWorkerError: an environment failed. CheckpointError: the run directory cannot be written.
    """
    return _to_the_end(Run(exp, init, trust=trust))


def resume(
    run_dir: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    env: Any = None,
    agent: AgentFn | None = None,
    eval_env: Any = None,
    policy_mapping_fn: PolicyMap | None = None,
    trust: bool = False,
) -> Result:
    """Continues a run from its newest good checkpoint, as if it had never stopped: `Run.resume` with an empty body.

    Args:
        changes: to `run.*` settings, e.g. {"run.steps": 400_000} to extend a finished run; to the sampler if it
            collects the same batches, e.g. {"sampler.runners": 3}, or {"sampler": "cpu", "sampler.workers": 2}; and
            {"algo.replay.shards": 3}.
        env, agent, eval_env, policy_mapping_fn: what could not be stored (a lambda), given again; must be the same.
        trust: allow importing and calling code that the run names; not needed for your own runs (docs/security.md).

    Raises:
        CheckpointError: no good checkpoint, or the run is not trusted. ConfigError: changes that make it another
            experiment.
    """
    return _to_the_end(
        Run.resume(
            run_dir,
            changes,
            env=env,
            agent=agent,
            eval_env=eval_env,
            policy_mapping_fn=policy_mapping_fn,
            trust=trust,
        )
    )


def _to_the_end(run: Run) -> Result:
    with run:
        for _ in run:
            pass
    return run.result


class Run:
    """A run to iterate over in a `with`: your code between iterations, everything else as in `ps.train`.

        with ps.Run(exp) as run:
            for it in run:
                it.metrics["weights/norm"] = norm(it.policy.agent)
        print(run.result.run_dir)

    It logs, evaluates, checkpoints, shows progress and obeys signals. `break` saves and ends the run as `run.stop()`
    does; `ps.resume` goes on after it. An error in the body saves the run, then propagates. The first Ctrl-C or SIGTERM
    finishes the iteration and its body, saves and exits with 130 or 143 (an interactive session gets the result so
    far); the second kills.

    Args:
        init: as in `ps.train`.

    Raises:
        ConfigError, EnvWorkerError, CheckpointError: as `ps.train`, on entry.
    """

    def __init__(self, exp: Experiment, init: Init | None = None, *, trust: bool = False) -> None:
        self._prepare(new_run(exp, init, trust), resumed=False)

    @classmethod
    def resume(
        cls,
        run_dir: str | Path,
        changes: Mapping[str, Any] | None = None,
        *,
        env: Any = None,
        agent: AgentFn | None = None,
        eval_env: Any = None,
        policy_mapping_fn: PolicyMap | None = None,
        trust: bool = False,
    ) -> Run:
        """The run of a directory, from its newest good checkpoint; arguments and errors as in `ps.resume`."""
        again = Supplied(env, agent, eval_env, policy_mapping_fn)
        run = cls.__new__(cls)
        run._prepare(resumed_run(Path(run_dir), changes, again, trust), resumed=True)
        return run

    def _prepare(self, opening: contextlib.AbstractContextManager[Trainer], resumed: bool) -> None:
        self._opening, self._resumed = opening, resumed
        self._live: Trainer | None = None
        self._result: Result | None = None
        self._signal: int | None = None
        self._unsaved: list[str] = []  # why checkpoints were not written
        self._told: set[str] = set()  # messages shown once
        self._restarts = Restarts()
        self._open: PendingIteration | None = None
        self._phase = _Phase.NEW
        self._ending: Literal["done", "asked"] | None = None
        """Why the last iteration handed out is the final one: the run is done, or was asked to stop."""
        self._metrics: ResultDict = {}  # of the last iteration
        self._evaluation: ResultDict = {}  # of the last evaluation
        self._earlier: ResultDict = {}  # of the evaluation beside training that counts in this iteration
        self._unlogged: ResultDict = {}  # for the next row
        self.standing: ResultDict = {}
        """Numbers for every row from now on, such as `settings/...`; one of yours is set again after a resume."""

    def __enter__(self) -> Run:
        if self._phase is not _Phase.NEW:
            raise ConfigError("a Run runs once; make another, or go on with it by ps.Run.resume(run_dir)")
        self._phase = _Phase.OVER  # unless all that follows succeeds
        with contextlib.ExitStack() as stack:
            self._live = trainer = stack.enter_context(self._opening)
            config, run_dir = trainer.exp.run, self.run_dir
            self._each: list[Callable[[Iteration], Any]] = [] if config.each is None else [import_object(config.each)]
            stack.callback(self._summarize)
            # Rows that a pending iteration has logged already are cut too: it is evaluated and logged again.
            known_steps = trainer.env_steps - bool(trainer.pending)
            self._log = MetricsLog(run_dir, known_steps if self._resumed else None)
            stack.callback(lambda: self._log.close())  # another one after a restart
            if self._resumed:
                cut_rows(run_dir / EVALUATIONS, known_steps)  # the resumed run repeats those after the checkpoint
                self.standing = settings_metrics(plain_changes(run_dir, known_steps))
            self._progress = Progress(config.steps, config.progress, title(trainer))
            stack.callback(self._progress.close)
            self._started, self._first_step = time.monotonic(), trainer.env_steps
            stack.enter_context(handling(ending_signals(), self._note))
            self._progress.note(headline(trainer))
            for text in remarks(trainer, self._resumed):
                self._say(text)
            self._senders = [Sender(run_dir, name) for name in config.trackers]
            stack.callback(self._finish_trackers)
            if self._resumed and trainer.sampler.cut_slots:
                self._unlogged["resume/cut_slots"] = float(len(trainer.sampler.cut_slots))
            self._stack = stack.pop_all()
        self._phase = _Phase.BETWEEN
        return self

    def __repr__(self) -> str:
        if self._result is not None:
            return f"Run({self._result!r})"
        if self._live is None or self._phase is _Phase.NEW:
            return "Run(not begun: with ps.Run(exp) as run: ...)"
        at = f"{self._live.env_steps:,} of {self._live.exp.run.steps:,} steps"
        return f"Run({title(self._live)}, {at}; {self._live.run_dir})"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is None:
                self.stop()  # by `break`, if nothing else has ended the loop
                while self._result is None:
                    self._end()
            elif self._phase is _Phase.BETWEEN and self._result is None:
                self._save_after(error)
            self._phase = _Phase.OVER if error is None else _Phase.FAILED
        if error is None and self._signal is not None and not _interactive():
            raise SystemExit(128 + self._signal)

    def __iter__(self) -> Iterator[Iteration]:
        _ = self.trainer
        return self

    def __next__(self) -> Iteration:
        """The next iteration; the one before is logged, and a checkpoint written if one is due."""
        while True:
            try:
                self._settle()
                it = None if self._result is not None or self._ends() else self._iterate(self.trainer)
                if it is None:
                    self._finish()
                    raise StopIteration
                return it
            except LearnerLostError as error:
                self._restart(error)

    @property
    def trainer(self) -> Trainer:
        """The live run: sampler, policy and counters. Raises ConfigError before the `with`."""
        if self._live is None:
            raise ConfigError("a Run is used in a with: `with ps.Run(exp) as run:`, and in it `for it in run:`")
        return self._live

    @property
    def policy(self) -> LoadedPolicy:
        """The policy in training."""
        return self.trainer.policy

    @property
    def run_dir(self) -> Path:
        """Where everything is kept."""
        run_dir = self.trainer.run_dir
        assert run_dir is not None
        return run_dir

    @property
    def envs(self) -> Envs:
        """The sampler's environments, between iterations: `call` methods, `get` and `set` attributes; see `Envs`.

        Raises:
            ConfigError: the run is over, or its sampler cannot reach environments.
        """
        trainer = self._in_the_with()
        elsewhere = trainer.plan.held_out is not None and trainer.plan.env.evaluation is None
        why = f"the run itself plays {trainer.plan.eval_env.name}, which one of its sampler's pools cannot play"

        def note(called: Called) -> None:
            write_change(self.run_dir, trainer.env_steps, {f"env_{called.kind}": to_plain(called._asdict())})

        return Envs(trainer.sampler, told=note, evaluator=why if elsewhere else "")

    @property
    def result(self) -> Result:
        """The result, once the loop has ended."""
        if self._result is None:
            raise ConfigError("run.result before the run has ended; read it after the loop")
        return self._result

    def stop(self) -> None:
        """Ends the run after this iteration, without a last evaluation; `ps.resume` can go on with it."""
        self._ending = self._ending or "asked"

    def set(self, changes: Mapping[str, Any]) -> None:
        """Changes settings from the next iteration on: `run.set({"algo.lr": 1e-4, "algo.clip": "linear(0.2, 0)"})`.

        Acting follows with the next version of the policy. Each change is a line of `changes.jsonl`, so that a resumed
        run repeats it at the same step; a number stands as `settings/...` in its row of metrics and in all later ones.

        Args:
            changes: values by path: step sizes, coefficients, discount, schedules, epochs and minibatches, replay ratio
                and priorities, targets, exploration; of several policies `algo.algos.ID.lr`; and `run.steps`, `stop`
                and the intervals of `run`.

        Raises:
            ConfigError: an unknown path, an invalid value, a setting that cannot change during a run, or the `with` has
                ended.
        """
        trainer = self._in_the_with()
        before, metrics = trainer.exp, self._metrics if self._open is None else self._open.it.metrics
        exp = changed(before, changes)
        if exp.run.stop != before.run.stop:
            trainer.check_stop(exp.run.stop, metrics)
        if exp.run.steps <= trainer.env_steps and exp.run.steps != before.run.steps:
            raise ConfigError(
                f"run.steps={exp.run.steps:,} at {trainer.env_steps:,} steps; expected more than these: run.stop() "
                "ends the run after this iteration"
            )
        trainer.change(changes)
        for path in changes:
            old, new = (at(x, path, None) for x in (before, trainer.exp))
            for row in (self.standing, {} if self._open is None else self._open.it.metrics):
                for name in [x for x in row if f"{x}.".startswith(f"settings/{path}.")]:
                    del row[name]
                row |= settings_metrics({path: new})
            self._say(f"step {trainer.env_steps:,}: {path} {old} -> {new}")
        if before.run.compile and any(path.startswith("algo.") for path in changes):
            self._say("run.compile: numbers that the loss reads are compiled in, so that it may compile anew")
        if self._ending == "done" and not self._over(self._metrics if self._open is None else self._open.it.metrics):
            self._ending = None  # made longer in what was to be its last iteration

    def say(self, text: str) -> None:
        """Shows a line above the progress display; with progress="off" it is a warning."""
        self._in_the_with()
        self._say(text)

    def save(self) -> Path:
        """Writes a checkpoint; returns its path, or the newest's if a learner is lost. Raises CheckpointError."""
        metrics, earlier = (self._metrics, {}) if self._open is None else (self._open.it.metrics, self._open.earlier)
        score = None if "eval/mean_reward" in earlier else metrics.get("eval/mean_reward")
        try:
            return self._in_the_with().save(score)
        except LearnerLostError as error:
            return self._restart(error)

    def evaluate(self, episodes: int | None = None) -> Episodes:
        """Evaluates now, even if not due; the metrics are added to those of this iteration.

        Args:
            episodes: how many; None for `run.eval_episodes`.
        """
        metrics, played = self._evaluate(self._in_the_with(), episodes)
        if self._open is not None:
            self._open.it.metrics |= metrics
            self._open.earlier = {name: x for name, x in self._open.earlier.items() if name not in metrics}
        return played

    def _in_the_with(self) -> Trainer:
        trainer = self.trainer
        if self._phase not in (_Phase.BETWEEN, _Phase.TRAINING):
            raise ConfigError("the with of this run is over; ps.evaluate(run.result.policy, env) plays its policy")
        return trainer

    def _iterate(self, trainer: Trainer) -> Iteration | None:
        """Trains and evaluates; None if a signal cut the evaluation short; a resumed run repeats it."""
        config, before, best = trainer.exp.run, trainer.env_steps, trainer.evaluations.best_score
        self._phase = _Phase.TRAINING
        interrupted, trainer.pending = trainer.pending, {}
        metrics, self._earlier = (interrupted or trainer.train()) | self._unlogged | self.standing, {}
        done, found, evaluation = self._over(metrics), dict[str, float](), None
        due = config.eval_episodes and (interrupted or _crossed(config.eval_interval, before, trainer.env_steps))
        if due or (done and (config.eval_episodes or trainer.evaluations.pending is not None)):
            if done:  # so that nothing is lost if the last evaluation is cut short
                trainer.pending = metrics
                self._checkpoint(None)
                trainer.pending = {}
            try:
                evaluation = self._take_evaluation(trainer)
                best, done = trainer.evaluations.best_score, done or self._over(metrics)
                if done or not trainer.evaluations.begin():
                    if config.eval_episodes:
                        found, evaluation = self._evaluate(trainer, None)
                        if self._signal is not None and not found:
                            raise _CutShort
                    trainer.evaluations.end()
            except _CutShort:
                trainer.pending, self._metrics, self._phase = metrics, metrics, _Phase.BETWEEN
                return None
            done = done or trainer.reached(metrics | found)
        earlier = {} if found else self._earlier
        metrics |= found or earlier
        self._ending, self._phase = "done" if done else None, _Phase.BETWEEN
        batch, episodes = (None, Episodes()) if interrupted else (trainer.batch, trainer.episodes)
        it = Iteration(trainer.itr, trainer.env_steps, metrics, batch, episodes, evaluation, self)
        self._open = PendingIteration(it, dict(metrics), before, best, earlier)
        for function in self._each:
            function(it)
        return it

    def _restart(self, error: LearnerLostError) -> Path:
        """Goes on from the newest checkpoint; returns its path. Raises the error if it recurs too often."""
        trainer = self.trainer
        if not isinstance(trainer.learners, LearnerGroup):
            raise error
        self._open, self._phase = None, _Phase.TRAINING
        self._ending = "asked" if self._ending == "asked" else None
        checkpoint = trainer.restart()
        self._restarts.count(checkpoint.step, error)
        known_steps = trainer.env_steps - bool(trainer.pending)
        self._log.close()
        self._log = MetricsLog(self.run_dir, known_steps)
        for sender in self._senders:
            sender.rewind()
        cut_rows(self.run_dir / EVALUATIONS, known_steps)
        self._metrics, self._unlogged, self._earlier, self._phase = {}, {}, {}, _Phase.BETWEEN
        self.standing = settings_metrics(plain_changes(self.run_dir, known_steps))
        self._say(f"{error}; all {trainer.exp.run.learners} learners go on from step {checkpoint.step:,}")
        return checkpoint.path

    def _settle(self) -> None:
        """Logs the iteration that was handed out, if one was, and saves a checkpoint if one is due."""
        if self._open is None:
            return
        open_, self._open = self._open, None
        it, before = open_.it, open_.before
        trainer, config = self.trainer, self.trainer.exp.run
        given = {name: _number(name, value) for name, value in it.metrics.items()}
        shown = given | {name: _number(name, x) for name, x in self.standing.items() if name not in given}
        self._metrics = {name: value for name, value in shown.items() if name not in open_.earlier}
        told = self._ending == "done" or "eval/mean_reward" in self._metrics or given != open_.shown
        if told or not config.log_interval or _crossed(config.log_interval, before, it.env_steps):
            self._log_row(it.env_steps, self._metrics)
            self._unlogged = {}
        self._progress.update(it.env_steps, shown)
        if _crossed(config.video_interval, before, it.env_steps) and self._signal is None:
            self._film(it)
        due = _crossed(config.checkpoint_interval, before, it.env_steps) or trainer.evaluations.best_score > open_.best
        if due and not self._ends():
            self._checkpoint(self._metrics.get("eval/mean_reward"))

    def _log_row(self, step: int, metrics: ResultDict) -> None:
        """Writes a row of metrics, for trackers to read."""
        self._log.write(step, metrics)
        for sender in self._senders:
            sender.wake()
            if sender.trouble:
                text = f"tracker {sender.name} failed: {sender.trouble}; training goes on, and it gets every row later"
                self._say_once(f"tracker {sender.name}", text)

    def _finish_trackers(self) -> None:
        if self._senders:
            finish(self._senders, self._say, most_s=60.0 if self._signal is None else 5.0)

    def _film(self, it: Iteration) -> None:
        """Films an episode; what keeps it from that is said once, and never stops training."""
        path = self.run_dir / "videos" / f"{it.env_steps:012d}.mp4"
        try:
            film_policy(self.trainer.plan, it.policy, it.itr, path, give_up=lambda: self._signal is not None)
        except (PenstockError, OSError) as error:
            self._say_once("film", f"run.video_interval: no video at step {it.env_steps:,}: {error}")

    def _over(self, metrics: ResultDict) -> bool:
        """True once the steps are done, or the stop rule is reached."""
        return self._by_rule(metrics) or self.trainer.env_steps >= self.trainer.exp.run.steps

    def _by_rule(self, metrics: ResultDict) -> bool:
        """True if the stop rule is reached, by these or with the evaluation beside training that counts with them."""
        return self.trainer.reached(metrics) or self.trainer.reached(metrics | self._earlier)

    def _ends(self) -> bool:
        """True if there is no further iteration."""
        trainer = self.trainer
        if self._ending is not None or self._signal is not None:
            return True
        return not trainer.pending and trainer.env_steps >= trainer.exp.run.steps

    def _end(self) -> None:
        """Logs and saves the remaining iterations; if a learner fails, falls back to the newest checkpoint."""
        try:
            with contextlib.ExitStack() as last:
                last.callback(self._finish)
                self._settle()
        except LearnerLostError as error:
            self._restart(error)

    def _finish(self, error: str | None = None) -> None:
        """Writes the last checkpoint and makes the result, once."""
        if self._result is not None:
            return
        trainer = self.trainer
        rule = self._ending == "done" and self._by_rule(self._metrics)
        over = rule or trainer.env_steps >= trainer.exp.run.steps
        trainer.finished = over and not trainer.pending
        path = self._checkpoint(self._metrics.get("eval/mean_reward"))
        ended = "stop rule" if rule else "steps" if over else STOPPED
        stopped_by = error or (ended if self._signal is None else signal.Signals(self._signal).name)
        metrics = {**self._evaluation, **self._metrics}
        unsaved = "" if path else self._unsaved[-1]
        given = trainer.recent, metrics, trainer.policy, self.run_dir, trainer.env_steps, stopped_by, path, unsaved
        self._result = Result(*given)

    def _save_after(self, error: BaseException) -> None:
        """Saves the run after its body raised; a failure to save is a warning, and does not hide that error."""
        for save in (self._settle, lambda: self._finish(type(error).__name__)):
            try:
                save()
            except Exception as another:
                warnings.warn(f"while saving after an error: {type(another).__name__}: {another}", stacklevel=3)
        if self._result is not None and self._result.checkpoint is not None:
            self._say(f"{type(error).__name__} in the loop; saved, to go on: penstock resume {self.run_dir}")

    def _checkpoint(self, score: float | None) -> Path | None:
        """Saves a checkpoint; None if it cannot be written."""
        return self._written(lambda: self.trainer.save(score))

    def _written(self, save: Callable[[], S]) -> S | None:
        """What `save` returns; None if the disk refuses (it is full, say), which never stops training."""
        try:
            return save()
        except CheckpointError as error:
            self._unsaved.append(str(error))
            self._say(f"checkpoint not written: {error}")
            return None

    def _evaluate(self, trainer: Trainer, episodes: int | None) -> tuple[ResultDict, Episodes]:
        """Evaluates and logs; returns the metrics, {} if a signal cut it short, and the episodes."""
        metrics, played = trainer.evaluate(episodes, give_up=lambda: self._signal is not None)
        if self._signal is not None and not metrics:
            return {}, played
        self._tell_evaluation(trainer.env_steps, metrics, played)
        return metrics, played

    def _take_evaluation(self, trainer: Trainer) -> Episodes | None:
        """Waits for the evaluation beside training, if there is one, and logs it with its own step.

        Raises _CutShort after a signal.
        """
        if trainer.evaluations.pending is None:
            return None
        found = trainer.evaluations.take(give_up=lambda: self._signal is not None)
        if found is None:
            raise _CutShort
        self._earlier = {**found.metrics, "eval/step": float(found.env_steps)}
        logged = {**found.metrics, TAKEN_AT: float(trainer.env_steps)}
        self._tell_evaluation(found.env_steps, logged, found.episodes)
        self._log_row(found.env_steps, logged)
        if found.best is not None:
            self._written(lambda: trainer.evaluations.save_best(found))
        return found.episodes

    def _tell_evaluation(self, step: int, metrics: ResultDict, played: Episodes) -> None:
        """Logs an evaluation, and says once if episodes were cut."""
        self._evaluation = metrics
        if cut := metrics.get("eval/cut_episodes"):
            self._say_once(
                "cut",
                f"{cut:.0f} of {len(played)} evaluation episodes had no end in run.eval_max_steps="
                f"{self.trainer.exp.run.eval_max_steps:,} steps and count as far as they went; a time limit, or "
                "another eval_max_steps, makes evaluations comparable",
            )
        log_evaluation(self.run_dir, step, metrics, played)

    def _summarize(self) -> None:
        trainer, result = self.trainer, self._result
        if result is None or trainer.exp.run.progress == "off" or self._phase is _Phase.FAILED:
            return
        took_s, steps = time.monotonic() - self._started, trainer.env_steps - self._first_step
        print_summary(title(trainer), summary(trainer, result, took_s, steps, len(self._unsaved)))

    def _say(self, text: str) -> None:
        """Shows a message in the display, or as a warning without a display."""
        if self.trainer.exp.run.progress == "off":
            warnings.warn(text, stacklevel=depth_of_user())
        else:
            self._progress.note(text)

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._say(text)

    def _note(self, number: int) -> None:
        """Notes the first signal; the second ends the process."""
        if self._signal is not None:
            if sys.stdout is not None and sys.stdout.isatty():
                tell(1, "\x1b[?25h")  # the live display has hidden the cursor
            die_of(number)
        self._signal = number
        if self.trainer.exp.run.progress != "off":
            name = signal.Signals(number).name
            tell(2, f"\n{name}: finishing this iteration and saving; once more ends it at once\n")


class _CutShort(Exception):
    """A signal came during an evaluation; a resumed run repeats it."""


class _Phase(Enum):
    """Where a Run stands."""

    NEW = "before its with"
    BETWEEN = "between two iterations: a checkpoint holds whole ones"
    TRAINING = "in an iteration, or beginning anew"
    OVER = "after its with, or before that has come up"
    FAILED = "after an error in its with"


def _number(name: str, value: Any) -> float:
    if type(value) is float or type(value) is int:
        return value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"it.metrics[{name!r}]={value!r} ({type(value).__name__}); expected a number") from error


def _crossed(interval: int, before: int, after: int) -> bool:
    """True if a multiple of `interval` lies in (before, after]; stateless, so that a resumed run agrees."""
    return interval > 0 and after // interval > before // interval


def _interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
