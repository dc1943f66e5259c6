"""`penstock resume RUN`: goes on with a run from its newest good checkpoint."""

from __future__ import annotations

from dataclasses import fields

from penstock.cli.options import Parser, dotted, import_modules
from penstock.core.errors import CheckpointError

_DESCRIPTION = """Goes on with a run from its newest good checkpoint, as if it had never stopped.

  penstock resume runs/a
  penstock resume runs/a --run.steps 400000      extends a finished run

Only settings of the run (--run.X, not seed or dir) may change.
"""


def run(argv: list[str]) -> int:
    """Resumes by the arguments; returns the exit code."""
    parser = Parser("resume", _DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_import(", because it registers environments")
    args, rest = parser.parse_known_args(argv)
    from penstock.run.experiment import RunConfig

    changes = dotted(rest, parser, [f"--run.{f.name}" for f in fields(RunConfig)])
    import_modules(args.imports)
    from penstock.cli.train import draw_curve
    from penstock.run.loop import resume

    result = resume(args.run, changes)
    draw_curve(result.run_dir, quiet=True)
    return CheckpointError.exit_code if result.checkpoint is None else 0
