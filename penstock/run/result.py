"""The result of a run, and the lines that the run shows before and after it trains."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.agents.networks import Encoder
from penstock.core.machine import counted
from penstock.core.spec import describe
from penstock.learn.algorithm import ResultDict
from penstock.learn.policy import Policy
from penstock.learn.policy_set import LoadedPolicy, by_id, trained_policies
from penstock.learn.rows.minibatch import part_count
from penstock.native.library import TORCH, kernel, why
from penstock.run.files.rundir import changes_since
from penstock.run.progress import number
from penstock.run.trainer import Trainer
from penstock.samplers.episodes import Episodes

STOPPED = "stop"
"""`Result.stopped_by` of a run that `run.stop()` or `break` has ended."""


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run."""

    episodes: Episodes
    """The last 100 training episodes."""
    metrics: ResultDict
    """Metrics of the last iteration and of the last evaluation."""
    policy: LoadedPolicy
    """The trained policy: `policy.agent` is the torch module, `policy.predict` acts; of many agents those by id."""
    run_dir: Path
    env_steps: int
    stopped_by: str
    """"steps", "stop rule", "stop" (by `run.stop()` or `break`), the name of a signal, or of an error in the loop."""
    checkpoint: Path | None
    """The last checkpoint; None if it could not be written."""
    unsaved: str = ""
    """Why it could not."""

    def plot(self, metric: str | None = None) -> Any:
        """The run's learning curve, over steps and wall time, as a matplotlib Figure that a notebook shows.

        Args:
            metric: of metrics.jsonl; None: the mean return, of self-play main's Elo.
        """
        from penstock.run.plots.figure import plot_runs

        return plot_runs([self.run_dir], metric=metric)

    def __repr__(self) -> str:
        parts = [f"{self.env_steps:,} steps", f"stopped by {_stopped_by(self)}"]
        if len(self.episodes):
            parts.append(f"return {self.episodes.mean_return:,.1f} over {counted(len(self.episodes), 'episode')}")
        if "eval/mean_reward" in self.metrics:
            parts.append(f"evaluation {self.metrics['eval/mean_reward']:,.1f}")
        return f"Result({', '.join(parts)}; {self.run_dir})"


def _stopped_by(result: Result) -> str:
    return "your code" if result.stopped_by == STOPPED else result.stopped_by


def title(trainer: Trainer) -> str:
    """Algorithm and environment, as in `PPO on CartPole-v1`."""
    algos = getattr(trainer.exp.algo, "algos", None) or {"": trainer.exp.algo}
    names = dict.fromkeys(type(algo).__name__ for algo in algos.values())
    return f"{' and '.join(names)} on {trainer.exp.env_config.name}"


def headline(trainer: Trainer) -> str:
    """Spaces, parameters, rows and updates of an iteration, seed and directory, in a line; and one with the sampler."""
    T, B = trainer.sampler.batch_spec if trainer.learners is None else trainer.exp.sampler_settings.spec
    together = "" if trainer.learners is None else f", {trainer.learners.size} learners"
    seating, policies = trainer.plan.seating, by_id(trainer.policy)
    head, end = f"{trainer.exp.algo_name} on {trainer.exp.env_config.name}: ", f"seed {trainer.exp.run.seed}; "
    where = f"{trainer.exp.sampler_settings.described}; learns on {trainer.exp.run.device}"
    where += "" if kernel() != TORCH else f", without the native kernel: {why()} (docs/install.md)"
    tail = f"{end}{trainer.run_dir}\n  sampler {where}"
    tail += "".join(f"\n  {note}" for note in (trainer.exp.env_config.note, trainer.plan.report.note) if note)
    if not seating.many:
        (policy,) = policies.values()
        said = _learning(policy, T, B, trainer.exp.run.steps)
        slots = f"{counted(B, 'slot')} x {counted(T, 'step')}"
        return f"{head}{_shown(policy)}; {slots} = {said}{together}; {tail}{_images(policy)}"
    moves, total = "moves" if seating.turns else "steps", trainer.exp.run.steps
    lines = [
        f"\n  policy {name}, {counted(n, 'agent')}: {_shown(policy)}; "
        + (
            _learning(policy, T, B * n, total, "row", total if seating.turns else total * n, moves)
            if name in trained_policies(trainer.policy)
            else "not trained"
        )
        + _images(policy).replace("\n", "\n  ")
        for (name, policy), n in zip(policies.items(), seating.seats)
    ]
    return (
        f"{head}{len(seating.agents)} agents that act {'in turn' if seating.turns else 'at once'}; "
        f"{counted(B, 'environment')} x {counted(T, moves[:-1])} a batch{together}; {tail}{''.join(lines)}"
    )


