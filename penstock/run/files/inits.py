"""The runs that a new one starts from, as `init` and `--init` name them: one, one policy, or one for each policy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from penstock.core.errors import ConfigError

Init: TypeAlias = str | Path | tuple[str | Path, str] | Mapping[str, str | Path | tuple[str | Path, str]]
"""A run; (run, id of one of its policies); or either of them by the id of the policy that starts from it."""
Named: TypeAlias = tuple[str, str]
"""A run, and the id of one of its policies; "" for its only one, or that of the same id."""
Given: TypeAlias = str | Named | dict[str, Named]
"""An Init that was read: a run, one policy, or one for each."""

_EXPECTED = (
    "expected a run, 'runs/a'; a policy of it, ('runs/a', 'b'); or by policy {'a': 'runs/x', 'c': ('runs/y', 'b')}"
)


def read(init: Init) -> Given:
    """The checked value of `init`. Raises ConfigError for anything else than an Init."""
    if isinstance(init, (str, os.PathLike)):
        return str(init)
    if not isinstance(init, Mapping):
        return _named(init, init)
    if not init or not all(isinstance(key, str) for key in init):
        raise ConfigError(f"init={init!r:.200}; {_EXPECTED}")
    return {key: _named(value, init) for key, value in init.items()}


def of_words(words: Sequence[str]) -> Given | None:
    """Parses the values of `--init`: RUN, RUN:POLICY, or POLICY=RUN and POLICY=RUN:POLICY. None without values.

    A folder of that name comes first: `--init runs/a:b` is a run if there is one.

    Raises:
        ConfigError: a policy that is named twice, or a run without its policy beside others.
    """
    found = [_word(text) for text in words]
    if len(found) == 1 and not found[0][0]:
        _, run, policy = found[0]
        return (run, policy) if policy else run
    given: dict[str, Named] = {}
    for text, (name, *where) in zip(words, found):
        if not name or name in given:
            said = "names that policy twice" if name else "beside others names no policy of this run"
            raise ConfigError(f"--init {text} {said}; expected each once, e.g. --init a=runs/x --init c=runs/y:b")
        given[name] = (where[0], where[1])
    return given or None


def words_of(init: Given) -> list[str]:
    """The values of `--init` that name the same."""
    if isinstance(init, dict):
        return [f"{name}={_joined(where)}" for name, where in init.items()]
    return [_joined((init, "") if isinstance(init, str) else init)] if init else []


def runs_of(init: Given | None) -> list[str]:
    """The runs, in their order."""
    if isinstance(init, dict):
        return [run for run, _ in init.values()]
    return [init if isinstance(init, str) else init[0]] if init else []


def at_runs(init: Given, runs: Sequence[str]) -> Given:
    """The same of other runs, in their order."""
    if isinstance(init, dict):
        return {name: (run, policy) for run, (name, (_, policy)) in zip(runs, init.items())}
    return init and (runs[0] if isinstance(init, str) else (runs[0], init[1]))


def absolute(init: Given) -> Given:
    """The same with absolute paths."""
    return at_runs(init, [str(Path(run).absolute()) for run in runs_of(init)])


def _named(value: Any, init: Any) -> Named:
    parts = (value, "") if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(parts, (tuple, list)) or len(cast(Sequence[Any], parts)) != 2:
        raise ConfigError(f"init={init!r:.200}; {_EXPECTED}")
    run, policy = cast(Sequence[Any], parts)
    if not isinstance(run, (str, os.PathLike)) or not isinstance(policy, str):
        raise ConfigError(f"init={init!r:.200}; {_EXPECTED}")
    return str(run), policy


def _joined(where: Sequence[str]) -> str:
    run, policy = where
    return f"{run}:{policy}" if policy else run


def _word(text: str) -> tuple[str, str, str]:
    """Id of the policy here or "", run, and id of the policy there or "", of a value of `--init`."""
    if os.path.isdir(text):
        return "", text, ""
    cuts = [i for i, c in enumerate(text) if c == "=" and i and "/" not in text[:i]]
    for i in cuts:
        if (found := _there(text[i + 1 :])) is not None:
            return text[:i], *found
    if (found := _there(text)) is not None:
        return "", *found
    return (text[: cuts[0]], text[cuts[0] + 1 :], "") if cuts else ("", text, "")


def _there(text: str) -> Named | None:
    """A run that is there, and the id of a policy or ""; None if no part of the text is a folder."""
    ends = [len(text), *(i for i in reversed(range(len(text))) if text[i] == ":")]
    return next(((text[:i], text[i + 1 :]) for i in ends if i and os.path.isdir(text[:i])), None)
