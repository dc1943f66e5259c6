"""Envs: access to the environments of a live sampler between two batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.wire import decode, encode
from penstock.envs.pools.calls import Answer, EnvCall, refused_name

if TYPE_CHECKING:
    from penstock.samplers.trackers.evaluation import Evaluates


class Called(NamedTuple):
    """A call made in environments."""

    kind: Literal["call", "set"]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: list[int] | None
    """None: all of them."""
    evaluation: bool


class Envs:
    """Calls methods of the sampler's environments, and reads and sets their attributes, through all wrappers.

    A call takes effect before the first batch not yet requested: the next one, or with `depth` the one after those in
    flight. With `reset="next_step"` a reset that is due comes after the call, with `reset="batch_end"` before it. Every
    slot's calls belong to the sampler's state: a resumed run and the replacement of a lost worker repeat them.
    Arguments and values are plain data: None, numbers, text, bytes, arrays, and lists, tuples and dicts of these.

    Args:
        told: called after each `call` and `set`, with it. evaluator: why evaluation environments cannot be reached; "":
            the sampler plays them.
    """

    def __init__(self, sampler: Any, told: Callable[[Called], Any] | None = None, evaluator: str = "") -> None:
        if not hasattr(sampler, "call_envs"):
            raise ConfigError(
                f"{type(sampler).__name__} has no call_envs(call, slots, evaluation), by which `envs` reaches "
                "environments; inherit penstock.samplers.trackers.evaluation.Evaluates and write it"
            )
        self._sampler: Evaluates = sampler
        self._told, self._evaluator = told, evaluator

    def __repr__(self) -> str:
        return f"Envs({type(self._sampler).__name__}, {len(self._sampler.calls_of_envs)} slots)"

    def call(
        self,
        method: str,
        /,
        *args: Any,
        slots: Sequence[int] | None = None,
        evaluation: bool = False,
        overwrites: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Calls a method of every environment, or of some.

        Args:
            slots: numbers of training environments; None for all. evaluation: call the evaluation environments
                instead, and those of all later evaluations.
            overwrites: the call undoes earlier calls of the same method, which need not be remembered.

        Returns:
            the values in the order of slots; with `slots` a dict by slot. None for a slot without environment, as while
            its runner is replaced; its new environment gets the call.

        Raises:
            ConfigError: no environment has the method, it is private or the sampler's own, a value or argument is no
                plain data, or the environments cannot be reached. EnvWorkerError: a method raised; the message names
                the slots. The others have executed it, and the sampler goes on.
        """
        return self._order("call", method, args, kwargs, slots, evaluation, overwrites)

    def get(self, name: str, /, *, slots: Sequence[int] | None = None, evaluation: bool = False) -> Any:
        """Returns an attribute of all environments, or of some; see `call`."""
        return self._order("get", name, (), {}, slots, evaluation)

    def set(self, name: str, value: Any, /, *, slots: Sequence[int] | None = None, evaluation: bool = False) -> None:
        """Sets an existing attribute of all environments, or of some; see `call`."""
        self._order("set", name, (value,), {}, slots, evaluation)

    def last_call(self, method: str, slot: int = 0) -> tuple[Any, ...] | None:
        """Returns the positional arguments of the last successful call of a method in a slot, or None."""
        calls = self._sampler.calls_of_envs
        mine = calls[slot] if 0 <= slot < len(calls) else ()
        own = [x for x in mine if (x.kind, x.name, x.raised) == ("call", method, False)]
        return decode(own[-1].data)[0] if own else None

    def _order(
        self,
        kind: Literal["call", "get", "set"],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        slots: Sequence[int] | None,
        evaluation: bool,
        overwrites: bool = False,
    ) -> Any:
        what = f"envs.{kind}({name!r})"
        if why := refused_name(kind, name):
            raise ConfigError(f"{what}: {why}")
        try:
            data = encode((args, kwargs), "(args, kwargs)")
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{what}: {error}") from None
        if evaluation and self._evaluator:
            raise ConfigError(f"{what}, evaluation=True: {self._evaluator}")
        numbers = self._numbers(what, slots, evaluation)
        answers = self._sampler.call_envs(EnvCall(kind, name, data, overwrites), numbers, evaluation)
        if self._told is not None and kind != "get" and any(x.counts for x in answers.values()):
            self._told(Called(kind, name, args, kwargs, None if slots is None else numbers, evaluation))
        _refuse(what, answers, evaluation)
        values = {b: decode(x.value) if x.status == "done" else None for b, x in answers.items()}
        return list(values.values()) if slots is None else values

    def _numbers(self, what: str, slots: Sequence[int] | None, evaluation: bool) -> list[int]:
        """The slots as a list. Raises ConfigError."""
        B = len(self._sampler.calls_of_envs)
        if slots is None:
            return list(range(B))
        if evaluation:
            raise ConfigError(f"{what}: slots={slots!r} with evaluation=True; all evaluation environments are called")
        try:
            numbers = [operator.index(b) for b in slots]
        except TypeError:
            numbers = []
        if not numbers or len({*numbers}) < len(numbers) or not all(0 <= b < B for b in numbers):
            raise ConfigError(f"{what}: slots={slots!r}; expected a list of different numbers from 0 to {B - 1}")
        return numbers


def _refuse(what: str, answers: dict[int, Answer], evaluation: bool) -> None:
    """Raises for slots that did not execute a call, or whose value cannot be sent."""
    by_status: dict[str, list[int]] = {}
    for b, answer in answers.items():
        by_status.setdefault(answer.status, []).append(b)
    for status in ("refused", "missing", "raised", "unsendable"):
        if status not in by_status:
            continue
        failed = by_status[status]
        first, done = answers[failed[0]], len(by_status.get("done", ())) + len(by_status.get("unsendable", ()))
        where = f"{'evaluation ' * evaluation}{_named(failed)}"
        others = f"; the other {done} slot{'s' * (done > 1)} executed it" if done else ""
        if evaluation and any(x.counts for x in answers.values()) and not what.startswith("envs.get"):
            others = "; evaluation environments are made anew without it"
        head, _, trace = str(first.value).partition("\n")
        if status == "refused":
            raise ConfigError(f"{what}: {head}")
        if status == "missing":
            kind = "method" if what.startswith("envs.call") else "attribute"
            raise ConfigError(f"{what}: {where}: the environment has no {kind} of this name, {head}{others}")
        if status == "raised":
            raise EnvWorkerError(f"{what}: {where}: {head}{others}\n{trace}")
        raise ConfigError(f"{what}: {where}: {head}; return plain data, or None")


def _named(slots: list[int]) -> str:
    """`slot 3`, `slots 0 to 7`, or `slots 1, 4, 6`."""
    if len(slots) == 1:
        return f"slot {slots[0]}"
    if slots == list(range(slots[0], slots[-1] + 1)):
        return f"slots {slots[0]} to {slots[-1]}"
    return f"slots {', '.join(map(str, slots[:8]))}{' and others' * (len(slots) > 8)}"
