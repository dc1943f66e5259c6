from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import penstock as ps
from penstock.learn.comm import SINGLE, GroupComm, meet
from tests.learn.gloo_rank import ALGO
from tests.learn.ranks import apart, batches_of, trained

LIMIT_S = 100.0


def start(zygote: Any, tmp_path: Path, count: int, *trouble: str) -> tuple[ps.EnvSpec, list[Any], list[Any]]:
    spec, batches = batches_of("CartPole-v1", ALGO, 64, 16, count)
    torch.save((spec, batches), tmp_path / "batches")
    names = [str(tmp_path / "meeting"), str(tmp_path / "batches"), str(tmp_path / "out")]
    script = Path(__file__).parent / "gloo_rank.py"
    return spec, batches, [zygote.script(script, str(rank), "2", *names, *trouble) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 13])
def test_two_processes_equal_one_learner(tmp_path: Path, zygote: Any, count: int) -> None:
    """Over 80 gradient steps a batch; one learner in the meantime takes the first 160."""
    spec, batches, processes = start(zygote, tmp_path, count)
    ((one, _),) = trained(ALGO, spec, batches[:2], [16])
    assert [(process.wait(), process.output) for process in processes] == [(0, ""), (0, "")]
    (updates, agent, optimizer), other = (torch.load(tmp_path / f"out.{rank}") for rank in range(2))
    assert updates == other[0] == count * 80
    assert all(torch.equal(x, other[1][name]) for name, x in agent.items())
    assert all(torch.equal(x, y) for x, y in zip(optimizer["squares"], other[2]["squares"]))
    assert one.updates == 160
    ((whole, _),) = trained(ALGO, spec, batches, [16])
    whole_agent = whole.agent.state_dict()
    assert max(float((x - agent[name]).abs().max()) for name, x in whole_agent.items()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("trouble", "least", "most"), [("die", 0.0, 4.0), ("hang", 4.0, 15.0)])
def test_a_rank_that_is_lost_is_an_error_in_time(
    tmp_path: Path, zygote: Any, until: Any, trouble: str, least: float, most: float
) -> None:
    _, _, (waits, harms) = start(zygote, tmp_path, 1, trouble)
    said = r"^([\d.]+) rank 0 of 2 waited in .* within 5 s"
    until(lambda: re.search(said, waits.output, re.M), waits)  # gloo lets no process go while a peer hangs
    if harms.running:
        harms.kill()
    assert waits.wait() == 6
    found = re.search(said, waits.output, re.M)
    assert found is not None and least <= float(found[1]) <= most


def comm_of_one(tmp_path: Path) -> GroupComm:
    return GroupComm(meet(str(tmp_path / "meeting"), 0, 1, timeout_s=20.0))


def test_collectives_of_one(tmp_path: Path) -> None:
    for comm in (SINGLE, comm_of_one(tmp_path)):
        x = torch.arange(6).reshape(2, 3)
        assert comm.rank == 0 and comm.size == 1
        assert torch.equal(comm.all_reduce(x.clone()), x)
        assert torch.equal(comm.broadcast(x.clone()), x)
        comm.barrier()
        for sent in (x, x.T, x > 2, x.double(), torch.tensor(3.5), torch.zeros(0, 2)):
            (found,) = comm.all_gather(sent)
            assert found.dtype == sent.dtype and torch.equal(found, sent)


def test_listens_on_loopback_alone(tmp_path: Path) -> None:
    before = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    comm = comm_of_one(tmp_path)
    opened = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN} - before
    assert {place.ip for place in opened} <= {"127.0.0.1"}
    assert comm.size == 1


def test_a_meeting_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ps.ConfigError, match=r"ranks cannot meet in .*No such file or directory; give a folder"):
        meet(str(tmp_path / "absent" / "file"), 0, 2)


def test_a_file_that_lies_later_where_ranks_met_is_left_alone(tmp_path: Path) -> None:
    """A FileStore that ended with its group, at some collection of garbage, wrote into it and read there for ever."""
    place = os.memfd_create("meeting")
    comm = GroupComm(meet(f"/proc/self/fd/{place}", 0, 1, timeout_s=20.0))
    other = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    os.dup2(other, place)
    comm.barrier()
    del comm
    gc.collect()
    os.close(place)
    os.close(other)
    assert (tmp_path / "log").read_bytes() == b""


@pytest.mark.slow
def test_ranks_that_do_not_come_in_time(tmp_path: Path) -> None:
    with pytest.raises(ps.LearnerLostError, match=r"rank 0 did not meet the other 1 in .* within 1 s"):
        meet(str(tmp_path / "meeting"), 0, 2, timeout_s=1.0)


def test_numbers_its_collectives(tmp_path: Path) -> None:
    seen: list[int] = []
    comm = GroupComm(meet(str(tmp_path / "meeting"), 0, 1, timeout_s=20.0), entering=seen.append)
    comm.barrier()
    comm.all_gather(torch.zeros(2))
    assert seen == [1, 2]
    assert threading.active_count() < 100


@pytest.mark.slow
def test_waits_longer_than_ranks_may_take_to_meet_and_hears_signals_meanwhile(tmp_path: Path) -> None:
    heard, ended_at = list[float](), list[float]()

    def later() -> None:
        comm = GroupComm(meet(str(tmp_path / "meeting"), 1, 2, timeout_s=3.0), 60.0)
        comm.barrier()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(4.0)
        ended_at.append(time.monotonic())
        comm.barrier()

    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(time.monotonic()))
    thread = threading.Thread(target=later, daemon=True)
    try:
        thread.start()
        comm = GroupComm(meet(str(tmp_path / "meeting"), 0, 2, timeout_s=3.0), 60.0)
        comm.barrier()
        comm.barrier()
    finally:
        signal.signal(signal.SIGUSR1, before)
    thread.join(timeout=LIMIT_S)
    assert not thread.is_alive()
    assert heard[0] < ended_at[0]


def test_no_group() -> None:
    with pytest.raises(ps.ConfigError, match="init_process_group"):
        GroupComm(None)


def test_equal_policies_are_apart_by_nothing() -> None:
    spec, _ = batches_of("CartPole-v1", ALGO, 2, 2, 1)
    assert apart(ALGO.build(spec, seed=1), ALGO.build(spec, seed=1)) == 0.0
