"""CpuSampler: each worker process steps its slots and runs its own copy of the agent.

The learner wakes the workers once for each batch and waits until all are done; in between nobody waits for anybody.
The agent's parameters lie in shared memory: the learner writes them before it wakes the workers, and never while one
acts. A small forward in every worker costs more than one large one, and the observations stay where they are made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import copy_parameters, parameters_of
from penstock.core.batch import SampleBatch
from penstock.core.config import check_fields
from penstock.core.errors import ConfigError
from penstock.core.noise import Noise
from penstock.core.placement import Placement
from penstock.core.spec import BatchSpec
from penstock.core.tree import Tree
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.pools.serial import Reset
from penstock.samplers.actor import DETERMINISTIC
from penstock.samplers.live import LiveSampler
from penstock.workers.faults import FaultPolicy, Faults
from penstock.workers.messages import Acting
from penstock.workers.pool import TRAINING, ProcessPool
from penstock.workers.process import pickled
from penstock.workers.shares import Shared
from penstock.workers.supervisor import Workers


@dataclass(frozen=True)
class CpuSampler:
    """Settings of a sampler whose workers step and act, each for its share of the slots."""

    T: int = 128
    """Time steps of a batch, usually 5 (A2C) to 2048 (PPO on one robot)."""
    B: int = 16
    """Slots: environments stepped side by side, usually 4 or more for each worker."""
    workers: int = 2
    """Processes, usually one for each core; any number gives the same batches."""
    groups: int = 1
    """Always 1: these workers wait for nobody within a batch."""
    reset: Reset = "next_step"
    """When a finished slot resets: in the next row, or (`batch_end`) in row 0 of the next batch, idling until then."""
    max_decorrelation_steps: int = 0
    """Each slot takes 1 to this many random steps before the first batch, so that episodes do not run in step."""
    discount: float = 0.99
    """Of the logged discounted episode return; no target is made with it."""
    journal_steps: int = 100_000
    """Rows of actions kept to replay open episodes on resume; a longer episode is cut there, and the run says so."""
    step_timeout_s: float = 60.0
    """Seconds without progress of a `step` or `reset` after which a worker counts as hung and is killed."""
    start_timeout_s: float = 300.0
    """The same while a worker starts and makes its environments."""
    fault_policy: FaultPolicy = "auto"
    """After a fault: `auto` raises what an environment raised and replaces workers that died or hang; `raise`,
    `restart`, or `drop` (go on without the slots of that worker)."""
    affinity: Placement | None = None
    """CPUs of each worker, as `penstock.run.affinity.plan` returns them; None leaves it to the kernel."""

    def __post_init__(self) -> None:
        if self.groups != 1:
            raise ConfigError(
                f"sampler.groups={self.groups} with CpuSampler, whose workers wait for nobody and have one group; "
                "use AlternatingSampler (--sampler alternating), or leave groups out"
            )
        check_process_settings(self)

    @property
    def spec(self) -> BatchSpec:
        """T and B."""
        return BatchSpec(self.T, self.B)

    def build(
        self,
        env: EnvConfig | str | Callable[..., Any],
        seed: int = 0,
        *,
        first_slot: int = 0,
        total_slots: int | None = None,
        shared: Shared | None = None,
    ) -> LiveSampler:
        """The live sampler, its workers started. `env` is an id, `module:qualname`, a callable or an EnvConfig.

        Args:
            first_slot: number of its first slot among those of several samplers, which addresses noise and seeds.
            total_slots: of all of them, over which ladders of epsilon are spread; None for B.
            shared: memory that another process is to see the batches in.

        Raises:
            ConfigError: the environment cannot be made, or does not fit these settings.
            EnvWorkerError: the environment's own code raised while it was made.
        """
        config = as_env_config(env)
        workers = start_workers(self, config, seed + first_slot, self.workers, shared)
        try:
            pool = ProcessPool(
                workers,
                TRAINING,
                config,
                seed,
                self.B,
                reset=self.reset,
                max_decorrelation_steps=self.max_decorrelation_steps,
                first_slot=first_slot,
            )
            return LiveSampler(
                self.spec,
                pool,
                config,
                seed,
                self.discount,
                self.journal_steps,
                server=WorkerActors(),
                first_slot=first_slot,
                total_slots=total_slots,
            )
        except BaseException:
            workers.close()
            raise


class WorkerActors:
    """Has each worker run the one loop over its own slots, with its own copy of the agent."""

    remote = True
    """Recurrent states are in shared memory and updated there."""
    device = None

    def serve(
        self,
        pool: ProcessPool,
        agents: Sequence[Agent],
        batches: Sequence[SampleBatch],
        views: Any,
        states: list[Tree],
        noise: Noise | None,
    ) -> None:
        """Publishes the parameters, between two batches, and has the batch filled; arguments as of `collect`."""
        there = {name: torch.from_numpy(x) for name, x in pool.parameters.items()}
        copy_parameters(agents[0], there)
        mode = DETERMINISTIC if noise is None else int(noise.purpose)
        pool.collect(batches[0], 0 if noise is None else noise.batch, mode)

    def place(
        self, pool: ProcessPool, batches: list[SampleBatch], states: Tree, agent: Agent
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves buffers, recurrent states and parameters into shared memory, and sends every worker a copy of the agent."""
        arrays = {name: np.ascontiguousarray(x.detach().cpu().numpy()) for name, x in parameters_of(agent).items()}
        return pool.place(batches, states, Acting("penstock.samplers.actor:Actor", copy.deepcopy(agent).cpu(), arrays))

    def metrics(self) -> dict[str, float]:
        """Nothing: workers wait for nobody."""
        return {}

    def close(self) -> None:
        """Nothing: the workers end with their pool."""


