"""Settings classes as their source declares them are those that an import makes, field by field."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from penstock.core.config import import_object, override, to_plain
from penstock.core.errors import ConfigError
from penstock.core.names.declared import declared, texts
from penstock.core.names.hints import settings_classes

CLASSES = [cls for classes in settings_classes().values() for cls in classes]


def real(cls: type) -> Any:
    return import_object(f"{cls.__module__}:{cls.__qualname__}")


def plain(value: Any) -> Any:
    """A default as data; a function is its name, as where its module was not imported."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value.__name__ if callable(value) else to_plain(value)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_fields_types_defaults_and_texts_are_those_of_the_class(cls: Any) -> None:
    other = real(cls)
    assert [f.name for f in dataclasses.fields(cls)] == [f.name for f in dataclasses.fields(other)]
    assert [base.__name__ for base in cls.__mro__] == [
        b.__name__ for b in other.__mro__ if b.__name__ not in ("Protocol", "Generic")
    ]
    hints = typing.get_type_hints(other, include_extras=True)
    for f, g in zip(dataclasses.fields(cls), dataclasses.fields(other)):
        if f.type is not Any and not any(word in str(hints[g.name]) for word in ("Callable", "penstock")):
            assert f.type == hints[f.name], f.name
        if g.default is not dataclasses.MISSING:
            assert plain(f.default) == plain(g.default), f.name
    assert texts(cls) == texts(other)
    assert all(texts(cls).values()), "each field has a text"


def test_types_of_numbers_are_known() -> None:
    """Else a slip in their values would only be found once torch is loaded."""
    open_ = {
        f"{c.__name__}.{f.name}"
        for c in CLASSES
        for f in dataclasses.fields(c)
        if f.type is Any or f.type == Any | None
    }
    given = {
        f"{c.__name__}.{f.name}"
        for c in CLASSES
        for f in dataclasses.fields(real(c))
        if f.type in ("Any", "Any | None")
    }
    assert open_ - given == {"EnvConfig.evaluation", "Experiment.algo", "Experiment.sampler"}


def test_limits_and_types_hold() -> None:
    ppo = declared("penstock.algos.ppo:PPO")()
    assert override(ppo, {"net.hidden": ["8", "9"], "lr": "linear(1e-3, 0)"}).net.hidden == (8, 9)
    for path, value, said in (
        ("discount", 1.5, "^discount=1.5; expected 0 to 1"),
        ("net.recurrent_size", 0, r"^net\.recurrent_size=0"),
        ("lr", "linear(1", "not understood"),
        ("epochs", "many", "whole"),
    ):
        with pytest.raises(ConfigError, match=said):
            override(ppo, {path: value})
