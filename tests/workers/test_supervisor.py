"""Whatever a worker process dies of, the batches keep coming or the error says what it was, and nothing is left."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import EnvWorkerError
from penstock.core.noise import env_seed
from penstock.envs.make import EnvConfig
from penstock.envs.toy import FaultEnv
from penstock.envs.toy.crashes import WAYS, CrashEnv
from penstock.envs.toy.plumbing import SeedEcho
from penstock.testing.records import RecordCheck
from penstock.workers import control, faults
from tests.samplers import placed
from tests.slow import slow
from tests.workers.crashing import (
    DIES,
    EPISODE,
    HANG_S,
    HANGS,
    KIND,
    LIMIT_S,
    RAISES,
    SAMPLERS,
    SEED,
    SLOT,
    B,
    T,
    crash,
    leaves_nothing,
    live,
    saves_time,
    told_of,
)  # fmt: skip

__all__ = ["leaves_nothing", "saves_time"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:.*(replaced|dropped)")]

PLACES = [(way, "step") for way in (*RAISES, *DIES)] + [("raise", "reset"), ("sigkill", "reset"), ("sleep", "reset")] + [
    (way, "step") for way in HANGS
]  # fmt: skip
"""What goes wrong, and in which method; those that hang come last."""
FIRST_HANG = PLACES.index(("sleep", "reset"))


def all_of(places: list[tuple[str, str]]) -> EnvConfig:
    """Every fault at its place, one in each second episode of SLOT; none comes again."""
    fatal = {env_seed(SEED, SLOT, EPISODE + 2 * k): place for k, place in enumerate(places)}

    def made() -> Any:
        class Doomed(SeedEcho):
            def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
                self.crash("reset", seed)
                return super().reset(seed=seed, options=options)

            def step(self, action: Any) -> Any:
                if self.t == 0:
                    self.crash("step", self.seed)
                return super().step(action)

            def crash(self, now: str, seed: int | None) -> None:
                way, where = fatal.get(seed, ("", ""))  # pyright: ignore
                if now == where:
                    WAYS[way]()

        return Doomed()

    return EnvConfig(made, info_keys=("echo",), checks="always")


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("alternating", PLACES[: len(RAISES)]),
        *slow(*((kind, PLACES) for kind in SAMPLERS)),
    ],
    ids=lambda x: x if isinstance(x, str) else "all" if x is PLACES else "raises",
)
def test_every_fault_is_named_and_replaced_in_every_sampler(
    kind: str, places: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_BUDGET", len(places))
    monkeypatch.setattr(faults, "_LONGEST_DELAY_S", 0.0)
    sampler = live(kind, all_of(places), fault_policy="restart")
    workers, told = sampler.pool._workers, list[faults.Fault]()
    decide = workers.faults.decide
    monkeypatch.setattr(workers.faults, "decide", lambda w, fault: told.append(fault) or decide(w, fault))
    check, lost, itr, last = RecordCheck(B, seed=SEED, acted=True, faults=True), 0, 0, 400
    try:
        while itr < last:
            # Short only where something hangs.
            workers._timeout_s = HANG_S if FIRST_HANG <= len(told) < len(places) else LIMIT_S
            batch, _ = sampler.obtain_samples(itr)
            check.add(batch)
            lost += sum(int(T - t) for b in range(B) if (t := _cut_at(batch, b)) is not None)
            assert check.cuts <= 2 * len(told), "the slots of one worker are cut, and no others"
            itr, last = itr + 1, itr + 4 if len(told) == len(places) and last == 400 else last
        assert len(told) == len(places)
        for k, (fault, (way, where)) in enumerate(zip(told, places)):
            assert fault.kind == KIND[way]
            assert re.match(told_of(way, where, EPISODE + 2 * k), fault.message), fault.message
        metrics = sampler.metrics()
        for each in ("exception", "signal", "exit", "timeout"):
            assert metrics.get(f"faults/{each}", 0) == sum(KIND[way] == each for way, _ in places)
        assert metrics["faults/restarts"] == len(places)
        assert metrics["faults/lost_steps"] == lost > 0
        assert len(places) - 2 <= check.cuts
    finally:
        sampler.shutdown()


def _cut_at(batch: Any, b: int) -> int | None:
    """The row from which slot b stands still without being valid to the end of the batch."""
    rows = np.nonzero(batch.valid[:, b] | batch.first[1:, b])[0]
    t = int(rows[-1]) + 1 if len(rows) else 0
    return t if t < T else None


RAISED = [("alternating", "raise", "auto"), *slow(("cpu", "sigkill", "raise"), ("gpu", "sleep", "raise"), ("no-overlap", "abort", "raise"),
          ("cpu", "interrupt", "auto"))]  # fmt: skip


@pytest.mark.parametrize(("kind", "way", "policy"), RAISED)
def test_the_error_is_raised_where_the_policy_says_so(kind: str, way: str, policy: str) -> None:
    sampler = live(kind, crash(way), fault_policy=policy, step_timeout_s=HANG_S if way in HANGS else LIMIT_S)
    try:
        with pytest.raises(EnvWorkerError, match=told_of(way, "step", EPISODE)):
            for itr in range(12):
                sampler.obtain_samples(itr)
        assert "faults/restarts" not in sampler.metrics()
    finally:
        sampler.shutdown()


@pytest.mark.parametrize(("kind", "way"), [("cpu", "os_exit"), *slow(("gpu", "orphan"), ("alternating", "sleep"))])
def test_by_default_deaths_and_hangs_are_replaced(kind: str, way: str, tmp_path: Path) -> None:
    sampler = live(kind, crash(way, once=tmp_path / "once"), step_timeout_s=HANG_S if way in HANGS else LIMIT_S)
    check = RecordCheck(B, seed=SEED, acted=True, faults=True)
    try:
        for itr in range(14):
            check.add(sampler.obtain_samples(itr)[0])
        metrics = sampler.metrics()
        assert metrics[f"faults/{KIND[way]}"] == metrics["faults/restarts"] == 1
        assert 1 <= check.cuts <= 2
    finally:
        sampler.shutdown()


KILLS = 4


@pytest.mark.slow
@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_echo_passes_under_random_kills(kind: str, reset: Any) -> None:
    env = EnvConfig(CrashEnv, {"where": "never", "nap_s": 0.0005}, info_keys=("echo",), checks="always")
    sampler = live(kind, env, reset=reset)
    workers = sampler.pool._workers.workers
    check = RecordCheck(B, seed=SEED, reset=reset, acted=True, faults=True)
    rng, over, killed = random.Random(1), threading.Event(), list[int]()

    def killer() -> None:
        """Each worker in turn, or one might use up its budget; and each process once: a busy machine buries it late."""
        while len(killed) < KILLS and not over.wait(0.01 + 0.15 * rng.random()):
            child = workers[len(killed) % len(workers)]
            pid = child.child.pid
            if child.up and not child.exited and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        itr, until = 0, time.monotonic() + 2 * LIMIT_S
        while len(killed) < KILLS and time.monotonic() < until:
            check.add(sampler.obtain_samples(itr)[0])
            itr += 1
        for more in range(itr, itr + 3):
            check.add(sampler.obtain_samples(more)[0])
        assert sampler.metrics()["faults/signal"] == len(killed) == KILLS
    finally:
        over.set()
        thread.join(LIMIT_S)
        sampler.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_replacement_that_is_slow_to_make_leaves_the_episodes_of_the_others_alone(kind: str) -> None:
    """The other worker begins episodes meanwhile; the one that replaces that one later must know of them."""

    def slow() -> Any:
        time.sleep(0.15)
        return CrashEnv(where="never", nap_s=0.01)

    sampler = live(kind, EnvConfig(slow, info_keys=("echo",), checks="always"))
    workers = sampler.pool._workers
    one, two = (worker.child.pid for worker in workers.workers)
    check = RecordCheck(B, seed=SEED, acted=True, faults=True)
    try:
        check.add(sampler.obtain_samples(0)[0])
        os.kill(one, signal.SIGKILL)
        check.add(sampler.obtain_samples(1)[0])
        workers.settle()
        os.kill(two, signal.SIGKILL)
        for itr in range(2, 5):
            check.add(sampler.obtain_samples(itr)[0])
        assert sampler.metrics()["faults/signal"] == sampler.metrics()["faults/restarts"] == 2
    finally:
        sampler.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_death_between_the_first_command_and_the_last_worker_that_hears_it(kind: str) -> None:
    sampler = live(kind, EnvConfig(CrashEnv, {"where": "never"}, info_keys=("echo",), checks="always"))
    workers = sampler.pool._workers
    (one, two), block = workers.workers, workers.control.blocks[0]
    first, commands, late = one.child.pid, block[control.COMMAND], list[str]()

    def wait_for(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not condition():
            late.append(what)

    def harm() -> None:
        wait_for(lambda: block[control.DONE_COMMAND] == block[control.COMMAND] > commands, "command")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: one.child is not None and one.child.pid != first, "replacement")
        os.kill(two.child.pid, signal.SIGCONT)

    os.kill(two.child.pid, signal.SIGSTOP)
    thread = threading.Thread(target=harm)
    thread.start()
    try:
        check = RecordCheck(B, seed=SEED, acted=True, faults=True)
        for itr in range(4):
            check.add(sampler.obtain_samples(itr)[0])
        assert not late
        assert sampler.metrics()["faults/signal"] == sampler.metrics()["faults/restarts"] == 1
    finally:
        thread.join(3 * LIMIT_S)
        sampler.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "alternating"])
def test_drop_goes_on_without_the_slots_of_the_worker(kind: str) -> None:
    sampler = live(kind, crash("sigkill"), fault_policy="drop")
    try:
        for itr in range(14):
            batch, _ = sampler.obtain_samples(itr)
        gone = ~batch.valid.any(0)
        assert gone.sum() == 2
        assert gone[SLOT]
        assert sampler.metrics() | {"faults/signal": 1.0} == sampler.metrics()
        assert "faults/restarts" not in sampler.metrics()
        state = sampler.state_dict()
        assert state["pool"]["ended"][SLOT]
    finally:
        sampler.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_past_the_budget_the_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_FIRST_DELAY_S", 0.01)
    sampler = live("gpu", EnvConfig(FaultEnv, {"fault": "sigkill_in_step", "at": 1}))
    try:
        with pytest.raises(EnvWorkerError, match=r"(?s)killed by signal 9.*was replaced 5 times within 10 minutes"):
            for itr in range(40):
                sampler.obtain_samples(itr)
        assert sampler.metrics()["faults/restarts"] >= 5
    finally:
        sampler.shutdown()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("ask", ["get_state", "set_state", "restart"])
def test_first_answers_of_a_replacement_are_not_those_of_the_dead_worker(
    ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was up before the other worker had answered: its specs were taken for lost slots, or for a state."""
    sampler = live("gpu", EnvConfig(CrashEnv, {"where": "never"}))
    pool, workers = sampler.pool, sampler.pool._workers
    first, slow = (worker.child for worker in workers.workers)
    mine = [b for slots in pool.shares[0] if slots is not None for b in range(slots.start, slots.stop)]
    wait_for_commands, waits = workers.wait_for_commands, [0]

    def replaced_meanwhile(*args: Any) -> None:
        waits[0] += 1
        if waits[0] == 1:
            first.kill()
            workers.wait(lambda: workers.workers[0].up and workers.workers[0].child is not first)
            os.kill(slow.pid, signal.SIGCONT)
        wait_for_commands(*args)

    try:
        for itr in range(2):
            sampler.obtain_samples(itr)
        state = pool.get_state()
        for child in (first, slow):
            os.kill(child.pid, signal.SIGSTOP)
        monkeypatch.setattr(workers, "wait_for_commands", replaced_meanwhile)
        if ask == "get_state":
            ended = pool.get_state().ended
            assert ended == [b in mine or state.ended[b] for b in range(B)] != state.ended
        elif ask == "set_state":
            cut = pool.set_state(state, sampler._filled, sampler._tracker.open_episodes())
            assert cut == [b for b in mine if not state.ended[b]] != []
        else:
            pool.restart(SEED + 1)
            assert waits == [2], "the worker in its place is asked too"
    finally:
        sampler.shutdown()


def test_each_episode_of_the_echo_is_known_to_this_file() -> None:
    assert SeedEcho.longest < 12 * T, "EPISODE must come within the batches of the tests"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert env_seed(SEED, SLOT, EPISODE) == CrashEnv(where="never", seed=SEED, slot=SLOT, episode=EPISODE)._fatal


def test_affinity_pins_workers_and_learner_and_is_undone() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    placement = ps.Placement(workers=((allowed[0],), (allowed[-1],)), learner=(allowed[0],))
    sampler, _ = placed.live(ps.GpuSampler(8, 4, workers=2, affinity=placement), "CartPole-v1", ps.PPO())
    try:
        sampler.obtain_samples(0)
        pids = [child.child.pid for child in sampler.pool._workers.workers]
        assert [os.sched_getaffinity(pid) for pid in pids] == [{allowed[0]}, {allowed[-1]}]
        assert os.sched_getaffinity(0) == {allowed[0]}
    finally:
        sampler.shutdown()
    assert sorted(os.sched_getaffinity(0)) == allowed
