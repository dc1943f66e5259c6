"""`penstock eval RUN`: plays episodes with a trained policy."""

from __future__ import annotations

from penstock.cli.options import Parser, here_on_path, import_modules, key_values


def run(argv: list[str]) -> int:
    """Evaluates as the arguments say; gives the exit code."""
    parser = Parser("eval", "Plays episodes with the policy of a run in environments of their own.")
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--episodes", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--which", default="last", help="checkpoint: last, best, or a step (default last)")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the most likely")
    parser.add_argument("--seed", type=int, help="of the episodes (default: the run's)")
    parser.add_argument("--video", action="store_true", help="record the first episodes into RUN/videos (extra video)")
    parser.add_argument("--video-episodes", type=int, default=3, help="how many to record (default 3)")
    parser.add_argument("--env-kwargs", nargs="+", default=[], metavar="K=V", help="added to those of the run")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="PKG", help="import a package first"
    )
    args = parser.parse_args(argv)
    here_on_path()
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
    for name, value in episodes.metrics("eval/{}").items():
        if name not in ("eval/rew", "eval/len"):
            rows[name.removeprefix("eval/")] = f"{value:,.3f}"
    print_summary(f"evaluation of {args.run}", rows)
    if args.video:
        print(f"video: {record_video(args.run, args.video_episodes, which=args.which, env_kwargs=kwargs)}")
    return 0
