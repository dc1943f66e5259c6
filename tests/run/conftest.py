from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import penstock as ps
from penstock.core.config import to_plain
from penstock.run.checkpoint import find_checkpoint

LIMIT_S = 60.0


class Child:
    """A forked process that trains or resumes."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self._zygote, self.pid, self._log = zygote, pid, log
        self.code: int | None = None

    def wait(self, timeout: float = LIMIT_S) -> int:
        """The exit code, negative for the signal that killed it."""
        if self.code is None:
            self.code = self._zygote.ask({"wait": self.pid, "timeout": timeout})
        assert self.code is not None, f"still running after {timeout} s:\n{self.output}"
        return self.code

    @property
    def running(self) -> bool:
        self.code = self.code if self.code is not None else self._zygote.ask({"wait": self.pid, "timeout": 0.001})
        return self.code is None

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and the proof that it was in time."""
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, f"it had ended by itself:\n{self.output}"

    def succeed(self) -> dict[str, Any]:
        assert self.wait() == 0, self.output
        return json.loads(self.output.splitlines()[-1])

    @property
    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


class Zygote:
    """Forks fresh processes; see zygote.py."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        script = str(Path(__file__).parent / "zygote.py")
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._children: list[Child] = []

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, **request: Any) -> Child:
        self._count += 1
        log = self._folder / f"{self._count}.log"
        self._children.append(child := Child(self, self.ask({"log": str(log), **request}), log))
        return child

    def train(self, exp: ps.Experiment, init: Path | None = None) -> Child:
        return self.start(train=to_plain(exp), init=init and str(init))

    def resume(self, run: Path, changes: dict[str, Any] | None = None) -> Child:
        return self.start(resume=str(run), changes=changes)

    def cli(self, *argv: str) -> Child:
        return self.start(argv=list(argv))

    def close(self) -> None:
        for child in self._children:
            if child.code is None:
                child.send(signal.SIGKILL)
                child.wait()
        self._process.communicate(timeout=10)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    live = Zygote(tmp_path_factory.mktemp("logs"))
    yield live
    live.close()


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    def until(condition: Callable[[], Any], child: Child, timeout: float = LIMIT_S) -> None:
        deadline, looked = time.monotonic() + timeout, time.monotonic()
        while not condition():
            now = time.monotonic()
            assert now < deadline, f"waited {timeout} s\n{child.output}"
            if now - looked > 0.2:
                looked = now
                assert child.running or condition(), f"it ended too soon, with {child.code}\n{child.output}"
            time.sleep(0.0005)

    return until


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by its path."""
    if isinstance(tree, dict):
        return {k: v for key, item in tree.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {k: v for i, item in enumerate(tree) for k, v in flat(item, f"{path}/{i}").items()}
    return {path: tree}


def bits(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (str(leaf.dtype), tuple(leaf.shape), leaf.contiguous().numpy().tobytes())
    return ("nan",) if isinstance(leaf, float) and math.isnan(leaf) else leaf


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a run without durations and rates."""
    lines = (run / name).read_text().splitlines()
    untimed = ("time/iterations", "time/total_timesteps")
    return [{k: v for k, v in json.loads(x).items() if not k.startswith("time/") or k in untimed} for x in lines]


def state(run: Path, which: str = "last") -> dict[str, Any]:
    """Every leaf of a checkpoint, wall time excepted, in a form that compares bit for bit."""
    path = find_checkpoint(run, which)
    leaves = flat(
        {"state": torch.load(path / "state.pt", weights_only=True), "policy": load_file(path / "policy.safetensors")}
    )
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
