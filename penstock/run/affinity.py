"""What CPUs does this machine give us, and which processes go where? Read from the kernel's files, planned as data."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.placement import Placement

_ROOT = Path("/")
_Unit = tuple[tuple[int, ...], int]
"""CPUs that are given out together, and their NUMA node."""
_NO_LIMIT = 2.0**60
"""Bytes; version 1 of control groups writes a number near 2**63 for no limit."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device."""

    name: str
    uuid: str
    """As CUDA_VISIBLE_DEVICES takes it; empty if unknown."""
    node: int | None = None
    """The NUMA node that it hangs on, if the kernel says."""


@dataclass(frozen=True)
class Machine:
    """What a process may use of a machine."""

    cores: tuple[tuple[int, ...], ...]
    """CPU numbers of each core, sibling threads together; the cores of a NUMA node stand together."""
    nodes: tuple[int, ...]
    """The NUMA node of each core."""
    quota: float | None = None
    """CPUs' worth of time that a control group grants; None for no limit."""
    memory: int | None = None
    """Bytes that a control group grants; None for no limit."""
    gpus: tuple[Gpu, ...] = ()

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPU numbers, rising."""
        return tuple(sorted(cpu for core in self.cores for cpu in core))

    @property
    def busy_cores(self) -> int:
        """Cores that can be kept busy at once: all, or what the quota is enough for; at least 1."""
        return max(1, min(len(self.cores), int(len(self.cores) if self.quota is None else self.quota)))

    def __str__(self) -> str:
        threads = max(len(core) for core in self.cores)
        parts = [_count(len(self.cores), "core") + (f" with {threads} threads" if threads > 1 else "")]
        parts += [_count(len(set(self.nodes)), "NUMA node")] if len(set(self.nodes)) > 1 else []
        parts += [f"{self.quota:g} CPUs of time"] if self.quota is not None and self.quota < len(self.cpus) else []
        parts += [_count(len(self.gpus), "GPU")] if self.gpus else []
        return ", ".join(parts)


def read_machine(root: Path = _ROOT, allowed: Iterable[int] | None = None) -> Machine:
    """The machine as this process may use it.

    Args:
        root: where `sys` and `proc` lie; another than / in tests.
        allowed: CPU numbers; None for those of this process.
    """
    cpus = sorted(allowed_cpus() if allowed is None else set(allowed))
    node_of = _nodes(root)
    folder = root / "sys/devices/system/cpu"
    siblings = {cpu: _cpu_list(folder / f"cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    cores = {tuple(x for x in cpus if x == cpu or x in siblings[cpu]) for cpu in cpus}
    in_order = sorted(cores, key=lambda core: (node_of.get(core[0], 0), core))
    groups, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    return Machine(
        tuple(in_order),
        tuple(node_of.get(core[0], 0) for core in in_order),
        cpu_quota(groups, own),
        memory_limit(groups, own),
        _gpus(root),
    )


def allowed_cpus() -> set[int]:
    """CPU numbers that this process may run on."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(groups: Path = _ROOT / "sys/fs/cgroup", own: Path = _ROOT / "proc/self/cgroup") -> float | None:
    """CPUs' worth of time that the control groups of this process grant, versions 1 and 2; None for no limit."""
    found: list[float] = []
    for folder in _control_groups(groups, own, "cpu"):
        limit, period = _numbers(folder / "cpu.cfs_quota_us"), _numbers(folder / "cpu.cfs_period_us")
        for pair in (_numbers(folder / "cpu.max"), [*limit[:1], *period[:1]]):
            found += [pair[0] / pair[1]] if len(pair) == 2 and min(pair) > 0 else []
    return min(found, default=None)


def memory_limit(groups: Path = _ROOT / "sys/fs/cgroup", own: Path = _ROOT / "proc/self/cgroup") -> int | None:
    """Bytes that the control groups of this process grant, versions 1 and 2; None for no limit."""
    files = ("memory.max", "memory.limit_in_bytes")
    folders = _control_groups(groups, own, "memory")
    found = [x for folder in folders for name in files for x in _numbers(folder / name) if x < _NO_LIMIT]
    return int(min(found)) if found else None


