"""Nothing waits for a device in a step, and little in a batch; updates that are not finite are not taken there either.

No GPU is needed: `tests/far.py` is a device of CPU memory that counts waits. `tests/gpu/test_waits.py` asks CUDA.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.parsed import ROOT

EPOCHS = {"ppo": 3, "ppo-1": 1, "ppo-normalised": 4, "a2c": 1, "pqn": 3}
BY_REPLAY = 12
"""Waits of a training step from replay, wherever it lies: copies of leaves of the batch, and metrics."""


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    args = [sys.executable, "-m", "tests.far_cases", request.param]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_sampling_waits_a_few_times_a_batch_and_never_in_a_step(found: dict[str, Any]) -> None:
    for name, of_length in found["waits"].items():
        short, long = (sum(of_length[T]["sampling"].values()) for T in ("8", "12"))
        assert short == long <= 8, (name, of_length)


def test_training_waits_once_a_batch_and_once_more(found: dict[str, Any]) -> None:
    for name, of_length in found["waits"].items():
        short, long = (of_length[T] for T in ("8", "12"))
        assert long["updates"] > short["updates"] or name == "a2c", name  # or nothing would be shown
        counts = [sum(x["training"].values()) for x in (short, long)]
        assert counts[0] == counts[1] <= 1 + EPOCHS.get(name, BY_REPLAY - 1), (name, of_length)


def test_updates_that_are_not_finite_leave_parameters_and_optimizers_as_they_were(found: dict[str, Any]) -> None:
    """For each kind of optimizer: one norm, several groups, several optimizers, and the sum of two learners."""
    for name, (far, cpu) in found["steps"].items():
        assert all(far["as it should"]) and all(cpu["as it should"]), name
        assert far["end"] == cpu["end"], f"{name}: the bits differ from those of the CPU, which waits"
        assert far["groups"] == cpu["groups"]


def test_such_updates_are_counted_and_told_a_batch_later(found: dict[str, Any]) -> None:
    seen = found["errors"]
    assert seen["same"] == [True] * 3
    assert seen["counted"] == [2 * seen["updates"], 3]
    metrics = seen["metrics"]
    assert all(x == x for x in metrics.values()), "the metrics of updates not taken are in the means"
    assert (metrics["train/n_updates"], metrics["train/skipped_updates"]) == (seen["counted"][0], 3)
    number = seen["counted"][0]
    assert seen["error"].startswith(
        f"gradients were not finite in 10 updates in a row (norm nan); the last that counted was number {number}"
    )
