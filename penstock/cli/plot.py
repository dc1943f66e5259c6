"""`penstock plot RUN...`: a picture or table of runs."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

from penstock.cli.options import Parser, whole_number
from penstock.core.errors import ConfigError

_DESCRIPTION = """Draws runs over steps and over wall time. Seeds of one environment, algorithm and settings become one
curve: their interquartile mean with a 95% bootstrap band.

  penstock plot runs/a runs/b --out curves.png
  penstock plot runs --x updates --metric train/value_loss --smooth 5
  penstock plot runs --kind improvement
  penstock plot runs --table latex
"""


def run(argv: list[str]) -> int:
    """Draws, or prints a table, by the arguments; returns the exit code."""
    parser = Parser("plot", _DESCRIPTION)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run directories, folders that hold some, or the --run.dir of a train with --seeds",
    )
    parser.add_argument(
        "--metric", help="metric on the y-axis (default rollout/ep_rew_mean, of self-play self_play/elo)"
    )
    parser.add_argument("--x", choices=("steps", "wall", "updates"), help="draw over this alone")
    parser.add_argument(
        "--smooth", type=whole_number, default=1, metavar="N", help="mean of each value and the N - 1 before it"
    )
    parser.add_argument(
        "--kind",
        choices=("curves", "profiles", "improvement"),
        default="curves",
        help="curves, or of the runs' last values: profiles, the share of runs that exceed a level, or improvement, "
        "how often runs of one curve are better than those of another (default curves)",
    )
    parser.add_argument(
        "--table", choices=("md", "latex"), help="print the runs' last values and comparisons as a table, draw nothing"
    )
    parser.add_argument(
        "--out", help="picture, .png .pdf or .svg (default: RUN/plots/METRIC.png, of --seeds DIR-plots)"
    )
    args = parser.parse_args(argv)
    for option, given in (("--x", args.x), ("--out", args.out), ("--kind", args.kind != "curves")):
        if args.table is not None and given:
            raise ConfigError(f"{option} is of a picture, and --table draws none; leave one of them out")
    from penstock.run.plots.run_table import run_dirs  # it loads numpy, which help does not need

    runs = [run for path in args.runs for run in run_dirs(Path(path))]
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("default")
        if args.table is not None:
            from penstock.run.plots.scores import score_table

            print(score_table(runs, args.metric, args.smooth, args.table))
        else:
            _draw(args, runs)
    for remark in remarks:
        print(f"penstock: {remark.message}", file=sys.stderr)
    return 0


def _draw(args: Any, runs: list[Path]) -> None:
    from penstock.run.plots.curve_sets import usual_metric
    from penstock.run.plots.figure import plot_runs

    first = Path(args.runs[0])  # of a train with --seeds, which lie beside it, it need not exist
    folder = first / "plots" if os.path.exists(first) else first.with_name(f"{first.name}-plots")
    metric = args.metric or usual_metric(runs)
    ending = "" if args.kind == "curves" else f"-{args.kind}"
    out = Path(args.out) if args.out else folder / f"{metric.replace('/', '-')}{ending}.png"
    try:
        print(plot_runs(runs, out, metric, x=args.x, smooth=args.smooth, kind=args.kind))
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error
