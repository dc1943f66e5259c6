"""One iteration of a run, as it is handed to code between two of them, and two such codes: Curriculum, Plateau."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.batch import AnyBatch
from penstock.core.config import override
from penstock.core.errors import ConfigError, nearest
from penstock.core.names.hints import slips
from penstock.core.wire import encode
from penstock.learn.algorithm import ResultDict
from penstock.learn.policy_set import LoadedPolicy
from penstock.run.files.changes import at, read_changes
from penstock.run.log import EVALUATIONS, read_metrics, read_rows
from penstock.samplers.episodes import Episodes

if TYPE_CHECKING:
    from penstock.run.loop import Run


@dataclass(repr=False, eq=False)
class Iteration:
    """One iteration of a run, after training and before it is logged."""

    itr: int
    """Its number from 1."""
    env_steps: int
    """Environment steps since the run began."""
    metrics: ResultDict
    """The row that is logged. Numbers added to it are logged too, even between two log intervals."""
    batch: AnyBatch
    """The SampleBatch or MultiAgentBatch that was collected last, valid until the next iteration.

    None where a resumed run only evaluates.
    """
    episodes: Episodes
    """The training episodes that ended in it."""
    evaluation: Episodes | None
    """The episodes of its evaluation; None if none was due. With `run.eval_workers` those of the evaluation before,
    as in `metrics`, where `eval/step` is the step of the policy that played."""
    run: Run
    """The run, for `set`, `envs`, `stop`, `save` and `evaluate`."""

    @property
    def policy(self) -> LoadedPolicy:
        """The policy in training; a change to it is trained on."""
        return self.run.policy

    def __repr__(self) -> str:
        return f"Iteration({self.itr}, {self.env_steps:,} steps, {len(self.metrics)} metrics)"


@dataclass(frozen=True)
class Curriculum:
    """Raises the level of all training environments as a metric reaches thresholds, and never lowers it.

    It is for `RunConfig.each`: `curriculum = ps.Curriculum({50: 1, 150: 2})` in a module, and
    `each="my_module:curriculum"`. One level at a time, and each only after `episodes` at the level before: the metric
    is a mean that still holds episodes of easier levels, and would pass several thresholds at once.

    Every row of metrics has `curriculum/level`, the number of thresholds passed, and `curriculum/since`, the value of
    `rollout/episodes` at which the level began (`curriculum/CALL/level` where `call` is another). A resumed run goes on
    exactly: it reads the level off the calls that the sampler keeps, and the latter off the last row that has it.
    """

    levels: Mapping[float, Any]
    """The argument of `call`, by the value of the metric from which on it holds; plain data, no two alike."""
    metric: str = "rollout/ep_rew_mean"
    """Name in `Iteration.metrics`; an iteration without it changes nothing."""
    call: str = "set_level"
    """Method of the environment, called with the level alone."""
    evaluation: bool = False
    """Evaluation environments follow; else they stay as they are made."""
    episodes: int = 100
    """Training episodes that must have ended at a level before the next one; 100 fill the window of `rollout/...`."""

    def __post_init__(self) -> None:
        numbers = (int, float)
        if not isinstance(self.levels, Mapping) or not self.levels or not all(
            isinstance(x, numbers) and not math.isnan(x) for x in self.levels
        ):  # fmt: skip
            raise ConfigError(
                f"Curriculum(levels={self.levels!r}); expected levels by threshold, as in {{50: 1, 150: 2}}"
            )
        try:
            different = len({encode(x) for x in self.levels.values()})
        except TypeError as error:
            raise ConfigError(f"Curriculum(levels={dict(self.levels)!r:.200}): {error}") from None
        if different < len(self.levels):
            raise ConfigError(f"Curriculum(levels={dict(self.levels)!r}) names a level twice; expected different ones")

    def __call__(self, it: Iteration) -> None:
        """Calls the environments if the metric of this iteration reaches the next level.

        Raises:
            ConfigError: this run does not report the metric, or no environment has the method.
        """
        run, thresholds = it.run, sorted(self.levels)
        require_metric(it, self.metric, "Curriculum")
        of = "curriculum" if self.call == "set_level" else f"curriculum/{self.call}"
        level_name, since_name = f"{of}/level", f"{of}/since"
        rows = [run.standing] if since_name in run.standing else read_metrics(run.run_dir)
        kept = next((row for row in reversed(rows) if since_name in row), dict[str, float]())
        last = run.envs.last_call(self.call)
        called = None if last is None else encode(last[0])
        level = next((i for i, x in enumerate(thresholds, 1) if encode(self.levels[x]) == called), 0)
        value, ended = it.metrics.get(self.metric, math.nan), it.metrics["rollout/episodes"]
        since = kept.get(since_name, 0.0) if kept.get(level_name, 0.0) == level else ended
        if level < len(thresholds) and value >= thresholds[level] and ended >= since + self.episodes:
            to, since = self.levels[thresholds[level]], ended
            run.envs.call(self.call, to, overwrites=True)
            if self.evaluation:
                run.envs.call(self.call, to, evaluation=True, overwrites=True)
            run.say(f"step {it.env_steps:,}: {self.call}({to!r}), as {self.metric} {value:.4g} >= {thresholds[level]}")
            level += 1
            it.metrics |= {level_name: float(level), since_name: since}
        run.standing |= {level_name: float(level), since_name: since}


@dataclass(frozen=True)
class Plateau:
    """Multiplies a setting by a factor once evaluations bring no new best: a step size at a plateau.

    It is for `RunConfig.each`, like Curriculum, with `run.eval_interval`. Evaluations are counted from the best one, or
    from the last change of the setting if that is later. Their file and the run's journal are its only memory, so that
    a resumed run goes on exactly.
    """

    setting: str = "algo.lr"
    """Dotted path of a number that may change in a run."""
    metric: str = "eval/mean_reward"
    """Metric of evaluations; larger is better."""
    factor: float = 0.5
    """Between 0 and 1."""
    patience: int = 5
    """Evaluations without a new best after which the setting changes."""
    least: float = 0.0
    """The setting does not fall below."""

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1 or self.patience < 1:
            raise ConfigError(
                f"Plateau(factor={self.factor}, patience={self.patience}); expected a factor between 0 and 1 and a "
                "patience from 1"
            )
        if not self.metric.startswith("eval/"):
            raise ConfigError(f"Plateau(metric={self.metric!r}); expected one of evaluations, e.g. 'eval/mean_reward'")

    def __call__(self, it: Iteration) -> None:
        """Changes the setting if this iteration's evaluation is the last one of its patience.

        Raises:
            ConfigError: evaluations are not on or lack the metric, or the setting is no number that may change.
        """
        run, exp = it.run, it.run.trainer.exp
        require_metric(it, self.metric, "Plateau")
        try:
            now = at(exp, self.setting)
        except (AttributeError, KeyError):
            override(exp, {self.setting: 0})  # raises, and names the setting that is meant
            raise
        if isinstance(now, bool) or not isinstance(now, (int, float)):
            raise ConfigError(f"Plateau(setting={self.setting!r}), which is {now!r}; expected the path of a number")
        if not math.isfinite(it.metrics.get(self.metric, math.nan)) or now <= self.least:
            return
        rows = [x for x in read_rows(run.run_dir / EVALUATIONS) if math.isfinite(x.get(self.metric, math.nan))]
        changes = read_changes(run.run_dir, math.inf)
        best = max(rows, key=lambda row: row[self.metric])["step"]  # the first of equals
        from_ = max([best, *(row["step"] for row in changes if self.setting in row.get("set", ()))])
        if sum(row["step"] > from_ for row in rows) >= self.patience:
            run.set({self.setting: max(now * self.factor, self.least)})


def require_metric(it: Iteration, name: str, of: str) -> None:
    """Raises ConfigError for a metric that this run does not report, once metrics of its kind are known."""
    config, kind = it.run.trainer.exp.run, f"{name.rpartition('/')[0]}/"
    if name.startswith("eval/") and not (config.eval_interval and config.eval_episodes):
        raise ConfigError(f"{of}(metric={name!r}) without evaluations during the run; set run.eval_interval")
    alike = [x for x in it.metrics if x.startswith(kind) and x != "rollout/episodes"]
    if name not in it.metrics and (alike or slips(name, it.metrics)):
        raise ConfigError(
            f"{of}(metric={name!r}), which this run does not report; {nearest(name, alike or it.metrics)}"
        )


@dataclass
class PendingIteration:
    """An iteration that was handed out and is not logged yet."""

    it: Iteration
    shown: ResultDict
    """Its metrics as they were handed out."""
    before: int
    """Environment steps before it."""
    best: float
    """The best score before it."""
    earlier: ResultDict
    """The metrics in it that are of an earlier evaluation, and logged with the step of that."""
