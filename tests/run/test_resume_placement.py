"""kill -9 of whole runs with worker processes: they end with the bits of a serial run that nothing ever stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch

import penstock as ps
from penstock.core.config import to_plain
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.files.stored_experiment import config_bytes
from tests.run.resumed import EXPERIMENTS, STEPS, checkpoints, logged

if TYPE_CHECKING:
    from conftest import Child, Zygote

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SERIAL = ps.SerialSampler(T=16, B=5, max_decorrelation_steps=20)
PLACES: dict[str, Any] = {
    "serial": SERIAL,
    "cpu": ps.CpuSampler(T=16, B=5, workers=2, max_decorrelation_steps=20),
    "gpu": ps.GpuSampler(T=16, B=5, workers=2, max_decorrelation_steps=20),
    "alternating": ps.AlternatingSampler(T=16, B=5, workers=2, max_decorrelation_steps=20),
    "no-overlap-alternating": ps.NoOverlapAlternatingSampler(T=16, B=5, workers=2, max_decorrelation_steps=20),
}
RECURRENT = EXPERIMENTS["recurrent"]
OPTIONS = (
    "--preset", "none", "--sampler.T", "16", "--sampler.B", "5", "--run.steps", str(STEPS), "--run.seed", "3",
    "--run.checkpoint-interval", "160", "--run.eval-interval", "600", "--run.eval-episodes", "3", "--run.log-interval", "1",
    "--run.progress", "off",
)  # fmt: skip


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a run without durations, rates and waits."""
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    untimed = ("time/iterations", "time/total_timesteps")
    return [{k: v for k, v in x.items() if k in untimed or not k.startswith(("time/", "sampler/"))} for x in lines]


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a checkpoint by its path, in a form that compares bit for bit."""
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, item in items for k, v in leaves(item, f"{path}/{key}").items()}
    if isinstance(tree, (torch.Tensor, np.ndarray)):
        return {path: (str(tree.dtype), tuple(tree.shape), np.asarray(tree).tobytes())}
    return {path: repr(tree)}


def assert_alike(a: Path, b: Path) -> None:
    one, two = (find_checkpoint(run) for run in (a, b))
    assert one.name == two.name
    assert (one / "policy.safetensors").read_bytes() == (two / "policy.safetensors").read_bytes()
    left, right = (leaves(load_checkpoint(each).state) for each in (one, two))
    assert left.pop("/trainer/elapsed_s") and right.pop("/trainer/elapsed_s")
    assert [name for name in left.keys() | right.keys() if left.get(name) != right.get(name)] == []
    for name in ("metrics.jsonl", "eval/evaluations.jsonl"):
        assert rows(a, name) == rows(b, name)


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A serial run that nothing ever stopped."""
    found: dict[str, Path] = {}

    def whole(name: str) -> Path:
        if name not in found:
            run = found[name] = tmp_path_factory.mktemp("whole") / name
            child = (
                zygote.train(at(RECURRENT, run, SERIAL)) if name == "recurrent" else cli_train(zygote, run, "serial")
            )
            assert child.wait() == 0, child.output
        return found[name]

    return whole


def at(exp: ps.Experiment, run: Path, sampler: Any) -> ps.Experiment:
    return replace(exp, sampler=sampler, run=replace(exp.run, dir=str(run)))


def cli_train(zygote: Zygote, run: Path, *sampler: str) -> Child:
    return zygote.cli("train", "ppo", "--env", "CartPole-v1", "--run.dir", str(run), *OPTIONS, "--sampler", *sampler)


def kill_midway(start: Callable[[], Child], ended_by: Any, left_of: Any, run: Path, rows: int, workers: int) -> None:
    """kill -9 of the learner alone; its workers are gone soon after."""
    young: list[psutil.Process] = []

    def start_anew() -> Child:
        shutil.rmtree(run, ignore_errors=True)
        return start()

    ended_by(start_anew, lambda: checkpoints(run) and logged(run) >= rows, young=young)
    assert len(young) >= workers
    assert left_of(young) == []
    assert checkpoints(run)[-1] < STEPS


@pytest.mark.parametrize("place", list(PLACES)[1:])
def test_a_killed_run_goes_on_with_the_same_bits(
    place: str, whole: Any, zygote: Zygote, ended_by: Any, left_of: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kill_midway(lambda: zygote.train(at(RECURRENT, run, PLACES[place])), ended_by, left_of, run, rows=7, workers=2)
    child = zygote.resume(run)
    assert child.succeed()["env_steps"] >= STEPS
    assert "cut" not in child.output
    assert_alike(whole("recurrent"), run)


def test_from_the_command_line(whole: Any, zygote: Zygote, ended_by: Any, left_of: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill_midway(
        lambda: cli_train(zygote, run, "alternating", "--sampler.workers", "2"),
        ended_by,
        left_of,
        run,
        rows=6,
        workers=2,
    )
    child = zygote.cli("resume", str(run))
    assert child.wait() == 0, child.output
    assert_alike(whole("cartpole"), run)


@pytest.mark.parametrize(("first", "second"), [("serial", "alternating"), ("cpu", "serial")])
def test_a_killed_run_goes_on_in_another_sampler(
    first: str, second: str, whole: Any, zygote: Zygote, ended_by: Any, left_of: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    workers = 2 * (first != "serial")
    kill_midway(
        lambda: zygote.train(at(RECURRENT, run, PLACES[first])), ended_by, left_of, run, rows=9, workers=workers
    )
    stored = json.loads((run / "config.json").read_text())
    stored["experiment"]["sampler"] = to_plain(PLACES[second])  # `resume` itself changes nothing but run.*
    (run / "config.json").write_bytes(config_bytes(stored["experiment"], stored["spec"]))
    zygote.resume(run).succeed()
    assert_alike(whole("recurrent"), run)
