"""Where work is placed changes nothing but speed: every sampler gives the bits of SerialSampler."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.toy import PixelCatch, TMaze
from penstock.learn.train_ops import as_tensors
from penstock.testing.samplers import bits, check_resume, check_sampler

pytestmark = pytest.mark.timeout(300)

PLACES: dict[str, Callable[..., Any]] = {
    "cpu-1": lambda T, B, **k: ps.CpuSampler(T, B, workers=1, **k),
    "cpu-2": lambda T, B, **k: ps.CpuSampler(T, B, workers=2, **k),
    "cpu-3": lambda T, B, **k: ps.CpuSampler(T, B, workers=3, **k),
    "gpu-1": lambda T, B, **k: ps.GpuSampler(T, B, workers=1, **k),
    "gpu-2": lambda T, B, **k: ps.GpuSampler(T, B, workers=2, **k),
    "alternating-2": lambda T, B, **k: ps.AlternatingSampler(T, B, workers=2, **k),
    "alternating-3": lambda T, B, **k: ps.AlternatingSampler(T, B, workers=2, groups=3, **k),
    "no-overlap": lambda T, B, **k: ps.NoOverlapAlternatingSampler(T, B, workers=2, **k),
    "async-serial-0": lambda T, B, **k: ps.AsyncSerialSampler(ps.SerialSampler(T, B, **k), depth=0),
    "async-cpu-0": lambda T, B, **k: ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2, **k), depth=0),
    "async-alternating-0": lambda T, B, **k: ps.AsyncAlternatingSampler(
        ps.AlternatingSampler(T, B, workers=2, **k), depth=0
    ),
}
"""Every sampler that must give the batches of SerialSampler."""
CASES: dict[str, tuple[Any, Any]] = {
    "pendulum": ("Pendulum-v1", ps.PPO(minibatch=64, net=ps.Net(normalize_obs=True, normalize_reward=True))),
    "cartpole": ("CartPole-v1", ps.PPO(minibatch=64)),
    "lstm": (TMaze, ps.PPO(minibatch=64, net=ps.Net(recurrent="lstm", recurrent_size=16))),
    "cnn": (EnvConfig(PixelCatch, {"scale": 5}), ps.PPO(minibatch=64, epochs=1)),
}


def live(settings: Any, env: Any, algo: Any) -> tuple[Any, Any]:
    sampler = settings.build(env, 5)
    policy = algo.build(sampler.spec, seed=5)
    sampler.initialize(policy.agent)
    return sampler, policy


def digest(policy: Any) -> str:
    leaves = [x for x in tree_leaves(dict(policy.agent.state_dict())) if isinstance(x, torch.Tensor)]
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in leaves)).hexdigest()


def run(settings: Any, env: Any, algo: Any, updates: int, evaluate: bool = False) -> tuple[list[Any], str]:
    """Of every update the bits of batch, values and episodes; and a digest of the parameters in the end."""
    sampler, policy = live(settings, env, algo)
    out: list[Any] = []
    try:
        for itr in range(updates):
            batch, episodes = sampler.obtain_samples(itr)
            values = policy.agent.values(as_tensors(batch, policy.device)).numpy().tobytes()
            out.append((bits(batch), values, episodes.return_.tobytes(), episodes.slot.tobytes()))
            ps.train_one_step(policy, batch)
            if evaluate and itr % 2:
                found = sampler.evaluate_agent(itr, 5, deterministic=itr % 4 == 1)
                out.append((found.return_.tobytes(), found.length.tobytes()))
    finally:
        sampler.shutdown()
    return out, digest(policy)


_SERIAL: dict[Any, Any] = {}


def serial(case: str, T: int, B: int, updates: int, evaluate: bool = False, **kwargs: Any) -> Any:
    key = case, T, B, updates, evaluate, tuple(kwargs.items())
    if key not in _SERIAL:
        _SERIAL[key] = run(ps.SerialSampler(T, B, **kwargs), *CASES[case], updates, evaluate)
    return _SERIAL[key]


def differences(a: Any, b: Any) -> list[str]:
    """Which leaves of which batch differ."""
    found: list[str] = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x[0], dict):
            found += [f"{i}: {key}" for key in x[0] if x[0][key] != y[0][key]]
        found += [f"{i}: part {k}" for k in range(len(x)) if not isinstance(x[k], dict) and x[k] != y[k]]
    return found


EVERYWHERE = [(place, case) for place in ("cpu-2", "gpu-2", "alternating-2") for case in CASES] + [
    ("no-overlap", "lstm"), ("async-serial-0", "pendulum"), ("async-cpu-0", "lstm"), ("async-alternating-0", "cnn"),
]  # fmt: skip
"""Every agent in each way to place work, and every sampler."""
MORE = [("cpu-1", "pendulum"), ("cpu-3", "lstm"), ("gpu-1", "cnn"), ("alternating-3", "lstm"), ("alternating-3", "pendulum"),
        ("no-overlap", "cartpole"), ("async-serial-0", "lstm")]  # fmt: skip


@pytest.mark.parametrize(("place", "case"), EVERYWHERE)
def test_twenty_updates_are_equal_bit_for_bit_wherever_work_is_placed(case: str, place: str) -> None:
    compare_with_serial(case, place)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("place", "case"), MORE)
def test_twenty_updates_are_equal_with_other_numbers_of_workers_and_groups(case: str, place: str) -> None:
    compare_with_serial(case, place)


def compare_with_serial(case: str, place: str) -> None:
    updates = 20 if case != "cnn" else 4
    batches, parameters = serial(case, 16, 7, updates)
    there, parameters_there = run(PLACES[place](16, 7), *CASES[case], updates)
    assert differences(batches, there) == []
    assert parameters == parameters_there


SHARES = [("cpu", 5, 1), ("cpu", 13, 4), ("gpu", 3, 1), ("gpu", 13, 4), ("alternating", 5, 1), ("alternating", 10, 2),
          ("alternating", 13, 4)]  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("place", "B", "workers"), SHARES)
def test_uneven_shares_change_nothing(place: str, B: int, workers: int) -> None:
    kinds = {"cpu": ps.CpuSampler, "gpu": ps.GpuSampler, "alternating": ps.AlternatingSampler}
    batches, parameters = serial("pendulum", 12, B, 3)
    there, parameters_there = run(kinds[place](12, B, workers), *CASES["pendulum"], 3)
    assert differences(batches, there) == []
    assert parameters == parameters_there


RESETS = [("cpu-2", "next_step"), ("cpu-2", "batch_end"), ("gpu-2", "next_step"), ("alternating-3", "next_step"),
          ("alternating-3", "batch_end"), ("no-overlap", "batch_end"), ("async-cpu-0", "batch_end")]  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("place", "reset"), RESETS)
def test_reset_modes_decorrelation_and_evaluations_change_nothing(place: str, reset: str) -> None:
    kwargs = {"reset": reset, "max_decorrelation_steps": 30}
    batches, parameters = serial("lstm", 9, 7, 6, True, **kwargs)
    there, parameters_there = run(PLACES[place](9, 7, **kwargs), *CASES["lstm"], 6, True)
    assert differences(batches, there) == []
    assert parameters == parameters_there
    quiet, quiet_parameters = serial("lstm", 9, 7, 6, **kwargs)
    assert differences([x for x in there if isinstance(x[0], dict)], quiet) == []
    assert quiet_parameters == parameters


@pytest.mark.usefixtures("forked")
def test_depth_one_is_the_same_from_run_to_run_and_from_sampler_to_sampler() -> None:
    inner = ps.CpuSampler(16, 8, workers=2), ps.SerialSampler(16, 8)
    settings = [ps.AsyncSampler(each, depth=1) for each in (*inner, inner[1])]
    (one, parameters), *others = (run(each, *CASES["cartpole"], 10) for each in settings)
    for other, other_parameters in others:
        assert differences(one, other) == []
        assert parameters == other_parameters


@pytest.mark.usefixtures("forked")
def test_the_newest_weights_are_no_older_than_the_depth() -> None:
    settings = ps.AsyncCpuSampler(ps.CpuSampler(16, 8, workers=1), depth=1, weights="newest")
    sampler, policy = live(settings, *CASES["cartpole"])
    try:
        for itr in range(10):
            batch, _ = sampler.obtain_samples(itr)
            assert ((itr - 1 <= batch.version) & (batch.version <= itr))[batch.valid].all()
            ps.train_one_step(policy, batch)
    finally:
        sampler.shutdown()


@pytest.mark.usefixtures("forked")
def test_versions_and_lag_are_those_of_the_depth() -> None:
    sampler, _ = live(ps.AsyncSerialSampler(ps.SerialSampler(8, 4), depth=2), "CartPole-v1", ps.PPO())
    try:
        for itr in range(6):
            batch, _ = sampler.obtain_samples(itr)
            assert (batch.version[batch.valid] == max(itr - 2, 0)).all()
            assert sampler.metrics()["sampler/lag"] == min(itr, 2)
        with pytest.raises(ConfigError, match=r"obtain_samples\(9\) where batch 6 is next"):
            sampler.obtain_samples(9)
    finally:
        sampler.shutdown()


CONTRACTS = [
    pytest.param(place, reset, decorrelated, id=f"{place}-{reset}{'-decorrelated' * decorrelated}")
    for place, reset, decorrelated in (
        ("cpu-2", "next_step", False), ("gpu-2", "batch_end", False), ("alternating-3", "batch_end", False),
        ("no-overlap", "next_step", False), ("async-serial-0", "next_step", True), ("async-alternating-0", "batch_end", False),
    )
]  # fmt: skip
"""The rest is in test_process_contract.py."""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("place", "reset", "decorrelated"), CONTRACTS)
def test_the_contract(place: str, reset: Any, decorrelated: bool) -> None:
    settings = PLACES[place](7, 6, reset=reset, max_decorrelation_steps=9 * decorrelated)
    consecutive = "async" in place  # works ahead, so it begins where it is told and goes on
    check_sampler(
        settings.build, nested=place == "cpu-2", reset=reset, decorrelated=decorrelated, batches=6 + consecutive
    )


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", ["alternating-2", "no-overlap", "async-cpu-0"])
def test_resumes_exactly(place: str) -> None:
    check_resume(PLACES[place](7, 6).build, before=1, after=2)


@pytest.mark.usefixtures("forked")
def test_resumes_exactly_with_waiting_batches() -> None:
    check_resume(ps.AsyncSerialSampler(ps.SerialSampler(7, 6), depth=1).build, before=2, after=2)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("first", "second"), [("serial", "alternating-2"), ("gpu-1", "cpu-2")])
def test_resumes_exactly_in_another_sampler(first: str, second: str) -> None:
    places = {**PLACES, "serial": lambda T, B, **k: ps.SerialSampler(T, B, **k)}
    env, algo = CASES["lstm"]
    one, _ = live(places[first](8, 7), env, algo)
    two, _ = live(places[second](8, 7), env, algo)
    try:
        for itr in range(3):
            one.obtain_samples(itr)
        two.load_state_dict(one.state_dict())
        assert two.cut_slots == []
        for itr in range(3, 6):
            assert bits(one.obtain_samples(itr)[0]) == bits(two.obtain_samples(itr)[0])
    finally:
        one.shutdown()
        two.shutdown()


def test_an_env_worker_has_no_torch_and_little_memory() -> None:
    from pathlib import Path

    sampler, _ = live(ps.GpuSampler(8, 4, workers=2), "CartPole-v1", ps.PPO())
    try:
        sampler.obtain_samples(0)
        for child in sampler._pool._workers.workers:
            assert "libtorch" not in Path(f"/proc/{child.process.pid}/maps").read_text()
    finally:
        sampler.shutdown()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.GpuSampler(8, 6, workers=8, groups=2), r"leaves 10 of 8 workers x 2 groups without a slot; use B>=16 or workers<=3"),
        (lambda: ps.CpuSampler(8, 2, workers=4), r"leaves 2 of 4 workers without a slot; use B>=4 or workers<=2"),
        (lambda: ps.CpuSampler(0, 2, workers=1), "each must be at least 1"),
        (lambda: ps.CpuSampler(8, 4, 2, step_timeout_s=0), "both must be positive"),
        (lambda: ps.AsyncSampler(ps.SerialSampler(), depth=-1), "depth=-1"),
        (lambda: ps.AsyncSampler(ps.AsyncSerialSampler()), "synchronous sampler's settings"),
        (lambda: ps.CpuSampler(8, 4, 2, affinity=ps.Placement(workers=((0,),))), "places 1 workers"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_stale_data_is_refused_where_an_algorithm_cannot_take_it() -> None:
    from penstock.run.trainer import Trainer

    exp = ps.Experiment("CartPole-v1", ps.A2C(), ps.AsyncSerialSampler(ps.SerialSampler(5, 4), depth=1))
    with pytest.raises(ConfigError, match=r"depth=1 with A2C.*use depth=0"):
        Trainer(exp)


def test_an_environment_that_cannot_be_sent_is_refused_before_anything_starts() -> None:
    import threading

    lock = threading.Lock()
    config = EnvConfig(lambda: (lock, __import__("gymnasium").make("CartPole-v1"))[1])
    with pytest.raises(ConfigError, match=r"cannot be sent to a worker process.*lock"):
        ps.CpuSampler(8, 4, 2).build(config)


def test_too_little_memory_is_said_before_any_is_taken() -> None:
    sampler = ps.GpuSampler(T=2**31, B=64, workers=1).build("CartPole-v1")
    agent = ps.PPO().build(sampler.spec).agent
    sampler._training = None
    try:
        with pytest.raises((ConfigError, MemoryError), match=r"bytes of shared memory|Unable to allocate"):
            sampler.initialize(agent)
    finally:
        sampler.shutdown()


def test_affinity_pins_workers_and_learner_and_is_undone() -> None:
    import os

    allowed = sorted(os.sched_getaffinity(0))
    placement = ps.Placement(workers=((allowed[0],), (allowed[-1],)), learner=(allowed[0],))
    sampler, _ = live(ps.GpuSampler(8, 4, workers=2, affinity=placement), "CartPole-v1", ps.PPO())
    try:
        sampler.obtain_samples(0)
        pids = [child.process.pid for child in sampler._pool._workers.workers]
        assert [os.sched_getaffinity(pid) for pid in pids] == [{allowed[0]}, {allowed[-1]}]
        assert os.sched_getaffinity(0) == {allowed[0]}
    finally:
        sampler.shutdown()
    assert sorted(os.sched_getaffinity(0)) == allowed
