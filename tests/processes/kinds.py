"""One of each kind of process that penstock starts, for tests that ask the same of all: `python kinds.py KIND BACKEND DO`.

Not a test module: it is the script of one test, which starts the process, plays rounds with it, and says what came of
it as a line of JSON. Its environment misbehaves in the child alone, in the way that a file in the current folder names.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
from gymnasium import spaces

import penstock as ps
from penstock.processes import death
from penstock.workers.env_check import check_apart

LIMIT_S = 4.0
"""The deadline of every kind that has one."""
HOME = "PENSTOCK_TEST_HOME"
"""Environment variable: the number of the parent, where the environment behaves."""


class Odd(gym.Env[Any, Any]):
    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if os.environ.get(HOME) != str(os.getpid()):
            misbehave()
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 5, False, {}


def misbehave() -> None:
    way = Path("way").read_text() if os.path.exists("way") else ""
    if way in ("hang", "kill"):  # once
        os.remove("way")
    if way == "hang":
        while True:
            time.sleep(60)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "chat":
        print("x" * 100_000, flush=True)


PPO = ps.PPO(minibatch=16, epochs=1, net=ps.Net(hidden=(4,)))
SERIAL = ps.SerialSampler(T=8, B=2)
Round = Callable[[], Any]


@contextmanager
def sampled(settings: Any, algo: Any = PPO) -> Iterator[Round]:
    live = settings.build(Odd, 1)
    try:
        policy = algo.build(live.spec, seed=1)
        live.initialize(policy.agent)
        count = iter(range(10**9))
        yield lambda: live.obtain_samples(next(count))
    finally:
        live.shutdown()


@contextmanager
def checked() -> Iterator[Round]:
    settings = ps.CpuSampler(T=8, B=2, step_timeout_s=LIMIT_S, start_timeout_s=LIMIT_S * 5)
    yield lambda: check_apart(Odd, 1, settings)


@contextmanager
def learned(backend: Any) -> Iterator[Round]:
    run = ps.RunConfig(
        steps=10**9, dir=f"run-{time.monotonic_ns()}", learners=2, learner_backend=backend, progress="off",
        eval_episodes=0, checkpoint_interval=10**8, learner_timeout_s=LIMIT_S,
    )  # fmt: skip
    with ps.Run(ps.Experiment(Odd, PPO, SERIAL, run)) as live:
        yield lambda: next(live)
        live.stop()


@contextmanager
def sharded(backend: Any) -> Iterator[Round]:
    replay = ps.ReplaySettings(capacity=1_000, shards=1, shard_backend=backend, shard_deadline_s=LIMIT_S)
    dqn = ps.DQN(net=ps.Net(hidden=(4,)), learning_starts=16, replay_ratio=4, batch_size=8, epsilon=0.1, replay=replay)
    live = SERIAL.build(Odd, 1)
    policy: Any = dqn.build(live.spec, seed=1)
    try:
        shown = live.initialize(policy.agent)
        policy.prepare(live.batch_spec, shown["info"])
        count = iter(range(10**9))
        yield lambda: ps.train_one_step(policy, live.obtain_samples(next(count))[0])
    finally:
        policy.replay_schedule.replay.close()
        live.shutdown()


@contextmanager
def launched(backend: Any) -> Iterator[Round]:
    from penstock.studies.slots.slots import make_slots

    slots = make_slots(backend, 1)
    try:
        run = f"run-{time.monotonic_ns()}"
        line = ["train", "ppo", "--env", "CartPole-v1", "--run.steps", "100000000", "--run.dir", run]
        quiet = ["--run.progress", "off", "--run.eval_episodes", "0"]
        running = slots.start(0, [*line, *quiet], Path("log"), {})

        def looked() -> None:
            until = time.monotonic() + 60
            while not os.path.exists(f"{run}/metrics.jsonl") and time.monotonic() < until and running.code() is None:
                time.sleep(0.05)
            code = running.code()
            if code is not None:
                raise RuntimeError(f"the run ended with {code}")

        yield looked
    finally:
        slots.close()


def started(kind: str, backend: Any, policy: Any) -> Any:
    """A context in which the process lives; it is entered with what plays a round."""
    limits: dict[str, Any] = {"step_timeout_s": LIMIT_S, "fault_policy": policy}
    return {
        "worker": lambda: sampled(ps.CpuSampler(T=8, B=2, workers=1, **limits)),
        "async": lambda: sampled(ps.AsyncSampler(SERIAL, depth=0, **limits)),
        "check": checked,
        "runner": lambda: sampled(ps.RunnerSampler(1, SERIAL, backend, deadline_s=LIMIT_S, fault_policy=policy)),
        "learner": lambda: learned(backend),
        "shard": lambda: sharded(backend),
        "slot": lambda: launched(backend),
    }[kind]()


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def the_child(kind: str) -> psutil.Process:
    """The process of the kind, by what stands in its command line or title."""
    words = {
        "worker": "env_worker", "async": "async_process", "runner": "unner", "learner": "earner", "shard": "hard",
        "slot": "slot",
    }  # fmt: skip
    for process in descendants():
        line = " ".join(process.cmdline())
        if words[kind] in line or (kind == "learner" and line.endswith("rank 1")):
            return process
    raise LookupError(f"no {kind} among {[p.cmdline() for p in descendants()]}")


def held() -> list[int]:
    gc.collect()  # mappings of shared memory, each with a descriptor, may lie in cycles
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(descendants())]


def kept() -> int:
    """Bytes of output that are kept in memory files."""
    sizes = [0]
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path) and "penstock-output" in os.readlink(path):
            sizes.append(os.stat(path).st_size)
    return max(sizes)


def behave(way: str) -> None:
    Path("way").write_text(way)


def die_when_there_are_children(forks: bool) -> None:
    """Says which processes there are, once one has been there for a moment, and kills this one."""
    while not descendants():
        time.sleep(0.01)
    time.sleep(1.0)
    pids = [process.pid for process in descendants()]
    fork = os.fork() if forks else -1
    if fork == 0:  # outlives this one, with all that it had open but the output, whose end is waited for
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        time.sleep(60)
        os._exit(0)
    print(json.dumps({"pids": pids, "forks": [fork] if forks else []}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str, backend: str, do: str) -> dict[str, Any]:
    os.environ[HOME] = str(os.getpid())
    if do == "limits":
        here = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (here + 6, here + 6))
    if do == "close":
        found = list[list[int]]()
        for _ in range(3):  # what is opened once and for all is opened by the first
            with started(kind, backend, "raise") as play:
                play()
            found.append(held())
        return {"held": found[1:]}
    if kind == "check" and do in ("dies", "dies_forked"):  # it is there for no longer than the call
        behave("hang")
        threading.Thread(target=die_when_there_are_children, args=(do == "dies_forked",), daemon=True).start()
    with started(kind, backend, "restart" if do == "budget" else "raise") as play:
        play()
        if do in ("dies", "dies_forked"):
            die_when_there_are_children(do == "dies_forked")
        if do == "output":
            behave("chat")
            sizes = [(play(), kept())[1] for _ in range(30)]
            return {"most": max(sizes)}
        if do == "oom":
            death.oom_kills = lambda: 10**6
        if do in ("hang", "signal", "oom"):
            behave("hang" if do == "hang" else "kill")
            if kind in ("shard", "slot"):  # which run nothing of the environment's
                process = the_child(kind)
                process.suspend() if do == "hang" else process.kill()
        for _ in range(100):
            if do == "budget":
                with contextlib.suppress(LookupError):
                    the_child(kind).kill()
            play()
            time.sleep(0.05)
    return {}


if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            said = main(*sys.argv[1:])
        except Exception as error:
            said = {"error": type(error).__name__, "text": str(error)}
        said["warnings"] = [str(w.message) for w in caught]
    print(json.dumps(said), flush=True)
