"""Settings classes as their source declares them, made without importing it: an algorithm's module would load torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from penstock.core.config import import_object
from penstock.core.limits import check_limits

_PACKAGE = Path(__file__).parents[2]
_ROOT = _PACKAGE.parent
_OPENING = f"{__name__.partition('.')[0]}."
_FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)
_LIGHT = __name__.rpartition(".")[0].rpartition(".")[0]
"""The layer whose modules may be imported: they load no torch."""


@functools.cache
def declared(path: str) -> Any:
    """A dataclass with the name, bases, fields, types, defaults and texts of the one at `module:NAME` of this package.

    It has no methods, and checks only the limits of single values. Types that would need another import are Any,
    defaults that would are their names. The text below a field stands in its `metadata["text"]`.
    """
    module, _, name = path.partition(":")
    source = _source(module)
    node = source.definitions[name]
    source[name] = Any  # meanwhile, for a field of its own type
    bases = tuple(base for expr in node.bases if isinstance(base := source.value(expr), type))
    made: list[Any] = []
    for entry, following in zip(node.body, [*node.body[1:], None]):
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        type_ = ast.unparse(entry.annotation)
        if type_.startswith("ClassVar"):
            continue
        default = dataclasses.MISSING if entry.value is None else source.value(entry.value)
        if not isinstance(default, dataclasses.Field):
            default = dataclasses.field(default=default)
        default.metadata = {"text": _text_of(following)}  # pyright: ignore[reportAttributeAccessIssue]
        made.append((entry.target.id, source.value(entry.annotation), default))
    checks = [
        call for call in ast.walk(node) if isinstance(call, ast.Call) and ast.unparse(call.func) == "check_settings"
    ]
    own: dict[str, Any] = {}
    if checks or not any(hasattr(base, "__post_init__") for base in bases):
        prefix = ast.literal_eval(checks[0].args[1]) if checks and len(checks[0].args) > 1 else ""
        own["__post_init__"] = lambda settings: check_limits(settings, prefix)
    cls = dataclasses.make_dataclass(name, made, bases=bases, namespace=own, frozen=True)
    cls.__module__, cls.__doc__ = module, ast.get_docstring(node)
    for expr in node.decorator_list:
        if ast.unparse(expr).startswith("renamed("):
            cls = source.value(expr)(cls)
    source[name] = cls
    return cls


def texts(cls: type) -> dict[str, str]:
    """The text below each field of a settings class, real or `declared`, as one line; "" for a field without."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            own = {f.name: f.metadata["text"] for f in dataclasses.fields(base) if "text" in f.metadata}
            found |= {name: text for name, text in (own or _texts_in_source(base)).items() if text}
    return {f.name: found.get(f.name, "") for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]


@functools.cache
def field_names() -> frozenset[str]:
    """Names that may be fields of a class of this package, by how their lines look; faster than reading the classes."""
    files = _PACKAGE.rglob("*.py")
    return frozenset(name for path in files for name in _FIELD.findall(path.read_text(encoding="utf-8")))


class FieldTexts:
    """The `__doc__` of a settings class with the texts of its fields, made when it is read: by help() or a notebook."""

    def __init__(self, cls: type) -> None:
        self._cls, self._doc = cls, cls.__doc__

    def __get__(self, instance: object, owner: type) -> str | None:
        if owner is not self._cls:
            return owner.__dict__.get("__doc__")
        found = [f"    {name}: {text}" for name, text in texts(owner).items() if text]
        return "\n".join([inspect.cleandoc(self._doc or ""), "", "Args:", *found]) if found else self._doc


def _texts_in_source(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(inspect.cleandoc(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # made in a terminal, or by a program
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        entry.target.id: _text_of(following)
        for entry, following in zip(body, [*body[1:], None])
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    }


def _text_of(node: ast.stmt | None) -> str:
    """The docstring that a statement is, as one line; "" for another statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


class _Source(dict[str, Any]):
    """The names of a module of this package, each with its value as far as that needs no import of another layer."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module
        path = _ROOT.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.definitions: dict[str, Any] = {}
        self._imports: dict[str, tuple[str, str]] = {}
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                stdlib = [a.name for a in node.names if a.name in sys.stdlib_module_names]
                self |= {name: importlib.import_module(name) for name in stdlib}
            elif isinstance(node, ast.ImportFrom):
                self._imports |= {a.asname or a.name: (node.module or "", a.name) for a in node.names}
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                self.definitions[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.definitions |= {t.id: node.value for t in targets if isinstance(t, ast.Name)}

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; Any where it needs what was not imported."""
        try:
            return eval(ast.unparse(node), {}, self)
        except (NameError, AttributeError, TypeError):
            return Any

    def __missing__(self, name: str) -> Any:
        node = self.definitions.get(name)
        if isinstance(node, ast.ClassDef):
            is_settings = any(ast.unparse(x).startswith("dataclass") for x in node.decorator_list)
            self[name] = declared(f"{self._module}:{name}") if is_settings else type(name, (), {})
        elif isinstance(node, ast.FunctionDef):
            self[name] = name
        elif node is not None:
            self[name] = self.value(node)
        elif name in self._imports:
            self[name] = self._imported(*self._imports[name])
        else:
            raise KeyError(name)  # a builtin
        return self[name]

    def _imported(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in sys.stdlib_module_names or module.startswith(f"{_LIGHT}."):
            return import_object(f"{module}:{name}")
        return _source(module)[name] if module.startswith(_OPENING) else Any


@functools.cache
def _source(module: str) -> _Source:
    return _Source(module)
