"""`penstock tune ALGO --env ID --search ...`: a search for settings on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import Parser, number_from_0, whole_number
from penstock.cli.settings import experiment, train_parser
from penstock.core.errors import ConfigError
from penstock.run.files.inits import Given, of_words
from penstock.run.files.modules import modules_named, search_here

if TYPE_CHECKING:
    from penstock.run.experiment import Experiment
    from penstock.run.search.queue import SearchQueue
    from penstock.run.search.report import SearchResult

_DESCRIPTION = """Searches for settings: trials of an experiment, whose scores decide which of them go on.

  penstock tune ppo --env CartPole-v1 --search "algo.lr=loguniform(1e-5,1e-2)" "sampler.T=choice(32,128)"
  penstock tune ppo --env CartPole-v1 --search "algo.lr=loguniform(1e-5,1e-2)" --scheduler pbt --trials 8 --parallel 2
  penstock tune runs/search                         go on with what was interrupted
  penstock tune runs/search --confirm 5             train the best settings with five other seeds

All other options are those of `penstock train`, for every trial. Forms: loguniform(a,b), uniform(a,b), int(a,b),
logint(a,b), choice(a,b,...). Schedulers: asha (successive halving), median, pbt (population based training), none.
Trials are `penstock train` processes pinned to the CPUs of their slot, each with a directory DIR/NAME and a
log DIR/logs/NAME.log. The same command again, or `penstock tune DIR`, goes on with what was interrupted. The first
Ctrl-C has every trial save and end, the second kills them.
Leaves DIR/best.toml, which `penstock train ALGO --env ID --preset-file DIR/best.toml` trains, and pictures.
Exit code 1 if no trial has a score.
"""
_OURS = {
    "run.dir": "--dir",
    "seeds": "--run.seed, which is every trial's; the winner's study has seeds of its own: --confirm",
    "run.stop": "--scheduler: trials are compared after equal steps",
}
_OF_BEGIN = ("search", "scheduler", "trials", "metric", "mode", "suggest", "interval", "eta", "dir")


def run(argv: list[str]) -> int:
    """Searches by the arguments; returns the exit code."""
    parser = _parser()
    first = argv[0] if argv and not argv[0].startswith("-") else None
    args, rest = parser.parse_known_args(argv[first is not None :])
    if first is None:
        parser.print_help(sys.stderr)
        print("\npenstock tune: what to train comes first: ALGO, or the DIR of an earlier search", file=sys.stderr)
        return 2
    from penstock.run.launch.slots import check_backend
    from penstock.run.search.stored import stored_modules
    from penstock.run.search.tune import directory, opened, prepared, reopened, search_settings

    check_backend(args.backend, args.address, args.cpus)
    given: dict[str, Any] = {"retries": args.retries, "confirm": args.confirm}
    with contextlib.ExitStack() as stack:
        if _is_dir(first, args, rest):
            search_here(stored_modules(Path(first), args.trust))
            queue = stack.enter_context(reopened(Path(first), args.trust, **given))
        else:
            exp, init, trust = _experiment(first, args, rest)
            exp = prepared(exp)
            settings = search_settings(
                exp,
                _space(args.search),
                args.scheduler or "asha",
                args.trials or 16,
                args.metric,
                args.mode or "max",
                args.suggest or "tpe",
                args.interval,
                args.eta or 3,
                synchronous=args.parallel == 1,
                init=init,
            )
            queue = stack.enter_context(opened(exp, settings, directory(exp, args.dir), trust, **given))
        return _carry_out(queue, args)


def _carry_out(queue: SearchQueue, args: Any) -> int:
    import signal

    from penstock.run.search.tune import execute

    search = queue.search
    if args.retry is not None:
        queue.retry(args.retry)
    left = sum(t.state not in ("finished", "pruned", "failed") for t in search.trials)
    left += search.settings.trials - len(search.trials)
    goals = ", ".join(f"{goal:,}" for goal in search.scheduler.goals)
    print(
        f"{queue.folder}: {left} of {search.settings.trials} trials to do, {args.parallel} at a time; "
        f"{search.scheduler.name} looks at {search.settings.metric} after {goals} steps",
        flush=True,
    )
    result = execute(queue, args.parallel, backend=args.backend, address=args.address, cpus=args.cpus)
    _report(queue, result)
    if result.stopped_by != "trials":
        return 128 + signal.Signals[result.stopped_by]
    return int(result.best is None)


def _report(queue: SearchQueue, result: SearchResult) -> None:
    from penstock.run.search.report import number, setting, study, train_line

    failed = [t for t in result.trials if t.state == "failed"]
    for trial in failed:
        print(f"\n{trial.run_dir.name} failed: {trial.reason}")
        print(f"  its log: {queue.folder / 'logs' / trial.run_dir.name}.log")
    for c in (lost := [c for c in queue.study if c.run.status == "failed"]):
        print(f"\n{c.run.name} failed: {c.reason}")
        print(f"  its log: {queue.log(c.run)}")
    if failed or lost:
        print(f"  once more: penstock tune {queue.folder} --retry")
    print()
    if result.best is None:
        print(f"{queue.folder}: no trial has a score")
    else:
        print(f"best of {len(result.trials)}: {number(result.best.score)} at {result.best.steps:,} steps, by")
        for path, value in result.best.values.items():
            print(f"  {path} = {setting(value)}")
        exp = result.experiment
        assert exp is not None
        assert result.preset is not None
        print(f"train it:  {train_line(exp, result.preset, queue.search.settings.init)}")
    if result.confirmed:
        print(study(list(result.confirmed.values())))
    for picture in result.pictures:
        print(f"picture:   {picture}")
    if result.stopped_by != "trials":
        print(f"go on:     penstock tune {queue.folder}")


def _is_dir(first: str, args: Any, rest: Sequence[str]) -> bool:
    """True if the first word is the directory of an earlier search, False if it is an algorithm."""
    if any(text.split("=")[0] in ("--env", "--config") for text in rest):
        return False
    if "/" not in first and not os.path.exists(first):
        return False
    given = [name for name in _OF_BEGIN if getattr(args, name) not in (None, [])]
    if given:
        raise ConfigError(
            f"{first} has its space and scheduler already, and --{given[0]} was given; only --parallel, --retries, "
            "--retry and --confirm go with a DIR"
        )
    if rest:
        _parser().refuse(rest[0])
    return True


def _space(pairs: Sequence[str]) -> dict[str, str]:
    space: dict[str, str] = {}
    for text in pairs:
        path, equals, form = text.removeprefix("--").partition("=")
        if not equals or not path:
            raise ConfigError(
                f'--search {text!r}; expected setting=form, e.g. --search "algo.lr=loguniform(1e-5,1e-2)"'
            )
        if path in space:
            raise ConfigError(f"--search names {path} twice")
        space[path.replace("-", "_")] = form
    return space


def _experiment(algo: str, args: Any, rest: Sequence[str]) -> tuple[Experiment, Given | None, bool]:
    """The experiment of `penstock train` with these arguments, --init and --trust; raises or exits as it does."""
    for option in rest:
        name = option.removeprefix("--").split("=")[0]
        if option.startswith("--") and name in _OURS:
            raise ConfigError(f"{option.split('=')[0]} does not go with a search; use {_OURS[name]}")
    parser = train_parser()
    found, words = parser.parse_known_args(list(rest))
    if (odd := next((w for w in words if w.startswith("--") and "." not in w.split("=")[0]), None)) is not None:
        _parser().refuse(odd, [text for action in parser._actions for text in action.option_strings])
    if found.env is None and found.config is None:
        raise ConfigError('--env is missing: penstock tune ALGO --env ID --search "algo.lr=loguniform(1e-5,1e-2)"')
    found.trust = found.trust or args.trust
    search_here(modules_named([args.suggest, *args.search]))
    return experiment(algo, found, words)[0], of_words(found.init), found.trust


def _parser() -> Parser:
    parser = Parser(
        "tune",
        _DESCRIPTION,
        usage="penstock tune ALGO --env ID --search K=FORM [OPTIONS]   or   penstock tune DIR",
    )
    parser.add_argument(
        "--search", nargs="+", action="extend", default=[], metavar="K=FORM", help="settings that vary, and their forms"
    )
    parser.add_argument("--scheduler", metavar="NAME", help="asha, median, pbt or none (default asha)")
    parser.add_argument("--trials", type=whole_number, metavar="N", help="how many (default 16)")
    parser.add_argument("--parallel", type=whole_number, default=1, metavar="N", help="trials at a time (default 1)")
    parser.add_argument(
        "--metric", help="the score: a metric in a run's last row (default eval/mean_reward, if it evaluates)"
    )
    parser.add_argument("--mode", choices=("max", "min"), help="whether the score should be large (default) or small")
    parser.add_argument(
        "--suggest", metavar="NAME", help="who proposes settings: tpe (default), random, or module:NAME of a function "
        "of a seed that returns an Optuna sampler"
    )  # fmt: skip
    parser.add_argument(
        "--interval",
        type=whole_number,
        metavar="STEPS",
        help="steps to asha's first rung (default 1/27 of all), or between decisions of median (1/5) and pbt (1/10)",
    )
    parser.add_argument(
        "--eta", type=whole_number, help="one in so many trials goes on from a rung of asha (default 3)"
    )
    parser.add_argument(
        "--backend", default="processes", metavar="NAME", help="where trials execute: processes of this machine "
        "(default), or ray, whose nodes all see --dir"
    )  # fmt: skip
    parser.add_argument(
        "--address", default="local", help="of the Ray cluster: local starts one (default), auto, or HOST:PORT"
    )
    parser.add_argument(
        "--cpus", type=float, default=1.0, metavar="N", help="that Ray counts for each trial (default 1)"
    )
    parser.add_argument("--dir", metavar="DIR", help="directory of all trials (default: named after the time)")
    parser.add_argument(
        "--retries", type=number_from_0, default=1, metavar="N", help="attempts after the first, of a trial whose "
        "environment or process died (default 1)"
    )  # fmt: skip
    parser.add_argument("--retry", nargs="*", metavar="NAME", help="with DIR: try again trials that failed")
    parser.add_argument(
        "--confirm", type=number_from_0, default=0, metavar="N", help="then train the best settings with N other seeds"
    )
    parser.add_trust("DIR")
    return parser
