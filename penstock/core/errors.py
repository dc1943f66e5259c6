"""The errors penstock raises: each says what was seen, what was expected, and what to change."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with each terminal control character (escape sequences, writing direction) replaced by its escape.

    Args:
        kept: characters that stay as they are.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def legible(text: object) -> str:
    """A name or path of others as messages show it: itself, or its `repr` if it holds what cannot be printed."""
    return str(text) if str(text).isprintable() else repr(str(text))


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose; `exit_code` is the command line's status for it.

    Its text is `printable`: names in it may be another's.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(PenstockError, ValueError):
    """Settings that contradict each other, an unknown name, or a space no part can handle."""

    exit_code = 2


class NativeEnvError(ConfigError):
    """A native batched environment where one environment for a slot was expected."""


class EnvWorkerError(PenstockError):
    """An environment raised, broke its contract or died; the message names slot, episode, step and seed."""

    exit_code = 3


class EnvContractError(EnvWorkerError):
    """An environment returned something other than its spaces and the Gymnasium API promise."""


class LearnerError(PenstockError):
    """Learning cannot go on."""

    exit_code = 4


class NonFiniteError(LearnerError):
    """Losses or gradients stayed NaN or infinite; the message names the file that holds the last batch."""


class LearnerLostError(LearnerError):
    """Another learner of this run has ended, or does not answer in time; the message names it where it is known."""

    exit_code = 6


class CheckpointError(PenstockError):
    """A checkpoint or run directory that cannot be written, read or trusted; the message is one line, with the file."""

    exit_code = 5

    def __str__(self) -> str:
        return printable(super().__str__(), kept="")


class MissingExtraError(ConfigError):
    """An optional dependency is absent; the message says which extra installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; it comes with an extra: pip install 'penstock[{extra}]'")


def words_of(error: BaseException) -> str:
    """`Type: text` of an error, whose own `__str__` may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as worse:
        return f"{type(error).__name__}, whose own __str__ raises {type(worse).__name__}"


def depth_of_user() -> int:
    """The `stacklevel` for a warning of the function that calls this, to name the nearest line outside penstock."""
    frame, level = sys._getframe(), 0  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "penstock":
        frame, level = frame.f_back, level + 1
    return max(level, 1)


def nearest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """A hint that names the known words closest to `name`, or all of them if they are few."""
    words = sorted(set(known))
    close = nearest_words(name, words, limit)
    if close:
        return "did you mean " + " or ".join(repr(w) for w in close) + "?"
    return known_words(words if len(words) <= 12 else [*words[:12], "..."])


def known_words(words: Iterable[str]) -> str:
    """`known: a, b`."""
    return "known: " + ", ".join(words)


def nearest_words(name: str, known: Iterable[str], limit: int = 3, cutoff: float = 0.5) -> list[str]:
    """The known words closest to `name`, the closest first; [] if none has a similarity of `cutoff`, 0 to 1."""
    import difflib  # needed for a typo only, and it makes every start slower

    return difflib.get_close_matches(name, sorted(set(known)), n=limit, cutoff=cutoff)
