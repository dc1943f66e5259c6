"""A place among the workers: messages to its process, reports from it, and environments that cannot be sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.wire import encode
from penstock.envs.make import EnvConfig
from penstock.envs.toy.plumbing import SeedEcho
from penstock.processes.fork_client import SERVER
from penstock.processes.serialization import unship
from penstock.processes.tether import Tether
from penstock.workers import process
from penstock.workers.messages import WorkerSettings
from penstock.workers.process import DESCRIPTORS, StartArguments, WorkerProcess, packed
from tests.slow import slow
from tests.workers.first_batches import PLACES, first_batches, no_process_is_left, refuse

__all__ = ["no_process_is_left"]
pytestmark = pytest.mark.timeout(300)


def test_an_environment_that_cannot_be_sent_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()
    config = EnvConfig(lambda: (lock, __import__("gymnasium").make("CartPole-v1"))[1])
    with pytest.raises(ConfigError, match=r"cannot be sent to a worker process.*lock"):
        ps.CpuSampler(8, 4, 2).build(config)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("what", ["lock", "file"])
def test_what_cannot_be_pickled_is_named_before_a_process_starts(
    what: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_start(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse_to_start)
    with (tmp_path / "file").open("w") as file:
        config = EnvConfig(SeedEcho, {"nested": threading.Lock() if what == "lock" else file})
        text = "'_thread.lock'" if what == "lock" else "not opened for reading"
        refuse(
            kind,
            config,
            rf"cannot be sent to a worker process.*({text}).*inside the environment's factory, or use SerialSampler",
        )


@pytest.mark.parametrize("kind", ["gpu", *slow("cpu", "alternating", "no-overlap")])
def test_lambdas_closures_and_local_classes_are_sent(kind: str) -> None:
    scale = 3.0

    class Local(gym.RewardWrapper):
        def reward(self, reward: Any) -> float:
            return scale * float(reward)

    config = EnvConfig(lambda size: Local(SeedEcho(nested=size > 1)), {"size": 1}, wrappers=(lambda env: env,))
    there = first_batches(PLACES[kind](T=6, B=5, workers=2), config)
    assert there == first_batches(ps.SerialSampler(T=6, B=5), config)


SCRIPT = """
import hashlib
import numpy as np
import gymnasium as gym
import penstock as ps
from penstock.testing.samplers import EchoAgent, bits

print("begun", flush=True)

class Walk(gym.Env):  # of the script itself, which has no main guard
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=2).astype(np.float32)
        self.t = 0
        return self.at.copy(), {}

    def step(self, action):
        self.at += self.np_random.normal(size=2).astype(np.float32) * float(action)
        self.t += 1
        return self.at.copy(), float(self.at.sum()), False, self.t >= LENGTH, {}

LENGTH = 11
digests = []
for settings in (ps.SerialSampler(8, 5), ps.CpuSampler(8, 5, 2), ps.AlternatingSampler(8, 5, 2)):
    sampler = settings.build(Walk, 3)
    sampler.initialize(EchoAgent(sampler.spec))
    found = [bits(sampler.obtain_samples(itr)[0]) for itr in range(4)]
    digests.append(hashlib.sha256(repr(found).encode()).hexdigest())
    sampler.shutdown()
