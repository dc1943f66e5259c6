"""A driver that is killed or told to stop: nothing stays behind, and the run goes on in the bits of one that was not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
import torch

import penstock as ps
from penstock.samplers.runners.settings import RunnerSampler

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

SCRIPT = """
import os, sys
os.setpgid(0, 0)
os.environ["STEP_S"] = "0.002"
from tests.samplers.runners.test_driver import experiment
import penstock as ps

ps.train(experiment(sys.argv[1], sys.argv[2]))
"""
STEPS = 2_400


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose steps take as long as the environment of the process says."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        time.sleep(float(os.environ.get("STEP_S", "0")))
        return super().step(action)


def experiment(folder: str, backend: Any, steps: int = 1_000_000) -> ps.Experiment:
    inner = ps.SerialSampler(8, 3)
    sampler = RunnerSampler(2, inner, backend, object_store_mb=80) if backend != "serial" else ps.SerialSampler(8, 6)
    run = ps.RunConfig(steps=steps, dir=folder, progress="off", checkpoint_interval=480, eval_episodes=2, keep=99)
    return ps.Experiment("tests.samplers.runners.test_driver:Slow", ps.PPO(epochs=1, minibatch=16), sampler, run)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = str(tmp_path_factory.mktemp("clean") / "run")
    ps.train(experiment(folder, "serial", STEPS))
    return ps.load(folder).agent.state_dict()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
@pytest.mark.parametrize("backend", ["processes", "ray"])
def test_ended_by_a_signal(
    backend: str, number: int, code: int, clean: Any, zygote: Any, until: Any, tmp_path: Path
) -> None:
    if backend == "ray":
        pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")
    folder, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(SCRIPT)
    forked = backend == "processes" and number != signal.SIGKILL
    driver = zygote.script(script, str(folder), backend, forked=forked)
    until(lambda: any(x.name.isdigit() for x in folder.glob("checkpoints/*")), driver)
    below = psutil.Process(driver.pid).children(recursive=True)
    assert len(below) >= 2
    if number == signal.SIGINT:  # a terminal sends it to all processes of its foreground group
        os.killpg(driver.pid, number)
    else:
        driver.send(number)
    assert driver.wait(60.0) == code, driver.output
    _, alive = psutil.wait_procs(below, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    # Under one runner in this process it ends as the run of a SerialSampler does.
    changes = {"sampler.runners": 1, "sampler.backend": "in-process", "run.steps": STEPS}
    result = ps.resume(folder, changes)
    assert STEPS <= result.metrics["time/total_timesteps"] < STEPS + 48, "the driver was faster than its killer"
    found = ps.load(folder).agent.state_dict()
    assert all(torch.equal(found[name], clean[name]) for name in clean)
