"""The device of these tests: CUDA, or what PENSTOCK_GPU_DEVICE names; `PENSTOCK_GPU_DEVICE=cpu pytest -m gpu` proves them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    """Where networks learn and act."""
    name = os.environ.get("PENSTOCK_GPU_DEVICE", "cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no CUDA device; PENSTOCK_GPU_DEVICE=cpu runs this on the CPU")
    return name


@pytest.fixture
def workers() -> int:
    """Worker processes, on a kernel that can watch them."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        pytest.skip(f"this kernel has no pidfd, which worker processes need: {error}")
    return 2


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Kernels whose sums have one order; where there is none, torch warns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)
