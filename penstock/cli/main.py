"""`penstock COMMAND ...`: dispatch to a command; errors become one line and an exit code."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType

from penstock.core import VERSION
from penstock.core.errors import PenstockError, nearest
from penstock.run.signals import open_standard_files, unfailing_output

COMMANDS = {
    "train": "train an algorithm on an environment",
    "eval": "play episodes with a trained policy, on video if you like",
    "enjoy": "watch a trained policy in a window, or on video",
    "play": "play an environment by the keyboard, and record it if you like",
    "record": "write episodes of a trained policy into a dataset",
    "export": "write the policy of a run as a file that acts without penstock",
    "push": "share the policy of a run on the Hugging Face Hub",
    "pull": "copy a shared policy from the Hugging Face Hub",
    "resume": "go on with a run as if it had never stopped",
    "replay": "show what a stored replay holds, or export it for numpy",
    "launch": "train many runs on this machine: a grid of settings x seeds",
    "tune": "search for settings: trials by a scheduler, on this machine",
    "convert": "print an rsl_rl config as settings of penstock",
    "bench": "measure which sampler is the fastest here",
    "runs": "list runs with their last numbers",
    "track": "send a run to trackers, afterwards or what they lack",
    "plot": "draw learning curves of runs",
    "view": "show runs in the browser, live",
    "envs": "list environment ids",
    "algos": "list algorithms and their presets",
    "completion": "print a script with which a shell completes all this",
    "doctor": "say what this machine has, and whether it keeps the promises",
}

_as_python_does = warnings.formatwarning
_LONG = ("train", "resume", "launch", "tune")
"""Commands with results on disk: they have succeeded even if their output could not be written."""
_HELP = """usage: penstock COMMAND [OPTIONS]

{commands}

`penstock COMMAND --help` explains a command, `penstock train ppo --help` the most used
settings of PPO, and `--help-all` every option.
Exit codes: 0 done, 1 a run of `launch` or a check of `doctor` failed, no answer from the Hub, output not written, or
penstock itself (with a traceback), 2 usage or settings, 3 environment, 4 learner, 5 checkpoint, 6 a rank of
--run.learners lost, 129 hang-up, 130 Ctrl-C, 143 SIGTERM.
"""


def main(argv: list[str] | None = None) -> int:
    """Executes a command; returns its exit code."""
    if argv is None:  # the process is ours
        open_standard_files()
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        warnings.formatwarning = _in_a_line
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _leave)
    args = sys.argv[1:] if argv is None else argv
    with unfailing_output() as out:
        code = _ended(args)
        if out is not None and not (args and args[0] in _LONG):
            out.flush()
            if out.lost is not None:
                print(f"penstock: the output could not be written: {out.lost.strerror}", file=sys.stderr)
                code = code or 1
    return code


def _ended(args: list[str]) -> int:
    try:
        return _carry_out(args)
    except SystemExit as end:  # argparse's, after help or a message
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def _carry_out(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        lines = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
        print(_HELP.format(commands=lines), end="")
        return 0
    if args[0] in ("-V", "--version"):
        print(f"penstock {VERSION}")
        return 0
    if args[0] not in COMMANDS:
        print(f"penstock: unknown command {args[0]!r}; {nearest(args[0], COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(f"penstock.cli.{args[0]}").run(args[1:])
    except PenstockError as error:
        print(f"penstock: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("penstock: interrupted before there was anything to save", file=sys.stderr)
        return 130


def _in_a_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Warnings as the command line shows them: those of penstock without the source, which a user need not know."""
    ours = Path(filename).is_relative_to(Path(__file__).parents[1]) or filename == sys.argv[0]
    if ours and category in (UserWarning, FutureWarning):
        return f"penstock: warning: {message}\n"
    return _as_python_does(message, category, filename, lineno, line)


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at once; a run, which has something to save, installs handlers of its own.

    It does not raise: in the middle of `import torch` an exception goes through C++ and ends in abort().
    """
    os.write(2, f"penstock: stopped by {signal.Signals(number).name}; no run was going on\n".encode())
    os._exit(128 + number)
