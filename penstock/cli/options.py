"""Options that several commands share, and the conversion of text to values."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.files import RUN_EXPECTED
from penstock.run.files.modules import modules_named, search_here

if TYPE_CHECKING:
    from penstock.envs.make import EnvConfig


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose message for an unknown option names the nearest one.

    Its `--help` shows the most used options, `--help-all` also those that `rare` names.

    Args:
        add_help: False where the command itself answers --help and --help-all.
    """

    def __init__(self, command: str, description: str, add_help: bool = True, **kwargs: Any) -> None:
        super().__init__(
            prog=f"penstock {command}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            **kwargs,
        )
        self._rare: set[str] = set()
        if add_help:
            self.add_argument("-h", "--help", action=_Help, nargs=0, help="show this")
            self.add_argument("--help-all", action=_Help, nargs=0, help=argparse.SUPPRESS)

    def rare(self, *options: str) -> None:
        """Leaves these options out of the short help."""
        self._rare |= set(options)

    def print_help(self, file: Any = None, whole: bool = False) -> None:
        """Prints the help, without the rare options unless it is to be whole."""
        hidden = [] if whole else [a for a in self._actions if self._rare & set(a.option_strings)]
        texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        super().print_help(file)
        for action, text in zip(hidden, texts):
            action.help = text
        if hidden:
            print(f"\n{len(hidden)} more options: --help-all", file=file)

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown[0])
        return found

    def refuse(self, option: str, further: Iterable[str] = (), classes: Sequence[type] = ()) -> NoReturn:
        """Exits with code 2 and names the option meant by an unknown one, from `core.names.hints`, or the nearest.

        Args:
            further: options besides the parser's own, such as `--algo.lr`; without them only spellings are compared.
            classes: those of algorithm, sampler and run, for which names of other libraries are judged.
        """
        known = [text for action in self._actions for text in action.option_strings] + list(further)
        name = option.split("=")[0]
        said = _setting_meant(name, known, classes) if further and name.startswith("--") else ""
        close = "" if said else _slip_of(name, known)
        hint = said or (close and f"did you mean {close}?") or _known_below(name, known)
        self.exit(2, f"{self.prog}: unknown option {option}{hint and f'; {hint}'}\n")

    def add_import(self, why: str) -> None:
        """Adds --import, which `import_modules` carries out."""
        text = f"import a package first{why}"
        self.add_argument("--import", dest="imports", action="append", default=[], metavar="PKG", help=text)

    def add_environment(self) -> None:
        """Adds --import, --wrappers and --env-kwargs, -options, -drop, -text, -mask: how an environment is made."""
        self.add_import(", because it registers environments; may be repeated")
        self.add_argument(
            "--env-kwargs", nargs="+", default=[], metavar="K=V", help="keyword arguments of the environment"
        )
        self.add_argument(
            "--env-options", nargs="+", default=[], metavar="K=V", help="options that every reset of it is given"
        )
        self.add_argument(
            "--wrappers",
            nargs="*",
            default=[],
            metavar="NAME",
            help="wrappers in order: module:qualname, or Gymnasium's by name, e.g. 'TimeLimit(100)'",
        )
        self.add_argument(
            "--env-drop",
            nargs="+",
            default=[],
            metavar="KEY",
            help="keys of a Dict observation to leave out; a/b for b in a",
        )
        self.add_argument(
            "--env-text", type=whole_number, default=0, metavar="N", help="show text in observations as N bytes"
        )
        self.add_argument(
            "--env-mask",
            metavar="KEY",
            help="key of the info that holds an action mask; '' for none (default: a method action_masks(), if any)",
        )
        self.rare("--env-options", "--env-drop", "--env-text", "--env-mask")

    def add_trust(self, of: str = "RUN") -> None:
        """Adds --trust, which `open_run` and all that opens a run take."""
        text = f"import and call what {of} names, though it was not trained here (docs/security.md)"
        self.add_argument("--trust", action="store_true", help=text)

    def add_policy(self, episodes: int) -> None:
        """Adds RUN and the options of commands that play episodes with its policy."""
        self.add_argument("run", metavar="RUN", help="run directory")
        self.add_argument("--episodes", type=number_from_0, default=episodes, help=f"how many (default {episodes})")
        self.add_argument("--which", default="last", help="checkpoint: last, best, or a step (default last)")
        self.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the most likely")
        self.add_argument("--seed", type=number_from_0, help="of the episodes (default: the run's)")
        self.add_argument("--env", metavar="ID", help="play in another environment (default: that of its evaluations)")
        self.add_environment()
        self.add_trust()
        self.rare("--trust")


