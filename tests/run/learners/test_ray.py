"""Learners as actors of a Ray cluster, which all tests but those of whole processes share."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import penstock as ps
from penstock.actors.cluster import start_ray
from penstock.envs.toy import ThreeStep

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parent.parent.parent.parent
LIMIT_S = 120.0
RUNNERS = ps.RunnerSampler(2, ps.SerialSampler(T=32, B=2), "ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Of three CPUs: two runners and a learner beside this process."""
    found = start_ray(num_cpus=3, store_bytes=160 << 20)
    yield found
    found.close()


def experiment(folder: Path, sampler: Any = RUNNERS, backend: Any = "ray", **run: Any) -> ps.Experiment:
    config: dict[str, Any] = {
        "seed": 1, "progress": "off", "eval_episodes": 2, "checkpoint_interval": 400, "log_interval": 0,
        "steps": 1_200, "learners": 2, **run,
    }  # fmt: skip
    algo = ps.PPO(epochs=2, minibatch=64, net=ps.Net(hidden=(16,), normalize_obs=True, normalize_reward=True))
    return ps.Experiment("CartPole-v1", algo, sampler, ps.RunConfig(dir=str(folder), learner_backend=backend, **config))


def processes(name: str) -> list[psutil.Process]:
    """The descendants of this process whose title has a word in it."""
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        try:
            if name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it has ended
            continue
    return found


def rows(folder: Path) -> list[dict[str, Any]]:
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    left_out = ("time/", "group/")
    return [{k: v for k, v in row.items() if not k.startswith(left_out) and "wait" not in k} for row in logged]


def same_bits(one: ps.Policy, other: ps.Policy) -> bool:
    mine, theirs = one.agent.state_dict(), other.agent.state_dict()
    return all(torch.equal(x, theirs[name]) for name, x in mine.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[ps.Policy, Path]:
    """The run by two processes of this machine, without Ray."""
    folder = tmp_path_factory.mktemp("learners") / "whole"
    return ps.train(experiment(folder, ps.SerialSampler(T=32, B=4), "processes")).policy, folder


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_learner_that_is_killed_costs_no_bit_and_all_share_one_cluster(
    tmp_path: Path, whole: tuple[ps.Policy, Path]
) -> None:
    seen: dict[str, int] = {}
    with warnings.catch_warnings(record=True) as caught, ps.Run(experiment(tmp_path / "run")) as run:
        warnings.simplefilter("always")
        for it in run:
            if it.itr == 6 and not seen:
                seen = {name: len(processes(name)) for name in ("ray::Learner", "ray::Runner", "gcs_server")}
                processes("ray::Learner")[0].kill()
    said = [str(x.message) for x in caught if "go on from step" in str(x.message)]
    assert seen == {"ray::Learner": 1, "ray::Runner": 2, "gcs_server": 1}
    assert len(said) == 1
    assert said[0].startswith("rank 1 ")
    assert "all 2 learners go on from step" in said[0]
    assert same_bits(run.policy, whole[0])
    assert rows(tmp_path / "run") == rows(whole[1])
    deadline = time.monotonic() + 20
    while (left := processes("ray::Learner") + processes("ray::Runner")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


class SleepsOnce(ThreeStep):
    """Sleeps in one process that is not `home`, once, after more steps than a check takes: a file says that it has."""

    def __init__(self, home: int = 0, told: str = "") -> None:
        super().__init__()
        self.home, self.told, self.steps = home, Path(told), 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps > 100 and os.getpid() != self.home and not self.told.exists():
            self.told.touch()
            threading.Event().wait(LIMIT_S)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_learner_that_hangs_is_named_with_its_stack_and_replaced(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", ps.SerialSampler(T=8, B=4), steps=1_000, learner_timeout_s=4.0)
    exp = replace(exp, env=SleepsOnce, env_kwargs={"home": os.getpid(), "told": str(tmp_path / "told")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ps.train(exp).env_steps >= 1_000
    said = next(str(x.message) for x in caught if "go on from step" in str(x.message))
    assert "rank 1 (pid " in said
    assert "hangs: it has not come to collective" in said
    assert re.search(r"test_ray.py\", line \d+ in step", said)


class Raises(ThreeStep):
    """Raises in every process but the one that made it."""

    def __init__(self, home: int = 0) -> None:
        super().__init__()
        self.home = home

    def step(self, action: Any) -> Any:
        if os.getpid() != self.home:
            raise ValueError("the simulator broke")
        return super().step(action)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_what_another_learner_raises_is_raised_here(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", ps.SerialSampler(T=8, B=4))
    exp = replace(exp, env=Raises, env_kwargs={"home": os.getpid()})
    with pytest.raises(ps.EnvWorkerError, match=r"rank 1: (.|\n)*the simulator broke"):
        ps.train(exp)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("run", "sampler", "said"),
    [
        ({"learner_threads": 64}, RUNNERS, r"run\.learners=2 needs places of 1, 65 CPUs, which it can never have on"),
        ({"learner_address": "auto"}, RUNNERS, r"run\.learner_address='auto' with sampler\.address='local'"),
        ({"learners": 3}, RUNNERS, r"run\.learners=3 with sampler\.runners=2"),
    ],
)
def test_what_cannot_be_placed_is_refused_at_once(tmp_path: Path, run: Any, sampler: Any, said: str) -> None:
    with pytest.raises(ps.ConfigError, match=said):
        ps.train(experiment(tmp_path / "run", sampler, **run))
    assert processes("ray::Learner") == []


SCRIPT = """
import penstock as ps
exp = ps.Experiment("CartPole-v1", ps.PPO(epochs=1), ps.RunnerSampler(2, ps.SerialSampler(T=32, B=2), "ray"),
    ps.RunConfig(steps=1_000_000, dir={folder!r}, learners=2, learner_backend="ray", progress="off", log_interval=0
    ))
ps.train(exp)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_nothing_outlives_the_run_or_listens_to_others(tmp_path: Path, number: int, code: int) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(folder=str(folder))], cwd=ROOT, env=os.environ, process_group=0
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        log = folder / "metrics.jsonl"
        while not (log.exists() and log.read_text().count("\n") > 2) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        known = {p.pid for p in (psutil.Process(process.pid), *family)}
        listening = {
            c.laddr.ip.removeprefix("::ffff:")
            for c in psutil.net_connections("inet")
            if c.pid in known and c.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        os.killpg(process.pid, number)
        assert process.wait(timeout=LIMIT_S) == code
    finally:
        process.kill()
        process.wait(timeout=LIMIT_S)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    if number == signal.SIGINT:
        assert list((folder / "checkpoints").iterdir())
