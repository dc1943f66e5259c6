"""`penstock eval RUN`: plays episodes with a trained policy."""

from __future__ import annotations

from typing import Any

from penstock.cli.options import Parser, played_env, whole_number


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
    args = parser.parse_args(argv)
    env, kwargs = played_env(args)
    from penstock.run.playing.evaluation import evaluate_run, record_video
    from penstock.run.progress import print_summary

    opened: dict[str, Any] = {"env": env, "env_kwargs": kwargs, "which": args.which, "trust": args.trust}
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
    rows |= {name: f"{value:,.3f}" for name, value in episodes.reported().items()}
    print_summary(f"evaluation of {args.run}", rows)
    if args.video:
        print(f"video: {record_video(args.run, args.video_episodes, **opened)}")
    return 0
