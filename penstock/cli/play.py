"""`penstock play ENV`: an environment played by the keyboard, as a dataset if asked."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.options import Parser, early_id, import_modules, key_values, number_from_0, whole_number


def run(argv: list[str]) -> int:
    """Lets a person play by the arguments; returns the exit code."""
    parser = Parser(
        "play",
        "Opens a window in which the keyboard plays, until it is closed or Escape is pressed. The keys are the\n"
        "environment's own, or the arrows, or a digit for each choice. Needs pygame (extra classic).",
    )
    parser.add_argument("env", metavar="ENV", help="environment id, or module:qualname")
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY=ACTION", help="keys to play by, e.g. left=0 a=1")
    parser.add_argument("--noop", metavar="ACTION", help="action while no key is pressed (default: wait for one)")
    parser.add_argument("--fps", type=whole_number, metavar="N", help="steps a second (default: the environment's)")
    parser.add_argument("--seed", type=number_from_0, help="of the first episode; the others count on from it")
    parser.add_argument("--dataset", metavar="DIR", help="write the episodes there; must be empty or absent")
    parser.add_argument("--append", action="store_true", help="add to the dataset that is there")
    parser.add_environment()
    args = parser.parse_args(argv)
    early_id(args.env, args.imports)
    import_modules(args.imports, vars(args))
    from penstock.envs.make import EnvConfig
    from penstock.run.playing.by_hand import play_by_hand
    from penstock.run.progress import print_summary

    config = EnvConfig(
        args.env,
        key_values(args.env_kwargs, "--env-kwargs"),
        tuple(args.wrappers),
        imports=tuple(args.imports),
        drop=tuple(args.env_drop),
        text=args.env_text,
        mask_key=args.env_mask,
        options=key_values(args.env_options, "--env-options"),
    )
    found = play_by_hand(
        config,
        keys=key_values(args.keys, "--keys") or None,
        noop=None if args.noop is None else key_values([f"x={args.noop}"], "--noop")["x"],
        fps=args.fps,
        seed=args.seed,
        dataset=None if args.dataset is None else Path(args.dataset),
        append=args.append,
    )
    rows = {"episodes": f"{len(found.returns):,}, {found.steps:,} steps"}
    if found.returns:
        rows["return"] = f"{sum(found.returns) / len(found.returns):,.2f}, best {max(found.returns):,.2f}"
    if found.dataset:
        rows["dataset"] = found.dataset
        rows["next"] = f"penstock train bc --env {args.env} --sampler offline --sampler.dataset {args.dataset}"
    print_summary(f"play of {args.env}", rows)
    return 128 + found.stopped_by if found.stopped_by else 0
