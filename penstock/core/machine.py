"""The machine as this process may use it: cores, GPUs, and the time and memory that control groups grant.

Read from the kernel's files below `root`, which is another directory than / in tests. A missing or unreadable file
sets no limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage, and the line of `memory.stat` on file pages that nobody reads; control groups of version 2, then 1."""
_TRIM_FROM, _MMAP_FROM = -1, -3
"""Options of glibc's mallopt: bytes from which freed memory is handed back, and from which a piece is mapped alone."""
_NO_LIMIT = 2.0**60
"""Bytes; version 1 of control groups writes a number near 2**63 for no limit."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA device."""

    name: str
    uuid: str
    """The device's name in CUDA_VISIBLE_DEVICES; empty if unknown."""
    node: int | None = None
    """The NUMA node that it is attached to; None if the kernel does not say."""


@dataclass(frozen=True)
class Machine:
    """The part of a machine that a process may use: CPUs, time, memory and GPUs."""

    cores: tuple[tuple[int, ...], ...]
    """CPU numbers of each core, sibling threads together; the cores of a NUMA node stand together."""
    nodes: tuple[int, ...]
    """The NUMA node of each core."""
    quota: float | None = None
    """CPU time that a control group grants, in CPUs; None for no limit."""
    memory: int | None = None
    """Bytes that a control group grants; None for no limit."""
    gpus: tuple[Gpu, ...] = ()

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPU numbers in ascending order."""
        return tuple(sorted(cpu for core in self.cores for cpu in core))

    @property
    def busy_cores(self) -> int:
        """Cores that can be kept busy at once: all, or as many as the quota pays for; at least 1."""
        return max(1, min(len(self.cores), int(len(self.cores) if self.quota is None else self.quota)))

    def __str__(self) -> str:
        threads = max(len(core) for core in self.cores)
        parts = [counted(len(self.cores), "core") + (f" with {threads} threads" if threads > 1 else "")]
        parts += [counted(len(set(self.nodes)), "NUMA node")] if len(set(self.nodes)) > 1 else []
        parts += [f"{self.quota:g} CPUs of time"] if self.quota is not None and self.quota < len(self.cpus) else []
        parts += [counted(len(self.gpus), "GPU")] if self.gpus else []
        return ", ".join(parts)


def cpu_family(root: Path = _ROOT) -> tuple[str, int]:
    """Maker of the processor as it names itself, `GenuineIntel` or `AuthenticAMD`, and its family; else ("", 0)."""
    text = _text(root / "proc/cpuinfo")
    vendor, family = (re.search(rf"^{key}\s*: (\S+)", text, re.MULTILINE) for key in ("vendor_id", "cpu family"))
    return vendor[1] if vendor else "", int(family[1]) if family else 0


@functools.cache
def keep_freed_memory() -> bool:
    """True if the C library keeps up to 256 MB of freed memory for what is allocated next; called before training.

    A gradient step on images frees 60 MB and the next allocates as much. Memory returned to the kernel comes back in
    pages of 4 kB at 2 us each, a tenth of the step. Only glibc is asked, and only if the environment variables by which
    a user tunes it are not set.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    return all(library.mallopt(option, size) == 1 for option, size in ((_MMAP_FROM, 32 << 20), (_TRIM_FROM, 256 << 20)))


