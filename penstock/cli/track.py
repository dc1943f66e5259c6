"""`penstock track RUN`: sends a run to trackers after it was trained, or what they could not get meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.cli.options import Parser, import_modules, require_run

_DESCRIPTION = """Sends trackers what they lack of a run: rows, settings, versions, videos and the final policy.

  penstock track runs/a                       to those that it was trained with
  penstock track runs/a --trackers wandb      to others

Nothing is sent twice.
"""


def run(argv: list[str]) -> int:
    """Sends by the arguments; returns the exit code, 1 if a tracker lacks something still."""
    parser = Parser("track", _DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--trackers", nargs="+", default=[], metavar="NAME", help="tensorboard, wandb, mlflow, trackio or module:NAME"
    )
    parser.add_trust()
    args = parser.parse_args(argv)
    require_run(Path(args.run))
    import_modules([], [args.trackers], [args.run], args.trust)
    from penstock.run.tracking.send import send_run

    def say(text: str) -> None:
        print(f"penstock: {text}", file=sys.stderr)

    return 0 if send_run(Path(args.run), args.trackers, say, args.trust) else 1
