"""Clusters of Ray as users start and join them, each in a process of its own: Ray keeps much for a process's life."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock[ray]'")
pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]
PATIENCE_S = 100.0

PRELUDE = """
import json, os, signal, stat, sys, time, warnings
import numpy as np
import psutil
from penstock.core.errors import ConfigError
from penstock.actors.addresses import listeners_of
from penstock.actors.backend import RunnerError
from penstock.actors.on_ray import Ray
from penstock.actors.cluster import start_ray
from tests.actors.echo import Echo
me = psutil.Process()
def tell(**facts):
    print(json.dumps(facts), flush=True)
def refused(call):
    try:
        call()
    except (ConfigError, RunnerError) as error:
        return [type(error).__name__, getattr(error, "kind", ""), str(error)]
"""


def started(script: str, home: Path, **settings: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = {**kept, "HOME": str(home), "RAY_ADDRESS": "127.0.0.1:1", **settings}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def told(script: str, home: Path, **settings: str) -> dict[str, Any]:
    process = started(script, home, **settings)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert process.returncode == 0 and lines, out + err
    return json.loads(lines[-1])


LOCAL = """
def handler(number, frame): ...
numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
for number in numbers:
    signal.signal(number, handler)
before = dict(os.environ)
backend = Ray(num_cpus=0.5, cluster_cpus=2)
cluster = backend.cluster
runner = backend.start(Echo, (), "runner 0")
where = backend.result(runner.where.remote(), 60)
listeners = listeners_of(os.getpid())
processes = me.children(recursive=True)
again = start_ray()
facts = {
    "shared": again is cluster, "origin": cluster.origin, "text": str(cluster), "listeners": listeners,
    "told": list(cluster.listeners), "mode": stat.S_IMODE(os.stat(cluster.folder).st_mode),
    "kept": all(signal.getsignal(n) is handler for n in numbers), "where": where,
    "home": os.listdir(os.environ["HOME"]), "token": len(os.environ["RAY_AUTH_TOKEN"]),
    "in_command_lines": any(os.environ["RAY_AUTH_TOKEN"] in " ".join(p.cmdline()) for p in processes),
    "room": [backend.require_room(4), refused(lambda: backend.require_room(5))],
    "threads": [open(f"/proc/self/task/{i}/comm").read().strip() for i in os.listdir("/proc/self/task")],
}
fed = [backend.start(Echo, (), f"runner {i}") for i in range(1, 4)]
for other in fed:
    backend.result(other.echo.remote(1), 60)
hungry = backend.start(Echo, (), "runner 4")
facts["waits"] = refused(lambda: backend.result(hungry.echo.remote(1), 3.0))
backend.close()
facts["held"] = cluster.ray.is_initialized()
again.close()
facts |= {
    "ended": not cluster.ray.is_initialized(), "left": [p.name() for p in processes if p.is_running()],
    "folder": os.path.exists(cluster.folder), "environment": dict(set(os.environ.items()) ^ set(before.items())),
    "kept_after": all(signal.getsignal(n) is handler for n in numbers),
}
facts["children"] = [p.name() for p in me.children(recursive=True)]
tell(**facts)
"""


def test_a_local_cluster_is_this_users_alone_and_leaves_nothing(tmp_path: Path) -> None:
    found = told(LOCAL, tmp_path)
    assert (found["origin"], found["shared"]) == ("started", True)
    assert len(found["listeners"]) >= 5 and all(x.startswith("127.0.0.1:") for x in found["listeners"])
    addresses = {x.split()[0] for x in found["listeners"]}
    assert {x.split()[0] for x in found["told"]} <= addresses and any("gcs_server" in x for x in found["told"])
    assert all(x in found["text"] for x in ("Ray 2.", "2 CPUs", "started", *found["told"])), found["text"]
    assert found["mode"] == 0o700
    assert found["token"] == 64 and not found["in_command_lines"] and found["home"] == []
    assert found["kept"] and found["kept_after"]
    assert "worker.io" in found["threads"] and not any("task_event" in x for x in found["threads"]), (
        "calls are recorded"
    )
    assert (found["where"]["threads"], found["where"]["nice"]) == ("1", os.nice(0))
    room, refusal = found["room"]
    assert room is None
    assert "5 runners with num_cpus=0.5 each never fit" in refusal[2] and "have 2 CPUs" in refusal[2], refusal
    assert "use runners<=4, or num_cpus<=0.4" in refusal[2], refusal
    assert found["waits"][:2] == ["RunnerError", "timeout"]
    assert "runner 4: no result within 3 s; if it never answered" in found["waits"][2]
    assert "needs 0.5 CPUs, 0 of the cluster's 2 are free" in found["waits"][2]
    assert found["held"] and found["ended"]
    assert found["left"] == found["children"] == [] and not found["folder"]
    assert set(found["environment"]) <= {"RAY_CLIENT_MODE"}, "which the import of Ray sets"


KILLED = """
import ray  # before the settings of a local cluster are there for it to read
backend = Ray(cluster_cpus=1)
runner = backend.start(Echo, (), "runner 0")
backend.result(runner.echo.remote(1), 60)
runner.sleep.remote(500.0)
pids = [p.pid for p in me.children(recursive=True)]
tell(pids=pids, folder=backend.cluster.folder, listeners=listeners_of(os.getpid()))
time.sleep(500)
"""


def test_a_cluster_ends_with_a_driver_that_is_killed_though_a_runner_hangs(tmp_path: Path) -> None:
    driver = started(KILLED, tmp_path)
    assert driver.stdout
    line = driver.stdout.readline()
    assert line, driver.communicate(timeout=PATIENCE_S)[1]
    found = json.loads(line)
    processes = [psutil.Process(pid) for pid in found["pids"] if psutil.pid_exists(pid)]
    assert len(processes) > 5
    assert len(found["listeners"]) >= 5 and all(x.startswith("127.0.0.1:") for x in found["listeners"])
    driver.kill()
    driver.communicate(timeout=PATIENCE_S)
    _, left = psutil.wait_procs(processes, timeout=30.0)  # Ray's own agents stay for 61 s
    assert not left
    deadline = time.monotonic() + 10.0
    while os.path.exists(found["folder"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(found["folder"])


SHARED = """
backend = Ray(num_cpus=1, cluster_cpus=1)
runner = backend.start(Echo, (), "runner 0")
facts = {"one": backend.result(runner.echo.remote(1), 60)}
other = Ray(num_cpus=1)  # whose runner has no CPU of those that are counted
other.require_room(9)
facts |= {"two": other.result(other.start(Echo, (), "runner 0").echo.remote(2), 60),
          "elsewhere": refused(lambda: start_ray("127.0.0.1:1", timeout_s=5.0))}
