"""Messages to a worker process: descriptors on its command line, and what its parent pickles for it alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from penstock.core.batch import SampleBatch
from penstock.core.tree import Tree
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import CallRecord
from penstock.envs.pools.settings import PoolSettings


@dataclass(frozen=True)
class SpawnArgs:
    """Descriptors and numbers on the command line of a worker."""

    index: int
    workers: int
    parent: int
    control: int
    event: int
    learner_event: int
    mailbox: int
    report: int
    memory_fds: list[int]

    @classmethod
    def read(cls, text: str) -> SpawnArgs:
        """The spawn arguments of this process from its command line; see `penstock.processes.child.Child`."""
        words = json.loads(text)
        return cls(**{f.name: words[f.name] for f in fields(cls)})


@dataclass(frozen=True)
class WorkerSettings:
    """The first message: settings that hold for the whole life of the worker."""

    cpus: tuple[int, ...]
    seed: int
    messages: list[Any]
    """Executed at once; their answers are the worker's first."""
    yields: bool = False
    """The core is given to others between looks at a counter."""


@dataclass(frozen=True)
class MakePool:
    """Message: make the environments of a pool (0 training, 1 evaluation) for `shares[part]`, slices of its slots."""

    pool: int
    config: EnvConfig
    seed: int
    shares: tuple[slice | None, ...]
    settings: PoolSettings
    """Without `activity` and `episode_table`, which are of the worker."""
    episode_table: Tree
    memory: int
    first_slot: int = 0
    """Number of the batch's first slot among those of all samplers of the run."""
    keep: bool = False
    """True for a replacement: it goes on from the episode table instead of clearing it."""
    entries: tuple[Any, ...] = ()
    """The environment's entry in Gymnasium's registry, for an id that only the learner's script registers."""
    calls: tuple[Sequence[list[CallRecord]], ...] = ()
    """By part and slot the calls that a new environment repeats; empty for none."""


class WorkerAgents(NamedTuple):
    """The agents that a worker acts with, one for each policy, their parameters, and the class that runs the loop."""

    actor: str
    """`module:class` that runs the loop in a worker, made from (pool, agents, parameters, batches, states): its
    `collect(block, itr, mode)` fills the buffer that the command names."""
    agents: list[Any]
    """As they can be pickled, with parameters on the CPU."""
    parameters: Tree
    """For each agent arrays by name, which the actor makes its own."""


@dataclass(frozen=True)
class Attach:
    """Message: the batches to write; with agents also places of their recurrent states [B, ...]."""

    pool: int
    memory: int
    batches: list[SampleBatch]
    """One policy after the other in each buffer."""
    states: Tree = None
    acting: WorkerAgents | None = None
    """The agents to act with, their `parameters` places in `parameter_memory`; None: the worker only steps."""
    log_and_turns: Tree = None
    """WorkerSettingsArgumentss of the `shares.LogAndTurns` of environments of many agents."""
    parameter_memory: int = 0


@dataclass(frozen=True)
class Resume:
    """Message: take the place of a dead worker, from the last buffer that it wrote (-1: none)."""

    pool: int
    buffer: int


@dataclass(frozen=True)
class Call:
    """Message: call a method of every local pool of a pool with the arguments of its part."""

    pool: int
    method: str
    args: tuple[tuple[Any, ...] | None, ...]


@dataclass(frozen=True)
class SetState:
    """Message: bring the slots of each part back; see `EnvPool.set_state`."""

    pool: int
    buffer: int
    states: tuple[Any, ...]
    journals: tuple[Any, ...]