class _Help(argparse.Action):
    """Prints the help of a command and ends."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.print_help(whole=option_string == "--help-all")
        parser.exit()


def _slip_of(option: str, known: Sequence[str]) -> str:
    """The known options that an option is a slip of the pen from: those of its part, else by their last name."""
    from penstock.core.names.hints import slips  # it loads numpy, which help does not need

    part, dot, leaf = option.rpartition(".")
    alike = {text.rpartition(".")[2]: text for text in known if text.rpartition(".")[0] == part}
    close = [alike[found] for found in slips(leaf, alike)]
    if not close and not dot:
        close = [text for text in known if "." in text and slips(option[2:], [text.rpartition(".")[2]])]
    return " or ".join(close[:3])


def _known_below(option: str, known: Sequence[str]) -> str:
    """The settings beside one that is not there, in a part of a part, such as those of --algo.rnd; "" elsewhere."""
    part = option.rpartition(".")[0]
    beside = [text.rpartition(".")[2] for text in known if text.rpartition(".")[0] == part and part.count(".")]
    return f"{part}.X is one of {', '.join(beside)}" if beside else ""


def _setting_meant(option: str, known: Sequence[str], classes: Sequence[type]) -> str:
    """A hint at the setting that an option means, "" if none is known."""
    from penstock.core.names.hints import Meaning, foreign, in_words, owners  # it loads numpy, which help does not need

    part, _, leaf = option.removeprefix("--").replace("-", "_").rpartition(".")
    above, _, holder = part.rpartition(".")
    has = any(holder in cls.__dataclass_fields__ for cls in classes)
    if above == "algo" and not has and "algo" in owners(holder):
        return f"--{part} is of {in_words('algo', owners(holder)['algo'])}"
    own = owners(leaf)
    found = foreign(leaf, classes) or (Meaning(".".join(filter(None, (next(iter(own)), leaf))), "") if own else None)
    alike = [text for text in known if text.rpartition(".")[2].lstrip("-").replace("-", "_") == leaf and "." in text]
    alike = [text for text in alike if text.startswith(f"--{part}.")] or alike
    if alike and (found is None or not part):
        return f"did you mean {' or '.join(alike)}?"
    if found is None or not found.path:
        return found.note if found else ""
    note = f": {found.note}" if found.note else ""
    where, _, leaf = found.path.rpartition(".")
    inner = f"--{where}.inner.{leaf}"
    for text in (f"--{found.path}", f"--{found.path.replace('_', '-')}", inner):
        if text in known:
            return f"did you mean {text}{note}?"
    if where == "sampler":
        from penstock.samplers import INNER, samplers_with  # torch, which a line with such an option has loaded

        at = "--sampler.inner" if "--sampler.inner.T" in known else "--sampler"
        named = [name for name in samplers_with(leaf) if at == "--sampler" or name in INNER]
        if named:
            return f"it is {at}.{leaf} of {at} {', '.join(named)}: name one of them{note}"
    return f"it is --{found.path} of {in_words(where, owners(leaf)[where])}{note}"


def whole_number(text: str) -> int:
    """A whole number from 1, as an argument type: 100000, 1e5 or 100_000. Raises ArgumentTypeError."""
    return _from(1, text)


def number_from_0(text: str) -> int:
    """A whole number from 0, as an argument type. Raises ArgumentTypeError."""
    return _from(0, text)


def _from(least: int, text: str) -> int:
    from penstock.core.config import whole  # it loads numpy, which help does not need

    try:
        number = whole(text)
    except ValueError:
        number = -1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number from {least}, such as 1000 or 1e3")
    return number


def import_modules(modules: Sequence[str], words: Any = (), runs: Sequence[str] = (), trust: bool = False) -> None:
    """Imports packages that register environments, also from the current folder if typed; see `search_here`.

    Args:
        words: further typed values, in nested lists and mappings, some of which may be `module:NAME`.
        runs: runs to open; modules that trusted runs name may lie there too. trust: the runs are trusted.

    Raises:
        ConfigError: a package is not there.
    """
    search_here([module.partition(".")[0] for module in modules])
    search_here(modules_named(words))
    for run in runs:
        search_here(_stored_modules(run, trust))
    for module in modules:
        try:
            importlib.import_module(module)
        except (ImportError, TypeError, ValueError) as error:
            raise ConfigError(f"--import {module}: {error}; is it installed and on PYTHONPATH?") from error


def require_modules(imports: Sequence[str], words: Sequence[str]) -> None:
    """Raises ConfigError for an --import, or a `module:NAME`, of a module that is not there; none is loaded."""
    search_here([*(module.partition(".")[0] for module in imports), *modules_named(words)])
    import_modules([module for module in imports if _is_missing(module)])
    for word in words:
        named = re.match(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*", word)  # a wrapper's arguments may follow
        if named is not None and _is_missing(named[1]):
            from penstock.core.config import import_object

            import_object(named[0])


def _is_missing(module: str) -> bool:
    top = module.partition(".")[0]
    return not top.isidentifier() or (top not in sys.modules and importlib.util.find_spec(top) is None)


def early_id(env: str | None, imports: Sequence[str]) -> None:
    """Raises ConfigError for an id that nothing registers, unless a package still to be imported may do so."""
    if env is not None and ":" not in env and not imports:
        from penstock.envs.ids import require_known  # it loads Gymnasium, which knows the ids

        require_known(env)


def require_run(folder: Path) -> None:
    """Raises CheckpointError, before anything is loaded, for a path that is no run; of a folder of runs it lists them.

    What else may be wrong with it, the reader of its config.json says.
    """
    if not os.path.exists(folder):
        raise CheckpointError(f"{folder} is no run directory: there is no such folder; {RUN_EXPECTED}")
    if not folder.is_dir() or (folder / "config.json").exists():
        return
    below = sorted(
        str(path.parent) for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}/metrics.jsonl")
    )
    if below:
        more = f", and {len(below) - 8} more" if len(below) > 8 else ""
        raise CheckpointError(f"{folder} is a folder of runs, name one of them: {', '.join(below[:8])}{more}")
    raise CheckpointError(f"{folder} is no run directory: it holds no config.json; {RUN_EXPECTED}")


def played_env(args: Any) -> tuple[EnvConfig | None, dict[str, Any]]:
    """The environment that the options of `Parser.add_policy` name, None for the run's own, and what to add to it."""
    early_id(args.env, args.imports)
    from penstock.envs.make import EnvConfig  # it loads Gymnasium, as help must not

    others = getattr(args, "against", [])
    import_modules(args.imports, vars(args), [args.run, *(o for o in others if os.path.isdir(o))], args.trust)
    added: dict[str, Any] = {
        "env_kwargs": key_values(args.env_kwargs, "--env-kwargs"),
        "env_options": key_values(args.env_options, "--env-options"),
    }
    made = {
        "--wrappers": args.wrappers,
        "--env-drop": args.env_drop,
        "--env-text": [args.env_text] if args.env_text else [],
        "--env-mask": [args.env_mask] if args.env_mask is not None else [],
    }
    if args.env is None:
        for option, values in made.items():
            if values:
                raise ConfigError(f"{option} {values[0]} without --env; the run's environment has its own")
        return None, added
    shown: dict[str, Any] = {"drop": tuple(args.env_drop), "text": args.env_text, "mask_key": args.env_mask}
    return EnvConfig(args.env, {}, tuple(args.wrappers), imports=tuple(args.imports), **shown), added


