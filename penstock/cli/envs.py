"""`penstock envs`: the list of environment ids."""

from __future__ import annotations

from penstock.cli.options import Parser, import_modules


def run(argv: list[str]) -> int:
    """Lists environment ids; returns the exit code."""
    parser = Parser("envs", "Lists the environment ids that can be made here, one a line.")
    parser.add_argument("filter", nargs="?", default="", help="only ids that contain this text")
    parser.add_import(", because it registers environments, e.g. minigrid")
    args = parser.parse_args(argv)
    import_modules(args.imports)
    from penstock.core.errors import nearest
    from penstock.envs.envpool import envpool_ids
    from penstock.envs.ids import known_ids
    from penstock.envs.pettingzoo import installed_ids

    known = [*known_ids(), *installed_ids(), *envpool_ids()]
    ids = [name for name in known if args.filter.lower() in name.lower()]
    for name in ids:
        print(name)
    if not ids:
        print(
            f"no id contains {args.filter!r}; {nearest(args.filter, known)} Packages register on import: --import PKG"
        )
    return 0 if ids else 2
