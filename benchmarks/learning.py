"""Learning of the presets on small tasks, over seeds, against a budget of steps and a return to reach.

Every run goes through the public API with a preset's settings, changed only in what a run is (seed, steps, evaluations,
directory). A seed passes if the mean of 20 deterministic episodes reaches the return in an evaluation within the
budget, and the run stops there; `--whole` lets every run go on to the end of its budget, to see whether it stays.
With `--add`, the results of the tasks asked for take the place of theirs in results/learning.*, the others stay.

    python benchmarks/learning.py [--only NAME] [--seeds 1,2,3,4,5] [--jobs 1] [--whole] [--add] [--out DIR]
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.core.errors import MissingExtraError, PenstockError
from penstock.envs.toy import RepeatPrevious
from penstock.run.presets import named_preset, with_preset

RESULTS = Path(__file__).parent / "results"
EPISODES = 20
MEMORY_BEST = 14.0  # RepeatPrevious: 16 steps, of which the first 2 pay nothing


@dataclass(frozen=True)
class Task:
    """A promise: at least `needed` of five seeds reach `threshold` within `budget` environment steps."""

    algo: str
    env: str
    budget: int
    threshold: float
    needed: int | None
    """Of five seeds, and in proportion of any other number; None: recorded without a promise."""
    eval_interval: int = 5_000
    kind: str = "reach"
    """`reach`: an evaluation of at least the threshold. `late`: the best of the last five, to the end of the budget.
    `stay below`: none above it. `stop`: the mean return of the last 100 training episodes reaches it; nothing is
    evaluated, and the wall time of `ps.train` counts."""
    median_s: float | None = None
    """For `stop`: what the median wall time over seeds may be."""
    preset: str = ""
    """Another than the environment's own: a table of the algorithm's presets."""
    whole: bool = False
    """Goes on to the end of the budget in any case."""
    note: str = ""


TASKS = {
    "ppo-cartpole": Task("ppo", "CartPole-v1", 60_000, 475.0, 5, whole=True),
    "ppo-cartpole-stop": Task("ppo", "CartPole-v1", 150_000, 475.0, 5, kind="stop", median_s=3.0,
                              note="mean of the last 100 training episodes"),
    "a2c-cartpole": Task("a2c", "CartPole-v1", 500_000, 450.0, 4, whole=True),
    "impala-cartpole": Task("impala", "CartPole-v1", 300_000, 450.0, 4, 10_000, whole=True, note="one batch ahead"),
    "appo-cartpole": Task("appo", "CartPole-v1", 300_000, 450.0, 4, 10_000, whole=True, note="one batch ahead"),
    "ppo-acrobot": Task("ppo", "Acrobot-v1", 150_000, -100.0, 4),
    "a2c-acrobot": Task("a2c", "Acrobot-v1", 200_000, -100.0, None),
    "ppo-pendulum": Task("ppo", "Pendulum-v1", 300_000, -250.0, 4, 10_000),
    "a2c-pendulum": Task("a2c", "Pendulum-v1", 1_000_000, -250.0, None, 50_000),
    "ppo-mountaincar": Task("ppo", "MountainCarContinuous-v0", 100_000, 90.0, None),
    "ppo-lunarlander": Task("ppo", "LunarLander-v3", 500_000, 200.0, None, 25_000),
    "memory-lstm": Task("lstm", "RepeatPrevious", 100_000, 0.95 * MEMORY_BEST, 4,
                        note=f"best {MEMORY_BEST:g}, chance {MEMORY_BEST / 4:g}"),
    "memory-none": Task("none", "RepeatPrevious", 100_000, 0.35 * MEMORY_BEST, 5, kind="stay below",
                        note="the same without memory"),
    "dqn-cartpole": Task("dqn", "CartPole-v1", 50_000, 475.0, 4, kind="late"),
    "c51-cartpole": Task("dqn", "CartPole-v1", 50_000, 475.0, 4, kind="late", preset="c51/CartPole-v1"),
    "dqn-acrobot": Task("dqn", "Acrobot-v1", 100_000, -100.0, None, kind="late"),
    "dqn-lunarlander": Task("dqn", "LunarLander-v3", 100_000, 200.0, None, kind="late"),
    "discrete-sac-cartpole": Task("discrete-sac", "CartPole-v1", 50_000, 475.0, None, kind="late"),
    "sac-pendulum": Task("sac", "Pendulum-v1", 5_000, -200.0, 4, 500, kind="late"),
    "td3-pendulum": Task("td3", "Pendulum-v1", 8_000, -220.0, 4, 800, kind="late"),
    "ddpg-pendulum": Task("ddpg", "Pendulum-v1", 10_000, -250.0, 4, 1_000, kind="late"),
    "r2d1-cartpole": Task("r2d1", "penstock.envs.toy:cartpole_positions", 150_000, 300.0, 4, kind="late",
                          note="without velocities"),
    "r2d1-memory": Task("r2d1", "penstock.envs.toy:RepeatPrevious", 50_000, 0.95 * MEMORY_BEST, 4, kind="late",
                        note=f"best {MEMORY_BEST:g}, chance {MEMORY_BEST / 4:g}"),
}  # fmt: skip
"""By the name that `--only` takes; a part of a name means all that contain it."""


@dataclass(frozen=True)
class Outcome:
    """What one run of one seed came to."""

    task: str
    seed: int
    passed: bool
    env_steps: int
    wall_s: float
    """From the call of `ps.train` to its return."""
    cpu_s: float
    """Processor time in that, which other work on the machine changes less."""
    best: float | None = None
    """Of all evaluations within the budget."""
    last: float | None = None
    reached_at: int | None = None
    """Environment steps at the first evaluation, or iteration for `stop`, that reached the threshold."""
    run_dir: str = ""
    problem: str = ""
    """Why there is no result."""
    scores: list[tuple[int, float]] | None = None
    """(environment steps, mean return) of every evaluation, for `late`."""


def experiment(task: Task) -> ps.Experiment:
    """The preset, or for the memory probe one set of settings with and without an LSTM."""
    if task.preset:
        return with_preset(task.algo, task.env, named_preset(f"{task.algo}/{task.preset}"))
    if task.env != "RepeatPrevious":
        return ps.preset(task.algo, task.env)
    net = ps.Net(hidden=(64,), recurrent="lstm" if task.algo == "lstm" else "none", recurrent_size=64)
    algo = ps.PPO(lr=1e-3, epochs=4, minibatch=128, discount=0.5, net=net)
    return ps.Experiment(ps.EnvConfig(RepeatPrevious), algo, ps.SerialSampler(T=32, B=16))


def run(name: str, seed: int, run_dir: Path, whole: bool) -> Outcome:
    """Trains one seed; what penstock refuses is an Outcome with a problem, everything else raises."""
    torch.set_num_threads(1)
    task = TASKS[name]
    stops, exp = task.kind == "stop", experiment(task)
    # A run ends with the batch that passes its steps, and its last evaluation is to lie within the budget.
    steps = task.budget - (exp.sampler.spec.size if task.kind == "late" else 0)
    changes: dict[str, Any] = {
        "run.seed": seed, "run.steps": steps, "run.dir": str(run_dir), "run.progress": "off",
        "run.eval_interval": 0 if stops else task.eval_interval, "run.eval_episodes": 0 if stops else EPISODES,
        "run.checkpoint_interval": 0, "run.stop": {"rollout/ep_rew_mean": task.threshold} if stops else {},
    }  # fmt: skip
    if task.kind == "reach" and not (whole or task.whole):
        changes["run.stop"] = {"eval/mean_reward": task.threshold}
    started = time.perf_counter(), time.process_time()
    try:
        result = ps.train(ps.override(exp, changes))
    except PenstockError as error:
        problem = f"{'not installed' if isinstance(error, MissingExtraError) else type(error).__name__}: {error}"
        return Outcome(name, seed, False, 0, 0.0, 0.0, run_dir=str(run_dir), problem=problem)
    seconds, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    outcome = Outcome(name, seed, False, result.env_steps, seconds, cpu, run_dir=str(run_dir))
    if not stops:
        return _judged(task, evaluations(run_dir), outcome)
    reached = result.env_steps if result.stopped_by == "stop rule" else None
    return replace(outcome, passed=reached is not None, last=result.episodes.mean_return, reached_at=reached)


def evaluations(run_dir: Path) -> list[tuple[int, float]]:
    """(environment steps, mean return) of every evaluation of a run."""
    rows = [json.loads(line) for line in (run_dir / "eval" / "evaluations.jsonl").read_text().splitlines()]
    return [(row["step"], row["eval/mean_reward"]) for row in rows]


def _judged(task: Task, scores: list[tuple[int, float]], outcome: Outcome) -> Outcome:
    within = [(step, score) for step, score in scores if step <= task.budget]
    counted = within[-5:] if task.kind == "late" else within
    best = max(score for _, score in counted)
    reached = next((step for step, score in within if score >= task.threshold), None)
    passed = best < task.threshold if task.kind == "stay below" else best >= task.threshold
    kept = within if task.kind == "late" else None
    return replace(outcome, passed=passed, best=best, last=within[-1][1], reached_at=reached, scores=kept)


def verdict(task: Task, outcomes: list[Outcome]) -> tuple[str, bool]:
    """What to print, and whether the promise is kept; a task without one always keeps it."""
    passed = sum(o.passed for o in outcomes)
    share = f"{passed}/{len(outcomes)}"
    if task.needed is None:
        return f"{share}, no bar", True
    needed = math.ceil(task.needed * len(outcomes) / 5)
    met = passed >= needed
    if task.median_s is not None:
        met = met and statistics.median(o.wall_s for o in outcomes) <= task.median_s
    return f"{share}, {'met' if met else '**missed**'}", met


def report(found: dict[str, list[Outcome]], about: dict[str, str]) -> str:
    """The table as Markdown."""
    head = ("task", "budget, steps", "return to reach", "needed of 5", "passed", "best evaluation by seed",
            "last evaluation by seed", "steps to the return by seed", "wall s by seed", "median s", "median cpu s")  # fmt: skip
    lines = ["# Learning", "", *(f"- {key}: {value}" for key, value in about.items()), "",
             f"An evaluation is the mean of {EPISODES} deterministic episodes. A dash: the return was not reached, or "
             "nothing was evaluated. Runs of most tasks stop where they reach it; those marked \"late\" go on to the "
             "end, and the best of their last five evaluations counts. Seconds are from the call of `ps.train` to its "
             "return, evaluations included.", "",
             f"| {' | '.join(head)} |", "|" + "---|" * len(head)]  # fmt: skip
    problems: list[str] = []
    for name, outcomes in found.items():
        task = TASKS[name]
        notes = "; ".join(note for note in ("late" if task.kind == "late" else "", task.note) if note)
        title = f"{name}{f' ({notes})' if notes else ''}"
        sign = "at most " if task.kind == "stay below" else ""
        needed = "-" if task.needed is None else str(task.needed)
        median = f"{statistics.median(o.wall_s for o in outcomes):.1f}"
        cells = [title, f"{task.budget:,}", f"{sign}{task.threshold:g}", needed, verdict(task, outcomes)[0],
                 _row([o.best for o in outcomes]), _row([o.last for o in outcomes]),
                 " ".join("-" if o.reached_at is None else f"{o.reached_at:,}" for o in outcomes),
                 _row([o.wall_s for o in outcomes]),
                 median + (f" (bar {task.median_s:.1f})" if task.median_s is not None else ""),
                 f"{statistics.median(o.cpu_s for o in outcomes):.1f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
        problems += [f"- {name}, seed {o.seed}: {o.problem}" for o in outcomes if o.problem]
    return "\n".join([*lines, *(["", "No result:", "", *problems] if problems else []), ""])


def _row(values: list[float | None]) -> str:
    return " ".join("-" if x is None else f"{x:.1f}" for x in values)


def about(argv: list[str], seeds: list[int], jobs: int) -> dict[str, str]:
    """Command, date, machine and versions."""
    out = {"command": " ".join(["python benchmarks/learning.py", *argv]),
           "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
           "seeds": ", ".join(map(str, seeds)),
           "machine": f"{_machine()}; one torch thread a run, {jobs} at a time, load {os.getloadavg()[0]:.1f} at the start",
           "python": platform.python_version()}  # fmt: skip
    return out | {
        package: importlib.metadata.version(package) for package in ("penstock", "torch", "numpy", "gymnasium")
    }


def _without(argv: list[str], option: str) -> list[str]:
    """The arguments less an option and its value: where run directories lie changes no result."""
    at = next((i for i, word in enumerate(argv) if word.partition("=")[0] == option), len(argv))
    return argv[:at] + argv[at + (1 if "=" in "".join(argv[at : at + 1]) else 2) :]


def _machine() -> str:
    """E.g. "4-core AMD EPYC VM"."""
    try:
        rows = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        rows = []
    known = {key.strip(): value.strip() for key, _, value in rows}
    virtual = " VM" if "hypervisor" in known.get("flags", "").split() else ""
    return f"{len(os.sched_getaffinity(0))}-core {known.get('model name', platform.machine())}{virtual}"


def run_all(
    names: list[str], seeds: list[int], jobs: int, out: Path, whole: bool, each: Callable[[Outcome], None]
) -> dict[str, list[Outcome]]:
    """The outcomes of every task, each run in a fresh process; `each` is called with every one as it comes."""
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = [pool.submit(run, name, seed, out / name / f"s{seed}", whole) for name in names for seed in seeds]
        for future in waiting:
            outcome = future.result()
            found[outcome.task].append(outcome)
            print(outcome, file=sys.stderr, flush=True)
            each(outcome)
    return found


def add(outcome: Outcome, header: dict[str, str]) -> None:
    """Puts a result in the place of its task's and seed's in results/learning.json; several processes may."""
    with (RESULTS / "learning.json").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kept = json.load(file)
        rows = [row for row in kept["runs"] if (row["task"], row["seed"]) != (outcome.task, outcome.seed)]
        rows = sorted([*rows, asdict(outcome) | {"run_dir": ""}], key=lambda row: (order(row["task"]), row["seed"]))
        kept["later"] = kept.get("later", {}) | {
            outcome.task: f"{header['command']}, {header['date']}, load {header['machine'].rpartition('load ')[2]}"
        }
        file.seek(0)
        file.truncate()
        file.write(json.dumps(kept | {"runs": rows}, indent=1) + "\n")


def order(task: str) -> int:
    """The place of a task in the tables."""
    return list(TASKS).index(task)


def write() -> None:
    """results/learning.md, and learning-replay.png of the tasks that keep their scores, from results/learning.json."""
    kept = json.loads((RESULTS / "learning.json").read_text())
    found: dict[str, list[Outcome]] = {}
    for row in kept["runs"]:
        found.setdefault(row["task"], []).append(Outcome(**row))
    later = {f"{name}, later": text for name, text in kept.get("later", {}).items()}
    (RESULTS / "learning.md").write_text(report(found, kept["about"] | later))
    draw({name: outcomes for name, outcomes in found.items() if any(o.scores for o in outcomes)})


def draw(found: dict[str, list[Outcome]]) -> None:
    """A panel for each task: the evaluations of each seed, and the return to reach."""
    from matplotlib.figure import Figure

    if not found:
        return
    columns = min(3, len(found))
    lines = math.ceil(len(found) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.0 * lines), dpi=120, layout="constrained")
    for panel, (name, outcomes) in enumerate(found.items()):
        task, axes = TASKS[name], figure.add_subplot(lines, columns, panel + 1)
        for outcome in outcomes:
            steps, scores = zip(*(outcome.scores or [(0, math.nan)]))
            axes.plot(steps, scores, marker=".", linewidth=1.2, label=f"seed {outcome.seed}")
        axes.axhline(task.threshold, color="black", linewidth=0.8, linestyle="--")
        axes.set(title=f"{name} ({task.env.rpartition(':')[2]})", xlabel="environment steps", ylabel="evaluation")
        axes.title.set_fontsize(9)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(color="#D9D9D9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(RESULTS / "learning-replay.png")


def main(argv: list[str]) -> int:
    """Runs the tasks asked for. 1 if a bar is missed; writes results/learning.* if no task is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"tasks by comma, or parts of names: {', '.join(TASKS)}")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="by comma")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; wall times are cleanest with 1")
    parser.add_argument("--whole", action="store_true", help="runs go on to the end of their budgets")
    parser.add_argument("--add", action="store_true", help="put the results in the place of earlier ones in results/")
    parser.add_argument("--out", type=Path, help="keeps the run directories there; a temporary directory if not given")
    args = parser.parse_args(argv)
    parts = [part for part in args.only.split(",") if part]
    names = [name for name in TASKS if not parts or any(part in name for part in parts)]
    try:
        seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        seeds = []
    if not names or not seeds or args.jobs < 1:
        parser.error(f"--only {args.only!r} --seeds {args.seeds!r} --jobs {args.jobs}: expected parts of {', '.join(TASKS)}, "
                     "seeds such as 1,2,3, and 1 job or more")  # fmt: skip
    header = about(_without(argv, "--out"), seeds, args.jobs)
    with tempfile.TemporaryDirectory() as temporary:
        each = (lambda outcome: add(outcome, header)) if args.add else (lambda outcome: None)
        found = run_all(names, seeds, args.jobs, args.out or Path(temporary), args.whole, each)
        text = report(found, header)
        print(text)
        if args.add:
            write()
        elif not parts:
            RESULTS.mkdir(exist_ok=True)
            rows = [asdict(o) | {"run_dir": ""} for outcomes in found.values() for o in outcomes]
            (RESULTS / "learning.json").write_text(json.dumps({"about": header, "runs": rows}, indent=1) + "\n")
            write()
            curves = [
                Path(o.run_dir) for name in ("ppo-cartpole", "a2c-cartpole") for o in found[name] if not o.problem
            ]
            ps.plot_runs(curves, RESULTS / "learning.png")
    return 0 if all(verdict(TASKS[name], outcomes)[1] for name, outcomes in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
