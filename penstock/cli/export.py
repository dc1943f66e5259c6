"""`penstock export RUN --to onnx --out FILE`: a policy as a file that acts without penstock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    parser.add_argument("--meta", metavar="FILE", help="JSON of text, numbers and lists by name, to stand in the file")
    parser.add_argument("--policy", metavar="ID", help="one of several policies (default: all)")
    parser.add_argument("--which", default="last", help="checkpoint: last, best, or a step (default last)")
    parser.add_import(", because it registers environments or holds the algorithm; may be repeated")
    parser.add_trust()
    parser.rare("--trust", "--import")
    args = parser.parse_args(argv)
    metadata = None if args.meta is None else _metadata(Path(args.meta))
    text = 0
    if Path(args.run).suffix != ".safetensors":
        require_run(Path(args.run))
        from penstock.run.files.stored_experiment import read_config  # it loads torch

        text = read_config(Path(args.run), args.trust).plain.get("env_text", 0)
        import_modules(args.imports, runs=[args.run], trust=args.trust)
    from penstock.learn.export.files import contract_path
    from penstock.learn.policy_set import by_id
    from penstock.run.checkpoints.load import load
    from penstock.run.progress import print_summary

    policy = load(args.run, args.which, trust=args.trust)
    if args.policy is not None:
        policies = by_id(policy)
        if args.policy not in policies:
            raise ConfigError(f"--policy {args.policy}: {args.run} has the policies {list(policies)}")
        policy = policies[args.policy]
    found = policy.export(args.out, args.to, metadata)
    written = [found] if found.is_file() else [found / f"{name}.{args.to}" for name in by_id(policy)]
    rows = {"checkpoint": args.which, "actions": "deterministic"}
    for file in written:
        contract = json.loads(contract_path(file).read_bytes())
        checked = contract["checked"]
        rows[contract["file"]] = (
            f"in {_names(contract['inputs'])}; out {_names(contract['outputs'])}; as predict over "
            f"{checked['observations']:,} observations, "
            + (f"boxes within {difference:.1g}" if (difference := checked["largest_difference"]) else "exactly")
        )
    rows["written"] = f"{found}, {found.stat().st_size / 1e3:,.1f} kB" if found.is_file() else f"{found}/"
    rows["contract"] = str(contract_path(found)) if found.is_file() else "beside each, FILE.contract.json"
    if text:
        rows["text"] = f"goes in as {text} bytes of UTF-8, zeros behind, for each text of an observation"
    print_summary(f"export of {args.run}", rows)
    return 0


def _metadata(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--meta {path}: {error}; expected a file of JSON") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--meta {path}: it holds a {type(found).__name__}; expected a JSON object, values by name")
    return found


def _names(ports: list[dict[str, Any]]) -> str:
    return ", ".join(port["name"] for port in ports)
