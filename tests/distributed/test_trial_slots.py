"""Trials on a Ray cluster, with a fake in the place of `penstock train`: what is lost, what goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.actors.cluster import start_ray
from penstock.core.errors import ConfigError
from penstock.distributed.trial_slots import RaySlots, SlotActor
from penstock.run.files.lock import RunLock
from penstock.run.launch.launcher import Launcher
from penstock.run.launch.slots import check_backend
from penstock.run.search.queue import SearchQueue, open_search
from penstock.run.search.trial import to_plain
from tests.distributed.test_learners import processes
from tests.run.launch.fakes import Seen
from tests.run.search import test_queue
from tests.run.search.test_queue import queue_of, slots

pytestmark = pytest.mark.timeout(180)
LIMIT_S = 60.0
fake = test_queue.fake


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    found = start_ray(num_cpus=4)
    yield found
    found.close()


def worked(queue: SearchQueue, where: Any) -> Seen:
    seen = Seen()
    queue.begin()
    Launcher(queue, where, seen).work()
    return seen


def record(queue: SearchQueue) -> list[dict[str, Any]]:
    return [{**to_plain(t), "run": t.run.name} for t in queue.search.trials]


def until(seen: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_trials_on_a_cluster_are_those_of_this_machine(fake: Path) -> None:
    here, there = queue_of(fake), queue_of(Path("there"))
    worked(here, slots())
    on_ray = RaySlots(1)
    worked(there, on_ray)
    on_ray.close()
    assert record(there) == record(here)
    said = (Path("there") / "logs" / "trial-000.log").read_text()
    assert said.splitlines()[0].endswith("--run.dir there/trial-000")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_slot_that_dies_takes_its_trial_along_which_is_tried_again_in_another(fake: Path) -> None:
    on_ray, queue = RaySlots(2), queue_of(fake)
    before = processes("ray::SlotActor")
    assert len(before) == 2

    def strike() -> None:
        until(lambda: list(fake.glob("trial-*/legs")))
        before[0].kill()

    thread = threading.Thread(target=strike)
    thread.start()
    worked(queue, on_ray)
    thread.join(LIMIT_S)
    on_ray.close()
    assert [t.state for t in queue.search.trials].count("failed") == 0
    assert open_search(fake).search.over
    until(lambda: not processes("ray::SlotActor"))


def test_a_directory_that_a_node_does_not_see_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent of the launcher is not there on node .*file system that all of"):
        SlotActor().execute(["train"], str(tmp_path / "absent"), str(tmp_path / "log"), {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("rey", "local", 1.0), "--backend rey: .*'ray'"),
        (("processes", "auto", 1.0), "--address and --cpus are of --backend ray"),
        (("processes", "local", 2.0), "--address and --cpus are of --backend ray"),
        (("ray", "local", -1.0), "--cpus -1; expected"),
    ],
)
def test_settings_of_another_backend(given: tuple[str, str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_backend(*given)


def test_more_slots_than_there_are_cpus() -> None:
    with pytest.raises(ConfigError, match=r"9,?999 slots on \d+ CPUs?; expected 1 to"):
        RaySlots(9_999)


def test_a_run_waits_until_what_was_left_of_it_is_gone(tmp_path: Path) -> None:
    free = list[float]()
    with RunLock(tmp_path):
        thread = threading.Thread(target=lambda: (RaySlots.settle(tmp_path), free.append(time.monotonic())))
        thread.start()
        time.sleep(0.1)
        held = time.monotonic()
    thread.join(LIMIT_S)
    assert free[0] >= held
