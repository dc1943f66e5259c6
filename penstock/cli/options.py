"""Options that several commands share, and how text becomes a value."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from penstock.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose message for an unknown option names the nearest one."""

    def __init__(self, command: str, description: str, **kwargs: Any) -> None:
        super().__init__(
            prog=f"penstock {command}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown[0])
        return found

    def refuse(self, option: str, further: Iterable[str] = ()) -> NoReturn:
        """Exits with 2, naming the options nearest to an unknown one."""
        known = [text for action in self._actions for text in action.option_strings] + list(further)
        close = difflib.get_close_matches(option.split("=")[0], known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        self.exit(2, f"{self.prog}: unknown option {option}{hint}\n")


def import_modules(modules: Sequence[str]) -> None:
    """Imports packages that register environments. Raises ConfigError if one is not there."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"--import {module}: {error}; is it installed and on PYTHONPATH?") from error


def here_on_path() -> None:
    """Lets `my_module:MyAlgo` name a file in the current folder, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def key_values(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """`key=value` texts as a dict; values are JSON where they can be, else text."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {pair!r}; expected key=value, e.g. {option} render_mode=rgb_array size=8")
        out[key] = _value(text)
    return out


def dotted(pairs: Sequence[str], parser: Parser) -> dict[str, Any]:
    """`--run.steps 1e5 --run.stop eval/mean_reward 475` as {"run.steps": 1e5, "run.stop": {"eval/mean_reward": 475}}.

    Refuses options without a dot, as the parser does. Raises ConfigError if one lacks its value.
    """
    out: dict[str, Any] = {}
    rest = list(pairs)
    while rest:
        option = rest.pop(0)
        name, equals, value = option.partition("=")
        if not name.startswith("--") or "." not in name:
            parser.refuse(option)
        values = [value] if equals else []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if len(values) != 1 and (not values or len(values) % 2):
            raise ConfigError(f"{name} has {len(values)} values; expected one, or pairs of key and value")
        found = [_value(text) for text in values]
        out[name[2:].replace("-", "_")] = found[0] if len(found) == 1 else dict(zip(found[::2], found[1::2]))
    return out


def _value(text: str) -> Any:
    """JSON if it is that, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
