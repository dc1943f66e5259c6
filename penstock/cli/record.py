"""`penstock record RUN --dataset DIR`: writes episodes of a trained policy into a dataset."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.cli.options import Parser, played_env, require_run

_EVERY_S = 5.0


def run(argv: list[str]) -> int:
    """Records by the arguments; returns the exit code."""
    parser = Parser(
        "record",
        "Plays episodes with the policy of a run and writes them into a dataset, to learn from offline.\n"
        "Ctrl-C keeps the whole episodes so far, and the dataset is complete.",
    )
    parser.add_policy(episodes=100)
    parser.add_argument("--dataset", metavar="DIR", required=True, help="where to write; must be empty or absent")
    parser.add_argument(
        "--format",
        choices=("penstock", "minari"),
        default="penstock",
        help="penstock, or Minari's HDF5 layout (extra offline); default penstock",
    )
    parser.add_argument(
        "--append", action="store_true", help="add to the dataset that is there, or finish a half-written one"
    )
    args = parser.parse_args(argv)
    require_run(Path(args.run))
    env, added = played_env(args)
    from penstock.run.progress import print_summary
    from penstock.run.recording import record

    started = shown = time.monotonic()

    def tell(episodes: int, steps: int, return_: float) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= _EVERY_S:
            shown = now
            print(
                f"{episodes:,}/{args.episodes:,} episodes  {steps:,} steps  {steps / (now - started):,.0f} steps/s  "
                f"last return {return_:,.1f}",
                flush=True,
            )

    found = record(
        args.run,
        args.dataset,
        args.episodes,
        which=args.which,
        deterministic=not args.stochastic,
        seed=args.seed,
        append=args.append,
        file_format=args.format,
        env=env,
        **added,
        trust=args.trust,
        progress=tell,
    )
    rows = {
        "checkpoint": f"{args.which}, step {found.checkpoint:,}",
        "episodes": f"{len(found.returns):,} of {args.episodes:,}, actions "
        f"{'sampled' if args.stochastic else 'deterministic'}; {found.total:,} in the dataset",
        "steps": f"{found.steps:,}",
    }
    if len(found.returns):
        low, high = found.returns.min(), found.returns.max()
        rows["return"] = f"{found.returns.mean():,.2f} +- {found.returns.std():,.2f}  (min {low:,.2f}, max {high:,.2f})"
    rows["dataset"] = f"{found.path}, {'Minari HDF5' if args.format == 'minari' else 'penstock'}"
    rows["next"] = f"penstock train bc --env {found.env} --sampler offline --sampler.dataset {found.path}"
    print_summary(f"recording of {args.run}", rows)
    return 128 + found.stopped_by if found.stopped_by else 0
