"""The first batches of samplers with worker processes, and the proof that no process is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.testing.samplers import EchoAgent, bits

PLACES: dict[str, Callable[..., Any]] = {
    "cpu": ps.CpuSampler, "gpu": ps.GpuSampler, "alternating": ps.AlternatingSampler,
    "no-overlap": ps.NoOverlapAlternatingSampler,
}  # fmt: skip


TWO_KINDS = ["cpu", "alternating"]
"""One whose workers act, and one whose workers only step."""


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def first_batches(settings: Any, env: Any, batches: int = 3) -> list[dict[str, bytes]]:
    sampler = settings.build(env, 4)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        return [bits(sampler.obtain_samples(itr)[0]) for itr in range(batches)]
    finally:
        sampler.shutdown()


def refuse(kind: str, env: Any, match: str, error: type[Exception] = ConfigError) -> None:
    with pytest.raises(error, match=match):
        first_batches(PLACES[kind](T=6, B=5, workers=2), env)
