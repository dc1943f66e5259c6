"""Messages to a worker process: descriptors on its command line, and what its parent pickles for it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree
from penstock.envs.make import EnvConfig
from penstock.envs.pools.serial import Reset


@dataclass(frozen=True)
class Boot:
    """Descriptors and numbers on the command line of a worker."""

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
        """Descriptors that the process inherits."""
        return [self.control, self.bell, self.learner_bell, self.mail, self.report, self.crash, self.alive, *self.slabs]


@dataclass(frozen=True)
class Start:
    """The first message: settings that hold for the whole life of the worker."""

    cpus: tuple[int, ...]
    seed: int
    spin_s: float
    messages: list[Any]
    """Executed at once; their answers are the worker's first."""


@dataclass(frozen=True)
class MakePool:
    """Message: make the environments of a pool (0 training, 1 evaluation) for `shares[group]`, slices of its slots."""

    pool: int
    config: EnvConfig
    seed: int
    shares: tuple[slice | None, ...]
    reset: Reset
    decorrelate: int
    evaluation: bool
    ledger: Tree
    slab: int
    first_slot: int = 0
    """Number of the batch's first slot among those of all samplers of the run."""
    keep: bool = False
    """True for a replacement: it goes on from the ledger instead of clearing it."""
    entry: Any = None
    """The environment's entry in Gymnasium's registry, for an id that only the learner's script registers."""


class Acting(NamedTuple):
    """The agent that a worker acts with, its parameters, and the class that runs the loop."""

    actor: str
    """`module:class` that runs the loop in a worker, made from (pool, agent, parameters, batches, states): its
    `collect(block, itr, mode)` fills the buffer that the command names."""
    agent: Any
    """As it can be pickled, with parameters on the CPU."""
    parameters: Tree
    """Arrays by name, which the actor makes the agent's own."""


@dataclass(frozen=True)
class Attach:
    """Message: the batches to write; with an agent also places of its recurrent states [B, ...]."""

    pool: int
    slab: int
    batches: list[SampleBatch]
    states: Tree = None
    acting: Acting | None = None
    """The agent to act with, its `parameters` places in `parameter_slab`; None: the worker only steps."""
    parameter_slab: int = 0


@dataclass(frozen=True)
class TakeOver:
    """Message: take the place of a dead worker, from the last buffer that it wrote (-1: none)."""

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
