"""Evaluations of the policy in training: at once, or beside training, which then goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from penstock.core.errors import ConfigError, nearest
from penstock.learn.algorithm import ResultDict
from penstock.run.checkpoints.checkpoint import save_evaluated
from penstock.run.playing.best_response import exploitability, starts
from penstock.run.playing.eval_workers import EvaluationRequest, EvalWorkers
from penstock.run.playing.evaluator import Evaluator
from penstock.run.playing.sides import Side
from penstock.samplers.episodes import Episodes, metric_names

if TYPE_CHECKING:
    from penstock.run.trainer import Trainer

_NAMES = ("eval/{stat}_{key}", "reward", "ep_length")
"""Names of the metrics, as `Episodes.metrics` takes them."""


class EvaluatedBeside(NamedTuple):
    """An evaluation that was played beside training."""

    env_steps: int
    """Those of the policy that played."""
    metrics: ResultDict
    episodes: Episodes
    best: dict[str, Tensor] | None
    """That policy's networks and normalisers, if no evaluation before was better."""


class Evaluations:
    """Plays evaluations of a Trainer's policy, which training does not notice.

    Raises:
        ConfigError: `run.stop` names a metric that they do not report, or `run.eval_exploitability` is set without a
            game.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, plan, run = trainer, trainer.plan, trainer.exp.run
        self.best_score = -math.inf
        """Best mean return so far."""
        self._evaluator: Evaluator | None = None
        self.beside: EvalWorkers | None = None
        """Processes of `run.eval_workers`."""
        self._agents = (plan.held_out or plan.report).agents if run.eval_exploitability else None
        """Agents of the game that exploitability is computed for."""
        if run.eval_exploitability and self._agents is None:
            raise ConfigError(
                f"run.eval_exploitability with {plan.eval_env.name}, an environment of one agent; expected a game"
            )
        self.check_stop(run.stop)

    def check_stop(self, stop: Mapping[str, float]) -> None:
        """Raises ConfigError if a stop rule names a metric that evaluations do not report, as far as that is known."""
        plan = self._trainer.plan
        if self._trainer.exp.run.eval_episodes and not plan.eval_seating.many:  # else at the first evaluation
            self._require_reported(stop, metric_names(*_NAMES, plan.eval_env.info_keys))

    def begin_workers(self) -> None:
        """Starts the processes of `run.eval_workers`, if there are to be any; the policy is ready to act."""
        workers = self._trainer.exp.run.eval_workers
        if workers:
            self.beside = EvalWorkers(self._trainer.plan, self._trainer.policy, workers)

    def now(
        self, episodes: int | None = None, give_up: Callable[[], bool] | None = None
    ) -> tuple[ResultDict, Episodes]:
        """Plays deterministic episodes; training may be over. Arguments as in `Trainer.evaluate`."""
        trainer = self._trainer
        run = trainer.exp.run
        usual = trainer.sampler.batch_spec.B if run.eval_in == "training" else run.eval_episodes
        count = episodes or usual
        how: dict[str, Any] = {"give_up": give_up, "slots": run.eval_slots, "max_steps": run.eval_max_steps}
        elsewhere = trainer.plan.held_out is not None and trainer.plan.env.evaluation is None
        if elsewhere or trainer.stopped:
            if self._evaluator is None:
                self._evaluator = trainer.plan.make_evaluator()
            played = self._evaluator.play(trainer.policy, trainer.itr, count, **how)
            if trainer.stopped:
                self.close()
        else:
            played = trainer.sampler.evaluate_agent(trainer.itr, count, **how)
        if give_up is not None and give_up():
            return {}, played
        metrics = self._metrics(played, run.eval_max_steps, self.exploitability(count))
        if len(played):
            self.best_score = max(self.best_score, played.mean_return)
        return metrics, played

    @property
    def pending(self) -> EvaluationRequest | None:
        """The evaluation that goes on beside training."""
        return None if self.beside is None else self.beside.pending

    def begin(self) -> bool:
        """Has the policy as it is now evaluated beside training; False if `run.eval_workers` leaves that to `now`."""
        trainer, run = self._trainer, self._trainer.exp.run
        if self.beside is None or not run.eval_workers:
            return False
        self.beside.begin(
            EvaluationRequest.of(
                trainer.policy,
                getattr(trainer.sampler, "evaluation_calls", ()),  # which a sampler of one's own may lack
                itr=trainer.itr,
                env_steps=trainer.env_steps,
                episodes=run.eval_episodes,
                slots=run.eval_slots,
                max_steps=run.eval_max_steps,
                extra=self.exploitability(run.eval_episodes),
            )
        )
        return True

    def begin_again(self, request: EvaluationRequest) -> None:
        """The same for one that was under way when a checkpoint was written."""
        if self.beside is None:  # the run went on with run.eval_workers=0
            self.beside = EvalWorkers(self._trainer.plan, self._trainer.policy, 1)
        self.beside.begin(request)

    def tend(self) -> ResultDict:
        """Has a process replaced that died or stands still; returns `faults/eval_...`. Errors as in `take`."""
        assert self.beside is not None
        self.beside.tend()
        return self.beside.metrics()

    def take(self, give_up: Callable[[], bool] | None = None) -> EvaluatedBeside | None:
        """Waits for the one that is pending, which stays so until `end`; None if `give_up` says so before.

        Raises:
            EnvWorkerError: an environment raised, or too many processes were lost.
        """
        assert self.beside is not None
        taken = self.beside.take(give_up)
        if taken is None:
            return None
        asked, played = taken
        metrics = self._metrics(played, asked.max_steps, asked.extra)
        best = asked.parameters if played.mean_return > self.best_score else None
        self.best_score = max(self.best_score, played.mean_return)
        return EvaluatedBeside(asked.env_steps, metrics, played, best)

    def end(self) -> None:
        """The one that was taken counts now, and a checkpoint need not hold it any more."""
        if self.beside is not None:
            self.beside.forget()

    def save_best(self, evaluated: EvaluatedBeside) -> None:
        """Keeps the policy of an evaluation beside training as the best so far. Raises CheckpointError."""
        run_dir, run, score = self._trainer.run_dir, self._trainer.exp.run, evaluated.episodes.mean_return
        assert run_dir is not None
        assert evaluated.best is not None
        how = {"keep": run.keep, "keep_replays": run.keep_replays}
        save_evaluated(run_dir, evaluated.env_steps, evaluated.best, score, **how)

    def exploitability(self, count: int) -> ResultDict:
        """The policy's `eval/exploitability` over so many starts, if the run reports it."""
        if self._agents is None:
            return {}
        trainer = self._trainer
        seeds, side = starts(trainer.exp.run.seed, count), Side("the policy", trainer.policy)
        found = exploitability(side, trainer.exp.eval_env_config, self._agents, seeds)
        return {"eval/exploitability": found.mean}

    def close(self) -> None:
        """Closes environments and processes. A second call does nothing."""
        evaluator, beside, self._evaluator, self.beside = self._evaluator, self.beside, None, None
        try:
            if evaluator is not None:
                evaluator.close()
        finally:
            if beside is not None:
                beside.close()

    def _metrics(self, played: Episodes, max_steps: int, extra: Mapping[str, float]) -> ResultDict:
        metrics = {**played.metrics(*_NAMES), **extra}
        if len(played):
            trainer = self._trainer
            reported = [*metrics, *metric_names(*_NAMES, trainer.plan.eval_env.info_keys)]
            self._require_reported(trainer.exp.run.stop, reported)
            if cut := played.without_end(max_steps):
                metrics["eval/cut_episodes"] = float(cut)
        return metrics

    def _require_reported(self, stop: Mapping[str, float], reported: Sequence[str]) -> None:
        for name in stop:
            if name.startswith("eval/") and name not in (*reported, "eval/cut_episodes"):
                raise ConfigError(
                    f"run.stop names {name!r}, which evaluations do not report; {nearest(name, reported)}"
                )
