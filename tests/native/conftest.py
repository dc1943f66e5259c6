"""The native kernel for tests, whatever the environment says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.native import library
from penstock.native.library import VARIABLE, loaded, why


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turns the kernel on; skips where the installation found no compiler."""
    monkeypatch.setenv(VARIABLE, "1")
    loaded.cache_clear()
    monkeypatch.setattr(library, "found", loaded()[0])
    if library.found is None:
        pytest.skip(f"no native kernel: {why()}")
    yield
    monkeypatch.undo()
    loaded.cache_clear()


@pytest.fixture
def each_instruction_set(by_kernel: None) -> Iterator[list[bytes]]:
    """The names of all that this processor runs; the widest again afterwards."""
    yield [name for name in (b"avx512", b"avx2", b"neon", b"scalar") if library.found.choose(name) is not None]
    library.found.choose(b"")
