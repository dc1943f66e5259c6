"""What a child process is told: descriptors on its command line, and messages that its parent pickles for it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree
from penstock.envs.make import EnvConfig
from penstock.envs.pools.serial import Reset


@dataclass(frozen=True)
class Boot:
    """Descriptors and numbers that a worker gets on its command line."""

    index: int
    workers: int
    learner_pid: int
    control: int
    bell: int
    learner_bell: int
    mail: int
    report: int
    crash: int
    alive: int
    slabs: tuple[int, ...]

    def fds(self) -> list[int]:
        """What the process inherits."""
        return [self.control, self.bell, self.learner_bell, self.mail, self.report, self.crash, self.alive, *self.slabs]


@dataclass(frozen=True)
class Start:
    """The first message: what holds for the whole life of the worker."""

    cpus: tuple[int, ...]
    seed: int
    spin_s: float
    messages: list[Any]
    """Obeyed at once; their answers are the first that the worker gives."""


@dataclass(frozen=True)
class MakePool:
    """Message: make the environments of a pool (0 training, 1 evaluation) for `shares[group]`, slices of its B slots."""

    pool: int
    config: EnvConfig
    seed: int
    shares: tuple[slice | None, ...]
    reset: Reset
    decorrelate: int
    evaluation: bool
    ledger: Tree
    slab: int
    keep: bool = False
    """The ledger tells of a worker that died, and stays as it is."""


@dataclass(frozen=True)
class Attach:
    """Message: the batches to write; with an agent also its recurrent states and where its parameters are."""

    pool: int
    slab: int
    batches: list[SampleBatch]
    states: Tree = None
    agent: Any = None
    parameters: Tree = None
    parameter_slab: int = 0


@dataclass(frozen=True)
class TakeOver:
    """Message: go on for a worker that died after it wrote this buffer; -1: it wrote none."""

    pool: int
    buffer: int


@dataclass(frozen=True)
class Call:
    """Message: call a method of every SerialPool of a pool with the arguments of its group."""

    pool: int
    method: str
    args: tuple[tuple[Any, ...] | None, ...]


@dataclass(frozen=True)
class SetState:
    """Message: bring the slots of each group back; see `EnvPool.set_state`."""

    pool: int
    buffer: int
    states: tuple[Any, ...]
    journals: tuple[Any, ...]
