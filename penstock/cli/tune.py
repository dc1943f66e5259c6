"""`penstock tune ALGO --env ID --search ...`, a search for settings; `penstock launch`, its short form for a sweep."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import Parser, number_from_0, whole_number
from penstock.cli.settings import check_early, experiment, seed_list, train_parser
from penstock.core.errors import CheckpointError, ConfigError, printable
from penstock.core.machine import counted
from penstock.run.files.inits import Given, of_words
from penstock.run.files.modules import modules_named, search_here

if TYPE_CHECKING:
    from penstock.run.experiment import Experiment
    from penstock.studies.report import StudyResult
    from penstock.studies.study import Study

_DESCRIPTION = """Searches for settings: trials of an experiment, whose scores decide which of them go on.

  penstock tune ppo --env CartPole-v1 --search "algo.lr=loguniform(1e-5,1e-2)" "sampler.T=choice(32,128)"
  penstock tune ppo --env CartPole-v1 --search "algo.lr=loguniform(1e-5,1e-2)" --scheduler pbt --trials 8 --parallel 2
  penstock tune runs/search                         go on with what was interrupted
  penstock tune runs/search --confirm 5             train the best settings with five other seeds

Forms: loguniform(a,b), uniform(a,b), int(a,b), logint(a,b), choice(a,b,...). Schedulers: asha (successive halving),
median, pbt (population based training), none. With --grid or --seeds it is a sweep, as in `penstock launch`.
{both}
Leaves DIR/best.toml, which `penstock train ALGO --env ID --preset-file DIR/best.toml` trains, and pictures.
Exit code 1 if no trial has a score.
"""
_LAUNCH = """Trains every combination of a grid of settings with every seed, as many at a time as keep the cores busy.

  penstock launch ppo --env CartPole-v1 --seeds 1,2,3 --grid algo.lr=1e-3,3e-4 sampler.B=8,16 --dir runs/sweep
  penstock launch runs/sweep                        go on with what was interrupted
  penstock launch runs/sweep --retry                run again what failed, too

