"""The live run: each `train()` is one iteration, sample then learn; its whole state can be saved and restored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.core.batch import AnyBatch, as_arrays, batches_of
from penstock.core.config import to_plain
from penstock.core.errors import ConfigError, LearnerLostError, NonFiniteError, nearest
from penstock.core.protocols import require_members
from penstock.core.tree import tree_leaves, tree_paths
from penstock.learn.algorithm import ResultDict, TrainingStep, TrainingStepFn
from penstock.learn.policies import for_agents
from penstock.learn.policy_set import AnyPolicy, LoadedPolicy, agents_of, by_id, trained_policies
from penstock.learn.precision import compute
from penstock.learn.train_ops import plan_whole, training_step
from penstock.processes.fork_client import end_ahead
from penstock.run.checkpoints.checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from penstock.run.checkpoints.form import require_form
from penstock.run.checkpoints.start import Start
from penstock.run.experiment import Experiment
from penstock.run.files.changes import (
    at,
    changed,
    journaled,
    known_steps,
    plain_changes,
    with_changes,
    without_weights,
    write_change,
)
from penstock.run.files.rundir import write_config
from penstock.run.files.stored_experiment import CONFIG, OTHERS, as_checkpoint_error
from penstock.run.learners.group import MOST_RESTARTS, LearnerGroup
from penstock.run.learners.rank import Rank
from penstock.run.memory import out_of_memory
from penstock.run.plan import Plan
from penstock.run.playing.eval_workers import EvaluationRequest
from penstock.run.playing.evaluations import Evaluations
from penstock.run.threads import fastest_threads
from penstock.run.timeline import Tracing
from penstock.samplers.episodes import Episodes, join_episodes
from penstock.samplers.sampler import Sampler

S = TypeVar("S")
_WINDOW = 100  # episodes behind `rollout/ep_rew_mean`, as in Stable-Baselines3


class Trainer:
    """Builds sampler and policy of an experiment; each `train()` trains on one batch.

    Args:
        made_from: an experiment, or its plan. run_dir: the directory that `save` writes to; only `save` needs it.
        init: parameters to start from (networks and normalisers), as `ps.load(run).agent.state_dict()` returns them,
            or a Start.
        rank: of a learner started by another one; None: with `run.learners` this one starts the others.

    Raises:
        ConfigError, EnvWorkerError: the settings contradict each other, or the environment breaks its contract.
    """

    def __init__(
        self,
        made_from: Experiment | Plan,
        run_dir: Path | None = None,
        init: dict[str, Any] | Start | None = None,
        *,
        rank: Rank | None = None,
    ) -> None:
        self.begun = self.plan = plan = Plan.of(made_from, ahead=True)
        """The plan as the run began; `plan` and `exp` hold changes made since."""
        self.exp, self.run_dir = plan.exp, run_dir
        exp = plan.exp
        self.stopped = False
        """True once the environments are closed."""
        self.evaluations = Evaluations(self)
        if isinstance(exp.run.learner_threads, int):
            torch.set_num_threads(exp.run.learner_threads)
        self._rank, self._init = rank, Start("parameters", whole=init) if isinstance(init, dict) else init
        self.persist(self._build, lambda: None)
        self.threads = exp.run.learner_threads if isinstance(exp.run.learner_threads, int) else 0
        self.itr = 0
        """Iterations finished."""
        self.env_steps = 0
        """Environment steps collected: valid rows only."""
        self.episodes_seen = 0
        self.episodes = Episodes()
        """Those that ended in the last iteration."""
        self.pending: ResultDict = {}
        """Metrics of an iteration whose evaluation a signal cut short; a resumed run evaluates and logs it again."""
        self.finished = False
        """True if the run has ended, final evaluation included; stored in the checkpoint for `resume`."""
        self.recent = Episodes()
        """The last 100 episodes."""
        self.elapsed_s = 0.0
        """Wall time until the last iteration, including earlier processes of a resumed run."""
        self._measured, self._rollout = self.recent, self.recent.metrics()
        self._clock = time.monotonic()

    def _build(self) -> None:
        """Makes this learner's policy and sampler, and starts other learners."""
        plan, exp, device = self.plan, self.exp, self.exp.run.device
        self._tracing: Tracing | None = None
        self.learners = self._rank or (LearnerGroup(plan, self._init, Trainer) if exp.run.learners > 1 else None)
        live: Sampler | None = None
        try:
            if self.learners is not None:
                device = self.learners.device(device)
            self.policy: LoadedPolicy = plan.make_policy(device)
            compute(self.policy, exp.run.precision, exp.run.compile)
            self._training_step: TrainingStepFn = getattr(plan.algo, "training_step", training_step)
            if self._init is not None:
                self._init.into(self.policy)
            if self._rank is None:
                self.evaluations.exploitability(exp.run.eval_episodes)  # refuses a game too large before training
            self._tracing = Tracing(exp.run.trace) if exp.run.trace is not None else None
            if self.learners is None:
                self.sampler = live = plan.make_sampler()
            else:
                self.sampler = live = self.learners.sampler(plan, device)
                self._training_step = self.learners.join(self.policy, self._step)
            require_members(self.sampler, Sampler, "docs/writing-a-sampler.md")
            end_ahead()
            examples = self.sampler.initialize(agents_of(self.policy))
            plan_whole(self.policy, self.sampler)
            self.policy.prepare(self.sampler.batch_spec, plan.infos(examples))
            plan.keep_datasets(self.policy, self.sampler)
            if self._rank is None:
                self.evaluations.begin_workers()
        except BaseException as error:
            end_ahead()
            self._end_trace()
            self.evaluations.close()
            if live is not None:
                live.shutdown()
            if self.learners is not None:
                self.learners.close()
            if isinstance(error, torch.OutOfMemoryError):
                raise out_of_memory(exp, "makes its networks", error) from error
            raise

    def train(self) -> ResultDict:
        """Samples a batch and learns from it: one iteration. Returns its metrics.

        Raises:
            EnvWorkerError: an environment failed. NonFiniteError: learning broke down; the batch is saved.
        """
        if not self.threads:
            self.threads = fastest_threads(self.policy, self.sampler)
        self.policy.set_progress(self.env_steps / self.exp.run.steps, self.env_steps)
        before = self._updates() if self.exp.run.stop else {}
        try:
            step = self._training_step(self.policy, self.sampler, self.itr)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; {self._save_batch()}") from error
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.exp, "samples and trains on a batch", error) from error
        if self._tracing is not None:
            self._tracing.tick(step.train_s)
        self.itr += 1
        self.env_steps += step.env_steps
        self.episodes_seen += len(step.episodes)
        self.episodes = step.episodes
        if len(step.episodes):
            self.recent = join_episodes([self.recent, step.episodes]).last(_WINDOW)
        now = time.monotonic()
        self.elapsed_s, self._clock = self.elapsed_s + now - self._clock, now
        metrics = {
            **self._rollout_metrics(),
            "rollout/episodes": float(self.episodes_seen),
            **step.metrics,
            **self.sampler.metrics(),
            **({} if self.evaluations.beside is None else self.evaluations.tend()),
            "time/iterations": float(self.itr),
            "time/total_timesteps": float(self.env_steps),
            "time/time_elapsed": self.elapsed_s,
            "time/fps": self.env_steps / max(self.elapsed_s, 1e-9),
            "time/sample_frac": step.sample_s / max(step.sample_s + step.train_s, 1e-9),
        }
        self._check_reported(self.exp.run.stop, metrics, before)
        return metrics

    def _step(self, policy: AnyPolicy, sampler: Sampler, itr: int) -> TrainingStep:
        """The current algorithm's training step, called inside that of several learners."""
        step: TrainingStepFn = getattr(self.plan.algo, "training_step", training_step)
        return step(policy, sampler, itr)

    def _updates(self) -> dict[str, int]:
        return {name: policy.updates for name, policy in trained_policies(self.policy).items()}

    def change(self, changes: Mapping[str, Any]) -> None:
        """Changes settings by path from the next iteration on, as `Run.set`; journaled if there is a run directory."""
        exp = changed(self.exp, changes)
        take = self._taking(exp)
        if self.run_dir is not None:
            write_change(self.run_dir, self.env_steps, {"set": {x: to_plain(at(exp, x)) for x in changes}})
        if isinstance(self.learners, LearnerGroup):
            self.learners.call("change", {x: at(exp, x) for x in changes})
        take()

    def _taking(self, exp: Experiment) -> Callable[[], None]:
        """A function that switches this run to the settings in `exp`. Raises ConfigError."""
        algo = for_agents(exp.algo, self.plan.report.agents)
        plan = replace(self.plan, exp=exp, algo=algo)
        twin = without_weights(algo).build(plan.specs, seed=plan.seed)
        of_policy = self.policy.taking_settings_of(twin)

        def take() -> None:
            of_policy()
            self.plan, self.exp = plan, exp
            if self.learners is None:
                self._training_step = getattr(algo, "training_step", training_step)

        return take

    def _awaits(self, metric: str, before: Mapping[str, int]) -> bool:
        """True for a metric of a policy without a gradient step since `before`; it may report it later."""
        kind, _, rest = metric.partition("/")
        own = trained_policies(self.policy)
        name = rest.partition("/")[0] if len(by_id(self.policy)) > 1 else next(iter(own))
        return kind in ("train", "replay") and name in own and own[name].updates == before[name]

    @property
    def batch(self) -> AnyBatch:
        """The batch collected last, valid until the next iteration; None if the sampler does not show it."""
        return getattr(self.sampler, "last_batch", None)

    def evaluate(
        self, episodes: int | None = None, give_up: Callable[[], bool] | None = None
    ) -> tuple[ResultDict, Episodes]:
        """Plays deterministic episodes in separate environments; training is not affected, and may be over.

        Args:
            give_up: asked now and then; once it returns True the evaluation ends, without metrics.
        """
        return self.evaluations.now(episodes, give_up)

    def check_stop(self, stop: Mapping[str, float], metrics: ResultDict) -> None:
        """Raises ConfigError if a stop rule names a metric that this run does not report, beside these of now."""
        self._check_reported(stop, metrics, dict.fromkeys(self._updates(), 0))
        self.evaluations.check_stop(stop)

    def _check_reported(self, stop: Mapping[str, float], metrics: ResultDict, before: Mapping[str, int]) -> None:
        others = [name for name in stop if name not in metrics and not name.startswith("eval/")]
        unknown = [name for name in others if not self._awaits(name, before)]
        if unknown and len(self.recent) and self.policy.updates:
            raise ConfigError(
                f"run.stop names {unknown[0]!r}, which this run does not report; {nearest(unknown[0], metrics)}"
            )

    def reached(self, metrics: ResultDict) -> bool:
        """True if `run.stop` names metrics and all of them are reached (rollout ones over a full window)."""
        stop = self.exp.run.stop
        if not stop:
            return False
        full = len(self.recent) >= _WINDOW
        return all(
            metrics.get(name, -math.inf) >= value and (full or not name.startswith("rollout/"))
            for name, value in stop.items()
        )

    def stop(self) -> None:
        """Closes the environments. A second call does nothing."""
        if not self.stopped:
            self.stopped = True
            self._end_trace()
            try:
                self.evaluations.close()
            finally:
                if self.learners is not None:
                    self.learners.close()
                self.sampler.shutdown()

    def save(self, score: float | None = None) -> Path:
        """Writes a checkpoint of all state into the run directory, and config.json if there is none.

        Returns the checkpoint's path. Raises CheckpointError.
        """
        if self.run_dir is None:
            raise ConfigError("Trainer.save without a run directory; pass run_dir=Path('runs/a') to Trainer")
        if not (self.run_dir / CONFIG).exists():  # a Trainer that no Run has made
            write_config(self)
        if self.learners is None:
            return self._save(score)
        with self.learners.explained():
            self.learners.call("state")
            return self._save(score)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states of policy and sampler, as of one learner with all slots; all learners call this."""
        return self.policy.state_dict(), self.sampler.state_dict()

    def _save(self, score: float | None) -> Path:
        assert self.run_dir is not None
        policy, sampler = self.state()
        agent = policy.pop("agent")
        state = {"policy": policy, "sampler": sampler, "trainer": self._own_state()}
        return save_checkpoint(
            self.run_dir,
            self.env_steps,
            state,
            agent,
            self.policy.arrays(),
            keep=self.exp.run.keep,
            keep_replays=self.exp.run.keep_replays,
            score=score,
        )

    def _own_state(self) -> dict[str, Any]:
        """The trainer's part of a checkpoint."""
        return {
            "itr": self.itr,
            "env_steps": self.env_steps,
            "episodes_seen": self.episodes_seen,
            "finished": self.finished,
            "pending": dict(self.pending),
            "best_score": self.evaluations.best_score,
            "elapsed_s": self.elapsed_s,
            "threads": self.threads,
            "changes": journaled(self.run_dir),
            "recent": self.recent.to_plain(),
            "evaluation": None if self.evaluations.pending is None else self.evaluations.pending.to_plain(),
        }

    def restore(self, checkpoint: Checkpoint | None = None) -> Checkpoint:
        """Restores a checkpoint, the newest good one by default; `sampler.cut_slots` then holds the lost slots."""
        if checkpoint is None:
            if self.run_dir is None:
                raise ConfigError("Trainer.restore without a run directory; pass run_dir to Trainer, or a checkpoint")
            checkpoint = load_checkpoint(find_checkpoint(self.run_dir, replay=True), replay=True)
        changes = {} if self.run_dir is None else plain_changes(self.run_dir, known_steps(checkpoint), cut=True)
        if self.learners is None:
            return self.restore_with(checkpoint, changes)
        with self.learners.explained():
            self.learners.call("restore", str(checkpoint.path), changes)
            return self.restore_with(checkpoint, changes)

    def restart(self) -> Checkpoint:
        """Makes policy, sampler and the other learners anew, and restores the newest good checkpoint."""
        self._rebuild()
        return self.persist(self.restore)

    def persist(self, act: Callable[[], S], again: Callable[[], None] | None = None) -> S:
        """Runs `act`, which opens or reopens a run; lost learners are restarted, a few times."""
        for _ in range(MOST_RESTARTS):
            try:
                return act()
            except LearnerLostError:
                (again or self._rebuild)()
        return act()

    def _rebuild(self) -> None:
        if isinstance(self.learners, LearnerGroup):
            self.learners.kill()
        self.evaluations.close()
        self.sampler.shutdown()
        self.plan, self.exp = self.begun, self.begun.exp
        self.persist(self._build, lambda: None)

    def restore_with(self, checkpoint: Checkpoint, changes: Mapping[str, Any]) -> Checkpoint:
        """Restores a checkpoint, with the changes of settings that the journal holds up to then."""
        if changes or self.exp is not self.begun.exp:
            self._taking(with_changes(self.begun.exp, changes))()
        with as_checkpoint_error(checkpoint.path, OTHERS):
            policy, sampler, state = (checkpoint.state[part] for part in ("policy", "sampler", "trainer"))
            require_form(policy, self.policy.state_dict(), "policy")
            require_form(state, self._own_state(), "trainer")
            self.policy.load_state_dict({**policy, "agent": checkpoint.policy}, checkpoint.arrays())
            self.sampler.load_state_dict(sampler)
            self.recent = join_episodes([Episodes(**state["recent"]), Episodes()])
        self.itr, self.env_steps, self.episodes_seen = state["itr"], state["env_steps"], state["episodes_seen"]
        self.finished = False  # may be True if a learner was lost as the end was saved
        self.evaluations.best_score = state["best_score"]
        self.elapsed_s, self.pending = state["elapsed_s"], dict(state["pending"])
        if self.exp.run.learner_threads == "auto" and state["threads"]:
            self.threads = state["threads"]
            torch.set_num_threads(self.threads)
        self._clock = time.monotonic()
        if state.get("evaluation") is not None and self._rank is None:
            with as_checkpoint_error(checkpoint.path, OTHERS):
                asked = EvaluationRequest.stored(state["evaluation"], self.policy, self.itr, self.env_steps)
            self.evaluations.begin_again(asked)
        return checkpoint

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _rollout_metrics(self) -> ResultDict:
        """Metrics of `recent`, recomputed if it changed: most one-step batches end no episode."""
        if self._measured is not self.recent:
            self._measured, self._rollout = self.recent, self.recent.metrics()
        return self._rollout

    def _end_trace(self) -> None:
        if self._tracing is not None:
            self._tracing.close()

    def _save_batch(self) -> str:
        batch = self.batch
        if self.run_dir is None or batch is None:
            return "no run directory to save the batch in"
        path = self.run_dir / "crash" / f"batch-{self.itr}.npz"
        batches = batches_of(batch)
        names = [name.strip("[]").replace("][", "/").replace("'", "").lstrip("/") for name in tree_paths(batches)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **dict(zip(names, tree_leaves(as_arrays(batches)))))
        except OSError as error:
            return f"the batch could not be saved in {path}: {error.strerror or error}"
        return f"the batch it happened on is in {path}"
