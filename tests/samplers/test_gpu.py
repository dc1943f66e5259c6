"""Settings of GpuSampler and its alternating forms that contradict each other or their environment."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from gymnasium.vector import SyncVectorEnv

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.pools.native_groups import NativeGroups
from penstock.envs.toy import SeedEcho
from penstock.samplers import gpu
from penstock.samplers.cpu import WorkerSampler


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.GpuSampler(8, 3, groups=5), r"sampler\.B=3 leaves 2 of 5 groups .*; use B>=5 or groups<=3$"),
        (lambda: ps.AlternatingSampler(8, 1), r"sampler\.B=1 leaves 1 of 2 groups without a slot"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_alternating_forms_differ_from_each_other_by_their_overlap_alone() -> None:
    names = [f.name for f in fields(ps.GpuSampler)]
    one, two, three = ps.GpuSampler(groups=2), ps.AlternatingSampler(), ps.NoOverlapAlternatingSampler()
    for settings in (two, three):
        assert [f.name for f in fields(settings)] == names
    assert [name for name in names if getattr(one, name) != getattr(two, name)] == []
    assert [name for name in names if getattr(two, name) != getattr(three, name)] == ["overlap"]
    assert (two.overlap, three.overlap) == (True, False)


def test_a_device_that_is_not_here_is_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSampler, "start_workers", lambda *args: pytest.fail("started"))
    with pytest.raises(ConfigError, match=r"sampler\.device='cuda:77' is not here: .*; use 'cpu'"):
        ps.GpuSampler(8, 4, device="cuda:77").build("CartPole-v1")


class Takes(SyncVectorEnv):
    """A batched environment that can be made for any number of slots, and step beside another."""

    def __init__(self, num_envs: int = 1) -> None:
        super().__init__([SeedEcho] * num_envs)

    def send(self, actions: Any) -> None:
        self.actions = actions

    def recv(self) -> Any:
        return super().step(self.actions)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reset": "batch_end"}, r"resets by itself.*; use reset='next_step', .* and max_decorrelation_st"),
        ({"max_decorrelation_steps": 1}, r"use reset='next_step', .* and max_decorrelation_steps=0$"),
        ({"workers": 1}, r"^sampler\.workers=1 with .*Takes, a native batched environment.*leave workers and affinity"),
        (
            {"affinity": ps.Placement(workers=((0,), (0,)))},
            r"^sampler\.workers=2 with .*leave workers and affinity out$",
        ),
    ],
)
def test_what_means_worker_processes_is_refused_for_native_environments(
    settings: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerSampler, "start_workers", lambda *args: pytest.fail("started"))
    with pytest.raises(ConfigError, match=message):
        ps.GpuSampler(8, 4, **settings).build(Takes)


@pytest.mark.parametrize("sampler", [ps.GpuSampler, ps.AlternatingSampler, ps.NoOverlapAlternatingSampler])
def test_native_environments_step_in_groups_without_a_worker(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSampler, "start_workers", lambda *args: pytest.fail("started"))
    made: list[Any] = []

    def groups(*args: Any, **named: Any) -> Any:
        made.append((args[1:], named))
        return NativeGroups(*args, **named)

    monkeypatch.setattr(gpu, "NativeGroups", groups)
    settings = sampler(8, 6, step_timeout_s=7.0)
    live = settings.build(Takes, 5, share=ps.Share(6, 12))
    live.shutdown()
    expected = {"exclusive": not settings.overlap, "step_timeout_s": 7.0, "first_slot": 6, "activity": None}
    assert made == [((5, 6, settings.groups), expected)]


def test_native_environments_are_served_without_graphs_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    server = gpu.ActionServer
    monkeypatch.setattr(gpu, "ActionServer", lambda *args: asked.append(args) or server(*args))
    ps.GpuSampler(8, 6, device="cpu", cuda_graph=False).build(Takes).shutdown()
    assert asked[-1] == ("cpu", False)
