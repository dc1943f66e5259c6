from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from penstock.core.machine import (
    Gpu,
    Machine,
    allowed_cpus,
    cpu_family,
    cpu_quota,
    free_memory,
    memory_limit,
    oom_kills,
    read_machine,
    total_memory,
)

Tree = Callable[[Mapping[str, str]], Path]
CPU = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
NODE = "sys/devices/system/node/node{}/cpulist"
GROUP = "sys/fs/cgroup"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files below an empty root."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def two_sockets() -> dict[str, str]:
    """2 x 4 cores with 2 threads: the siblings of 0..7 are 8..15, nodes hold 0-3,8-11 and 4-7,12-15."""
    files = {CPU.format(cpu): f"{cpu % 8},{cpu % 8 + 8}\n" for cpu in range(16)}
    return {**files, NODE.format(0): "0-3,8-11\n", NODE.format(1): "4-7,12-15\n"}


def test_two_sockets_with_hyperthreads(tree: Tree) -> None:
    found = read_machine(tree(two_sockets()), range(16))
    assert found.cores == tuple((c, c + 8) for c in range(8))
    assert found.nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert found.cpus == tuple(range(16))
    assert str(found) == "8 cores with 2 threads, 2 NUMA nodes"


def test_the_processor_names_its_maker_and_its_family(tree: Tree) -> None:
    first = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n"
    assert cpu_family(tree({})) == ("", 0)
    assert cpu_family(tree({"proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\n"})) == ("", 0)
    more = first.replace("25", "26").replace("AuthenticAMD", "GenuineIntel")
    assert cpu_family(tree({"proc/cpuinfo": first + more})) == ("AuthenticAMD", 25)


def test_cores_of_a_node_stand_together_however_they_are_numbered(tree: Tree) -> None:
    files = {NODE.format(0): "0,2\n", NODE.format(1): "1,3\n"}
    found = read_machine(tree(files), range(4))
    assert found.cores == ((0,), (2,), (1,), (3,))
    assert found.nodes == (0, 0, 1, 1)


def test_only_cpus_that_are_allowed(tree: Tree) -> None:
    found = read_machine(tree(two_sockets()), [1, 9, 12])
    assert found.cores == ((1, 9), (12,))
    assert found.nodes == (0, 1)


def test_without_topology_each_cpu_is_a_core(tree: Tree) -> None:
    found = read_machine(tree({}), [0, 1, 5])
    assert found == Machine(((0,), (1,), (5,)), (0, 0, 0))
    assert str(found) == "3 cores"


def test_one_cpu(tree: Tree) -> None:
    found = read_machine(tree({CPU.format(0): "0\n"}), [0])
    assert str(found) == "1 core"
    assert found.busy_cores == 1


def test_fourteen_cores_and_a_gpu(tree: Tree) -> None:
    files = {CPU.format(c): f"{2 * (c // 2)}-{2 * (c // 2) + 1}\n" for c in range(28)}
    gpu = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 77\nGPU UUID: \t GPU-ab12\nBus Location: \t 0000:1B:00.0\n"
    files |= {
        "proc/driver/nvidia/gpus/0000:1B:00.0/information": gpu,
        NODE.format(0): "0-13\n",
        NODE.format(1): "14-27\n",
    }
    found = read_machine(tree({**files, "sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n"}), range(28))
    assert found.cores == tuple((2 * c, 2 * c + 1) for c in range(14))
    assert found.gpus == (Gpu("NVIDIA H100 80GB HBM3", "GPU-ab12", 1),)
    assert str(found) == "14 cores with 2 threads, 2 NUMA nodes, 1 GPU"


