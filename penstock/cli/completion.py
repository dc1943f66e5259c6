"""`penstock completion bash`: a script that completes commands, algorithms, options and their values in a shell."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterable, Mapping
from typing import get_args

from penstock.cli.options import Parser

_DESCRIPTION = """Prints a script with which a shell completes commands, algorithms, options, settings and their values.

  penstock completion bash > ~/.local/share/bash-completion/completions/penstock
  penstock completion zsh > ~/.zfunc/_penstock              (a folder of fpath)
  penstock completion fish > ~/.config/fish/completions/penstock.fish
"""
_Words = Mapping[str, Iterable[str]]
SHELLS = ("bash", "zsh", "fish")
_OF_ALGORITHMS = ("train", "launch", "tune")
"""Commands whose first word is an algorithm, with options for its settings."""
_WORDS = """_penstock_words() {{ # place of the word, command, word after it, the word so far, the word before
  if [ "$1" -eq 1 ]; then echo "{commands}"; return; fi
  case "$4" in
  -*)
    case "$2" in
{options}
    esac
    case "$2/$3" in
{settings}
    esac ;;
  *)
    case "$1 $2" in
{places}
    esac
    case "$2 $5" in
{values}
    esac ;;
  esac
}}
"""
_BASH = """_penstock() {
  local word="${COMP_WORDS[COMP_CWORD]}"
  local words="$(_penstock_words "$COMP_CWORD" "${COMP_WORDS[1]}" "${COMP_WORDS[2]}" "$word" \\
    "${COMP_WORDS[COMP_CWORD - 1]}")"
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _penstock penstock"""
_ZSH = """_penstock() {
  local -a found
  found=($(_penstock_words $((CURRENT - 1)) "$words[2]" "$words[3]" "$words[CURRENT]" "$words[CURRENT - 1]"))
  if (( $#found )); then compadd -- $found; else _files; fi
}
if [ "$funcstack[1]" = _penstock ]; then _penstock "$@"; else compdef _penstock penstock; fi"""


def run(argv: list[str]) -> int:
    """Prints the script of a shell; returns the exit code."""
    parser = Parser("completion", _DESCRIPTION)
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    print(script(parser.parse_args(argv).shell))
    return 0


def script(shell: str) -> str:
    """The script of bash, zsh or fish, from the help of all commands as they are."""
    from penstock.algos import ALGOS
    from penstock.cli.main import COMMANDS
    from penstock.run.tracking.tracker import TRACKERS
    from penstock.samplers import INNER, SAMPLERS
    from penstock.studies.proposals import SuggestName
    from penstock.studies.schedulers import SchedulerName

    names = {  # beside which others are allowed, so that the help shows no braces
        **dict.fromkeys(("--trackers", "--run.trackers"), tuple(TRACKERS)),
        "--sampler": (*SAMPLERS, "auto"),
        "--sampler.inner": INNER,
        "--scheduler": get_args(SchedulerName),
        "--suggest": get_args(SuggestName),
        "--which": ("last", "best"),
    }
    options = {command: _options(command) for command in COMMANDS}
    samplers = [_options("train", "ppo", "--sampler", name) for name in SAMPLERS]
    placed = {option: words for found in samplers for option, words in found.items() if option[:10] == "--sampler."}
    settings = {algo: _options("train", algo) | placed for algo in ALGOS}
    places = {f"2 {command}": [*ALGOS] for command in _OF_ALGORITHMS} | {"3 bench": [*ALGOS]}
    places |= {f"2 {command}": found.pop("") for command, found in options.items() if "" in found}
    values = {f"{command} {option}": words for command, found in options.items() for option, words in found.items()}
    for option, words in (item for found in settings.values() for item in found.items()):
        values[f"* {option}"] = [*dict.fromkeys([*values.get(f"* {option}", ()), *words])]
    values = {at: [*words, *names.get(at.split()[1], ())] for at, words in values.items()}
    if shell == "fish":
        return _fish(COMMANDS, options, settings, places, values)
    words = _WORDS.format(
        commands=" ".join(COMMANDS),
        options=_cases(options),
        settings=_cases({f"{command}/{algo}": found for algo, found in settings.items() for command in _OF_ALGORITHMS}),
        places=_cases(places),
        values=_cases(values),
    )
    return f"{words}{_BASH}" if shell == "bash" else f"#compdef penstock\n{words}{_ZSH}"


def _options(*words: str) -> dict[str, list[str]]:
    """The options that the whole help of a command names, each with its choices; those of its first word under ""."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        importlib.import_module(f"penstock.cli.{words[0]}").run([*words[1:], "--help-all"])
    found: list[tuple[str, str]] = re.findall(r"^  (?:-\w, )?(--[\w.-]+|(?={)) ?(\S*)", said.getvalue(), re.MULTILINE)
    return {option: [w for part in re.findall("{(.*?)}", at) for w in part.split(",")] for option, at in found}


def _cases(table: _Words) -> str:
    """Branches of a shell's `case`, which print words; patterns with the same words are one branch."""
    found: dict[str, list[str]] = {}
    for at, words in table.items():
        found.setdefault(" ".join(words), []).append(f'"{at}"'.replace('"*', '*"'))
    return "\n".join(f'    {"|".join(at)}) echo "{words}" ;;' for words, at in found.items() if words)


def _fish(commands: Mapping[str, str], options: _Words, settings: _Words, places: _Words, values: _Words) -> str:
    def line(when: str, words: Iterable[str], more: str = "") -> str:
        return f"complete -c penstock -n '{when}' -a '{' '.join(words)}'{more}"

    dash = 'string match -q -- "-*" (commandline -ct)'
    of = "__fish_seen_subcommand_from {}"
    place = "test (count (commandline -opc)) -eq {}"
    algorithmic = of.format(" ".join(_OF_ALGORITHMS))
    lines = [line(place.format(1), [name], f" -f -d '{text}'") for name, text in commands.items()]
    lines += [line(f"{dash}; and {of.format(name)}", found) for name, found in options.items()]
    lines += [line(f"{dash}; and {algorithmic}; and {of.format(algo)}", found) for algo, found in settings.items()]
    for at, words in places.items():
        number, command = at.split()
        lines.append(line(f"{place.format(number)}; and {of.format(command)}", words, " -f"))
    for at, words in values.items():
        command, option = at.split()
        after = f"test (commandline -opc)[-1] = {option}" + f"; and {of.format(command)}" * (command != "*")
        lines += [line(after, words, " -f")] if words else []
    return "\n".join(lines)
