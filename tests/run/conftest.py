from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core import trace
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from tests.run.resumed import EXPERIMENTS, train


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by its path."""
    if isinstance(tree, dict):
        return {k: v for key, item in tree.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {k: v for i, item in enumerate(tree) for k, v in flat(item, f"{path}/{i}").items()}
    return {path: tree}


def bits(leaf: Any) -> Any:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return (str(leaf.dtype), tuple(leaf.shape), np.asarray(leaf).tobytes())
    return ("nan",) if isinstance(leaf, float) and math.isnan(leaf) else leaf


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a run without durations and rates."""
    lines = (run / name).read_text().splitlines()
    untimed = ("time/iterations", "time/total_timesteps")
    return [{k: v for k, v in json.loads(x).items() if not k.startswith("time/") or k in untimed} for x in lines]


def state(run: Path, which: str = "last") -> dict[str, Any]:
    """Every leaf of a checkpoint, wall time excepted, in a form that compares bit for bit."""
    path = find_checkpoint(run, which)
    stored = load_checkpoint(path)
    leaves = flat({"state": stored.state, "policy": stored.policy})
    assert leaves.pop("/state/trainer/elapsed_s") > 0
    return {"/step": int(path.name), **{name: bits(leaf) for name, leaf in leaves.items()}}


@pytest.fixture(scope="session")
def same_run() -> Callable[[Path, Path], None]:
    """Asserts that two runs ended in the same bits and reported the same numbers on the way."""

    def same_run(a: Path, b: Path) -> None:
        left, right = state(a), state(b)
        assert left.keys() == right.keys()
        different = [name for name in left if left[name] != right[name]]
        assert not different, f"different bits: {different}"
        assert rows(a) == rows(b)
        assert len({json.dumps(row) for row in rows(a)}) == len(rows(a))
        if (a / "eval").exists() or (b / "eval").exists():
            assert rows(a, "eval/evaluations.jsonl") == rows(b, "eval/evaluations.jsonl")
        texts = [
            np.genfromtxt(run / "progress.csv", delimiter=",", names=True, dtype=None, encoding=None) for run in (a, b)
        ]
        names = [n for n in texts[0].dtype.names if not n.startswith("time")]
        for name in names:
            np.testing.assert_array_equal(texts[0][name], texts[1][name])

    return same_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of A2C on CartPole that has ended after its 320 steps; for readers."""
    return train(EXPERIMENTS["a2c"], tmp_path_factory.mktemp("finished") / "run").run_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on from or to damage."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def nothing_left_set() -> Iterator[None]:
    """Restores torch's threads; asserts that no trace goes on."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert trace.VARIABLE not in os.environ
