from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves
from penstock.envs.conformance import check_pool, echo_config
from penstock.envs.make import EnvConfig
from penstock.envs.toy import PixelCatch, TMaze
from penstock.learn.train_ops import as_tensors
from penstock.samplers.conformance import bits, check_resume, check_sampler
from penstock.samplers.cpu import start_workers
from penstock.samplers.process_pool import TRAINING, ProcessPool

pytestmark = pytest.mark.timeout(120)

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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", PLACES)
def test_twenty_updates_are_equal_bit_for_bit_wherever_work_is_placed(case: str, place: str) -> None:
    updates = 20 if case != "cnn" else 4
    batches, parameters = serial(case, 16, 7, updates)
    there, parameters_there = run(PLACES[place](16, 7), *CASES[case], updates)
    assert differences(batches, there) == []
    assert parameters == parameters_there


@pytest.mark.parametrize(("B", "workers"), [(3, 1), (5, 1), (8, 1), (13, 4), (10, 2), (16, 2)])
@pytest.mark.parametrize("place", ["cpu", "gpu", "alternating"])
def test_uneven_shares_change_nothing(place: str, B: int, workers: int) -> None:
    kinds = {"cpu": ps.CpuSampler, "gpu": ps.GpuSampler, "alternating": ps.AlternatingSampler}
    batches, parameters = serial("pendulum", 12, B, 3)
    there, parameters_there = run(kinds[place](12, B, workers), *CASES["pendulum"], 3)
    assert differences(batches, there) == []
    assert parameters == parameters_there


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
@pytest.mark.parametrize("place", ["cpu-2", "gpu-2", "alternating-3", "no-overlap", "async-cpu-0"])
def test_reset_modes_decorrelation_and_evaluations_change_nothing(place: str, reset: str) -> None:
    kwargs = {"reset": reset, "max_decorrelation_steps": 30}
    batches, parameters = serial("lstm", 9, 7, 6, True, **kwargs)
    there, parameters_there = run(PLACES[place](9, 7, **kwargs), *CASES["lstm"], 6, True)
    assert differences(batches, there) == []
    assert parameters == parameters_there
    quiet, quiet_parameters = run(PLACES[place](9, 7, **kwargs), *CASES["lstm"], 6)
    assert differences([x for x in there if isinstance(x[0], dict)], quiet) == []
    assert quiet_parameters == parameters


@pytest.mark.parametrize("weights", ["exact", "newest"])
def test_depth_one_is_the_same_from_run_to_run(weights: str) -> None:
    settings = ps.AsyncCpuSampler(ps.CpuSampler(16, 8, workers=2), depth=1, weights=weights)  # pyright: ignore
    one, parameters = run(settings, *CASES["cartpole"], 10)
    if weights == "exact":
        two, parameters_two = run(settings, *CASES["cartpole"], 10)
        assert differences(one, two) == []
        assert parameters == parameters_two


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
    for place in ("cpu-2", "gpu-2", "alternating-3", "no-overlap", "async-serial-0", "async-alternating-0")
    for reset, decorrelated in (("next_step", False), ("batch_end", False), ("next_step", True))
]


@pytest.mark.parametrize(("place", "reset", "decorrelated"), CONTRACTS)
def test_the_contract(place: str, reset: Any, decorrelated: bool) -> None:
    settings = PLACES[place](7, 6, reset=reset, max_decorrelation_steps=9 * decorrelated)
    consecutive = "async" in place  # works ahead, so it begins where it is told and goes on
    check_sampler(
        settings.build, nested=place == "cpu-2", reset=reset, decorrelated=decorrelated, batches=6 + consecutive
    )


@pytest.mark.parametrize("place", ["cpu-2", "alternating-2", "no-overlap", "async-serial-0", "async-cpu-0"])
def test_resumes_exactly(place: str) -> None:
    check_resume(PLACES[place](7, 6).build, before=1, after=2)


def test_resumes_exactly_with_waiting_batches() -> None:
    check_resume(ps.AsyncSerialSampler(ps.SerialSampler(7, 6), depth=1).build, before=2, after=2)


@pytest.mark.parametrize(("first", "second"), [("cpu-2", "serial"), ("serial", "alternating-2"), ("gpu-1", "cpu-3")])
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


@pytest.mark.parametrize(("reset", "steps"), [("next_step", 0), ("batch_end", 0), ("next_step", 9), ("batch_end", 9)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("workers", "groups", "overlap"), [(1, 1, True), (2, 1, True), (2, 3, True), (3, 2, True), (2, 2, False)]
)
def test_the_pools_contract(workers: int, groups: int, overlap: bool, nested: bool, reset: Any, steps: int) -> None:
    settings = ps.GpuSampler(7, 7, workers, groups=groups, overlap=overlap, reset=reset, max_decorrelation_steps=steps)
    check_pool(
        lambda: _Attaching(settings, echo_config(nested)), seed=3, reset=reset, decorrelated=steps > 0, batches=4
    )


class _Attaching:
    """A ProcessPool that copies to and from the suite's buffers, which are not in shared memory."""

    def __init__(self, settings: Any, config: EnvConfig) -> None:
        self._workers = start_workers(settings, config, 3, 1, None)
        self._pool = ProcessPool(
            self._workers, TRAINING, config, 3, 7, groups=settings.groups, reset=settings.reset,
            exclusive=not settings.overlap, max_decorrelation_steps=settings.max_decorrelation_steps,
        )  # fmt: skip
        self.spec, self.groups, self.info_keys = self._pool.spec, self._pool.groups, self._pool.info_keys
        self._shared: Any = None

    def bind(self, out: Any) -> None:
        if self._shared is None:
            self._shared, _ = self._pool.attach([out.copy()])
        for x, y in zip(tree_leaves(self._shared[0]), tree_leaves(out)):
            x[-1] = self._last[id(x)] if hasattr(self, "_last") else y[-1]
        self._out = out
        self._pool.bind(self._shared[0])
        for name in ("obs", "first", "prev_action", "prev_reward"):
            for x, y in zip(tree_leaves(getattr(out, name)), tree_leaves(getattr(self._shared[0], name))):
                x[0] = y[0]
        out.first[1:] = False
        for x, y in zip(tree_leaves(out.info.get("env")), tree_leaves(self._shared[0].info.get("env"))):
            x[...] = y

    def send(self, group: int, row: int) -> None:
        slots = self.groups[group]
        for x, y in zip(tree_leaves(self._shared[0].action), tree_leaves(self._out.action)):
            x[row, slots] = y[row, slots]
        self._sent = {**getattr(self, "_sent", {}), group: row}
        self._pool.send(group, row)

    def recv(self) -> int:
        group = self._pool.recv()
        row, slots, there, out = self._sent[group], self.groups[group], self._shared[0], self._out
        for x, y in zip(tree_leaves((out.obs, out.first)), tree_leaves((there.obs, there.first))):
            x[row + 1, slots] = y[row + 1, slots]
        names = ("reward", "terminated", "truncated", "valid")
        for x, y in zip([*(getattr(out, n) for n in names), *tree_leaves(out.info.get("env"))],
                        [*(getattr(there, n) for n in names), *tree_leaves(there.info.get("env"))]):  # fmt: skip
            x[row, slots] = y[row, slots]
        self._last = {id(x): x[-1].copy() for x in tree_leaves(there)}
        return group

    def close(self) -> None:
        self._pool.close()


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
    sampler._stage = None
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