def check_process_settings(settings: Any) -> None:
    """Raises ConfigError where settings of a sampler with worker processes contradict each other."""
    check_fields(settings)
    groups = getattr(settings, "groups", 1)
    if min(settings.T, settings.B, settings.workers, groups) < 1:
        raise ConfigError(
            f"sampler.T={settings.T}, B={settings.B}, workers={settings.workers}, groups={groups}; each must be at "
            "least 1"
        )
    if settings.max_decorrelation_steps < 0 or settings.journal_steps < 0:
        raise ConfigError(
            f"sampler.max_decorrelation_steps={settings.max_decorrelation_steps}, "
            f"journal_steps={settings.journal_steps}; neither may be negative"
        )
    if min(settings.step_timeout_s, settings.start_timeout_s) <= 0:
        raise ConfigError(
            f"sampler.step_timeout_s={settings.step_timeout_s}, start_timeout_s={settings.start_timeout_s}; both "
            "must be positive, usually 60 and 300"
        )
    needed = settings.workers * groups
    if needed > settings.B:
        text = f"{settings.workers} workers" + (f" x {groups} groups" if groups > 1 else "")
        most = settings.B // groups
        fix = f"B>={needed}" + (f" or workers<={most}" if most else f" or groups<={settings.B}")
        raise ConfigError(f"sampler.B={settings.B} leaves {needed - settings.B} of {text} without a slot; use {fix}")
    if settings.affinity is not None and len(settings.affinity.workers) != settings.workers:
        raise ConfigError(
            f"sampler.affinity places {len(settings.affinity.workers)} workers and sampler.workers="
            f"{settings.workers}; make them equal"
        )


def start_workers(settings: Any, config: EnvConfig, seed: int, computing: int, shared: Shared | None) -> Workers:
    """Starts the worker processes of a sampler, once the environment's settings are known to be picklable."""
    pickled({f.name: getattr(config, f.name) for f in fields(config)})
    cpus, own = (), ()
    if settings.affinity is not None:
        cpus, own = settings.affinity.workers, settings.affinity.server + settings.affinity.learner
    return Workers(
        settings.workers,
        seed,
        Faults(settings.fault_policy),
        settings.step_timeout_s,
        settings.start_timeout_s,
        cpus,
        computing,
        slab=None if shared is None else shared.slab,
        own=tuple(dict.fromkeys(own)),
    )
