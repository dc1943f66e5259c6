"""The public names of `penstock.testing`: there, explained, and loaded only when asked for."""

from __future__ import annotations

import ast
import inspect
import sys
from subprocess import run

import pytest

from penstock import testing


@pytest.mark.parametrize("name", testing.__all__)
def test_every_public_name_is_there_and_explained(name: str) -> None:
    value = getattr(testing, name)
    assert value.__name__ == name
    assert inspect.getdoc(value)


def test_the_lazy_table_and_the_typed_imports_agree() -> None:
    tree = ast.parse(inspect.getsource(testing))
    block = next(n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))
    typed = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert typed == testing._WHERE  # pyright: ignore[reportPrivateUsage]


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(AttributeError, match="no 'check_agents'; did you mean 'check_agent'"):
        _ = testing.check_agents  # pyright: ignore


def test_pools_are_tested_without_torch() -> None:
    code = "import sys; from penstock.testing import check_pool, SeedEcho, FaultEnv; assert 'torch' not in sys.modules"
    run([sys.executable, "-c", code], check=True, timeout=60)