def plan(machine: Machine, workers: int, groups: int = 1, server: bool = False, learner_cores: int = 1) -> Placement:
    """Which CPUs the processes of one run get; for the setting `affinity` of a sampler with worker processes.

    The server's core is reserved first, then the learner's if cores are left over, since it mostly works while the
    workers wait. Workers get a core each, then sibling threads, then share; neighbours stay on one NUMA node. With
    several groups a worker gets both threads of its core: its slots of one group may step beside those of another.

    Args:
        groups: of the sampler; the slots of each take turns. server: the model runs in an action server.
        learner_cores: as many as `run.learner_threads`.
    """
    if workers < 1 or groups < 1 or learner_cores < 1 or not machine.cores:
        raise ConfigError(
            f"workers={workers}, groups={groups}, learner_cores={learner_cores} on {len(machine.cores)} cores; each "
            "must be at least 1"
        )
    units = list(zip(machine.cores, machine.nodes))
    if len(units) == 1:  # then its threads are all there is to share out
        units = [((cpu,), machine.nodes[0]) for cpu in machine.cores[0]]
    first = next((gpu.node for gpu in machine.gpus if gpu.node in machine.nodes), machine.nodes[0])
    units.sort(key=lambda unit: unit[1] != first)  # stable; server and learner stand beside the GPU
    spare = max(len(units) - workers, 0)
    served = (max(1, min(spare, 1)) if len(units) > 1 else 0) if server else 0
    learning = min(learner_cores, spare - served) if spare > served else 0
    taken, rest = units[: served + learning], sorted(units[served + learning :], key=lambda unit: (unit[1], unit[0]))
    server_cpus = _cpus_of(taken[:served])
    learner_cpus = _cpus_of(taken[served:]) or server_cpus
    places, how = _place(rest, workers, groups)
    words = [how]
    if server:
        words.append(f"server on {ranges(server_cpus)}" if server_cpus else "server anywhere")
    shared = " with the server" if learner_cpus and learner_cpus == server_cpus else ""
    words.append(
        f"learner on {ranges(learner_cpus)}{shared}" if learner_cpus else "learner anywhere, since no core is left over"
    )
    if machine.quota is not None and machine.quota < workers:
        words.append(f"a control group grants {machine.quota:g} CPUs of time, fewer than there are workers")
    return Placement(places, server_cpus, learner_cpus, "; ".join(words))


