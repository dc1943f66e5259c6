"""One iteration of a run, as it is handed to code between two of them, and the code of a curriculum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.batch import AnyBatch
from penstock.core.errors import ConfigError
from penstock.learn.algorithm import ResultDict
from penstock.learn.policy_set import LoadedPolicy
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
    `each="my_module:curriculum"`. Its only memory is the calls that the sampler keeps, so that a resumed run goes on
    with the same level.
    """

    levels: Mapping[float, Any]
    """The argument of `call`, by the value of the metric from which on it holds; plain data."""
    metric: str = "rollout/ep_rew_mean"
    """Name in `Iteration.metrics`; an iteration without it changes nothing."""
    call: str = "set_level"
    """Method of the environment, called with the level alone."""
    evaluation: bool = False
    """Evaluation environments follow; else they stay as they are made."""

    def __post_init__(self) -> None:
        numbers = (int, float)
        if not isinstance(self.levels, Mapping) or not self.levels or not all(
            isinstance(x, numbers) and not math.isnan(x) for x in self.levels
        ):  # fmt: skip
            raise ConfigError(
                f"Curriculum(levels={self.levels!r}); expected levels by threshold, as in {{50: 1, 150: 2}}"
            )

    def __call__(self, it: Iteration) -> None:
        """Calls the environments if the metrics of this iteration reach a higher level."""
        thresholds, envs = sorted(self.levels), it.run.envs
        last, value = envs.last_call(self.call), it.metrics.get(self.metric, math.nan)
        reached = sum(value >= x for x in thresholds)
        if reached and (last is None or last[0] not in [self.levels[x] for x in thresholds[reached - 1 :]]):
            level = self.levels[thresholds[reached - 1]]
            envs.call(self.call, level, overwrites=True)
            if self.evaluation:
                envs.call(self.call, level, evaluation=True, overwrites=True)


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