call = runner.echo.remote(3)
ray = backend.cluster.ray
ray.shutdown()  # as a script may by mistake
calls = [lambda: backend.result(call, 9), lambda: backend.wait([call], 9), lambda: backend.put([np.zeros(99999, "u1")]),
         lambda: backend.call(runner, "echo", 4), lambda: backend.start(Echo, (), "runner 1"),
         lambda: backend.start(int, (), "runner 1")]
facts["refused"] = [refused(call) for call in calls]
facts["again"] = ray.is_initialized()
for ended in (backend, other):
    ended.close()
tell(**facts, left=[p.name() for p in me.children(recursive=True)], folder=os.path.exists(backend.cluster.folder))
"""


def test_a_cluster_is_shared_and_no_other_one_is_taken_for_it(tmp_path: Path) -> None:
    found = told(SHARED, tmp_path)
    assert (found["one"], found["two"]) == (1, 2)
    assert found["elsewhere"][0] == "ConfigError"
    assert "address='127.0.0.1:1' while this process uses the cluster at" in found["elsewhere"][2]
    assert len(found["refused"]) == 6
    for name, _, text in found["refused"]:
        assert name == "ConfigError" and "Ray was shut down while runners live on it" in text
    assert not found["again"], "Ray starts another cluster by itself where it is asked for anything"
    assert found["left"] == [] and not found["folder"]


NODES = """
import tempfile, ray
from ray.cluster_utils import Cluster
import ray._private.ray_constants as constants
assert not constants.ENABLE_RAY_CLUSTER  # by the environment: loopback only, of these nodes too
checks = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 3}
small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
head = {**small, "_system_config": checks, "temp_dir": os.path.join(tempfile.gettempdir(), "pr" + str(os.getpid()))}
os.makedirs(os.path.join(tempfile.gettempdir(), "ray"), exist_ok=True)  # where Ray writes the address of the head
nodes = Cluster(initialize_head=True, head_node_args=head)
two = nodes.add_node(**{**small, "num_cpus": 2})
nodes.wait_for_nodes(timeout=60)
constants.ENABLE_RAY_CLUSTER = True  # as without that
facts = {"remote": refused(lambda: start_ray("127.0.0.1:1", timeout_s=5.0))}
os.environ["RAY_ADDRESS"] = nodes.address
backend = Ray("auto", num_cpus=2)
facts |= {"origin": backend.cluster.origin, "text": str(backend.cluster),
          "room": [backend.require_room(1), refused(lambda: backend.require_room(2))]}
runner = backend.start(Echo, (), "runner 1")
facts["where"] = backend.result(runner.where.remote(), 60)
facts["listeners"] = listeners_of(os.getpid())
hanging = runner.sleep.remote(500.0)
nodes.remove_node(two, allow_graceful=False)
facts["gone"] = [refused(lambda: backend.result(call, 60)) for call in (hanging, runner.echo.remote(1))]
backend.close()
facts["left"] = not ray.is_initialized()
constants.ENABLE_RAY_CLUSTER = False
ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")  # as a user's own script may
backend = Ray(num_cpus=1)
facts["found"] = [backend.cluster.origin, backend.result(backend.start(Echo, (), "r").echo.remote(7), 60)]
backend.close()
facts["still"] = ray.is_initialized()
ray.shutdown()
nodes.shutdown()
import shutil; shutil.rmtree(head["temp_dir"], ignore_errors=True)
tell(**facts)
"""


def test_a_cluster_is_joined_a_node_is_lost_and_the_scripts_own_connection_stays(tmp_path: Path) -> None:
    found = told(NODES, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="t" * 64, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    assert found["remote"][0] == "ConfigError" and "no cluster answers at 127.0.0.1:1 within 5 s" in found["remote"][2]
    assert found["origin"] == "joined" and "joined: 3 CPUs, nodes 2; listening: 127.0.0.1:" in found["text"]
    assert found["room"][0] is None and "use runners<=1, or num_cpus<=1" in found["room"][1][2], found["room"]
    assert all(x.startswith("127.0.0.1:") for x in found["listeners"])
    assert found["where"]["threads"] == "1"
    for name, kind, text in found["gone"]:
        assert (name, kind) == ("RunnerError", "node") and "runner 1 is gone with its node" in text
    assert found["left"]
    assert found["found"] == ["found", 7] and found["still"]
