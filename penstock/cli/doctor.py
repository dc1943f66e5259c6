"""`penstock doctor`: versions, hardware, conflicts between packages, and whether rows keep their bits."""

from __future__ import annotations

from penstock.cli.options import Parser


def run(argv: list[str]) -> int:
    """Prints the report; returns the exit code."""
    parser = Parser(
        "doctor",
        "Prints versions, cores, memory, accelerators and packages known not to work together, and measures for\n"
        "which numbers of rows a network gives the same bits. Exit code 1 if a row's bits change with the number of\n"
        "rows even when padded: then the same seed does not give the same batch in every sampler on this machine.",
    )
    parser.parse_args(argv)
    from penstock.run.doctor import examine

    return examine()
