"""`penstock eval RUN`: plays episodes with a trained policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from penstock.cli.options import Parser, played_env, require_run, whole_number
from penstock.core.errors import ConfigError, MissingExtraError

_ANY_WIDTH = 100_000


def run(argv: list[str]) -> int:
    """Evaluates by the arguments; returns the exit code."""
    parser = Parser("eval", "Plays episodes with the policy of a run in environments of their own.")
    parser.add_policy(episodes=20)
    parser.add_argument("--video", action="store_true", help="record the first episodes into RUN/videos (extra video)")
    parser.add_argument("--video-episodes", type=whole_number, default=3, help="how many to record (default 3)")
    parser.add_argument(
        "--max-steps", type=whole_number, metavar="N", help="cut longer episodes (default: the run's eval_max_steps)"
    )
    parser.add_argument("--slots", type=whole_number, metavar="N", help="environments side by side (default 16)")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="WHOM",
        help="play matches against other runs, random, or module:function of an observation; --episodes each, "
        "with the seats changed for half of them",
    )
    parser.add_argument(
        "--seats",
        nargs="+",
        default=[],
        metavar="AGENT",
        help="with --against: agents that the first side plays in the first half, the other side in the second "
        "(default: every second agent)",
    )
    parser.add_argument(
        "--exploit",
        action="store_true",
        help="what a player gains who knows the policy, exactly, by a walk over a small game from --episodes starts",
    )
    parser.add_argument(
        "--exploit-steps",
        type=whole_number,
        metavar="N",
        help="the same of an exploiter trained for N steps, as a lower bound, in any environment of many agents",
    )
    parser.rare("--seats", "--exploit", "--exploit-steps", "--video-episodes", "--slots", "--max-steps")
    args = parser.parse_args(argv)
    if args.seats and not args.against:
        raise ConfigError(f"--seats {' '.join(args.seats)} without --against; a run by itself plays all agents")
    if not args.against:
        require_run(Path(args.run))
    env, added = played_env(args)
    if args.against:
        return _matches(args, env, added)
    if args.exploit or args.exploit_steps:
        return _exploit(args, env, added)
    from penstock.run.playing.evaluation import evaluate_run, record_video
    from penstock.run.playing.video import require_ffmpeg
    from penstock.run.progress import print_summary

    if args.video:
        require_ffmpeg()  # before all is played, not after
    opened: dict[str, Any] = {"env": env, **added, "which": args.which, "trust": args.trust}
    how: dict[str, Any] = {"seed": args.seed, "slots": args.slots, "max_steps": args.max_steps}
    episodes, step = evaluate_run(args.run, episodes=args.episodes, deterministic=not args.stochastic, **opened, **how)
    rows = {
        "checkpoint": f"{args.which}, step {step:,}",
        "episodes": f"{len(episodes)}, actions {'sampled' if args.stochastic else 'deterministic'}",
        "return": f"{episodes.mean_return:,.2f} +- {episodes.return_.std():,.2f}  "
        f"(min {episodes.return_.min():,.2f}, max {episodes.return_.max():,.2f})",
        "length": f"{episodes.mean_length:,.1f}",
    }
    if args.max_steps and (cut := episodes.without_end(args.max_steps)):
        rows["cut"] = f"{cut} at {args.max_steps:,} steps"
    for kind, parts in (("policy", episodes.policies), ("agent", episodes.agents)):
        for name, own in parts.items() if len(parts) > 1 else ():
            if len(own):
                rows[f"return, {kind} {name}"] = f"{own.mean_return:,.2f} +- {own.return_.std():,.2f}"
    rows |= {name: f"{value:,.3f}" for name, value in episodes.reported().items()}
    print_summary(f"evaluation of {args.run}", rows)
    if args.video:
        print(f"video: {record_video(args.run, args.video_episodes, **opened)}")
    return 0


def _exploit(args: Any, env: Any, added: Any) -> int:
    """Says how exploitable the policy of a run is."""
    from penstock.run.playing.exploiter import exploit_run
    from penstock.run.progress import print_summary

    if args.video:
        raise ConfigError("--video with --exploit; a video is of the run's own evaluation: leave one of them out")
    how: dict[str, Any] = {"which": args.which, "seed": args.seed, "slots": args.slots, "max_steps": args.max_steps}
    found = exploit_run(
        args.run,
        args.episodes,
        args.exploit_steps,
        env=env,
        **added,
        deterministic=not args.stochastic,
        trust=args.trust,
        **how,
    )
    trained = f"at least, by an exploiter of {args.exploit_steps:,} steps" if args.exploit_steps else "exact"
    rows = {
        "actions": "sampled" if args.stochastic else "deterministic",
        "exploitability": f"{found.mean:,.4f}, {trained}",
    }
    for name, best, own in zip(*found):
        rows[f"in place of {name}"] = f"{best:,.4f}, the policy itself {own:,.4f}"
    print_summary(f"exploitability of {args.run}", rows)
    return 0


def _matches(args: Any, env: Any, added: Any) -> int:
    """Plays the run against others, prints a table, and draws a picture where there are several."""
    from rich.console import Console
    from rich.table import Table

    from penstock.run.playing.matches import match_runs

    if args.exploit or args.exploit_steps:
        raise ConfigError("--exploit with --against; it is of the run alone: leave one of them out")
    if args.video:
        raise ConfigError("--video with --against; a video is of the run's own evaluation: leave one of them out")
    found = match_runs(
        args.run,
        args.against,
        args.episodes,
        env=env,
        **added,
        which=args.which,
        seed=args.seed,
        deterministic=not args.stochastic,
        slots=args.slots,
        max_steps=args.max_steps,
        first=args.seats,
        trust=args.trust,
    )
    titles = (
        "of",
        "against",
        "episodes",
        "won",
        "drawn",
        "lost",
        "points",
        "as first",
        "as second",
        "return",
        "theirs",
    )
    acting = "sampled" if args.stochastic else "deterministic; --stochastic samples them"
    table = Table(*titles, caption=f"actions {acting}")
    for match in found:
        numbers = (match.points, *match.points_by_seat)
        table.add_row(
            *match.sides,
            *(f"{n:,}" for n in (match.episodes, match.won, match.drawn, match.lost)),
            *(f"{x:.3f}" for x in numbers),
            *(f"{x:,.3f}" for x in match.returns),
        )
    console = Console()
    wide = console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum
    Console(width=max(console.width, wide)).print(table)
    if len(found) > 1:
        from penstock.run.playing.matrix import draw_matrix

        out = Path(args.run) / "plots" / "matches.png"
        try:
            print(f"picture: {draw_matrix(found, out, f'{args.episodes} episodes each')}")
        except MissingExtraError as error:
            print(f"no picture drawn: {error}", file=sys.stderr)
    return 0