def default_workers(machine: Machine, B: int, groups: int = 1, server: bool = False) -> int:
    """A good number of workers for B slots: one for each core, and no more than make a batch quicker.

    16 slots on 14 cores take as long as on 8: two steps after each other. So it is 8. A server takes a core.
    """
    slots = max(B // groups, 1)
    most = max(min(machine.busy_cores - server, slots), 1)
    return math.ceil(slots / math.ceil(slots / most))


def slices(machine: Machine, n: int) -> list[Machine]:
    """The machine cut into n parts of disjoint CPUs for n runs side by side: whole cores if they are enough, else threads.

    Quota and memory are shared out equally; a GPU goes to one part, or in turn to several if there are too few.
    """
    cpus = [((cpu,), node) for core, node in zip(machine.cores, machine.nodes) for cpu in core]
    if not 1 <= n <= len(cpus):
        raise ConfigError(
            f"{n} slots on {_count(len(cpus), 'CPU')}; expected 1 to {len(cpus)}, since each has CPUs of its own"
        )
    units = list(zip(machine.cores, machine.nodes)) if n <= len(machine.cores) else cpus
    parts: list[Machine] = []
    for k in range(n):
        mine = units[k * len(units) // n : (k + 1) * len(units) // n]
        whole: dict[int, tuple[int, ...]] = {}
        for i, (core, node) in enumerate(zip(machine.cores, machine.nodes)):
            kept = tuple(cpu for cpu in core if (core, node) in mine or ((cpu,), node) in mine)
            whole |= {i: kept} if kept else {}
        gpus = machine.gpus[k::n] or ((machine.gpus[k % len(machine.gpus)],) if machine.gpus else ())
        parts.append(
            replace(
                machine,
                cores=tuple(whole.values()),
                nodes=tuple(machine.nodes[i] for i in whole),
                gpus=gpus,
                quota=None if machine.quota is None else machine.quota / n,
                memory=None if machine.memory is None else machine.memory // n,
            )
        )
    return parts


def ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _place(units: Sequence[_Unit], workers: int, groups: int) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The CPUs of each worker, and a word on how."""
    threads = max(len(core) for core, _ in units)
    if workers <= len(units):
        mine = _spread(units, workers)
        if groups > 1 and threads > 1:
            return tuple(
                core for core, _ in mine
            ), f"a core with both its threads for each of {_count(workers, 'worker')}"
        return tuple(core[:1] for core, _ in mine), f"a core for each of {_count(workers, 'worker')}"
    # Core by core within a round of threads, so that no thread is shared before every one is in use.
    cpus = [((core[t],), node) for t in range(threads) for core, node in units if t < len(core)]
    rounds, over = divmod(workers, len(cpus))
    chosen = [*cpus * rounds, *cpus[:over]]
    if workers > len(cpus):
        how = (
            f"{workers} workers share {_count(len(cpus), 'CPU')}: more than there are left, which is slower than fewer"
        )
    else:
        how = f"{workers} workers on {len(units)} cores: {workers - len(units)} of them on sibling threads"
    return tuple(cpu for cpu, _ in sorted(chosen, key=lambda unit: unit[1])), how


def _spread(units: Sequence[_Unit], count: int) -> list[_Unit]:
    """`count` of the units, from each NUMA node in proportion to what it has; those of a node stand together."""
    out: list[_Unit] = []
    seen = 0
    for node in sorted({node for _, node in units}):
        here = [unit for unit in units if unit[1] == node]
        share = round((seen + len(here)) * count / len(units)) - len(out)
        out += here[:share]
        seen += len(here)
    return out


def _cpus_of(units: Iterable[_Unit]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core, _ in units for cpu in core))


def _nodes(root: Path) -> dict[int, int]:
    """The NUMA node of each CPU; empty if the kernel does not say."""
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    return {cpu: int(folder.name[4:]) for folder in folders for cpu in _cpu_list(folder / "cpulist")}


def _cpu_list(file: Path) -> set[int]:
    """The numbers in a file such as "0-3,8"; none if it is not there."""
    found = re.findall(r"(\d+)(?:-(\d+))?", _text(file))
    return {cpu for first, last in found for cpu in range(int(first), int(last or first) + 1)}


def _control_groups(groups: Path, own: Path, controller: str) -> list[Path]:
    """Folders that may hold a limit on this process: its own group and all above, of every hierarchy with the controller.

    Inside a container the path that the kernel names may not be mounted; then the mount itself is the group.
    """
    found = [groups, groups / controller]
    for line in _text(own).splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if names and controller not in names.split(","):
            continue
        for mount in [groups / names, groups / controller] if names else [groups, groups / "unified"]:
            below = mount / path.strip().lstrip("/")
            found += [mount, below, *(p for p in below.parents if mount in p.parents)]
    return list(dict.fromkeys(found))


def _gpus(root: Path) -> tuple[Gpu, ...]:
    """NVIDIA devices as the driver lists them, without loading CUDA; nvidia-smi where the driver has no such files."""
    found: list[Gpu] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        facts = dict(re.findall(r"^([\w ]+?):\s*(.*?)\s*$", _text(folder / "information"), re.MULTILINE))
        found.append(Gpu(facts.get("Model", "GPU"), facts.get("GPU UUID", ""), _gpu_node(root, folder.name)))
    if found or root != _ROOT or shutil.which("nvidia-smi") is None:
        return tuple(found)
    try:
        asked = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    return tuple(Gpu(name.strip(), uuid.strip()) for name, _, uuid in rows)


def _gpu_node(root: Path, address: str) -> int | None:
    node = _numbers(root / f"sys/bus/pci/devices/{address.lower()}/numa_node")
    return int(node[0]) if node and node[0] >= 0 else None


def _numbers(file: Path) -> list[float]:
    """The numbers in a file of the kernel's; none if it is not there or says "max"."""
    try:
        return [float(word) for word in _text(file).split()]
    except ValueError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
