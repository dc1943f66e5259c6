"""`penstock resume RUN`: goes on with a run from its newest good checkpoint."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from penstock.cli.options import Parser, dotted, import_modules, require_run
from penstock.core.errors import CheckpointError

_DESCRIPTION = """Goes on with a run from its newest good checkpoint, as if it had never stopped.

  penstock resume runs/a
  penstock resume runs/a --run.steps 400000      extends a finished run
  penstock resume runs/a --sampler.runners 3     goes on with other runners
  penstock resume runs/a --sampler serial        or with none

Only settings of the run (--run.X, not seed or dir) may change, and the sampler (--sampler NAME, --sampler.X) where it
collects the same batches: the slots of a batch are as many, and divided anew; so is a replay by --algo.replay.shards.
"""


def run(argv: list[str]) -> int:
    """Resumes by the arguments; returns the exit code."""
    parser = Parser("resume", _DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_import(", because it registers environments")
    parser.add_argument("--sampler", metavar="NAME", help="another sampler, as in penstock train")
    parser.add_argument("--sampler.inner", dest="inner", metavar="NAME", help="another sampler inside it")
    parser.add_trust()
    args, rest = parser.parse_known_args(argv)
    from penstock.core.names.declared import declared

    names = {"sampler": args.sampler, "sampler.inner": args.inner}
    changes = {path: name for path, name in names.items() if name is not None}
    changes |= dotted(rest, parser, [f"--run.{f.name}" for f in fields(declared("penstock.run.experiment:RunConfig"))])
    require_run(Path(args.run))
    import_modules(args.imports, [vars(args), rest], [args.run], args.trust)
    from penstock.cli.train import draw_curve, told_unsaved
    from penstock.run.loop import resume
    from penstock.run.result import in_a_line

    result = resume(args.run, changes, trust=args.trust)
    if json.loads((result.run_dir / "config.json").read_text())["experiment"]["run"]["progress"] == "off":
        print(in_a_line(result))
    draw_curve(result, quiet=True)
    return CheckpointError.exit_code if told_unsaved(result) else 0
