import copy
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pytest

from penstock.core.config import from_plain, import_object, import_path, known_names, override, to_plain, whole
from penstock.core.errors import ConfigError


class Shape(NamedTuple):
    rows: int
    columns: int = 2


@dataclass(frozen=True)
class Inner:
    lr: float = 0.5
    widths: tuple[int, ...] = (4, 4)


@dataclass(frozen=True)
class Wider(Inner):
    extra: int = 1


class AnyInner(Protocol):
    lr: float


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    part: AnyInner = Inner()
    count: int = 1
    name: str = "x"
    flag: bool = False
    maybe: int | None = None
    schedule: float | str = 1.0
    mode: Literal["fast", "slow"] = "fast"
    pair: tuple[int, float] = (1, 2.0)
    where: Path = Path("a")
    shape: Shape = Shape(3)  # noqa: RUF009
    hook: Callable[..., Any] = len
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    inner_or_name: Inner | str = "default"
    inner_or_none: Inner | None = None
    anything: Any = None


def a_function() -> int:
    return 1


def test_dotted_paths_reach_any_depth_and_leave_the_original_alone():
    base = Outer()
    new = override(base, {"inner.lr": 0.25, "count": 3, "part.lr": 0.125, "shape.rows": 7})
    assert new == Outer(inner=Inner(lr=0.25), count=3, part=Inner(lr=0.125), shape=Shape(7, 2))
    assert base == Outer()
    assert override(base, {}) is base


