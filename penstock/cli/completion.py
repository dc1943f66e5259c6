"""`penstock completion bash`: a script that completes commands, algorithms and options in a shell."""

from __future__ import annotations

import contextlib
import importlib
import io
import re

from penstock.cli.options import Parser

_DESCRIPTION = """Prints a script with which a shell completes commands, algorithms and options, settings too.

  penstock completion bash > ~/.local/share/bash-completion/completions/penstock
  penstock completion zsh > ~/.zfunc/_penstock              (a folder of fpath)
  penstock completion fish > ~/.config/fish/completions/penstock.fish
"""
SHELLS = ("bash", "zsh", "fish")
_OF_ALGORITHMS = ("train", "launch", "tune")
"""Commands whose first word is an algorithm, with options for its settings."""
_WORDS = """_penstock_words() {{ # place of the word, command, word after it, the word so far
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
    if [ "$1" -eq 2 ]; then
      case "$2" in
      {algorithmic}) echo "{algos}" ;;
      completion) echo "{shells}" ;;
      esac
    fi ;;
  esac
}}
"""
_BASH = """_penstock() {
  local word="${COMP_WORDS[COMP_CWORD]}"
  local words="$(_penstock_words "$COMP_CWORD" "${COMP_WORDS[1]}" "${COMP_WORDS[2]}" "$word")"
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _penstock penstock"""
_ZSH = """_penstock() {
  local -a found
  found=($(_penstock_words $((CURRENT - 1)) "$words[2]" "$words[3]" "$words[CURRENT]"))
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
    from penstock.samplers import SAMPLERS

    options = {command: _options(command) for command in COMMANDS}
    samplers = [_options("train", "ppo", "--sampler", name) for name in SAMPLERS]
    placed = [option for found in samplers for option in found if option.startswith("--sampler.")]
    settings = {algo: list(dict.fromkeys([*_options("train", algo), *placed])) for algo in ALGOS}
    if shell == "fish":
        return _fish(COMMANDS, options, settings)
    words = _WORDS.format(
        commands=" ".join(COMMANDS),
        options="\n".join(f'    {command}) echo "{" ".join(found)}" ;;' for command, found in options.items()),
        settings="\n".join(
            f'    {"|".join(f"{command}/{algo}" for command in _OF_ALGORITHMS)}) echo "{" ".join(found)}" ;;'
            for algo, found in settings.items()
        ),
        algorithmic="|".join(_OF_ALGORITHMS),
        algos=" ".join(ALGOS),
        shells=" ".join(SHELLS),
    )
    return f"{words}{_BASH}" if shell == "bash" else f"#compdef penstock\n{words}{_ZSH}"


def _options(*words: str) -> list[str]:
    """The options that the whole help of a command names."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        importlib.import_module(f"penstock.cli.{words[0]}").run([*words[1:], "--help-all"])
    return re.findall(r"^  (?:-\w, )?(--[\w.-]+)", said.getvalue(), re.MULTILINE)


def _fish(commands: dict[str, str], options: dict[str, list[str]], settings: dict[str, list[str]]) -> str:
    def line(when: str, words: str, more: str = "") -> str:
        return f"complete -c penstock -n '{when}' -a '{words}'{more}"

    dash = 'string match -q -- "-*" (commandline -ct)'
    of = "__fish_seen_subcommand_from {}"
    first = "test (count (commandline -opc)) -eq {}"
    algorithmic = of.format(" ".join(_OF_ALGORITHMS))
    lines = [line(first.format(1), name, f" -f -d '{text}'") for name, text in commands.items()]
    lines += [line(f"{first.format(2)}; and {algorithmic}", " ".join(settings), " -f")]
    lines += [line(f"{first.format(2)}; and {of.format('completion')}", " ".join(SHELLS), " -f")]
    lines += [line(f"{dash}; and {of.format(name)}", " ".join(found)) for name, found in options.items()]
    lines += [
        line(f"{dash}; and {algorithmic}; and {of.format(algo)}", " ".join(found)) for algo, found in settings.items()
    ]
    return "\n".join(lines)
