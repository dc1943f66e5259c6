"""`penstock bench samplers ALGO ENV`: the fastest sampler on this machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import Parser, early_id, import_modules, key_values, whole_number

if TYPE_CHECKING:
    from penstock.run.bench.search import Synchronous

_DESCRIPTION = """Measures which sampler is the fastest for an environment and an algorithm on this machine.

Each candidate collects batches for some seconds, with the environment and the algorithm's network; nothing is learned.

  penstock bench samplers ppo CartPole-v1
  penstock bench samplers ppo ALE/Pong-v5 --B 64 --seconds 10 --trace pong.json

`penstock train ... --sampler auto` does the same, 2 s each, and keeps the answer.
"""


def run(argv: list[str]) -> int:
    """Prints the tables and the recommended setting; returns the exit code."""
    args = _parser().parse_args(argv)
    from penstock.algos import ALGOS, require_algo_name  # it loads numpy, which help does not need

    if args.env in ALGOS and args.algo not in ALGOS:  # the other way round, as it was in 0.1.0
        args.algo, args.env = args.env, args.algo
    import_modules(args.imports, vars(args))
    require_algo_name(args.algo)
    early_id(args.env, args.imports)
    from penstock.core.spec import BatchSpec
    from penstock.run.bench.report import print_verdict, trace_sampler
    from penstock.run.bench.search import bench
    from penstock.run.plan import Plan
    from penstock.run.presets import find_preset, with_preset
    from penstock.run.timeline import check_path

    if args.trace is not None:
        check_path(args.trace)
    kwargs = key_values(args.env_kwargs, "--env-kwargs")
    found = None if args.no_preset else find_preset(args.algo, args.env, kwargs, args.wrappers)
    exp = with_preset(args.algo, args.env, found)
    settings = exp.sampler_settings
    exp = replace(
        exp,
        sampler=settings.sized(BatchSpec(args.T or settings.spec.T, args.B or settings.spec.B)),
        imports=(*exp.imports, *args.imports),
        env_kwargs={**exp.env_kwargs, **kwargs},
        env_options={**exp.env_options, **key_values(args.env_options, "--env-options")},
        wrappers=(*exp.wrappers, *args.wrappers),
        env_drop=(*exp.env_drop, *args.env_drop),
        env_text=args.env_text or exp.env_text,
        env_mask=exp.env_mask if args.env_mask is None else args.env_mask,
        run=replace(exp.run, device=args.device or exp.run.device),
    )
    plan = Plan.with_usual_sampler(exp)
    verdict = bench(plan, args.seconds, say=_progress)
    _progress("")
    print_verdict(exp, verdict, _command(args, verdict.best.sampler))
    if args.trace is not None:
        trace_sampler(plan, verdict, Path(args.trace))
        print(f"timeline: {args.trace} (opens in https://ui.perfetto.dev), {Path(args.trace).with_suffix('.png')}")
    return 0


def _command(args: Any, sampler: Synchronous) -> str:
    """The command line that trains with this sampler."""
    from penstock.run.bench.search import settings_of

    found = settings_of(sampler)
    parts = ["penstock", "train", args.algo, "--env", args.env]
    parts += [word for module in args.imports for word in ("--import", module)]
    parts += ["--env-kwargs", *args.env_kwargs] if args.env_kwargs else []
    parts += ["--env-options", *args.env_options] if args.env_options else []
    parts += ["--wrappers", *args.wrappers] if args.wrappers else []
    parts += ["--env-drop", *args.env_drop] if args.env_drop else []
    parts += ["--env-text", str(args.env_text)] if args.env_text else []
    parts += ["--env-mask", args.env_mask] if args.env_mask is not None else []
    parts += ["--preset", "none"] if args.no_preset else []
    parts += ["--run.device", args.device] if args.device else []
    parts += ["--sampler", found.pop("name")]
    if found.get("groups") == 1:
        del found["groups"]
    given = {"T": args.T, "B": args.B, **found}
    parts += [word for key, value in given.items() if value is not None for word in (f"--sampler.{key}", str(value))]
    return shlex.join(parts)


def _progress(text: str) -> None:
    """Shows on a terminal the measurement in progress, on a line that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{f'measuring {text} ...' if text else ''}", end="", file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser("bench samplers", _DESCRIPTION, usage="penstock bench samplers ALGO ENV [OPTIONS]")
    parser.add_argument("what", choices=("samplers",), help="the parts to compare: samplers")
    parser.add_argument("algo", metavar="ALGO", help="ppo, a2c, ... or module:NAME; its network is measured")
    parser.add_argument("env", metavar="ENV", help="Gymnasium id, or module:qualname of something that makes one")
    parser.add_argument(
        "--seconds", type=_positive, default=2.0, metavar="S", help="seconds for each sampler (default 2)"
    )
    parser.add_argument("--T", type=whole_number, metavar="N", help="time steps of a batch (default: as in training)")
    parser.add_argument("--B", type=whole_number, metavar="N", help="slots (default: as in training)")
    parser.add_argument("--device", metavar="NAME", help="where the network learns: cpu, cuda or cuda:1")
    parser.add_environment()
    parser.add_argument("--no-preset", action="store_true", help="the algorithm's defaults, not the preset's settings")
    parser.add_argument(
        "--trace", metavar="FILE.json", help="also a timeline of 20 batches with the recommended sampler"
    )
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds, e.g. 2")
    return value
