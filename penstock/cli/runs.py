"""`penstock runs [DIR]`: a table of runs with their last numbers."""

from __future__ import annotations

import sys
import warnings

from penstock.cli.options import Parser, key_values

_DESCRIPTION = """Lists runs: environment, algorithm, seed, steps, last returns, and the settings in which they differ.

  penstock runs
  penstock runs runs/a runs/b
  penstock runs --filter env=CartPole-v1 algo.lr=0.001
  penstock runs --sort evaluation --reverse

The same as a table in Python: penstock.runs("runs").
"""


def run(argv: list[str]) -> int:
    """Prints the table by the arguments; returns the exit code."""
    parser = Parser("runs", _DESCRIPTION)
    parser.add_argument("dirs", nargs="*", metavar="DIR", help="runs, or folders that hold some (default runs)")
    parser.add_argument(
        "--filter", nargs="+", default=[], metavar="K=V", help="only runs of these columns or settings, e.g. algo=ppo"
    )
    parser.add_argument("--sort", metavar="K", help="order by a column or setting, e.g. evaluation or algo.lr")
    parser.add_argument("--reverse", action="store_true", help="the largest first")
    args = parser.parse_args(argv)
    equal = key_values(args.filter, "--filter")
    from penstock.run.plots.run_table import runs  # it loads numpy, which help does not need

    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("default")
        found = runs(*args.dirs).filter(**equal)
        print(found if args.sort is None else found.sort(args.sort, args.reverse))
    for remark in remarks:
        print(f"penstock: {remark.message}", file=sys.stderr)
    return 0
