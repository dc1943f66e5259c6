from __future__ import annotations

from typing import Any

import pytest

from penstock.core.config import from_plain, to_plain
from penstock.core.errors import ConfigError
from penstock.core.machine import Gpu, Machine, read_machine
from penstock.run.affinity import default_workers, plan, ranges, slices


def machine(cores: int, threads: int = 1, nodes: int = 1, quota: float | None = None, gpus: int = 0) -> Machine:
    each = tuple(tuple(core + cores * t for t in range(threads)) for core in range(cores))
    where = tuple(core * nodes // cores for core in range(cores))
    return Machine(each, where, quota, None, tuple(Gpu("H", f"GPU-{i}", None) for i in range(gpus)))


TWO_SOCKETS = machine(8, threads=2, nodes=2)


# Where processes go


def test_a_core_each_and_the_first_for_the_learner() -> None:
    placement = plan(machine(14, threads=2), 8)
    assert placement.workers == tuple((c,) for c in range(1, 9))
    assert placement.learner == (0, 14)
    assert placement.server == ()
    assert placement.why == "a core for each of 8 workers; learner on 0, 14"


def test_groups_get_both_threads_of_a_core() -> None:
    placement = plan(machine(14, threads=2), 8, groups=2, server=True)
    assert placement.server == (0, 14)
    assert placement.learner == (1, 15)
    assert placement.workers == tuple((c, c + 14) for c in range(2, 10))
    assert plan(machine(14), 8, groups=2).workers == tuple((c,) for c in range(1, 9))


@pytest.mark.parametrize(("threads", "workers"), [(1, 14), (2, 14), (2, 27), (2, 20)])
@pytest.mark.parametrize("groups", [1, 2])
def test_with_few_cores_left_the_learner_shares_the_servers(threads: int, workers: int, groups: int) -> None:
    placement = plan(machine(14, threads=threads), workers, groups=groups, server=True)
    assert placement.learner == placement.server == tuple(range(0, 14 * threads, 14))
    assert "with the server" in placement.why
    assert not {cpu for cpus in placement.workers for cpu in cpus} & set(placement.server)


def test_siblings_come_after_every_core_is_in_use() -> None:
    placement = plan(machine(4, threads=2), 6)
    assert sorted(placement.workers) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert placement.learner == ()
    assert placement.why.startswith("6 workers on 4 cores: 2 of them on sibling threads; learner anywhere")


def test_more_workers_than_cpus_wrap_around_and_it_says_so() -> None:
    placement = plan(machine(2), 5, server=True)
    assert placement.workers == ((1,),) * 5
    assert placement.why.startswith("5 workers share 1 CPU: more than there are left")
    assert plan(machine(2), 5).workers == ((0,), (1,), (0,), (1,), (0,))


def test_the_server_gets_a_core_beside_the_gpu() -> None:
    cores = tuple((2 * c, 2 * c + 1) for c in range(14))
    found = Machine(cores, (0,) * 7 + (1,) * 7, gpus=(Gpu("H", "GPU-0", 1),))
    placement = plan(found, 8, groups=2, server=True)
    assert (placement.server, placement.learner) == ((14, 15), (16, 17))


def test_a_quota_below_the_number_of_workers_is_told() -> None:
    found = machine(8, quota=1.5)
    assert default_workers(found, 16) == 1
    assert "grants 1.5 CPUs of time, fewer than there are workers" in plan(found, 4).why
    assert "grants" not in plan(found, 1).why


def test_this_machine_can_be_planned_for() -> None:
    assert plan(read_machine(), 2).workers


def test_one_cpu_takes_all() -> None:
    placement = plan(machine(1), 2, groups=2, server=True)
    assert placement.workers == ((0,), (0,))
    assert (placement.server, placement.learner) == ((), ())
    both = plan(machine(1, threads=2), 1, server=True)
    assert (both.workers, both.server, both.learner) == (((1,),), (0,), (0,))


def test_workers_spread_over_numa_nodes_and_neighbours_stay_together() -> None:
    found = TWO_SOCKETS
    assert plan(found, 4, server=True).workers == ((2,), (4,), (5,), (6,))  # 2 of 8 cores of node 0 are taken
    assert plan(found, 8).workers == tuple((c,) for c in range(8))
    assert [w[0] % 8 // 4 for w in plan(found, 16).workers] == [0] * 8 + [1] * 8


def test_a_learner_with_several_threads_gets_as_many_cores_as_are_left() -> None:
    assert plan(machine(14), 8, learner_cores=4).learner == (0, 1, 2, 3)
    assert plan(machine(14), 12, learner_cores=4).learner == (0, 1)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 14])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("server", [False, True])
