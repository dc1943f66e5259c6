"""`penstock push RUN user/name`: a run's policy and model card to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.options import Parser, import_modules, require_run
from penstock.core.machine import counted


def run(argv: list[str]) -> int:
    """Pushes by the arguments; returns the exit code."""
    parser = Parser(
        "push",
        "Pushes the policy of a run to the Hugging Face Hub: weights that ps.load opens, contract, model card,\n"
        "learning curve, newest video; nothing else. The endpoint is HF_ENDPOINT, the token that of `hf auth login`.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("name", metavar="USER/NAME", help="repository, made if there is none")
    parser.add_argument("--which", default="last", help="checkpoint: last, best, or a step (default last)")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_import(", because it holds the algorithm; may be repeated")
    parser.add_trust()
    parser.rare("--trust", "--import")
    args = parser.parse_args(argv)
    require_run(Path(args.run))
    import_modules(args.imports, runs=[args.run], trust=args.trust)
    from penstock.run.progress import print_summary
    from penstock.run.sharing.hub import push_run

    done = push_run(Path(args.run), args.name, args.which, private=args.private or None, trust=args.trust)
    rows = {"pushed": ", ".join(done.files), "to": done.where}
    if done.left:
        rows["left as they were"] = counted(len(done.left), "other file")
    rows["next"] = f'ps.load("hf:{args.name}")'
    print_summary(f"push of {args.run}", rows)
    return 0
