"""`penstock train ALGO --env ID`: one run for each seed, with settings from preset and options."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cli.options import Parser, import_modules
from penstock.cli.settings import check_early, declared_settings, experiment, train_parser
from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.files.inits import Init, of_words

if TYPE_CHECKING:
    from penstock.run.experiment import Experiment
    from penstock.run.result import Result


def run(argv: list[str]) -> int:
    """Trains by the arguments; returns the exit code."""
    parser = train_parser()
    algo = argv[0] if argv and not argv[0].startswith("-") else None
    args, rest = parser.parse_known_args(argv[algo is not None :])
    wants_help = any(a in ("-h", "--help", "--help-all") for a in rest)
    if wants_help:
        return _help(parser, algo, args, "--help-all" in rest)
    if args.config is None and (algo is None or args.env is None):
        print(f"penstock train: {_missing(algo, args.env, rest)}\nAll options: penstock train --help", file=sys.stderr)
        return 2
    check_early(algo, args, rest)
    if args.sampler != "cpu":
        return _train(algo, args, rest)
    from penstock.processes.fork_client import end_ahead, start_ahead
    from penstock.processes.python import one_thread_environment
    from penstock.samplers import ACTING

    start_ahead(ACTING, one_thread_environment())  # before torch is imported here
    try:
        return _train(algo, args, rest)
    finally:
        end_ahead()


def _train(algo: str | None, args: argparse.Namespace, rest: list[str]) -> int:
    exp, found = experiment(algo, args, rest)
    if exp.run.progress != "off":
        if args.config is not None:
            print(f"settings of {args.config}; options override them")
        elif found is None:
            from penstock.run.presets import why_no_preset

            assert algo is not None
            said = why_no_preset(algo, args.env or "", exp.env_kwargs, args.wrappers)
            said = "no preset asked for: default settings" if args.preset == "none" else said
            print(f"{said}; {exp.run.steps:,} steps (--run.steps)")
        else:
            short = {key: f"{x:.6g}" if isinstance(x, float) else x for key, x in found.changes.items()}
            values = ", ".join(f"{key}={value}" for key, value in short.items())
            print(f"preset {found.name}: {values}\n  {found.why} Options override it; --preset none switches it off.")
    return _train_all(exp, args.seeds or [exp.run.seed], of_words(args.init), args.sampler == "auto", args.trust)


def _help(parser: Parser, algo: str | None, args: argparse.Namespace, whole: bool) -> int:
    """Prints the options of `train`, and with an algorithm its settings; those of a class of one's own are imported."""
    parser.print_help(whole=whole)
    if algo is None:
        return 0
    from penstock.cli.help import settings_help

    import_modules(args.imports, [algo, args.sampler, args.inner])
    settings = declared_settings(algo, args.sampler, args.inner)
    if ":" in algo:
        from penstock.algos import make_algo

        settings = {"algo": make_algo(algo), **settings}
    print(settings_help(settings, whole))
    return 0


def _missing(algo: str | None, env: str | None, rest: list[str]) -> str:
    """The part that a command line lacks, and a corrected line where its words stand elsewhere."""
    from penstock.algos import ALGOS

    said = "ALGO is missing; it comes first" if algo is None else "--env is missing"
    words = [word for word in (algo, *rest[:1]) if word and not word.startswith("-")]
    meant = next((word for word in words if word in ALGOS), None)
    other = env or next((word for word in words if word != meant), None)
    if meant is None or other is None:
        return f"{said}: penstock train {algo or 'ppo'} --env ID"
    return f"{said}; did you mean: penstock train {meant} --env {other}?"


def _train_all(exp: Experiment, seeds: list[int], init: Init | None, auto: bool, trust: bool) -> int:
    from penstock.run.bench.cache import auto_sampler
    from penstock.run.files.rundir import free_run_dir
    from penstock.run.files.supplied_arguments import require_storable
    from penstock.run.loop import train
    from penstock.run.plan import Plan
    from penstock.run.result import in_a_line

    def of_seed(seed: int) -> Experiment:
        dir_ = f"{exp.run.dir}-s{seed}" if len(seeds) > 1 and exp.run.dir is not None else exp.run.dir
        return replace(exp, run=replace(exp.run, seed=seed, dir=dir_))

    require_storable(exp, "penstock eval, record and resume make it again by what was stored")
    for seed in seeds:  # before the first begins, not hours later
        free_run_dir(of_seed(seed))
    if auto:
        plan = Plan.with_usual_sampler(exp)
        exp = plan.with_sampler(auto_sampler(plan)).exp
    lost, dirs = False, list[str]()
    for seed in seeds:
        result = train(of_seed(seed), init, trust=trust)
        dirs.append(str(result.run_dir))
        if exp.run.progress == "off":
            print(in_a_line(result))
        draw_curve(result, exp.run.progress == "off")
        lost = told_unsaved(result) or lost
    if len(seeds) > 1 and exp.run.progress != "off":
        print(
            f"all seeds in one picture: penstock plot {shlex.join(dirs if exp.run.dir is None else [str(exp.run.dir)])}"
        )
    return CheckpointError.exit_code if lost else 0


def told_unsaved(result: Result) -> bool:
    """True if the last checkpoint could not be written; then prints why, as the last line of the run."""
    if result.unsaved:
        print(f"penstock: CheckpointError: {result.unsaved}", file=sys.stderr, flush=True)
    return bool(result.unsaved)


def draw_curve(result: Result, quiet: bool) -> None:
    """Draws a run's learning curve; without any, or on a full disk, it prints the reason and the run counts as good."""
    from penstock.run.plots.figure import plot_runs

    try:
        picture = plot_runs([result.run_dir], result.run_dir / "plots" / "learning-curve.png")
    except (ConfigError, OSError) as error:
        ended = len(result.episodes) or isinstance(error, OSError)
        why = error if ended else f"no episode ended in {result.env_steps:,} steps"
        print(f"no learning curve drawn: {why}", file=sys.stderr)
        return
    if not quiet:
        print(f"learning curve: {picture}")