def _stored_modules(run: str, trust: bool) -> set[str]:
    from penstock.run.files.stored_experiment import stored_modules  # it loads torch

    return stored_modules(Path(run), trust)


def key_values(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """`key=value` texts as a dict; values are JSON where they can be, else text."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {pair!r}; expected key=value, e.g. {option} render_mode=rgb_array size=8")
        out[key] = _value(text)
    return out


def dotted(pairs: Sequence[str], parser: Parser, known: Sequence[str] = ()) -> dict[str, Any]:
    """Settings by path: `--run.steps 1e5 --run.stop a 475` is {"run.steps": 1e5, "run.stop": {"a": 475}}.

    Refuses options without a dot, as the parser does, naming one of `known`. Raises ConfigError if one lacks its value.
    """
    out: dict[str, Any] = {}
    rest = list(pairs)
    while rest:
        option = rest.pop(0)
        name, equals, value = option.partition("=")
        if not name.startswith("--") or "." not in name:
            parser.refuse(option, known)
        values = [value] if equals else []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if len(values) != 1 and (not values or len(values) % 2):
            raise ConfigError(f"{name} has {len(values)} values; expected one, or pairs of key and value")
        found = [None if text.lower() == "none" else _value(text) for text in values]
        out[name[2:].replace("-", "_")] = found[0] if len(found) == 1 else dict(zip(found[::2], found[1::2]))
    return out


def _value(text: str) -> Any:
    """The value of a text that is JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