@pytest.mark.parametrize(
    ("files", "own", "quota"),
    [
        ({}, "", None),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
        ({"cpu.max": "150000 100000\n"}, "", 1.5),
        ({"a/cpu.max": "800000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 8.0),
        ({"a/cpu.max": "800000 100000\n", "a/b/cpu.max": "200000 100000\n"}, "0::/a/b\n", 2.0),
        ({"other/cpu.max": "100000 100000\n"}, "0::/a\n", None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n", None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/not/mounted\n", 0.5),
        (
            {"cpu,cpuacct/d/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/d/cpu.cfs_period_us": "100000\n"},
            "4:cpu,cpuacct:/d\n",
            2.5,
        ),
        ({"cpu.max": "garbage\n"}, "nonsense\n", None),
    ],
)
def test_control_groups_share_of_time(files: dict[str, str], own: str, quota: float | None, tree: Tree) -> None:
    root = tree({**{f"{GROUP}/{name}": text for name, text in files.items()}, "proc/self/cgroup": own})
    assert cpu_quota(root) == quota
    assert read_machine(root, range(4)).quota == quota


@pytest.mark.parametrize(
    ("files", "own", "limit"),
    [
        ({}, "", None),
        ({"memory.max": "max\n"}, "0::/\n", None),
        ({"memory.max": "1048576\n"}, "0::/\n", 1048576),
        ({"a/memory.max": "4096\n", "a/b/memory.max": "8192\n"}, "0::/a/b\n", 4096),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, "1:memory:/\n", None),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/x/memory.limit_in_bytes": "4096"}, "1:memory:/x\n", 4096),
    ],
)  # fmt: skip
def test_control_groups_memory(files: dict[str, str], own: str, limit: int | None, tree: Tree) -> None:
    root = tree({**{f"{GROUP}/{name}": text for name, text in files.items()}, "proc/self/cgroup": own})
    assert memory_limit(root) == limit


def test_a_quota_of_one_and_a_half_cpus(tree: Tree) -> None:
    found = read_machine(tree({f"{GROUP}/cpu.max": "150000 100000\n"}), range(8))
    assert str(found) == "8 cores, 1.5 CPUs of time"
    assert found.busy_cores == 1


def test_nvidia_smi_where_the_driver_has_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("the driver has them here")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 80GB, GPU-ab'\necho 'NVIDIA T4, GPU-cd'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert read_machine().gpus == (Gpu("NVIDIA H100, 80GB", "GPU-ab"), Gpu("NVIDIA T4", "GPU-cd"))
    program.write_text("#!/bin/sh\nexit 9\n")
    assert read_machine().gpus == ()


def test_this_machine() -> None:
    found = read_machine()
    assert set(found.cpus) == (os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(found.cpus))


def test_free_memory_is_what_machine_and_control_groups_leave(tree: Tree) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", "proc/meminfo": "MemTotal: 40 kB\nMemFree: 1 kB\nMemAvailable:   20 kB\n"}
    assert free_memory(tree(files)) == 20 * 1024
    for path, limit, used in (("a", "9000", "5000"), ("a/b", "max", "4000")):
        folder = f"{GROUP}/{path}"
        files |= {f"{folder}/memory.max": limit, f"{folder}/memory.current": used}
        files |= {f"{folder}/memory.stat": "anon 7\ninactive_file 1500\n"}
    assert free_memory(tree(files)) == 9000 - 5000 + 1500
    assert free_memory(tree({f"{GROUP}/a/memory.current": "99999"})) == 0


def test_free_memory_in_control_groups_of_version_1(tree: Tree) -> None:
    folder = f"{GROUP}/memory/x"
    files = {
        "memory.limit_in_bytes": "8000",
        "memory.usage_in_bytes": "3000",
        "memory.stat": "total_inactive_file 200\n",
    }
    root = tree({"proc/self/cgroup": "1:memory:/x\n", **{f"{folder}/{name}": text for name, text in files.items()}})
    assert free_memory(root) == 8000 - 3000 + 200


def test_without_files_free_memory_is_all_there_is(tmp_path: Path) -> None:
    assert 9000 < free_memory(tmp_path / "nothing") == total_memory(tmp_path / "nothing")
    assert 0 < free_memory() <= total_memory()


def test_memory_is_at_most_the_control_groups(tree: Tree, tmp_path: Path) -> None:
    total = total_memory(tmp_path)
    root = tree({f"{GROUP}/memory.max": "1048576\n"})
    assert (free_memory(root), total_memory(root)) == (1048576, 1048576)
    assert total_memory(tree({f"{GROUP}/memory.max": "max\n"})) == total


@pytest.mark.parametrize(("text", "kills"), [(None, 0), ("low 3\noom 9\noom_kill 2\n", 2), ("low 0\n", 0), ("?", 0)])
def test_processes_that_the_kernel_killed(text: str | None, kills: int, tree: Tree) -> None:
    root = tree({} if text is None else {f"{GROUP}/memory.events": text})
    assert oom_kills(root) == kills


def test_all_cpus_are_allowed_where_a_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert allowed_cpus() == {0, 1, 2}


KEEPING = """
import resource
import numpy as np
from penstock.core.machine import keep_freed_memory
print(keep_freed_memory())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [np.ones(7_000_000, np.float32) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc only")
@pytest.mark.parametrize("tuned", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_freed_memory_is_kept_for_the_next_step_unless_a_user_tunes_it(tuned: dict[str, str]) -> None:
    env = {name: x for name, x in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run([sys.executable, "-c", KEEPING], capture_output=True, text=True, timeout=60, env=env | tuned)
    assert not done.returncode, done.stderr
    kept, faults = done.stdout.split()
    assert kept == str(not tuned)
    assert (int(faults) < 1_000) is (not tuned)  # 84 MB are 20,508 pages of 4 kB
