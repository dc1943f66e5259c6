"""`penstock convert FILE --num-envs N`: an rsl_rl config as a file for `penstock train --config`."""

from __future__ import annotations

from penstock.cli.options import Parser
from penstock.core.errors import ConfigError


def run(argv: list[str]) -> int:
    """Prints the settings; returns the exit code."""
    parser = Parser(
        "convert",
        "Prints the settings of a PPO config of rsl_rl (Isaac Lab's params/agent.yaml, or JSON) as TOML. Comments\n"
        "name what penstock has not, or has otherwise.\n\n"
        "  penstock convert agent.yaml --num-envs 4096 > anymal.toml\n"
        "  penstock train --config anymal.toml --env my_module:simulator",
    )
    parser.add_argument("file", metavar="FILE", help="the config, YAML or JSON")
    parser.add_argument("--num-envs", metavar="N", type=int, required=True, help="environments of the simulator")
    args = parser.parse_args(argv)
    if args.num_envs < 1:
        raise ConfigError(f"--num-envs {args.num_envs}; expected 1 or more")
    from penstock.studies.rsl_rl import converted, read_config  # it loads torch

    print(converted(read_config(args.file), args.num_envs).toml(), end="")
    return 0
