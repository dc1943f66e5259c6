"""Calls to environments' methods and attributes: lookup through wrappers, answers, and each slot's history."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from penstock.core.errors import nearest, words_of
from penstock.core.wire import decode, encode

_BELOW = ("env", "aec_env", "par_env")
"""Attributes in which wrappers and PettingZoo's conversions keep the inner environment."""
_OWN = frozenset(("reset", "step", "close", "action_space", "observation_space"))
"""Names that the sampler needs for itself."""
UNSTARTED = 0, -1
"""Place of a call before the first reset."""


class Answer(NamedTuple):
    """The outcome of a call in one environment."""

    status: Literal["done", "unsendable", "raised", "missing", "absent", "refused"]
    """`unsendable`: done, but the value is no plain data. `absent`: the slot has no environment now. `refused`: it can
    never have one."""
    value: Any = None
    """`done`: the encoded value. `missing`: a hint at existing names. Else the error as text."""
    episode: int = UNSTARTED[0]
    """Number of the slot's open episode, else of the next one."""
    step: int = UNSTARTED[1]
    """Steps taken in it; -1 before its reset."""

    @property
    def counts(self) -> bool:
        """The call applies to the slot's environment, or to the next one if absent."""
        return self.status not in ("missing", "refused")


class EnvCall(NamedTuple):
    """A method to call, an attribute to read, or one to set; plain data."""

    kind: Literal["call", "get", "set"]
    name: str
    data: bytes
    """`core.wire` encoding of the arguments, (tuple, dict by name); with `set` just (value,)."""
    overwrites: bool = False
    """It undoes earlier calls of this method."""

    def record(self, answer: Answer) -> CallRecord:
        """The call's record for the slot that gave this answer."""
        return CallRecord(*self, answer.episode, answer.step, answer.status == "raised")

    @property
    def assigns(self) -> bool:
        """It makes an earlier one of the same kind and name unnecessary."""
        return self.overwrites or self.kind == "set"


class CallRecord(NamedTuple):
    """A call made in one slot; plain data."""

    kind: Literal["call", "get", "set"]
    name: str
    data: bytes
    overwrites: bool
    episode: int
    step: int
    """`episode` and `step`: the place of the call, as in `Answer`."""
    raised: bool
    """The environment raised, as it does again when the call is repeated."""

    @property
    def call(self) -> EnvCall:
        """The call itself."""
        return EnvCall(self.kind, self.name, self.data, self.overwrites)

    def precedes(self, episode: int) -> bool:
        """True if the call came before this episode's reset."""
        return self.episode < episode or (self.episode == episode and self.step < 0)


def refused_name(kind: str, name: Any) -> str:
    """Why a method or attribute of this name may not be called or set; "" if it may."""
    if not isinstance(name, str) or not name.isidentifier():
        return "expected the name of a method or attribute as text"
    if name[0] == "_":
        return "names with an underscore are private; give the environment a public method"
    if name in _OWN and kind != "get":
        return f"{name!r} is for the sampler alone, whose record would be wrong without it"
    return ""


def execute(env: Any, call: EnvCall) -> Answer:
    """Executes a call in an environment; the errors of the environment are answers."""
    holder = _holder(env, call)
    if holder is None:
        inside = [(layer, name) for layer in layers(env) for name in dir(layer) if name[:1] != "_"]
        names = {name for layer, name in inside if call.kind != "call" or callable(_static(layer, name))}
        return Answer("missing", nearest(call.name, names))
    args, named = decode(call.data)
    try:
        if call.kind == "set":
            setattr(holder, call.name, *args)
            value = None
        else:
            value = getattr(holder, call.name)
            value = value(*args, **named) if call.kind == "call" else value
    except (Exception, SystemExit) as error:
        return Answer("raised", f"{words_of(error)}\n{''.join(traceback.format_exception(error))}")
    try:
        return Answer("done", encode(value, "the value"))
    except (TypeError, ValueError, RecursionError) as error:
        method = f"; it is a method: use envs.call({call.name!r})" if call.kind == "get" and callable(value) else ""
        return Answer("unsendable", f"{error}{method}")


def plain(calls: Sequence[Sequence[CallRecord]]) -> list[list[tuple[Any, ...]]]:
    """Histories by slot as plain data; `from_plain` is the inverse."""
    return [[tuple(x) for x in mine] for mine in calls]


def from_plain(calls: Sequence[Sequence[Sequence[Any]]]) -> list[list[CallRecord]]:
    """Inverse of `plain`. Raises TypeError for an invalid record, ValueError and the like for unreadable arguments."""
    found = [[CallRecord(*x) for x in mine] for mine in calls]
    for x in (x for mine in found for x in mine):
        known = x.kind in ("call", "set") and not refused_name(x.kind, x.name) and isinstance(x.data, bytes)
        if not known or type(x.episode) is not int or type(x.step) is not int:
            raise TypeError(f"{x!r:.200} is no call of an environment")
        args, named = decode(x.data)
        if not isinstance(args, tuple) or not isinstance(named, dict):
            raise TypeError(f"{x!r:.200} is a call without arguments")
    return found


def recorded(calls: Sequence[list[CallRecord]], call: EnvCall, slots: Sequence[int], answers: Sequence[Answer]) -> None:
    """Adds a call to the histories of the slots it applies to."""
    for b, answer in zip(slots, answers) if call.kind != "get" else ():
        if answer.status == "absent" and calls[b]:  # the episode of the last call is lost
            last = calls[b][-1]
            answer = answer._replace(episode=last.episode + (last.step >= 0))
        if answer.counts:
            calls[b][:] = remembered(calls[b], call.record(answer))


def remembered(history: Sequence[CallRecord], record: CallRecord) -> list[CallRecord]:
    """A slot's history with one more call, without those that need not be repeated.

    Among calls made before the open episode, an assignment (`set`, or a call with `overwrites`) is dropped if a later
    one of the same kind and name follows with nothing but assignments between them. Calls within the open episode stay,
    as its replay needs them.
    """
    history = [*history, record]
    early = [x for x in history if x.precedes(record.episode)]
    kept, later = list[CallRecord](), set[tuple[str, str]]()
    for x in reversed(early):
        if not x.call.assigns or x.raised:
            later.clear()
        elif (x.kind, x.name) in later:
            continue
        else:
            later.add((x.kind, x.name))
        kept.append(x)
    return kept[::-1] + [x for x in history if not x.precedes(record.episode)]


def layers(env: Any) -> Iterator[Any]:
    """An environment and those inside it, outermost first."""
    while env is not None:
        yield env
        import gymnasium as gym

        innermost = isinstance(env, gym.Env) and not isinstance(env, gym.Wrapper)
        inside = {} if innermost else getattr(env, "__dict__", {})
        env = next((inside[name] for name in _BELOW if name in inside), None)


def _holder(env: Any, call: EnvCall) -> Any:
    """The outermost layer that has the attribute or method itself; None if there is none."""
    layer = env
    for layer in layers(env):
        if call.name in getattr(layer, "__dict__", ()) or hasattr(type(layer), call.name):
            found = _static(layer, call.name)
            return (
                layer if call.kind != "call" or callable(found) or isinstance(found, (property, classmethod)) else None
            )
    forwards = call.kind != "set" and hasattr(layer, call.name)  # by the environment's own `__getattr__`
    return layer if forwards else None


def _static(layer: Any, name: str) -> Any:
    """The attribute of a layer or of its class, without running a property."""
    own = getattr(layer, "__dict__", {})
    return own[name] if name in own else inspect.getattr_static(type(layer), name, None)
