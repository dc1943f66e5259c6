"""`penstock plot RUN...`: a picture of learning curves."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from penstock.cli.options import Parser
from penstock.core.errors import ConfigError


def run(argv: list[str]) -> int:
    """Draws curves by the arguments; returns the exit code."""
    parser = Parser(
        "plot",
        "Draws curves over steps and over wall time. Seeds of one environment, algorithm and settings become one "
        "curve: their interquartile mean with a 95% bootstrap band.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run directories, folders that hold some, or the --run.dir of a train with --seeds",
    )
    parser.add_argument(
        "--metric", help="metric on the y-axis (default rollout/ep_rew_mean, of self-play self_play/elo)"
    )
    parser.add_argument(
        "--out", help="picture, .png .pdf or .svg (default: RUN/plots/METRIC.png, of --seeds DIR-plots)"
    )
    args = parser.parse_args(argv)
    from penstock.run.plots.run_table import run_dirs

    runs = [run for path in args.runs for run in run_dirs(Path(path))]
    from penstock.run.plots.figure import plot_runs, usual_metric

    first = Path(args.runs[0])  # of a train with --seeds, which lie beside it, it need not exist
    folder = first / "plots" if os.path.exists(first) else first.with_name(f"{first.name}-plots")
    metric = args.metric or usual_metric(runs)
    out = Path(args.out) if args.out else folder / f"{metric.replace('/', '-')}.png"
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("default")
        try:
            print(plot_runs(runs, out, metric))
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error
    for remark in remarks:
        print(f"penstock: {remark.message}", file=sys.stderr)
    return 0
