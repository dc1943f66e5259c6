"""`penstock enjoy RUN`: a policy plays in a window, else on video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.cli.options import Parser, played_env, require_run, whole_number


def run(argv: list[str]) -> int:
    """Shows episodes by the arguments; returns the exit code."""
    parser = Parser(
        "enjoy",
        "Shows a policy at play, deterministic, in a window. Where there is no display, or the environment draws no\n"
        "window, it writes a video instead (extra video). In a window of pygame space pauses, q ends.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory; with --env also a policy's file, or hf:user/name")
    parser.add_argument("--episodes", type=whole_number, default=5, help="how many (default 5)")
    parser.add_argument("--which", default="last", help="checkpoint: last, best, or a step (default last)")
    parser.add_argument("--seed", type=int, help="of the episodes (default: the run's)")
    parser.add_argument("--video", metavar="FILE", help="write a video, .mp4, instead of opening a window")
    parser.add_argument("--env", metavar="ID", help="play in another environment (default: that of its evaluations)")
    parser.add_environment()
    parser.add_trust()
    parser.rare("--trust", "--import", "--wrappers", "--env-kwargs")
    args = parser.parse_args(argv)
    name = args.run
    if not name.startswith("hf:") and Path(name).suffix != ".safetensors":
        require_run(Path(name))
    env, added = played_env(args)
    from penstock.run.playing.enjoy import enjoy

    video = None if args.video is None else Path(args.video)
    how: dict[str, Any] = {"which": args.which, "seed": args.seed, "video": video, "trust": args.trust}
    found = enjoy(name, args.episodes, env=env, **added, **how)
    if found.video is not None:
        print(f"{found.why}; a video instead: {found.video}" if found.why else f"video: {found.video}")
    return 0