def read_machine(root: Path = _ROOT, allowed: Iterable[int] | None = None) -> Machine:
    """The part of this machine that this process may use, or one with the CPU numbers `allowed`."""
    cpus = sorted(allowed_cpus() if allowed is None else set(allowed))
    node_of = _nodes(root)
    folder = root / "sys/devices/system/cpu"
    siblings = {cpu: _cpu_list(folder / f"cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    cores = {tuple(x for x in cpus if x == cpu or x in siblings[cpu]) for cpu in cpus}
    in_order = sorted(cores, key=lambda core: (node_of.get(core[0], 0), core))
    return Machine(
        tuple(in_order),
        tuple(node_of.get(core[0], 0) for core in in_order),
        cpu_quota(root),
        memory_limit(root),
        _gpus(root),
    )


def allowed_cpus() -> set[int]:
    """CPU numbers that this process may run on."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPU time that the control groups (versions 1 and 2) of this process grant, in CPUs; None for no limit."""
    quotas: list[float] = []
    for folder in _control_groups(root, "cpu"):
        limit, period = _numbers(folder / "cpu.cfs_quota_us"), _numbers(folder / "cpu.cfs_period_us")
        for pair in (_numbers(folder / "cpu.max"), [*limit[:1], *period[:1]]):
            quotas += [pair[0] / pair[1]] if len(pair) == 2 and min(pair) > 0 else []
    return min(quotas, default=None)


def memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes that the control groups (versions 1 and 2) of this process grant; None for no limit."""
    return min((granted for granted, _ in _memory_of_groups(root) if granted < _NO_LIMIT), default=None)


def total_memory(root: Path = _ROOT) -> int:
    """Bytes built in, or the control groups' limit if that is lower."""
    built_in = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else sys.maxsize
    return min(built_in, memory_limit(root) or built_in)


def free_memory(root: Path = _ROOT) -> int:
    """Bytes that can be had without swapping, in the machine and each control group; all of them if not on Linux."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    free = int(match[1]) * 1024 if match else total_memory(root)
    return max(min([free, *(left for _, left in _memory_of_groups(root))]), 0)


def oom_kills(root: Path = _ROOT) -> int:
    """Number of processes in this control group that the kernel killed for want of memory; 0 if it does not say."""
    match = re.search(r"^oom_kill (\d+)", _text(root / "sys/fs/cgroup/memory.events"), re.MULTILINE)
    return int(match[1]) if match else 0


def has_display() -> bool:
    """False on a machine without a screen."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(x) for x in ("DISPLAY", "WAYLAND_DISPLAY"))


@contextlib.contextmanager
def drawing_unseen() -> Generator[None]:
    """Keeps SDL, where there is no display, from looking for one and for sound, and from complaining of neither."""
    names = () if has_display() else ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER")
    added = [name for name in names if name not in os.environ]
    os.environ |= dict.fromkeys(added, "dummy")
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def counted(n: int, noun: str) -> str:
    """`1 core`, `3 cores`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _nodes(root: Path) -> dict[int, int]:
    """The NUMA node of each CPU; empty if the kernel does not say."""
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    return {cpu: int(folder.name[4:]) for folder in folders for cpu in _cpu_list(folder / "cpulist")}


def _cpu_list(file: Path) -> set[int]:
    """The numbers in a file such as "0-3,8"; none if it is not there."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", _text(file))
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _memory_of_groups(root: Path) -> list[tuple[int, int]]:
    """Granted and unused bytes of each control group that this process counts in."""
    limits: list[tuple[int, int]] = []
    for folder in _control_groups(root, "memory"):
        for limit, usage, cache in _MEMORY_FILES:
            # Pages of files that nobody reads are given up for others.
            unread = re.search(rf"^{cache} (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
            used = sum(_numbers(folder / usage)) - int(unread[1] if unread else 0)
            limits += [(int(granted), int(granted - used)) for granted in _numbers(folder / limit)]
    return limits


def _control_groups(root: Path, controller: str) -> list[Path]:
    """Folders that may limit this process: its own group and all above, in each hierarchy with the controller.

    Inside a container the path that the kernel names may not be mounted; then the mount itself is the group.
    """
    groups = root / "sys/fs/cgroup"
    folders = [groups, groups / controller]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if names and controller not in names.split(","):
            continue
        for mount in [groups / names, groups / controller] if names else [groups, groups / "unified"]:
            below = mount / path.strip().lstrip("/")
            folders += [mount, below, *(p for p in below.parents if mount in p.parents)]
    return list(dict.fromkeys(folders))


def _gpus(root: Path) -> tuple[Gpu, ...]:
    """NVIDIA devices as the driver lists them, without loading CUDA; nvidia-smi where the driver has no such files."""
    gpus: list[Gpu] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        facts = dict(re.findall(r"^([\w ]+?):\s*(.*?)\s*$", _text(folder / "information"), re.MULTILINE))
        gpus.append(Gpu(facts.get("Model", "GPU"), facts.get("GPU UUID", ""), _gpu_node(root, folder.name)))
    if gpus or root != _ROOT or shutil.which("nvidia-smi") is None:
        return tuple(gpus)
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
