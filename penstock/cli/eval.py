"""`penstock eval RUN`: plays episodes with a trained policy."""

from __future__ import annotations

from penstock.cli.options import Parser, import_modules, key_values, whole_number


def run(argv: list[str]) -> int:
    """Evaluates by the arguments; returns the exit code."""
    parser = Parser("eval", "Plays episodes with the policy of a run in environments of their own.")
    parser.add_policy(episodes=20)
    parser.add_argument("--video", action="store_true", help="record the first episodes into RUN/videos (extra video)")
    parser.add_argument("--video-episodes", type=whole_number, default=3, help="how many to record (default 3)")
    args = parser.parse_args(argv)
    import_modules(args.imports)
    from penstock.run.evaluation import evaluate, record_video
    from penstock.run.progress import print_summary

    kwargs = key_values(args.env_kwargs, "--env-kwargs")
    episodes, step = evaluate(
        args.run, args.episodes, which=args.which, deterministic=not args.stochastic, seed=args.seed, env_kwargs=kwargs
    )
    rows = {
        "checkpoint": f"{args.which}, step {step:,}",
        "episodes": f"{len(episodes)}, actions {'sampled' if args.stochastic else 'deterministic'}",
        "return": f"{episodes.mean_return:,.2f} +- {episodes.return_.std():,.2f}  "
        f"(min {episodes.return_.min():,.2f}, max {episodes.return_.max():,.2f})",
        "length": f"{episodes.mean_length:,.1f}",
    }
    rows |= {name: f"{value:,.3f}" for name, value in episodes.reported().items()}
    print_summary(f"evaluation of {args.run}", rows)
    if args.video:
        print(f"video: {record_video(args.run, args.video_episodes, which=args.which, env_kwargs=kwargs)}")
    return 0
