"""Settings of CpuSampler that contradict each other, by the messages of all samplers with worker processes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.config import import_object
from penstock.core.errors import ConfigError
from penstock.core.noise import Noise, Purpose
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs.make import EnvConfig
from penstock.samplers import cpu
from penstock.samplers.actor import DETERMINISTIC, Actor
from penstock.testing.samplers import EchoAgent
from penstock.workers.shares import SharedMemory


def test_groups_with_a_cpu_sampler_name_the_sampler_that_has_them() -> None:
    text = r"sampler\.groups=2 with CpuSampler.*use AlternatingSampler.*leave groups out"
    with pytest.raises(ConfigError, match=text):
        ps.CpuSampler(groups=2)
    with pytest.raises(ConfigError, match=text):
        ps.CpuSampler(T=8, B=2, workers=2, groups=2)
    with pytest.raises(ConfigError, match=text):
        ps.override(ps.Experiment("CartPole-v1", ps.PPO(), ps.CpuSampler()), {"sampler.groups": 2})
    assert ps.CpuSampler(groups=1) == ps.CpuSampler()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.CpuSampler(0, 2, workers=1), "sampler.T=0; expected 1 or more"),
        (lambda: ps.CpuSampler(8, 4, 2, step_timeout_s=0), "sampler.step_timeout_s=0; expected more than 0"),
        (lambda: ps.CpuSampler(8, 4, 2, affinity=ps.Placement(workers=((0,),))), "places 1 workers"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.usefixtures("forked")
def test_no_worker_is_started_that_would_have_no_slot() -> None:
    assert [ps.CpuSampler(8, B, workers=4).processes for B in (1, 3, 4, 9)] == [1, 3, 4, 4]
    assert [ps.GpuSampler(8, B, workers=8, groups=2).processes for B in (2, 3, 6, 16)] == [1, 1, 3, 8]
    with pytest.warns(UserWarning, match=r"sampler\.workers=2 with sampler\.B=1: 1 worker"):
        sampler = ps.CpuSampler(2, 1, workers=2, affinity=ps.Placement(workers=((0,), (0,)))).build("CartPole-v1", 3)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        assert sampler.obtain_samples(0)[0].valid.all()
    finally:
        sampler.shutdown()


SAMPLERS = (ps.CpuSampler, ps.GpuSampler, ps.AlternatingSampler, ps.NoOverlapAlternatingSampler)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"T": 0}, r"^sampler\.T=0; expected 1 or more$"),
        ({"B": 0}, r"^sampler\.B=0; expected 1 or more$"),
        ({"workers": 0}, r"^sampler\.workers=0; expected 1 or more$"),
        (
            {"max_decorrelation_steps": -1},
            r"^sampler\.max_decorrelation_steps=-1; expected 0 or more$",
        ),
        ({"journal_steps": -3}, r"^sampler\.journal_steps=-3; expected 0 or more$"),
        (
            {"step_timeout_s": 0.0},
            r"^sampler\.step_timeout_s=0\.0; expected more than 0$",
        ),
        ({"start_timeout_s": -1.0}, r"^sampler\.start_timeout_s=-1\.0; expected more than 0$"),
        (
            {"affinity": ps.Placement(workers=((0,), (1,), (2,)))},
            r"^sampler\.affinity places 3 workers and sampler\.workers=2; make them equal$",
        ),
        ({"reset": "sometimes"}, r"reset"),
        ({"fault_policy": "retry"}, r"fault_policy"),
        ({"T": 3.5}, r"T"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_contradiction_is_said_by_every_sampler_with_workers(sampler: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampler(**settings)


def test_what_is_at_the_limit_is_taken() -> None:
    least = {"T": 1, "workers": 1, "journal_steps": 0, "step_timeout_s": 1e-3, "start_timeout_s": 1e-3}
    for sampler in SAMPLERS:
        groups = sampler().groups
        assert sampler(**least, B=groups).spec == (1, groups)
        assert sampler(B=2 * groups, affinity=ps.Placement(workers=((0,), (1,)))).workers == 2


def test_workers_are_told_of_their_places_seed_and_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's own CPUs are those of the server and of itself, each once."""
    told: list[Any] = []
    monkeypatch.setattr(cpu, "Workers", lambda *args, **named: told.append((args, named)))
    placement = ps.Placement(workers=((0,), (1,)), server=(2, 3), learner=(3, 4))
    settings = ps.CpuSampler(8, 4, 2, step_timeout_s=7, start_timeout_s=9, fault_policy="drop", affinity=placement)
    settings.start_workers(EnvConfig("CartPole-v1"), 5, 3, SharedMemory(11, None))
    (count, seed, faults, step_s, start_s, cpus, computing), named = told.pop()
    assert (count, seed, step_s, start_s, cpus, computing) == (2, 5, 7, 9, ((0,), (1,)), 3)
    assert faults.policy == "drop"
    assert named == {"shared": SharedMemory(11, None), "own": (2, 3, 4), "forked_with": ()}
    ps.GpuSampler().start_workers(EnvConfig("CartPole-v1"), 5, 3, None)
    (*_, cpus, _), named = told.pop()
    assert (cpus, named) == ((), {"shared": None, "own": (), "forked_with": ()})


def test_nothing_is_started_where_the_environment_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "Workers", lambda *args, **named: pytest.fail("started"))
    with pytest.raises(ConfigError, match="cannot be sent to a worker process"):
        ps.CpuSampler().start_workers(EnvConfig("CartPole-v1", {"lock": threading.Lock()}), 5, 3, None)


class Pool:
    """Stands for a ProcessPool whose workers act."""

    def __init__(self) -> None:
        self.parameters: list[Any] = [{"unused": np.zeros(1, np.float32)}]
        self.collected: list[Any] = []
        self.placed: list[Any] = []

    def collect(self, *args: Any) -> None:
        self.collected.append((*args, self.parameters[0]["unused"].tolist()))

    def place(self, *args: Any) -> Any:
        self.placed.append(args)
        return "placed", "there"


SPEC = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(4,)))


def test_parameters_are_published_before_workers_collect() -> None:
    pool, agent = Pool(), EchoAgent(SPEC)
    agent.unused.data.fill_(3.0)
    cpu.WorkerActors().serve(pool, [agent], ["batch"], None, [], Noise(1, Purpose.EVALUATE, 9))  # type: ignore
    agent.unused.data.fill_(4.0)
    cpu.WorkerActors().serve(pool, [agent], ["batch"], None, [], None)  # type: ignore
    assert pool.collected == [
        (["batch"], 9, Purpose.EVALUATE, [3.0]),
        (["batch"], 0, DETERMINISTIC, [4.0]),
    ]


def test_workers_get_a_copy_of_the_agent_and_its_parameters_as_arrays() -> None:
    pool, agent = Pool(), EchoAgent(SPEC)
    agent.unused.data.fill_(3.0)
    assert cpu.WorkerActors().place(pool, ["batch"], "states", [agent]) == ("placed", "there")  # type: ignore
    ((batches, states, acting),) = pool.placed
    assert (batches, states, acting.actor) == (["batch"], "states", "penstock.samplers.actor:Actor")
    (copied,), (parameters,) = acting.agents, acting.parameters
    assert copied is not agent
    assert {name: x.tolist() for name, x in parameters.items()} == {"unused": [3.0]}
    assert import_object(acting.actor) is Actor
