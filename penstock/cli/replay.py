"""`penstock replay info|export`: the content of a stored replay, or a copy of it that numpy opens."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.options import Parser

_DESCRIPTION = """Shows the replay of a checkpoint, or writes it into a file that numpy opens (docs/runs.md).

  penstock replay info runs/a
  penstock replay info runs/a/checkpoints/000000050000
  penstock replay export runs/a --to replay.npz        or --to a/folder, one .npy for each array
"""


def run(argv: list[str]) -> int:
    """Shows or exports a replay by the arguments; returns the exit code."""
    parser = Parser("replay", _DESCRIPTION)
    parser.add_argument("action", choices=("info", "export"), help="print a summary, or write a copy")
    parser.add_argument(
        "path", metavar="PATH", help="run directory, checkpoint directory, or (info) an exported replay"
    )
    parser.add_argument("--which", default="last", help="checkpoint of a run: last, best, or a step (default last)")
    parser.add_argument("--policy", metavar="ID", help="of a run with several policies the one whose replay it is")
    parser.add_argument(
        "--to", metavar="FILE.npz|DIR", help="where to export to; must not be there yet, its parent must"
    )
    parser.add_argument(
        "--frames", action="store_true", help="export stacks of images as they are kept: single frames and their age"
    )
    args = parser.parse_args(argv)
    if (args.action == "export") != bool(args.to):
        parser.error("export needs --to FILE.npz or --to DIR" if args.action == "export" else "info takes no --to")
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from penstock.run.files.stored import undamaged
    from penstock.run.progress import print_summary
    from penstock.run.replays.export import export
    from penstock.run.replays.exported import exported
    from penstock.run.replays.stored import fields, open_replay, open_replays, summary

    path = Path(args.path)
    if args.action == "export":
        replay = open_replay(path, args.which, args.policy)
        with undamaged(replay.path):
            written = export(replay, Path(args.to), frames=args.frames)
        print(f"{args.to}: {written:,} bytes")
        return 0
    about = exported(path)
    if about is not None:
        shown = [about]
    else:
        replays = open_replays(path, args.which)
        replays = replays if args.policy is None else {args.policy: open_replay(path, args.which, args.policy)}
        shown: list[tuple[dict[str, str], list[tuple[str, str, str, str]]]] = []
        for replay in replays.values():
            with undamaged(replay.path):
                shown.append((summary(replay), fields(replay)))
    for rows, table in shown:
        print_summary(f"replay of {path}", rows)
        arrays = Table("field", "dtype", "shape", Column("bytes", justify="right"))
        for row in table:
            arrays.add_row(*(Text(cell) for cell in row))
        Console(highlight=False).print(arrays)
    return 0