def test_every_plan_is_whole(cores: int, threads: int, server: bool) -> None:
    here = machine(cores, threads, nodes=min(cores, 2))
    for workers in range(1, 40):
        for groups in (1, 2):
            placement = plan(here, workers, groups, server)
            assert len(placement.workers) == workers
            assert all(placement.workers)
            used = {cpu for cpus in placement.workers for cpu in cpus}
            assert used <= set(here.cpus)
            assert not used & {*placement.server, *placement.learner}
            free = len(here.cpus) - len({*placement.server, *placement.learner})
            if workers >= free:
                assert len(used) == free
            assert from_plain(to_plain(placement)) == placement


@pytest.mark.parametrize("numbers", [{"workers": 0}, {"workers": 1, "groups": 0}, {"workers": 1, "learner_cores": 0}])
def test_refuses_to_place_nothing(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        plan(machine(4), **numbers)


@pytest.mark.parametrize(
    ("cores", "B", "groups", "server", "workers"),
    [
        (14, 16, 1, False, 8),  # 14 would take two steps after each other as well
        (14, 64, 1, False, 13),  # 5 each
        (4, 16, 1, False, 4),
        (4, 16, 1, True, 3),
        (4, 16, 2, True, 3),
        (14, 16, 2, False, 8),
        (4, 2, 2, False, 1),
        (1, 16, 2, True, 1),
        (64, 1, 1, False, 1),
    ],
)
def test_default_number_of_workers(cores: int, B: int, groups: int, server: bool, workers: int) -> None:
    found = default_workers(machine(cores), B, groups, server)
    assert found == workers
    assert found * groups <= max(B, groups)


# Several runs


def test_slices_are_disjoint_whole_cores() -> None:
    found = TWO_SOCKETS
    parts = slices(found, 2)
    assert [part.cores for part in parts] == [found.cores[:4], found.cores[4:]]
    assert [set(part.nodes) for part in parts] == [{0}, {1}]
    assert [len(part.cores) for part in slices(found, 3)] == [2, 3, 3]
    for n in range(1, 17):
        cpus = [cpu for part in slices(found, n) for cpu in part.cpus]
        assert sorted(cpus) == list(range(16))
        assert all(plan(part, 1).workers for part in slices(found, n))


def test_slices_of_threads_where_cores_are_too_few() -> None:
    assert [part.cores for part in slices(machine(2, threads=2), 4)] == [((0,),), ((2,),), ((1,),), ((3,),)]
    assert [part.cores for part in slices(machine(2, threads=2), 3)] == [((0,),), ((2,),), ((1, 3),)]


def test_slices_share_out_the_rest() -> None:
    whole = Machine(((0,), (1,)), (0, 0), 1.5, 1001, (Gpu("a", "0"), Gpu("b", "1"), Gpu("c", "2")))
    left, right = slices(whole, 2)
    assert (left.quota, left.memory) == (0.75, 500)
    assert ([g.uuid for g in left.gpus], [g.uuid for g in right.gpus]) == (["0", "2"], ["1"])
    assert [part.gpus[0].uuid for part in slices(machine(4, gpus=2), 4)] == ["GPU-0", "GPU-1", "GPU-0", "GPU-1"]


@pytest.mark.parametrize("n", [0, 5])
def test_more_slots_than_cpus(n: int) -> None:
    with pytest.raises(ConfigError, match=f"{n} slots on 4 CPUs; expected 1 to 4"):
        slices(machine(4), n)


def test_ranges() -> None:
    assert ranges((3, 0, 1, 7)) == "0-1, 3, 7"
    assert ranges(()) == ""
