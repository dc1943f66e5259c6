"""`penstock launch ALGO --env ID --grid ... --seeds ... --dir DIR`: a sweep of runs on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import Parser, whole_number
from penstock.cli.settings import experiment, seed_list, train_parser
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.run.experiment import Experiment
    from penstock.run.launch.sweep import Sweep

_DESCRIPTION = """Trains every combination of a grid of settings with every seed, as many at a time as there are slots.

  penstock launch ppo --env CartPole-v1 --seeds 1,2,3 --grid algo.lr=1e-3,3e-4 sampler.B=8,16 --dir runs/sweep
  penstock launch runs/sweep                        go on with what was interrupted
  penstock launch runs/sweep --retry                run again what failed

All other options are those of `penstock train`, for every run. Runs are `penstock train` processes pinned to
the CPUs of their slot, each with a directory DIR/NAME and a log DIR/logs/NAME.log; with `--sampler auto` each measures
on those CPUs. The same command again skips what has finished and goes on with what was interrupted. The first Ctrl-C
has every run save and end, the second kills them.
Exit code 1 if a run failed.
"""
_OURS = {"run.seed": "--seeds", "run.dir": "--dir", "seeds": "--seeds"}


def run(argv: list[str]) -> int:
    """Launches a sweep by the arguments; returns the exit code."""
    parser = _parser()
    first = argv[0] if argv and not argv[0].startswith("-") else None
    args, rest = parser.parse_known_args(argv[first is not None :])
    if first is None:
        parser.print_help(sys.stderr)
        print("\npenstock launch: what to run comes first: ALGO, or the DIR of an earlier launch", file=sys.stderr)
        return 2
    from penstock.core.machine import read_machine
    from penstock.run.affinity import ranges, slices
    from penstock.run.files.lock import RunLock
    from penstock.run.files.trust import remember
    from penstock.run.launch.display import LaunchDisplay, report
    from penstock.run.launch.launcher import Launcher, Listed
    from penstock.run.launch.sweep import STATE, choose, new_queue, read_queue, require_same, require_trust
    from penstock.workers.checking import check_apart  # it loads numpy, which help must not

    sweep = None if _is_dir(first, args, rest) else _sweep(first, args, rest)
    folder = Path(first if sweep is None else args.dir)
    with contextlib.ExitStack() as stack:
        if os.path.exists(folder / STATE):
            stack.enter_context(RunLock(folder))
        queue = read_queue(folder) if sweep is None or os.path.exists(folder / STATE) else new_queue(folder, sweep)
        if sweep is not None:
            require_same(queue, sweep)
        else:
            require_trust(queue, args.trust)
        experiments = [_experiment(queue.sweep.arguments(c)) for c in queue.sweep.combinations()]
        for exp in {repr(exp.env_config): exp for exp in experiments}.values():
            check_apart(exp.env_config, exp.run.seed, exp.sampler)  # an unknown id is said now, not by every run
        todo, machine = choose(queue, args.retry), read_machine()
        count = args.slots or max(
            1, min(machine.busy_cores // max(exp.sampler_settings.cores for exp in experiments), len(todo))
        )
        slots = slices(machine, count)
        if not os.path.exists(folder / STATE):
            _refuse_other_things(folder, STATE)
            stack.enter_context(RunLock(folder))
        queue.save()
        remember(folder / STATE, queue.sweep.digest)
        where = "; ".join(f"slot {k + 1}: CPU {ranges(slot.cpus)}" for k, slot in enumerate(slots))
        what = f"{len(todo)} of {len(queue.runs)} runs to do, {count} at a time on {machine} ({where})"
        print(what if todo else "nothing has failed" if args.retry is not None else "nothing is left to do", flush=True)
        steps = [exp.run.steps for exp in experiments for _ in queue.sweep.seeds]
        with LaunchDisplay(queue, dict(zip((r.name for r in queue.runs), steps))) as display:
            stopped = Launcher(Listed(queue, todo), slots, display, args.trust and sweep is None).work()
    report(queue)
    if stopped is not None:
        return 128 + stopped
    return int(queue.count("failed") > 0 or any(r.status != "finished" for r in todo))


def _refuse_other_things(folder: Path, state: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(path.name != ".lock" for path in folder.iterdir())):
        raise ConfigError(
            f"{folder} is not empty and holds no {state}; nothing in it was touched. Choose another --dir"
        )


def _is_dir(first: str, args: Any, rest: Sequence[str]) -> bool:
    """True if the first word is the directory of an earlier launch, False if it is an algorithm."""
    if any(text.split("=")[0] == "--env" for text in rest) or any(text.startswith("env=") for text in args.grid):
        return False
    if "/" not in first and not os.path.exists(first):
        return False
    if args.grid or args.dir or args.seeds:
        raise ConfigError(f"{first} has its grid, seeds and directory already; only --slots and --retry go with a DIR")
    if rest:
        _parser().refuse(rest[0])
    return True


def _sweep(algo: str, args: Any, rest: Sequence[str]) -> Sweep:
    from penstock.run.launch.sweep import Sweep, split_values

    if args.dir is None:
        raise ConfigError("--dir is missing: where the runs and their logs go, e.g. --dir runs/sweep")
    for option in rest:
        name = option.removeprefix("--").split("=")[0]
        if option.startswith("--") and name in _OURS:
            raise ConfigError(f"{option.split('=')[0]} is set for each run; use {_OURS[name]}")
    grid: dict[str, tuple[str, ...]] = {}
    for key, value in _pairs(args.grid):
        if key in _OURS:
            raise ConfigError(f"--grid {key}: it is set for each run; use {_OURS[key]}")
        values = split_values(value)
        if key in grid or len(set(values)) < len(values) or not all(values):
            raise ConfigError(
                f"--grid {key}={value} names {'a setting' if key in grid else 'a value'} twice, or an empty value"
            )
        grid[key] = values
    trust = ("--trust",) if args.trust else ()
    return Sweep(algo, (*rest, *trust, *_quiet(rest)), grid, tuple(args.seeds or (0,)))


def _quiet(rest: Sequence[str]) -> tuple[str, ...]:
    """The option that makes runs print lines, which suit a log, unless the user chose a display."""
    return () if any(text.split("=")[0] == "--run.progress" for text in rest) else ("--run.progress", "plain")


def _pairs(grid: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for text in grid:
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals or not key:
            raise ConfigError(
                f"--grid {text!r}; expected setting=value,value, e.g. --grid algo.lr=1e-3,3e-4 sampler.B=8,16"
            )
        pairs.append((key, value))
    return pairs


def _experiment(argv: Sequence[str]) -> Experiment:
    """The experiment of `penstock train` with these arguments; raises or exits as it does."""
    algo, *options = argv
    args, rest = train_parser().parse_known_args(options)
    if args.env is None:
        raise ConfigError("--env is missing: penstock launch ALGO --env ID --dir DIR")
    try:
        return experiment(algo, args, rest)[0]
    except SystemExit:
        print(f"penstock launch: nothing was started; these options are wrong: {' '.join(argv)}", file=sys.stderr)
        raise


def _parser() -> Parser:
    parser = Parser(
        "launch", _DESCRIPTION, usage="penstock launch ALGO --env ID --dir DIR [OPTIONS]   or   penstock launch DIR"
    )
    parser.add_argument("--dir", metavar="DIR", help="directory of all runs, e.g. runs/sweep")
    parser.add_argument(
        "--grid",
        nargs="+",
        action="extend",
        default=[],
        metavar="K=V,V",
        help="settings that vary, and their values; [64,64] is one value of several numbers",
    )
    parser.add_argument(
        "--seeds", type=seed_list, metavar="1,2,3", help="one run of each combination for each seed (default 0)"
    )
    parser.add_argument(
        "--slots", type=whole_number, metavar="N", help="runs at a time (default: as many as keep the cores busy)"
    )
    parser.add_argument(
        "--retry", nargs="*", metavar="NAME", help="with DIR: run again those that failed, all or by name"
    )
    parser.add_trust("DIR, or the run of --init,")
    return parser