def test_mappings_take_new_keys():
    new = override(Outer(kwargs={"a": 1}), {"kwargs.b": 2, "kwargs.deep.c": 3})
    assert new.kwargs == {"a": 1, "b": 2, "deep": {"c": 3}}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("inner.lr", 1, 1.0),
        ("inner.lr", "3e-4", 3e-4),
        ("inner.widths", [8, 9.0, "10"], (8, 9, 10)),
        ("inner.widths", [], ()),
        ("count", 4.0, 4),
        ("count", "200_000", 200_000),
        ("flag", "true", True),
        ("flag", "False", False),
        ("maybe", 3, 3),
        ("maybe", None, None),
        ("maybe", "3", 3),
        ("schedule", "linear(1, 0)", "linear(1, 0)"),
        ("schedule", 2, 2.0),
        ("schedule", "3e-4", "3e-4"),
        ("mode", "slow", "slow"),
        ("pair", [1, 2], (1, 2.0)),
        ("where", "b/c", Path("b/c")),
        ("shape", [5, 6], Shape(5, 6)),
        ("shape", {"columns": 6.0, "rows": 5}, Shape(5, 6)),
        ("hook", "builtins:max", max),
        ("hook", min, min),
        ("kwargs", {"z": [1]}, {"z": [1]}),
        ("inner", Wider(), Wider()),
        ("inner_or_name", Inner(lr=2.0), Inner(lr=2.0)),
        ("inner_or_name", "text", "text"),
        ("part", object, object),
        ("anything", b"x", b"x"),
    ],
)
def test_values_are_converted_where_nothing_is_lost(path: str, value: Any, expected: Any):
    new = override(Outer(), {path: value})
    for key in path.split("."):
        new = getattr(new, key)
    assert new == expected
    assert type(new) is type(expected)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("count", 1.5, r"count=1.5 \(float\); expected a whole number"),
        ("count", True, r"count=True \(bool\); expected a whole number"),
        ("count", "many", "expected a whole number"),
        ("inner.lr", True, r"inner.lr=True \(bool\); expected float"),
        ("inner.lr", "fast", "expected float"),
        ("flag", 1, r"flag=1 \(int\); expected bool"),
        ("flag", "yes", "expected bool"),
        ("name", 3, "expected str"),
        ("maybe", "three", r"maybe='three' \(str\); expected int \| None"),
        ("inner_or_none", "true", r"\(str\); expected Inner \| None, or a setting below it: inner_or_none.lr"),
        ("mode", "fats", "mode='fats'; did you mean 'fast'"),
        ("pair", [1], r"pair=\[1\]; expected 2 values"),
        ("pair", 5, "expected tuple"),
        ("inner.widths", [1, "a"], "inner.widths='a'"),
        ("shape", [1, 2, 3], "expected 2 values: rows, columns"),
        ("shape", {"rows": 1, "colums": 2}, "expected 2 values: rows, columns"),
        ("shape", 3, "expected Shape"),
        ("inner", "big", r"inner='big' \(str\); expected Inner"),
        ("inner_or_name", 5, "inner_or_name=5"),
        ("hook", 5, "hook=5"),
        ("kwargs", 5, "kwargs=5"),
        ("inner.rl", 1, "unknown setting 'inner.rl': Inner has no 'rl'; did you mean 'lr'"),
        ("iner.lr", 1, "unknown setting 'iner.lr': Outer has no 'iner'; did you mean 'inner'"),
        ("shape.row", 1, "Shape has no 'row'; did you mean 'rows'"),
        ("count.x", 1, "nothing lies below int 1; shorten the path"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_so(path: str, value: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        override(Outer(), {path: value})


def test_settings_survive_json():
    settings = Outer(
        inner=Wider(lr=0.1, extra=5),
        maybe=3,
        pair=(2, 0.5),
        where=Path("a/b"),
        shape=Shape(8, 9),
        hook=a_function,
        kwargs={"a": [1, {"b": None}]},
        inner_or_name=Inner(),
    )
    plain = json.loads(json.dumps(to_plain(settings)))
    assert plain["class"] == f"{__name__}:Outer"
    again = from_plain(plain)
    assert again == settings
    assert isinstance(again.inner, Wider)
    assert isinstance(again.inner.widths, tuple)
    assert isinstance(again.shape, Shape)
    assert isinstance(again.where, Path)


def test_a_whole_algorithm_survives_json():
    from penstock.agents.networks import Net
    from penstock.algos.ppo import PPO

    for settings in (PPO(), PPO(lr="linear(1e-3, 0)", net=Net(hidden=(8,), shared=True, recurrent="lstm"))):
        assert from_plain(json.loads(json.dumps(to_plain(settings)))) == settings


def test_numpy_values():
    assert to_plain({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}) == {"a": 0.5, "b": 3, "c": True}
    assert type(to_plain(np.int64(3))) is int
    assert "unstorable" in to_plain(np.zeros(3))


def test_what_cannot_be_stored_says_so_when_it_is_missed():
    @dataclass(frozen=True)
    class Local:
        x: int = 1

    plain = to_plain({"f": lambda: 1, "set": {1}})
    assert plain["f"] == {"unstorable": "test_what_cannot_be_stored_says_so_when_it_is_missed.<locals>.<lambda>"}
    assert plain["set"] == {"unstorable": "{1}"}
    with pytest.raises(ConfigError, match=r"<lambda> could not be stored.*pass it again"):
        from_plain(plain)
    with pytest.raises(ConfigError, match="class that cannot be imported"):
        from_plain(to_plain(Local()))


def test_stored_settings_that_no_longer_fit_are_refused():
    plain = to_plain(Inner())
    with pytest.raises(ConfigError, match=r"stored settings of Inner name 'lrr'; did you mean 'lr'"):
        from_plain({**plain, "lrr": 1})
    with pytest.raises(ConfigError, match=r"widths=3 .*expected tuple"):
        from_plain({**plain, "widths": 3})
    with pytest.raises(ConfigError, match="has no 'Innner'; did you mean 'Inner'"):
        from_plain({**plain, "class": f"{__name__}:Innner"})
    assert from_plain({"class": plain["class"]}) == Inner()


def test_import_paths_lead_back():
    assert import_path(Outer) == f"{__name__}:Outer"
    assert import_path(Inner.__init__) is None or import_object(import_path(Inner.__init__)) is Inner.__init__
    assert import_path(a_function) == f"{__name__}:a_function"
    assert import_object(import_path(Path.joinpath)) is Path.joinpath
    assert import_path(lambda: 1) is None
    assert import_path(3) is None

    def a_function_of_another_place() -> None: ...

    assert import_path(a_function_of_another_place) is None
    renamed = type("Outer", (), {"__module__": __name__, "__qualname__": "Outer"})
    assert import_path(renamed) is None  # that name leads to another object


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("os.path", "no import path; expected module:name"),
        (":x", "no import path"),
        ("os:", "no import path"),
        ("no_such_module_at_all:x", "cannot import 'no_such_module_at_all'.*PYTHONPATH"),
        ("pathlib:Pth", "module 'pathlib' has no 'Pth'; did you mean 'Path'"),
    ],
)
def test_an_import_error_says_which_half_is_wrong(path: str, message: str):
    with pytest.raises(ConfigError, match=message):
        import_object(path)


