"""`penstock replay info|export`: the content of a stored replay; its rows for numpy, or its episodes as a dataset."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.cli.options import Parser
from penstock.core.errors import CheckpointError
from penstock.run.files import RUN_EXPECTED

_DESCRIPTION = """Shows the replay of a checkpoint, or writes it for numpy or as a dataset (docs/runs.md).

  penstock replay info runs/a
  penstock replay info runs/a/checkpoints/000000050000
  penstock replay export runs/a --to replay.npz        every row
  penstock replay export runs/a --to data/a            the whole episodes, as a dataset
"""


def run(argv: list[str]) -> int:
    """Shows or exports a replay by the arguments; returns the exit code."""
    parser = Parser("replay", _DESCRIPTION)
    parser.add_argument("action", choices=("info", "export"), help="print a summary, or write a copy")
    parser.add_argument("path", metavar="PATH", help="run directory, or checkpoint directory")
    parser.add_argument("--which", default="last", help="checkpoint of a run: last, best, or a step (default last)")
    parser.add_argument("--policy", metavar="ID", help="policy of the replay, in a run with several")
    parser.add_argument(
        "--to", metavar="FILE.npz|DIR", help="where to export to: the rows into a new FILE.npz, the episodes into DIR"
    )
    args = parser.parse_args(argv)
    if (args.action == "export") != bool(args.to):
        parser.error("export needs --to FILE.npz or --to DIR" if args.action == "export" else "info takes no --to")
    if not os.path.exists(args.path):
        raise CheckpointError(f"{args.path} is no run or checkpoint: there is no such folder; {RUN_EXPECTED}")
    if args.action == "export":
        return _export(Path(args.path), Path(args.to), args.which, args.policy)
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from penstock.run.files.stored_experiment import as_checkpoint_error
    from penstock.run.progress import print_summary
    from penstock.run.replays.stored_replay import fields, open_replay, open_replays, summary

    path = Path(args.path)
    replays = open_replays(path, args.which)
    replays = replays if args.policy is None else {args.policy: open_replay(path, args.which, args.policy)}
    for replay in replays.values():
        with as_checkpoint_error(replay.path):
            rows, table = summary(replay), fields(replay)
        print_summary(f"replay of {path}", rows)
        arrays = Table("field", "dtype", "shape", Column("bytes", justify="right"))
        for row in table:
            arrays.add_row(*(Text(cell) for cell in row))
        Console(highlight=False).print(arrays)
    return 0


def _export(path: Path, to: Path, which: str, policy: str | None) -> int:
    """Writes a new file or dataset, never a part of one under its name."""
    import numpy as np

    from penstock.core.errors import ConfigError
    from penstock.run.replays.contents import load_replay, replay_to_dataset

    if to.suffix not in (".npz", ""):
        raise ConfigError(
            f"--to {to} ends in {to.suffix!r}; expected .npz for all rows, or a name without a suffix for a dataset of "
            f"the whole episodes: use {to.with_suffix('.npz').name} or {to.name.replace('.', '-')}"
        )
    if not to.parent.is_dir():
        raise ConfigError(f"there is no folder {to.parent} to write {to.name} into; make it, or choose another --to")
    if not to.suffix:
        episodes = replay_to_dataset(path, to, which, policy=policy)
        print(f"{to}: {episodes:,} whole episodes")
        return 0
    if to.exists():
        raise ConfigError(f"{to} is there already and was not touched; choose another --to")
    arrays = load_replay(path, which, policy=policy)
    unnamed = to.with_name(f".{to.name}.unfinished-{os.getpid()}")
    try:
        with open(unnamed, "xb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        unnamed.rename(to)
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error.strerror or error}; choose another --to") from error
    finally:
        unnamed.unlink(missing_ok=True)
    print(f"{to}: {to.stat().st_size:,} bytes")
    return 0