def _shown(policy: Policy) -> str:
    count = sum(p.numel() for p in policy.agent.parameters())
    spec = policy.spec
    return f"observation {describe(spec.obs)}, action {describe(spec.action)}; {count:,} parameters"


def _images(policy: Policy) -> str:
    """A line for each part of the observation that an encoder takes for an image, or could."""
    taken: dict[str, str] = {}
    for module in policy.agent.modules():
        if isinstance(module, Encoder):
            taken |= module.in_words()
    return "".join(f"\n  obs{path}: {text}" for path, text in taken.items())


def _learning(
    policy: Policy, T: int, B: int, steps: int, unit: str = "step", most: int | None = None, moves: str = "steps"
) -> str:
    """The rows of a batch and the work on them, in a run of this many steps, with `most` rows in total."""
    rows = f"{counted(B * T, 'row')} a batch"
    if policy.replay_schedule is None:
        parts = part_count(T, B, policy.minibatch, columns=policy.recurrent)
        return f"{rows}, {counted(policy.epochs * parts, 'update')} each"
    never = policy.replay_schedule.learning_starts >= (steps if most is None else most)
    said = f", which is never in the {steps:,} {moves} of this run" if never else ""
    return f"{rows}; {policy.replay_schedule.describe(unit)}{said}"


def remarks(trainer: Trainer, resumed: bool) -> list[str]:
    """Remarks that a reader of the run's numbers should know beforehand."""
    said: list[str] = []
    if not trainer.plan.report.reproducible:
        why = "the environment does not repeat itself from a seed and actions"
        if not trainer.plan.report.steps:
            why = "a batched environment cannot be brought back into its episodes"
        said.append(f"{why}: a resumed run starts new episodes")
    if resumed and trainer.run_dir is not None and (changed := changes_since(trainer.run_dir)):
        said.append(f"since the run began: {', '.join(changed)}; the last bits may differ")
    if resumed and (cut := len(trainer.sampler.cut_slots)):
        slots = trainer.sampler.batch_spec.B
        said.append(f"{cut} of {slots} slots could not be brought back and start a new episode")
    return said


def in_a_line(result: Result) -> str:
    """The result of a run as one line, for a run that shows no progress."""
    parts = [f"{result.env_steps:,} steps"]
    if len(result.episodes):
        parts.append(f"return {number(result.episodes.mean_return)} over the last {len(result.episodes)} episodes")
    if "eval/mean_reward" in result.metrics:
        parts.append(f"{_evaluated(result.metrics)} in evaluation")
    return f"{result.run_dir}: {', '.join(parts)}"


def _evaluated(metrics: Mapping[str, float]) -> str:
    return f"{number(metrics['eval/mean_reward'])} +- {number(metrics.get('eval/std_reward', 0.0))}"


def summary(trainer: Trainer, result: Result, took_s: float, steps: int, lost_checkpoints: int) -> Mapping[str, str]:
    """The rows of the table at the end of a run; `steps` of it were taken in these `took_s` seconds."""
    metrics, run = result.metrics, result.run_dir
    here = f"{steps:,} of them in " if steps < result.env_steps else ""
    rate = f"{steps / max(took_s, 1e-9):,.0f} a second"
    rows = {
        "stopped by": _stopped_by(result),
        "environment steps": f"{result.env_steps:,} ({here}{took_s:,.1f} s, {rate})",
    }
    if len(result.episodes):
        rows["return, last episodes"] = f"{number(result.episodes.mean_return)} over {len(result.episodes)}"
    if "eval/mean_reward" in metrics:
        rows["return, evaluation"] = _evaluated(metrics)
    if trainer.policy.skipped:
        rows["updates skipped"] = f"{trainer.policy.skipped} of {trainer.policy.updates} (not finite)"
    faults = {
        name.removeprefix("faults/"): n for name, n in trainer.sampler.metrics().items() if name.startswith("faults/")
    }
    if faults:
        rows["faults"] = ", ".join(f"{n:,.0f} {name.replace('_', ' ')}" for name, n in faults.items())
    if lost_checkpoints:
        rows["checkpoints lost"] = str(lost_checkpoints)
    rows["run directory"] = str(run)
    rows["checkpoint"] = str(result.checkpoint or "not written")
    rows["next"] = "\n".join(_next_commands(result, trainer.exp.run.steps))
    return rows


def _next_commands(result: Result, steps: int) -> list[str]:
    """Commands that play the policy, and that go on with the run: up to `steps`, or beyond where it stands there."""
    run, short = shlex.quote(str(result.run_dir)), result.env_steps < steps
    more = "" if short else f" --run.steps {2 * result.env_steps}"
    if result.stopped_by == "stop rule":
        more = f" --run.stop '{{}}'{more}"  # which holds still, and would end it after a batch
    return [f"penstock eval {run}", f"penstock resume {run}{more}"]
