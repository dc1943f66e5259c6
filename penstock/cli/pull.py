"""`penstock pull user/name DIR`: a pushed policy from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.options import Parser
from penstock.core.machine import counted


def run(argv: list[str]) -> int:
    """Pulls by the arguments; returns the exit code."""
    parser = Parser(
        "pull",
        "Copies what `penstock push` wrote from the Hugging Face Hub into a folder, and nothing else that lies there.",
    )
    parser.add_argument("name", metavar="USER/NAME", help="repository; user/name@revision for another revision")
    parser.add_argument("folder", metavar="DIR", help="where to write; must be empty or absent")
    args = parser.parse_args(argv)
    from penstock.run.progress import print_summary
    from penstock.run.sharing.hub import pull_run

    done = pull_run(args.name, Path(args.folder))
    rows = {"pulled": ", ".join(done.files), "to": done.where}
    if done.left:
        rows["left there"] = counted(len(done.left), "other file")
    rows["next"] = f'ps.load("{done.where}/policy.safetensors")'
    print_summary(f"pull of {args.name}", rows)
    return 0