print(len(set(digests)), "digest", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "stdin"])
def test_a_class_of_a_script_without_a_main_guard(way: str, tmp_path: Path) -> None:
    """`stdin` has no file to import again, as a notebook has none."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    argv, text = ([str(path)], None) if way == "script" else (["-"], SCRIPT)
    done = subprocess.run(
        [sys.executable, *argv], input=text, capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["begun", "1 digest"], "the script ran again in a worker, or bits differ"


# A place, without a process in it.


@pytest.fixture
def child() -> Iterator[WorkerProcess]:
    child = WorkerProcess(0, place())
    yield child
    child.close()


def place(mark: str = "0123456789abcdef.") -> StartArguments:
    return StartArguments(
        "some.module", 1, Tether(Beside(), lambda: None), mark, {"control": 4, "memory_fds": [10, 11]}, None
    )


class Beside:
    """An owner of a tether."""


def answer(value: Any) -> bytes:
    data = encode(value)
    return len(data).to_bytes(8, "little") + data


def test_nothing_reported_is_none(child: WorkerProcess) -> None:
    assert child.read_report() is None


@pytest.mark.parametrize("cut", [1, 7, 8, 9, -1])
def test_half_a_report_is_none(child: WorkerProcess, cut: int) -> None:
    whole = answer({"answer": [1, "two", None]})
    os.pwrite(child.report, whole[:cut], 0)
    assert child.read_report() is None
    os.pwrite(child.report, whole, 0)
    assert child.read_report() == {"answer": [1, "two", None]}


def test_a_report_may_lie_over_the_end_of_a_longer_one(child: WorkerProcess) -> None:
    os.pwrite(child.report, answer({"answer": "x" * 500}), 0)
    os.pwrite(child.report, answer({"answer": 1}), 0)
    assert child.read_report() == {"answer": 1}


def test_mail_has_the_import_path_where_it_is_asked_for(child: WorkerProcess) -> None:
    first = ["m" * 10_000]
    for message in (first, ["again"]):
        child.write(message, path=message is first)
        data = os.pread(child.mailbox, 1 << 20, 0)
        size = int.from_bytes(data[:8], "little")
        assert (json.loads(data[8 : 8 + size]) == sys.path) if message is first else size == 0
        assert cloudpickle.loads(data[8 + size :]) == message, "something of the message before is left"


def test_a_launch_forgets_what_an_earlier_process_left(child: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Started:
        def __init__(self, module: str, name: str, tether: Any, descriptors: Any, words: Any, **options: Any) -> None:
            asked.update(options, module=module, name=name, descriptors=descriptors, words=words)
            self.exited, self.ends = False, list[str]()

        def kill(self) -> None:
            self.ends.append("kill")

        def close(self) -> None:
            self.ends.append("close")

    monkeypatch.setattr(process, "Child", Started)
    os.pwrite(child.report, answer({"error": {"kind": "exit", "text": "old"}}), 0)
    child.event.set()
    child.start_at, child.token = 5.0, b"old"
    assert child.exited and not child.started
    child.launch(WorkerSettings((), 0, []))
    assert child.read_report() is None
    assert os.eventfd_write(child.event.fd, 1) is None and os.eventfd_read(child.event.fd) == 1, "an old event was left"
    assert (child.start_at, child.token, child.started, child.exited) == (None, b"", True, False)
    assert (asked["module"], asked["name"]) == ("some.module", "worker 0 of 1")
    own = {"event": child.event.fd, "mailbox": child.mailbox, "report": child.report}
    assert asked["descriptors"] == {"control": 4, "memory_fds": [10, 11], **own}
    assert asked["words"] == {"index": 0, "workers": 1}
    first: Any = child.child
    child.launch(WorkerSettings((), 0, []))
    assert first.ends == ["kill", "close"] and child.child is not first
    child.release()
    assert child.exited


def test_a_mark_of_a_worker_is_as_long_as_that_of_the_process_it_is_forked_of(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[str] = []

    def refuse(*args: Any, mark: str, **options: Any) -> Any:
        marks.append(mark)
        raise ChildProcessError

    monkeypatch.setattr(process, "Child", refuse)
    child = WorkerProcess(3, place("0123456789abcdef."))
    with pytest.raises(ChildProcessError):
        child.launch(WorkerSettings((), 0, []))
    assert len(marks[0]) == len(f"0123456789abcdef.{SERVER}") and child.exited
    child.close()


def test_the_descriptors_are_given_back() -> None:
    at = place()
    before = len(os.listdir("/proc/self/fd"))
    child = WorkerProcess(0, at)
    assert len(os.listdir("/proc/self/fd")) == before + DESCRIPTORS - 2
    child.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_pickled_is_a_config_error_that_names_it() -> None:
    assert unship(packed({"a": (1, None)})) == {"a": (1, None)}
    with pytest.raises(ConfigError, match=r"cannot be sent to a worker process: TypeError: .*lock.*or use Serial") as e:
        packed({"env": threading.Lock()})
    assert isinstance(e.value.__cause__, TypeError)
