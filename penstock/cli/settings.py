"""The experiment that the options of `penstock train` describe, for `train` and for each run of `launch`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, make_dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cli.options import Parser, import_modules, key_values

if TYPE_CHECKING:
    from penstock.run.experiment import Experiment
    from penstock.run.presets import Preset

_DESCRIPTION = """Trains an algorithm on an environment and leaves everything in a run directory.

ALGO comes first: ppo, a2c, ... (penstock algos), or module:NAME of your own.

  penstock train ppo --env CartPole-v1
  penstock train ppo --env Pendulum-v1 --algo.lr "linear(1e-3, 0)" --run.steps 200000 --run.seed 1 --run.dir runs/a
  penstock train my_module:MyAlgo --env ALE/Pong-v5 --import ale_py --seeds 1,2,3

Settings of the algorithm (--algo.X), the sampler (--sampler.X) and the run (--run.X):
  penstock train ppo --help
"""


def train_parser() -> Parser:
    """A parser of the options of `penstock train` that are not settings of algorithm, sampler and run."""
    parser = Parser("train", _DESCRIPTION, add_help=False, usage="penstock train ALGO --env ID [OPTIONS]")
    parser.add_argument("--env", metavar="ID", help="Gymnasium id, or module:qualname of something that makes one")
    parser.add_environment()
    parser.add_argument("--info-keys", nargs="+", default=[], metavar="KEY", help="numeric info keys to record and log")
    parser.add_argument(
        "--env-checks",
        choices=("sampled", "always", "finite", "off"),
        help="how often observations are checked for NaN and bounds (default sampled)",
    )
    parser.add_argument(
        "--sampler",
        metavar="NAME",
        help="serial, cpu, gpu, alternating, no-overlap-alternating, async-serial, async-cpu, async-gpu, "
        "async-alternating, offline, module:NAME, or auto: the fastest here, measured once in 20 s",
    )
    parser.add_argument("--preset", metavar="NAME", help="another preset, or none (default: the environment's)")
    parser.add_argument("--algo.agent", dest="agent", metavar="M:N", help="your own agent function as module:name")
    parser.add_argument("--seeds", type=seed_list, metavar="1,2,3", help="one run for each seed")
    parser.add_argument("--init", metavar="RUN", help="start from the networks and normalisers of another run")
    parser.add_trust("the run of --init")
    return parser


def experiment(algo: str, args: Any, rest: Sequence[str]) -> tuple[Experiment, Preset | None]:
    """The experiment, and the preset that it is based on or None.

    With `--sampler auto` its sampler is a SerialSampler with T, B and all else that concerns the batches, until the
    fastest is chosen.

    Args:
        args, rest: the result of `train_parser().parse_known_args`. For help alone, --env may be missing.

    Raises:
        ConfigError: an unknown name, or settings that contradict each other.
        SystemExit: after help, or after a message about a wrong option.
    """
    import_modules(args.imports)
    # Torch is imported from here on: everything above must stay quick.
    from penstock.core.config import import_object, override
    from penstock.run.bench.search import base_sampler
    from penstock.run.presets import find_preset, is_full_name, named_preset, with_preset
    from penstock.samplers import find_sampler, sized

    found = None
    if args.preset is None:
        found = find_preset(algo, args.env) if args.env else None
    elif args.preset != "none":
        found = named_preset(args.preset if is_full_name(args.preset) else f"{algo}/{args.preset}")
    exp = with_preset(algo, args.env or "", found)
    if args.sampler == "auto":
        exp = replace(exp, sampler=base_sampler(exp))
    elif args.sampler is not None:
        exp = replace(exp, sampler=sized(find_sampler(args.sampler)(), exp.sampler_settings.spec))
    settings = _settings(exp, list(rest))
    exp = replace(
        exp,
        algo=settings.algo,
        sampler=settings.sampler,
        run=settings.run,
        env_kwargs={**exp.env_kwargs, **key_values(args.env_kwargs, "--env-kwargs")},
        wrappers=(*exp.wrappers, *args.wrappers),
        info_keys=(*exp.info_keys, *args.info_keys),
        imports=(*exp.imports, *args.imports),
        env_checks=args.env_checks or exp.env_checks,
    )
    return exp if args.agent is None else override(exp, {"algo.agent": import_object(args.agent)}), found


def seed_list(text: str) -> list[int]:
    """The seeds in a text such as 1,2,3, none of them twice."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}; expected whole numbers between commas, e.g. 1,2,3")
    seeds = [int(part) for part in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} names a seed twice")
    return seeds


def _settings(exp: Experiment, rest: list[str]) -> Any:
    """Settings algo, sampler and run with changes by `--algo.X`, `--sampler.X` and `--run.X`."""
    import tyro

    parts = ("algo", "sampler", "run")
    known = [f"--{name}.{f.name}" for name in parts for f in fields(getattr(exp, name))]
    for option in rest:
        if option.startswith("--") and option != "--help" and option[2:].split(".")[0] not in parts:
            train_parser().refuse(option, known)
    if any(option in ("-h", "--help") for option in rest):
        train_parser().print_help()
    cls = make_dataclass("Settings", [(name, type(getattr(exp, name))) for name in parts], frozen=True)
    default = cls(**{name: getattr(exp, name) for name in parts})
    config = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff, tyro.conf.SuppressFixed)
    return tyro.cli(cls, args=rest, default=default, prog="penstock train ALGO", config=config, description="Settings:")
