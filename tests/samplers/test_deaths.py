"""Processes that die in resume, in a checkpoint or in a batch of an AsyncSampler, and environments that fail to close."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.noise import env_seeds
from penstock.envs.make import EnvConfig
from penstock.envs.toy.crashes import CrashEnv
from penstock.envs.toy.plumbing import SeedEcho
from penstock.samplers import async_process
from penstock.testing.samplers import EchoAgent
from penstock.workers import control
from tests.slow import slow
from tests.workers.crashing import LIMIT_S, SEED, B, T, crash, leaves_nothing, told_of

__all__ = ["leaves_nothing"]
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:.*(replaced|dropped)"),
]

KINDS: dict[str, Any] = {
    "cpu": ps.CpuSampler(T, B, workers=2, step_timeout_s=LIMIT_S),
    "alternating": ps.AlternatingSampler(T, B, workers=2, step_timeout_s=LIMIT_S),
    "async-serial": ps.AsyncSerialSampler(ps.SerialSampler(T, B), step_timeout_s=LIMIT_S),
    "async-cpu": ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2, step_timeout_s=LIMIT_S), step_timeout_s=LIMIT_S),
}


class DiesOnce(SeedEcho):
    """Kills its process in the first reset after a file was made, which it removes."""

    def __init__(self, armed: str) -> None:
        super().__init__()
        self._armed = armed

    def reset(self, **kwargs: Any) -> Any:
        try:
            os.unlink(self._armed)
        except FileNotFoundError:
            return super().reset(**kwargs)
        return os.kill(os.getpid(), signal.SIGKILL)


def started(settings: Any, env: Any) -> Any:
    sampler = settings.build(env, SEED)
    sampler.initialize(EchoAgent(sampler.spec))
    return sampler


def seeds_by_slot(batch: Any) -> list[list[int]]:
    """Seeds of the episodes that open in rows 1 to T of a batch, by slot."""
    seed, _ = SeedEcho.place_of(batch.obs)
    return [seed[1:, b][batch.first[1:, b]].tolist() for b in range(B)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_dies_while_a_run_is_resumed_repeats_no_episode(kind: str, tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    config = EnvConfig(DiesOnce, {"armed": str(armed)})
    known = [env_seeds(SEED, b, 0, 500) for b in range(B)]
    last = [0] * B
    sampler = started(KINDS[kind], config)
    for itr in range(6):
        for b, seeds in enumerate(seeds_by_slot(sampler.obtain_samples(itr)[0])):
            last[b] = max([last[b], *(known[b].index(seed) for seed in seeds)])
    state = sampler.state_dict()
    sampler.shutdown()

    resumed = started(KINDS[kind], config)
    armed.touch()
    resumed.load_state_dict(state)
    assert not armed.exists(), "no worker has died"
    if kind == "async-serial":  # its whole process has gone, and the new one restored everything
        assert resumed.cut_slots == []
    else:
        assert resumed.cut_slots in ([0, 1], [2, 3], [0], [1], [2], [3], [0, 2], [1, 3])
    opened = 0
    for itr in range(6, 12):
        for b, seeds in enumerate(seeds_by_slot(resumed.obtain_samples(itr)[0])):
            episodes = [known[b].index(seed) for seed in seeds]
            assert all(episode > last[b] for episode in episodes), f"slot {b} plays {episodes} after {last[b]}"
            last[b] = max([last[b], *episodes])
            opened += len(episodes)
    assert opened > 20
    if not kind.startswith("async-cpu"):
        assert resumed.metrics()["faults/signal"] == 1
    resumed.shutdown()


@pytest.mark.slow
def test_a_worker_that_dies_before_its_first_episode_twice_does_not_idle(tmp_path: Path) -> None:
    """Its replacement knows only what the shared episode table says, which the dead one never wrote."""
    sampler = started(KINDS["cpu"], crash("sigkill", "init", tmp_path / "once"))
    os.kill(sampler.pool._workers.workers[0].child.pid, signal.SIGKILL)
    valid = [sampler.obtain_samples(itr)[0].valid.any(0) for itr in range(3)]
    assert np.any(valid, 0).all(), valid
    sampler.shutdown()


@pytest.mark.slow
def test_the_process_of_an_async_sampler_may_die_in_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    armed = tmp_path / "armed"
    read = async_process.AsyncHost.read

    def dies(self: Any, message: Any) -> Any:
        if isinstance(message, async_process.GetInner) and armed.exists():
            armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, message)

    monkeypatch.setattr(async_process.AsyncHost, "read", dies)  # of the processes that are forked from here
    sampler = started(KINDS["async-serial"], SeedEcho)
    for itr in range(3):
        sampler.obtain_samples(itr)
    armed.touch()
    state = sampler.state_dict()
    assert not armed.exists()
    assert sampler.metrics()["faults/restarts"] == 1
    after = [sampler.obtain_samples(itr)[0].reward.tobytes() for itr in range(3, 6)]
    sampler.shutdown()
    resumed = started(KINDS["async-serial"], SeedEcho)
    resumed.load_state_dict(state)
    assert [resumed.obtain_samples(itr)[0].reward.tobytes() for itr in range(3, 6)] == after
    resumed.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sigkill", "sleep"])
@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_death_in_the_process_of_an_async_serial_sampler_is_named_and_counted(
    where: str, way: str, tmp_path: Path
) -> None:
    limit_s = 1.0 if way == "sleep" else LIMIT_S  # on a busy machine a process waits for its turn
    settings = ps.AsyncSerialSampler(ps.SerialSampler(T, B), step_timeout_s=limit_s, fault_policy="raise")
    sampler = started(settings, crash(way, where))
    match = told_of(way, where, 2)
    with pytest.raises(EnvWorkerError, match=match):
        for itr in range(12):
            sampler.obtain_samples(itr)
    sampler.shutdown()
    sampler = started(KINDS["async-serial"], crash("sigkill", "step", tmp_path / "once"))
    for itr in range(12):
        sampler.obtain_samples(itr)
    assert 0 < sampler.metrics()["faults/lost_steps"] < T * B
    sampler.shutdown()


def test_a_death_in_its_evaluation_is_named_too() -> None:
    class Dies(SeedEcho):
        def step(self, action: Any) -> Any:
            seed, t = self.place_of(self.observe())
            if (int(seed), int(t)) == fatal:
                os._exit(0)
            return super().step(action)

    seed = env_seeds(SEED + (1 << 40), 1, 0, 1, evaluation=True)[0]
    fatal = (seed, 0)
    settings = ps.AsyncSerialSampler(ps.SerialSampler(T, B), fault_policy="raise", step_timeout_s=LIMIT_S)
    sampler = started(settings, Dies)
    place = rf"evaluation slot 1 of .*Dies in step\(\) at episode 0, step 0, seed {seed}: .*exit code 0"
    with pytest.raises(EnvWorkerError, match=place):
        sampler.evaluate_agent(0, 4)
    sampler.shutdown()


@pytest.mark.slow
def test_the_process_of_an_async_cpu_sampler_may_hang_no_longer_than_the_limit(tmp_path: Path) -> None:
    """While its workers are at work it is not hung, however long a batch takes."""
    slow = EnvConfig(CrashEnv, {"where": "never", "nap_s": 0.05})
    settings = ps.AsyncCpuSampler(ps.CpuSampler(12, B, workers=1, step_timeout_s=LIMIT_S), step_timeout_s=1.5)
    sampler = started(settings, slow)
    sampler.obtain_samples(0)  # 12 rows of 4 naps are 2.4 s
    assert "faults/timeout" not in sampler.metrics()
    process = sampler._workers.workers[0].child
    os.kill(process.pid, signal.SIGSTOP)
    sampler.obtain_samples(1)
    assert sampler.metrics()["faults/timeout"] == 1
    sampler.shutdown()


def test_the_process_of_an_async_cpu_sampler_shows_that_it_waits_for_its_workers() -> None:
    sampler = started(KINDS["async-cpu"], SeedEcho)
    assert sampler._workers._timeout_s == LIMIT_S
    sampler.obtain_samples(0)
    sampler.obtain_samples(1)
    assert sampler._block[control.ACTIVITY + 2] >= 2
    sampler.shutdown()


class WontClose(SeedEcho):
    def __init__(self, way: str = "raise") -> None:
        super().__init__()
        self._way = way

    def close(self) -> None:
        if self._way == "raise":
            raise ValueError("the arm is stuck")
        if self._way == "hang":
            time.sleep(1000)
        os._exit(0)


@pytest.mark.parametrize("kind", ["serial", "cpu", "async-serial", *slow("alternating", "async-cpu")])
def test_an_environment_that_fails_to_close_is_a_warning_everywhere(kind: str) -> None:
    settings = KINDS.get(kind, ps.SerialSampler(T, B))
    sampler = started(settings, WontClose)
    sampler.obtain_samples(0)
    sampler.evaluate_agent(0, 2)
    with pytest.warns(
        UserWarning, match=r"slot 0 and 3 more of .*WontClose in close\(\): ValueError: the arm is stuck"
    ) as seen:
        sampler.shutdown()
    said = sorted(str(w.message).split(" of ")[0] for w in seen)
    assert said == ["evaluation slot 0 and 1 more", f"slot 0 and {B - 1} more"], "one for all of their workers"


@pytest.mark.parametrize("way", ["exit", *slow("hang")])
def test_one_that_hangs_or_dies_in_it_too(way: str) -> None:
    settings = ps.CpuSampler(T, B, workers=2, step_timeout_s=1.0 if way == "hang" else LIMIT_S)
    sampler = started(settings, EnvConfig(WontClose, {"way": way}))
    sampler.obtain_samples(0)
    what = "has not closed its environments in time and is killed" if way == "hang" else "ended with exit code 0"
    with pytest.warns(UserWarning, match=rf"worker \d.*slot \d of .*WontClose in close\(\): .*{what}"):
        sampler.shutdown()


def test_slots_that_differ_within_one_process_are_refused() -> None:
    made: list[int] = []

    class Grows(SeedEcho):
        def __init__(self) -> None:
            super().__init__()
            made.append(0)
            if len(made) == 3:
                self.action_space = gym.spaces.Discrete(5)

    match = r"Grows differs between instances: .*discrete\(4\).*discrete\(5\)"
    for settings in (ps.SerialSampler(T, 3), ps.CpuSampler(T, 3, workers=1)):
        made.clear()
        with pytest.raises(ConfigError, match=match):
            settings.build(Grows, SEED)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("serial", ValueError), ("cpu", SystemExit), ("async-serial", ValueError),
     *slow(("serial", SystemExit), ("cpu", ValueError), ("async-serial", SystemExit))],
)  # fmt: skip
def test_an_error_in_a_constructor_names_the_slot(kind: str, error: type[BaseException]) -> None:
    made: list[int] = []
    at = 3 if kind == "cpu" else 4  # the others make one to look at it

    class Third(SeedEcho):
        def __init__(self) -> None:
            super().__init__()
            made.append(0)
            if len(made) == at:
                raise error("no licence")

    settings = {
        "serial": ps.SerialSampler(T, 3),
        "cpu": ps.CpuSampler(T, 3, workers=1),
        "async-serial": ps.AsyncSerialSampler(ps.SerialSampler(T, 3)),
    }[kind]
    match = rf"slot 2 of .*Third in its construction: .*{error.__name__}: no licence"
    with pytest.raises(EnvWorkerError, match=match) as caught:
        settings.build(Third, SEED)
    if kind != "serial":  # there the exception itself brings it along
        assert "in __init__" in str(caught.value)
