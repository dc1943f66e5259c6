"""The package's sources, each read and parsed once by all tests that scan them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "penstock").rglob("*.py"))


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree(text: str) -> ast.Module:
    return ast.parse(text)


@functools.cache
def nodes(text: str) -> list[ast.AST]:
    """Every node, from the outside in."""
    return list(ast.walk(tree(text)))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name and its attributes; of anything else its whole text."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


@functools.cache
def named_calls(text: str) -> list[tuple[ast.Call, str]]:
    return [(node, dotted(node.func)) for node in nodes(text) if isinstance(node, ast.Call)]


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    text = text_of(path)
    docs: set[int] = set()
    for node in nodes(text):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and i not in docs for i, line in lines)