With `--sampler auto` each run measures on the CPUs of its slot.
{both}
Exit code 1 if a run failed.
"""
_BOTH = """
All other options are those of `penstock train`, for every run. Runs are `penstock train` processes pinned to the CPUs
of their slot, each with a directory DIR/NAME and a log DIR/logs/NAME.log. The same command again, or the command with
DIR, goes on with what was interrupted. The first Ctrl-C has every run save and end, the second kills them."""
_OURS = {
    "run.dir": "--dir",
    "seeds": "--run.seed, which is every trial's; the winner is trained with other seeds by --confirm",
    "run.stop": "--scheduler: trials are compared after equal steps",
}
_OF_SEARCH = ("search", "scheduler", "trials", "suggest", "interval", "eta")
_OF_BEGIN = (*_OF_SEARCH, "grid", "seeds", "metric", "mode", "dir")
_MOST_LOGS = 10
_GRID = "algo.lr=1e-3,3e-4 sampler.B=8,16"


def run(argv: list[str], name: str = "tune") -> int:
    """Searches, or as `launch` sweeps, by the arguments; returns the exit code."""
    parser = _parser(name)
    first = argv[0] if argv and not argv[0].startswith("-") else None
    args, rest = parser.parse_known_args(argv[first is not None :])
    if first is None:
        parser.print_help(sys.stderr)
        print(f"\npenstock {name}: what to train comes first: ALGO, or the DIR of an earlier study", file=sys.stderr)
        return 2
    again = _is_dir(first, args, rest, parser)
    if again and not os.path.exists(first):
        raise CheckpointError(f"{first} holds no study.json: there is no such folder")
    if not again:
        from penstock.core.config import split_values  # it loads numpy, which help does not need

        pairs = _pairs(args.grid, "--grid", _GRID)
        points = [_words(path, value) for path, text in pairs for value in split_values(text)]
        with _nothing_started(first, rest):
            for words in points or [[]]:
                check_early(first, *_of_train(args, [*rest, *words], parser))
    from penstock.studies.slots.slots import check_backend
    from penstock.studies.study_file import stored_modules
    from penstock.studies.tune import locked_study, resume_study

    check_backend(args.backend, args.address, args.cpus, args.parallel)
    given: dict[str, Any] = {"retries": args.retries, "confirm": args.confirm}
    with contextlib.ExitStack() as stack:
        if again:
            search_here(stored_modules(Path(first), args.trust))
            study = stack.enter_context(resume_study(Path(first), args.trust, **given))
        else:
            begin = _sweep if name == "launch" or args.grid or (args.seeds and not args.search) else _search
            study = stack.enter_context(locked_study(*begin(first, args, rest, parser), **given))
        return _carry_out(study, args, again and args.trust)


def _carry_out(study: Study, args: Any, trust: bool) -> int:
    import signal

    from penstock.studies.tune import execute, usual_parallel

    search = study.search
    if args.retry is not None:
        study.retry(args.retry)
    left = sum(t.state not in ("finished", "pruned", "failed") for t in search.trials)
    left += search.settings.trials - len(search.trials)
    parallel = args.parallel or usual_parallel(study)
    goals = ", ".join(f"{goal:,}" for goal in search.scheduler.goals)
    looks = "" if study.sweep else f"; {search.scheduler.name} looks at {search.settings.metric} after {goals} steps"
    what = f"{left} of {counted(search.settings.trials, 'trial')} to do, {parallel} at a time{looks}"
    print(f"{study.folder}: {what if left or args.confirm else 'nothing is left to do'}", flush=True)
    result = execute(study, parallel, trust=trust, backend=args.backend, address=args.address, cpus=args.cpus)
    _report(study, result)
    if result.stopped_by != "trials":
        return 128 + signal.Signals[result.stopped_by]
    return int(any(t.state == "failed" for t in result.trials) if study.sweep else result.best is None)


def _report(study: Study, result: StudyResult) -> None:
    from penstock.studies.logs import log_end
    from penstock.studies.report import confirmed, number, setting, train_line

    trials = [(t.run, t.reason) for t in study.search.trials if t.state == "failed"]
    failed = [*trials, *((c.run, c.reason) for c in study.confirming if c.run.status == "failed")]
    for k, (one, reason) in enumerate(failed):
        print(f"\n{one.name} failed: {printable(reason, kept='')}")
        if one.attempts:
            print(f"  its log: {study.log(one)}" + (", which ends" if k < _MOST_LOGS else ""))
            for line in log_end(study.log(one)) if k < _MOST_LOGS else ():
                print(f"  | {printable(line, kept='')}")
    if failed:
        print(f"  once more: {study.line} --retry")
    states = [t.state for t in result.trials]
    print(
        f"\n{study.folder}: {states.count('finished')} of {counted(study.search.settings.trials, 'trial')} finished",
        end="",
    )
    print(", ".join(["", *(f"{n} {s}" for s in ("pruned", "failed") if (n := states.count(s)))]))
    if result.best is None:
        if not (study.sweep and "env" in study.search.space):
            print(f"{study.folder}: no trial has a score")
    else:
        print(f"best of {len(result.trials)}: {number(result.best.score)} at {result.best.steps:,} steps, by")
        for path, value in result.best.values.items():
            print(f"  {path} = {setting(value)}")
        exp = result.experiment
        assert exp is not None
        assert result.preset is not None
        print(f"train it:  {train_line(exp, result.preset, study.search.settings.init)}")
    if result.confirmed:
        print(confirmed(list(result.confirmed.values())))
    for picture in result.pictures:
        print(f"picture:   {picture}")
    if study.sweep:
        print(f"curves:    penstock plot {study.folder}")
    if result.stopped_by != "trials":
        print(f"go on:     {study.line}")


def _is_dir(first: str, args: Any, rest: Sequence[str], parser: Parser) -> bool:
    """True if the first word is the directory of an earlier study, False if it is an algorithm."""
    if any(text.split("=")[0] in ("--env", "--config") for text in rest):
        return False
    if any(text.startswith("env=") for text in args.grid) or ("/" not in first and not os.path.exists(first)):
        return False
    given = [name for name in _OF_BEGIN if getattr(args, name) not in (None, [])]
    if given:
        raise ConfigError(
            f"{first} has its settings already, and --{given[0]} was given; only --parallel, --retries, --retry and "
            "--confirm go with a DIR"
        )
    if rest:
        parser.refuse(rest[0])
    return True


def _search(algo: str, args: Any, rest: Sequence[str], parser: Parser) -> tuple[list[Experiment], Any, Path, bool]:
    """The experiment of a search, its settings, directory and whether `--trust` was given."""
    from penstock.studies.tune import directory, prepared, search_settings

    for option in (*rest, *(["--seeds"] if args.seeds else [])):
        name = option.removeprefix("--").split("=")[0]
        if option.startswith("--") and name in _OURS:
            raise ConfigError(f"{option.split('=')[0]} does not go with a search; use {_OURS[name]}")
    exp, init, trust, _ = _experiment(algo, args, rest, parser)
    exp = prepared(exp)
    settings = search_settings(
        exp,
        dict(_pairs(args.search, "--search", '"algo.lr=loguniform(1e-5,1e-2)"')),
        args.scheduler or "asha",
        args.trials or 16,
        args.metric,
        args.mode or "max",
        args.suggest or "tpe",
        args.interval,
        args.eta or 3,
        synchronous=(args.parallel or 1) == 1,
        init=init,
    )
    return [exp], settings, directory(exp, args.dir), trust


def _sweep(algo: str, args: Any, rest: Sequence[str], parser: Parser) -> tuple[list[Experiment], Any, Path, bool]:
    """The experiments of a sweep, its settings, directory and whether `--trust` was given."""
    from penstock.core.config import split_values
    from penstock.studies.space import SEED, grid_names, read_space
    from penstock.studies.tune import FIXED, check_grid, directory, prepared, sweep_settings

    if (wrong := next((name for name in _OF_SEARCH if getattr(args, name) not in (None, [])), None)) is not None:
        raise ConfigError(
            f"--{wrong} is of a search, and this is a sweep; use penstock tune without --grid and --seeds"
        )
    for option in rest:
        name = option.removeprefix("--").split("=")[0]
        if option.startswith("--") and name in ("run.dir", SEED):
            raise ConfigError(f"{option.split('=')[0]}: {FIXED[name]}")
    grid = {path: split_values(text) for path, text in _pairs(args.grid, "--grid", _GRID)}
    check_grid(grid)
    seeds = tuple(args.seeds or (0,))
    read_space({**grid, SEED: seeds}, grid=True)
    exps: list[Experiment] = []
    said = None
    for point in grid_names(grid).values() if grid else [{}]:
        said = _experiment(algo, args, [*rest, *(w for path, x in point.items() for w in _words(path, x))], parser)
        exp = prepared(said[0], sweep=True)
        exps += [replace(exp, run=replace(exp.run, seed=seed)) for seed in seeds]
    assert said is not None
    _, init, trust, measured = said
    settings = sweep_settings(exps, {**grid, SEED: seeds}, args.metric, args.mode or "max", init, measured)
    return exps, settings, directory(exps[0], args.dir, "sweep"), trust


def _words(path: str, value: str) -> list[str]:
    """An option as arguments: `--algo.lr 1e-3`; of a value in square brackets `--algo.net.hidden 64 64`."""
    from penstock.core.config import split_values

    if value.startswith("[") and value.endswith("]"):
        return [f"--{path}", *filter(None, split_values(value[1:-1]))]
    return [f"--{path}={value}"] if value.startswith("-") else [f"--{path}", value]


def _pairs(texts: Sequence[str], option: str, example: str) -> list[tuple[str, str]]:
    """The settings of `--search` or `--grid` and their forms or values, each setting once."""
    pairs: dict[str, str] = {}
    for text in texts:
        path, equals, value = text.removeprefix("--").partition("=")
        if not equals or not path:
            form = "form" if option == "--search" else "value,value"
            raise ConfigError(f"{option} {text!r}; expected setting={form}, e.g. {option} {example}")
        if path in pairs:
            raise ConfigError(f"{option} names {path} twice")
        pairs[path.replace("-", "_") if option == "--search" else path] = value
    return list(pairs.items())


def _experiment(algo: str, args: Any, rest: Sequence[str], ours: Parser) -> tuple[Experiment, Given | None, bool, bool]:
    """The experiment of `penstock train` with these arguments, --init, --trust, and whether its sampler is "auto".

    Raises or exits as `train` does.
    """
    found, words = _of_train(args, rest, ours)
    search_here(modules_named([args.suggest, *args.search]))
    with _nothing_started(algo, rest):
        return experiment(algo, found, words)[0], of_words(found.init), found.trust, found.sampler == "auto"


def _of_train(args: Any, rest: Sequence[str], ours: Parser) -> tuple[Any, list[str]]:
    """The options of `penstock train` among these, and those of settings."""
    parser = train_parser()
    found, words = parser.parse_known_args(list(rest))
    if (odd := next((w for w in words if w.startswith("--") and "." not in w.split("=")[0]), None)) is not None:
        ours.refuse(odd, [text for action in parser._actions for text in action.option_strings])
    if found.env is None and found.config is None and not any(text.startswith("env=") for text in args.grid):
        raise ConfigError(f"--env is missing: penstock {ours.prog.split()[-1]} ALGO --env ID ...")
    found.trust = found.trust or args.trust
    return found, words


@contextlib.contextmanager
def _nothing_started(algo: str, rest: Sequence[str]) -> Generator[None]:
    try:
        yield
    except SystemExit:
        print(f"nothing was started; these options are wrong: {algo} {' '.join(rest)}", file=sys.stderr)
        raise


def _parser(name: str) -> Parser:
    launch = name == "launch"
    parser = Parser(
        name,
        (_LAUNCH if launch else _DESCRIPTION).replace("{both}", _BOTH),
        usage=f"penstock {name} ALGO --env ID {'--grid K=V,V' if launch else '--search K=FORM'} [OPTIONS]   or   "
        f"penstock {name} DIR",
    )
    parser.add_argument(
        "--grid",
        nargs="+",
        action="extend",
        default=[],
        metavar="K=V,V",
        help="settings that vary, and their values; [64,64] is one value of several numbers",
    )
    parser.add_argument(
        "--seeds", type=seed_list, metavar="1,2,3", help="of a sweep: one run of each combination for each (default 0)"
    )
    parser.add_argument(
        "--search", nargs="+", action="extend", default=[], metavar="K=FORM", help="settings that vary, and their forms"
    )
    parser.add_argument("--scheduler", metavar="NAME", help="asha, median, pbt or none (default asha)")
    parser.add_argument("--trials", type=whole_number, metavar="N", help="how many (default 16)")
    parser.add_argument(
        "--parallel", "--slots", type=whole_number, metavar="N", help="runs at a time (default: of a sweep as many as "
        "keep the cores busy, of a search 1)"
    )  # fmt: skip
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
        "--retries", type=number_from_0, default=int(not launch), metavar="N", help="attempts after the first, of a "
        f"run whose environment or process died (default {int(not launch)})"
    )  # fmt: skip
    parser.add_argument("--retry", nargs="*", metavar="NAME", help="run again what failed, all or by name")
    parser.add_argument(
        "--confirm", type=number_from_0, default=0, metavar="N", help="then train the best settings with N other seeds"
    )
    parser.add_trust("DIR")
    parser.rare("--suggest", "--interval", "--eta", "--address", "--cpus", "--retries", "--trust")
    return parser
