"""`penstock export RUN --to onnx --out FILE`: a policy as a file that acts without penstock."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.options import Parser, import_modules, require_run
from penstock.core.errors import ConfigError


def run(argv: list[str]) -> int:
    """Exports by the arguments; returns the exit code."""
    parser = Parser(
        "export",
        "Writes the policy of a run as a file that acts without penstock, and its contract beside it: names, shapes,\n"
        "dtypes and spaces of inputs and outputs. It is first compared with the policy, over 1,000 observations.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, or a file of policy.save")
    parser.add_argument(
        "--to",
        choices=("onnx", "pt2", "safetensors"),
        help="ONNX (extra export), torch.export, or weights for ps.load; default: the suffix of --out",
    )
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="where to write; of several policies a folder, a file for each"
    )
    parser.add_argument("--policy", metavar="ID", help="one of several policies (default: all)")
    parser.add_argument("--which", default="last", help="checkpoint: last, best, or a step (default last)")
    parser.add_argument(
        "--stochastic", action="store_true", help="sample actions, by an input of uniform noise, instead of the mode"
    )
    parser.add_import(", because it registers environments or holds the algorithm; may be repeated")
    parser.add_trust()
    parser.rare("--trust", "--import")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if Path(args.run).suffix != ".safetensors":
        require_run(Path(args.run))
        import_modules(args.imports, runs=[args.run], trust=args.trust)
    from penstock.learn.export.files import check_place, contract_path
    from penstock.learn.policy_set import by_id
    from penstock.run.entry import load
    from penstock.run.progress import print_summary

    policy = load(args.run, args.which, trust=args.trust)
    policies = by_id(policy)
    if args.policy is not None:
        if args.policy not in policies:
            raise ConfigError(f"--policy {args.policy}: {args.run} has the policies {list(policies)}")
        policies = {args.policy: policies[args.policy]}
        policy = policies[args.policy]
    check_place(out, args.to, len(policies))
    found = policy.export(out, args.to, deterministic=not args.stochastic)
    form = args.to or out.suffix[1:]
    files = [found] if len(policies) == 1 else [found / f"{name}.{form}" for name in policies]
    rows = {
        "checkpoint": args.which,
        "actions": "sampled" if args.stochastic else "deterministic",
        "policies": ", ".join(policies),
    }
    for file in files:
        rows[file.name] = f"{file}, {file.stat().st_size / 1e3:,.1f} kB; contract {contract_path(file)}"
    print_summary(f"export of {args.run}", rows)
    return 0
