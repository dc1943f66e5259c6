"""`penstock eval RUN`: plays episodes with a trained policy."""

from __future__ import annotations

from penstock.cli.options import Parser, import_modules, key_values, whole_number


def run(argv: list[str]) -> int:
    """Evaluates by the arguments; returns the exit code."""
    parser = Parser("eval", "Plays episodes with the policy of a run in environments of their own.")
    parser.add_policy(episodes=20)
    parser.add_argument("--video", action="store_true", help="record the first episodes into RUN/videos (extra video)")
    parser.add_argument("--video-episodes", type=whole_number, default=3, help="how many to record (default 3)")
    parser.add_argument("--env", metavar="ID", help="play in another environment (default: that of its evaluations)")
    parser.add_argument(
        "--max-steps", type=whole_number, metavar="N", help="cut longer episodes (default: the run's eval_max_steps)"
    )
    parser.add_argument("--slots", type=whole_number, metavar="N", help="environments side by side (default 16)")
    args = parser.parse_args(argv)
    import_modules(args.imports)
    from penstock.run.evaluation import evaluate_run, record_video
    from penstock.run.progress import print_summary

    kwargs = key_values(args.env_kwargs, "--env-kwargs")
    episodes, step = evaluate_run(
        args.run,
        args.env,
        args.episodes,
        not args.stochastic,
        args.seed,
        kwargs,
        args.which,
        args.slots,
        args.max_steps,
    )
    rows = {
        "checkpoint": f"{args.which}, step {step:,}",
        "episodes": f"{len(episodes)}, actions {'sampled' if args.stochastic else 'deterministic'}",
        "return": f"{episodes.mean_return:,.2f} +- {episodes.return_.std():,.2f}  "
        f"(min {episodes.return_.min():,.2f}, max {episodes.return_.max():,.2f})",
        "length": f"{episodes.mean_length:,.1f}",
    }
    if args.max_steps and (cut := int((~episodes.terminated & (episodes.length >= args.max_steps)).sum())):
        rows["cut"] = f"{cut} at {args.max_steps:,} steps"
    rows |= {name: f"{value:,.3f}" for name, value in episodes.reported().items()}
    print_summary(f"evaluation of {args.run}", rows)
    if args.video:
        print(
            f"video: {record_video(args.run, args.video_episodes, which=args.which, env=args.env, env_kwargs=kwargs)}"
        )
    return 0
