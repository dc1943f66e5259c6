"""`penstock eval RUN`: plays episodes with a trained policy."""

from __future__ import annotations

from typing import Any

from penstock.cli.options import Parser, played_env


def run(argv: list[str]) -> int:
    """Evaluates by the arguments; returns the exit code."""
    parser = Parser("eval", "Plays episodes with the policy of a run in environments of their own.")
    parser.add_policy(episodes=20)
    parser.add_argument("--video", action="store_true", help="record the first episodes into RUN/videos (extra video)")
    parser.add_argument("--video-episodes", type=int, default=3, help="how many to record (default 3)")
    args = parser.parse_args(argv)
    env, kwargs = played_env(args)
    from penstock.run.evaluation import evaluate, record_video
    from penstock.run.progress import print_summary

    opened: dict[str, Any] = {"which": args.which, "env": env, "env_kwargs": kwargs, "trust": args.trust}
    episodes, step = evaluate(args.run, args.episodes, deterministic=not args.stochastic, seed=args.seed, **opened)
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
        print(f"video: {record_video(args.run, args.video_episodes, **opened)}")
    return 0