@pytest.mark.parametrize("text", ["100000", "1e5", "100_000", "0.1e6", "100000.0", "+1E5"])
def test_whole_numbers_are_read_as_people_write_them(text: str):
    assert whole(text) == 100_000
    assert override(Outer(), {"count": text, "maybe": text}) == Outer(count=100_000, maybe=100_000)


@pytest.mark.parametrize("text", ["1.5", "1.1e0", "inf", "nan", "1e400", "e5", "", "ten"])
def test_what_is_no_whole_number_is_refused(text: str):
    with pytest.raises(ValueError):
        whole(text)
    with pytest.raises(ConfigError, match="expected a whole number, such as 100000, 1e5 or 100_000"):
        override(Outer(), {"count": text})


@dataclass(frozen=True)
class Strict:
    __new__ = known_names

    discount: float = 0.99
    B: int = 4


@dataclass(frozen=True)
class Subclass(Strict):
    more: int = 0


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("gamma", r"it is 'discount' here \(--algo.discount\)"),
        ("num_envs", r"it is 'B' here \(--sampler.B\)"),
        ("discuont", "did you mean 'discount'"),
        ("total_timesteps", r"it is 'steps' of ps.RunConfig here \(--run.steps\)"),
        ("totl_timesteps", "known: B, discount, more"),  # no guess is stated as a fact
        ("zzz", "known: B, discount, more"),
        ("init", r"to start from another run's networks: ps.train\(exp, init=RUN\)"),
    ],
)
def test_names_that_settings_do_not_have_are_answered_with_ours(given: str, hint: str):
    with pytest.raises(ConfigError, match=rf"Subclass has no setting '{given}'; {hint}"):
        Subclass(**{given: 1})
    with pytest.raises(ConfigError, match=rf"unknown setting '{given}': Subclass has no '{given}'; {hint}"):
        override(Subclass(), {given: 1})


def test_strict_settings_are_made_copied_and_sent_as_any_dataclass():
    made = Subclass(0.5, 2, more=3)
    assert (made.discount, made.B, made.more) == (0.5, 2, 3)
    assert copy.copy(made) == pickle.loads(pickle.dumps(made)) == replace(made) == made
    assert list(inspect.signature(Subclass).parameters) == ["discount", "B", "more"]
    with pytest.raises(TypeError, match="positional arguments"):
        Subclass(1, 2, 3, 4)  # pyright: ignore


def test_none_is_spelt_where_text_is_no_value():
    outer = Outer(maybe=3)
    assert override(outer, {"maybe": "none"}).maybe is None
    assert override(outer, {"maybe": "None"}).maybe is None
    assert override(outer, {"name": "none"}).name == "none"
    with pytest.raises(ConfigError, match="count='none'"):
        override(outer, {"count": "none"})


@dataclass(frozen=True)
class WithOptional:
    inner: Inner | None = None


@pytest.mark.parametrize("order", [1, -1])
def test_a_part_that_is_left_out_and_set_is_an_error_in_either_order(order: int) -> None:
    changes = {"inner": None, "inner.lr": 0.25}
    with pytest.raises(ConfigError, match=r"'inner' is None, and 'inner.lr' is given beside it; expected one"):
        override(WithOptional(Inner()), dict(list(changes.items())[::order]))
    assert override(WithOptional(Inner()), {"inner": None}).inner is None
    assert override(WithOptional(), {"inner.lr": 0.25, "inner": Inner(widths=(8,))}).inner == Inner(0.25, (8,))
