"""`penstock train ALGO --env ID`: settings from preset and options, then one run for each seed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any

from penstock.cli.options import Parser, here_on_path, import_modules, key_values
from penstock.core.errors import CheckpointError, ConfigError

_DESCRIPTION = """Trains an algorithm on an environment and leaves everything in a run directory.

ALGO comes first: ppo, a2c, ... (penstock algos), or module:NAME of your own.

  penstock train ppo --env CartPole-v1
  penstock train ppo --env Pendulum-v1 --algo.lr "linear(1e-3, 0)" --run.steps 200000 --run.seed 1 --run.dir runs/a
  penstock train my_module:MyAlgo --env ALE/Pong-v5 --import ale_py --seeds 1,2,3

Settings of the algorithm (--algo.X), the sampler (--sampler.X) and the run (--run.X):
  penstock train ppo --help
"""


def run(argv: list[str]) -> int:
    """Trains as the arguments say; gives the exit code."""
    parser = _parser()
    algo = argv[0] if argv and not argv[0].startswith("-") else None
    args, rest = parser.parse_known_args(argv[algo is not None :])
    wants_help = any(a in ("-h", "--help") for a in rest)
    if algo is None or (args.env is None and not wants_help):
        parser.print_help(sys.stdout if wants_help else sys.stderr)
        if not wants_help:
            missing = (
                "ALGO is missing; it comes first: penstock train ppo --env ID" if algo is None else "--env is missing"
            )
            print(f"\npenstock train: {missing}", file=sys.stderr)
        return 0 if wants_help else 2
    here_on_path()
    import_modules(args.imports)
    # Torch is imported from here on: everything above must stay quick.
    from penstock.run.experiment import Experiment
    from penstock.run.presets import find_preset, named_preset, with_preset

    found = None
    if args.preset is None:
        found = find_preset(algo, args.env) if args.env else None
    elif args.preset != "none":
        found = named_preset(args.preset if "/" in args.preset else f"{algo}/{args.preset}")
    exp: Experiment = with_preset(algo, args.env or "", found)
    if args.sampler == "auto":  # until it is chosen, a stand-in that takes T, B and what else concerns the batches
        from penstock.run.bench import base_sampler

        exp = replace(exp, sampler=base_sampler(exp))
    elif args.sampler is not None:
        from penstock.samplers import find_sampler, sized

        exp = replace(exp, sampler=sized(find_sampler(args.sampler)(), exp.sampler.spec))
    if wants_help:
        parser.print_help()
    settings = _settings(exp, rest)
    exp = replace(
        exp, algo=settings.algo, sampler=settings.sampler, run=settings.run,
        env_kwargs={**exp.env_kwargs, **key_values(args.env_kwargs, "--env-kwargs")},
        wrappers=(*exp.wrappers, *args.wrappers), info_keys=(*exp.info_keys, *args.info_keys),
        imports=(*exp.imports, *args.imports), env_checks=args.env_checks or exp.env_checks,
    )  # fmt: skip
    if args.agent is not None:
        from penstock.core.config import import_object

        exp = replace(exp, algo=replace(exp.algo, agent=import_object(args.agent)))
    if exp.run.progress != "off":
        if found is None:
            print(
                f"no preset {'asked for' if args.preset == 'none' else f'for {algo} on {args.env}'}: default settings"
            )
        else:
            values = ", ".join(f"{key}={value}" for key, value in found.changes.items())
            print(f"preset {found.name}: {values}\n  {found.why} Options override it; --preset none switches it off.")
    return _train_all(exp, args.seeds or [exp.run.seed], args.init, args.sampler == "auto")


def _train_all(exp: Any, seeds: list[int], init: str | None, auto: bool) -> int:
    from penstock.run.bench_cache import auto_sampler
    from penstock.run.entry import train
    from penstock.run.rundir import free_run_dir

    def of_seed(seed: int) -> Any:
        dir_ = f"{exp.run.dir}-s{seed}" if len(seeds) > 1 and exp.run.dir is not None else exp.run.dir
        return replace(exp, run=replace(exp.run, seed=seed, dir=dir_))

    for seed in seeds:  # before the first begins, not hours later
        free_run_dir(of_seed(seed))
    if auto:
        exp = replace(exp, sampler=auto_sampler(exp))
    lost = False
    for seed in seeds:
        result = train(of_seed(seed), init)
        lost = lost or result.checkpoint is None
        draw_curve(result.run_dir, exp.run.progress == "off")
    return CheckpointError.exit_code if lost else 0


def draw_curve(run_dir: Path, quiet: bool) -> None:
    """Draws a run's learning curve; a run without one, or a full disk, is no failure of the run."""
    from penstock.run.plots import plot_runs

    try:
        picture = plot_runs([run_dir], run_dir / "plots" / "learning-curve.png")
    except (ConfigError, OSError) as error:
        print(f"no learning curve drawn: {error}", file=sys.stderr)
        return
    if not quiet:
        print(f"learning curve: {picture}")


def _parser() -> Parser:
    parser = Parser("train", _DESCRIPTION, add_help=False, usage="penstock train ALGO --env ID [OPTIONS]")
    parser.add_argument("--env", metavar="ID", help="Gymnasium id, or module:qualname of something that makes one")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="PKG",
                        help="import a package first, because it registers environments; may be repeated")  # fmt: skip
    parser.add_argument(
        "--env-kwargs", nargs="+", default=[], metavar="K=V", help="keyword arguments of the environment"
    )
    parser.add_argument(
        "--wrappers", nargs="+", default=[], metavar="M:N", help="wrappers as module:qualname, in order"
    )
    parser.add_argument("--info-keys", nargs="+", default=[], metavar="KEY", help="numeric info keys to record and log")
    parser.add_argument("--env-checks", choices=("sampled", "always", "finite", "off"),
                        help="how often observations are checked for NaN and bounds (default sampled)")  # fmt: skip
    parser.add_argument(
        "--sampler",
        metavar="NAME",
        help="serial, cpu, gpu, alternating, no-overlap-alternating, async-serial, async-cpu, async-gpu, "
        "async-alternating, module:NAME, or auto: the fastest here, measured once in 20 s",
    )
    parser.add_argument("--preset", metavar="NAME", help="another preset, or none (default: the environment's)")
    parser.add_argument("--algo.agent", dest="agent", metavar="M:N", help="your own agent function as module:name")
    parser.add_argument("--seeds", type=_seeds, metavar="1,2,3", help="one run for each seed")
    parser.add_argument("--init", metavar="RUN", help="start from the networks and normalisers of another run")
    return parser


def _seeds(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}; expected whole numbers between commas, e.g. 1,2,3")
    seeds = [int(part) for part in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} names a seed twice")
    return seeds


def _settings(exp: Any, rest: list[str]) -> Any:
    """algo, sampler and run from `--algo.X`, `--sampler.X` and `--run.X`, their present values being the defaults."""
    import tyro

    parts = ("algo", "sampler", "run")
    known = [f"--{name}.{f.name}" for name in parts for f in fields(getattr(exp, name))]
    for option in rest:
        if option.startswith("--") and option != "--help" and option[2:].split(".")[0] not in parts:
            _parser().refuse(option, known)
    cls = make_dataclass("Settings", [(name, type(getattr(exp, name))) for name in parts], frozen=True)
    default = cls(**{name: getattr(exp, name) for name in parts})
    config = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff, tyro.conf.SuppressFixed)
    return tyro.cli(cls, args=rest, default=default, prog="penstock train ALGO", config=config, description="Settings:")
