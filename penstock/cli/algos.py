"""`penstock algos`: the list of algorithms and presets."""

from __future__ import annotations

from penstock.cli.options import Parser


def run(argv: list[str]) -> int:
    """Lists algorithms and their presets; returns the exit code."""
    Parser("algos", "Lists the built-in algorithms and their presets. One of your own is module:NAME.").parse_args(argv)
    from penstock.algos import ALGOS
    from penstock.run.presets import preset_names

    for name, path in ALGOS.items():
        presets = ", ".join(preset_names(name)) or "none"
        print(f"{name:<12} {path}\n             presets: {presets}")
    return 0
