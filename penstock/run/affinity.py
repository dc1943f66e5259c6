"""The CPUs of each process of a run: planned from the machine, and shared out among several runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.core.errors import ConfigError
from penstock.core.machine import Machine, counted
from penstock.core.placement import Placement

_Unit = tuple[tuple[int, ...], int]
"""CPUs that are given out together, and their NUMA node."""


def plan(machine: Machine, workers: int, groups: int = 1, server: bool = False, learner_cores: int = 1) -> Placement:
    """The CPUs of each process of a run, for the setting `affinity` of a sampler with worker processes.

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
    """The number of workers for B slots: at most one for each core, and none that would not make a batch faster.

    16 slots on 14 cores take as long as on 8, two steps after each other, so it is 8. A server takes a core.
    """
    slots = max(B // groups, 1)
    most = max(min(machine.busy_cores - server, slots), 1)
    return math.ceil(slots / math.ceil(slots / most))


def slices(machine: Machine, n: int) -> list[Machine]:
    """The machine in n parts of disjoint CPUs, for n runs at a time: whole cores if there are enough, else threads.

    Quota and memory are shared out equally; a GPU goes to one part, or in turn to several if there are too few.
    """
    cpus = [((cpu,), node) for core, node in zip(machine.cores, machine.nodes) for cpu in core]
    if not 1 <= n <= len(cpus):
        raise ConfigError(
            f"{n} slots on {counted(len(cpus), 'CPU')}; expected 1 to {len(cpus)}, since each has CPUs of its own"
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
    """Numbers as text, runs of them shortened: 1, 2, 3, 7 is "1-3, 7"."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _place(units: Sequence[_Unit], workers: int, groups: int) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The CPUs of each worker, and a phrase that describes them."""
    threads = max(len(core) for core, _ in units)
    if workers <= len(units):
        mine = _spread(units, workers)
        if groups > 1 and threads > 1:
            return tuple(
                core for core, _ in mine
            ), f"a core with both its threads for each of {counted(workers, 'worker')}"
        return tuple(core[:1] for core, _ in mine), f"a core for each of {counted(workers, 'worker')}"
    # Core by core within a round of threads, so that no thread is shared before every one is in use.
    cpus = [((core[t],), node) for t in range(threads) for core, node in units if t < len(core)]
    rounds, over = divmod(workers, len(cpus))
    chosen = [*cpus * rounds, *cpus[:over]]
    if workers > len(cpus):
        how = (
            f"{workers} workers share {counted(len(cpus), 'CPU')}: more than there are left, which is slower than fewer"
        )
    else:
        how = f"{workers} workers on {len(units)} cores: {workers - len(units)} of them on sibling threads"
    return tuple(cpu for cpu, _ in sorted(chosen, key=lambda unit: unit[1])), how


def _spread(units: Sequence[_Unit], count: int) -> list[_Unit]:
    """`count` of the units, from each NUMA node in proportion to its units; those of a node stand together."""
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
