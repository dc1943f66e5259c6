"""CpuSampler: each worker process steps its slots and runs its own copy of the agent.

The learner wakes the workers once for each batch and waits until all are done; in between nobody waits for anybody.
The agent's parameters lie in shared memory: the learner writes them before it wakes the workers, and never while one
acts. A small forward in every worker costs more than one large one, and the observations stay where they are made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Self

from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Limit, Positive, Unit, Whole, check_settings
from penstock.core.machine import counted
from penstock.core.placement import Placement
from penstock.core.spec import WHOLE, BatchSpec, Share
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.pools.settings import PoolSettings, Reset
from penstock.processes.fork_client import start_ahead
from penstock.processes.python import one_thread_environment
from penstock.samplers import ACTING, PLAYING
from penstock.samplers.actor import WorkerActors
from penstock.samplers.collector import Server
from penstock.samplers.live import LiveSampler
from penstock.samplers.sampler import SamplerSettings
from penstock.workers.control import MAX_GROUPS
from penstock.workers.faults import FaultPolicy, Faults
from penstock.workers.pool import TRAINING, ProcessPool
from penstock.workers.process import packed
from penstock.workers.shares import SharedMemory, even_split
from penstock.workers.supervisor import Workers

Groups = Annotated[int, Limit(1, MAX_GROUPS)]
"""1, 2, ..., as many as a worker can tell apart."""


@dataclass(frozen=True)
class WorkerSampler(SamplerSettings):
    """Settings of every sampler that steps environments in worker processes."""

    kept = PLAYING
    hosts_eval_env = True

    T: Count = 128
    """Time steps of a batch, usually 5 (A2C) to 2048 (PPO on one robot)."""
    B: Count = 16
    """Slots: environments stepped side by side, usually 4 or more for each worker; 16 to 1024 where a device acts. With
    many agents each environment has a column for every seat."""
    workers: Count = 2
    """Worker processes, usually one for each core, less one where an action server acts. Batches do not depend on the
    number, and no worker without a slot is started. Native batched environments step in their own threads: leave the
    default."""
    groups: Groups = 1
    """Groups of slots that alternate, 1 to 8, each worker having some slots of each; always 1 for a CpuSampler."""
    reset: Reset = "next_step"
    """When a finished slot resets: in the next row, or (`batch_end`) in row 0 of the next batch, idling until then."""
    max_decorrelation_steps: Whole = 0
    """Each slot takes 1 to this many random steps before the first batch, so that episodes are not synchronised."""
    discount: Unit | None = None
    """Discount of the logged discounted episode return, not of targets. None: the algorithm's, or 0.99 without one."""
    journal_steps: Whole = 100_000
    """Rows of actions kept to replay open episodes on resume; a longer episode is cut there, and the run says so."""
    step_timeout_s: Positive = 60.0
    """Seconds without progress of a `step` or `reset` after which a worker counts as hung and is killed."""
    start_timeout_s: Positive = 300.0
    """Seconds without progress while a worker starts and makes its environments, after which it is killed."""
    fault_policy: FaultPolicy = "auto"
    """After a fault: `auto` raises an environment's exception and replaces workers that died or hang; `raise` always
    raises, `restart` always replaces the worker, `drop` continues without its slots."""
    affinity: Placement | None = None
    """CPUs of each worker and of an action server, as `penstock.run.affinity.plan` returns them; None for any."""

    def __post_init__(self) -> None:
        check_settings(self, "sampler.")
        if self.groups > self.B:
            raise ConfigError(
                f"sampler.B={self.B} leaves {self.groups - self.B} of {self.groups} groups without a slot; use "
                f"B>={self.groups} or groups<={self.B}"
            )
        if self.affinity is not None and len(self.affinity.workers) != self.workers:
            raise ConfigError(
                f"sampler.affinity places {len(self.affinity.workers)} workers and sampler.workers="
                f"{self.workers}; make them equal"
            )

    @property
    def described(self) -> str:
        return f"{super().described} with {counted(self.workers, 'worker')}"

    @property
    def cores(self) -> int:
        """One for each worker, and one that acts for them."""
        return self.workers + 1

    def sized(self, spec: BatchSpec) -> Self:
        groups = min(self.groups, spec.B)
        return replace(self, **spec._asdict(), groups=groups, workers=max(min(self.workers, spec.B // groups), 1))

    def shares(self, learners: int) -> list[Self]:
        workers, whole = even_split(self.workers, learners), super().shares(learners)
        return [replace(x, workers=max(min(n, x.B // x.groups), 1)) for x, n in zip(whole, workers)]

    @property
    def processes(self) -> int:
        """Worker processes: as many as `workers` says, or as have a slot of every group."""
        return min(self.workers, self.B // self.groups)

    def start_workers(
        self, config: EnvConfig, seed: int, computing: int, shared: SharedMemory | None, acting: bool = False
    ) -> Workers:
        """Starts the worker processes, once the environment's settings are known to be picklable.

        Args:
            seed: of the workers' global generators. computing: processes that compute at a time. acting: the workers
                act, and so need torch.
        """
        packed({f.name: getattr(config, f.name) for f in fields(config)})
        if self.processes < self.workers:
            per = f" in {self.groups} groups" if self.groups > 1 else ""
            warnings.warn(
                f"sampler.workers={self.workers} with sampler.B={self.B}{per}: {self.processes} worker(s) are used, "
                f"since the others would have no slot; use B>={self.workers * self.groups} to keep all busy",
                stacklevel=2,
            )
        cpus, own = (), ()
        if self.affinity is not None:
            cpus, own = self.affinity.workers[: self.processes], self.affinity.server + self.affinity.learner
        return Workers(
            self.processes,
            seed,
            Faults(self.fault_policy),
            self.step_timeout_s,
            self.start_timeout_s,
            cpus,
            computing,
            shared=shared,
            own=tuple(dict.fromkeys(own)),
            forked_with=ACTING if acting and self.processes > 1 else (),
        )

    def over_workers(
        self,
        config: EnvConfig,
        seed: int,
        share: Share,
        shared: SharedMemory | None,
        server: Server,
        exclusive: bool = False,
    ) -> LiveSampler:
        """The live sampler over worker processes of its own.

        Args:
            server: runs the loop, here or in the workers. exclusive: never have two groups stepping at a time.
        """
        workers = self.start_workers(
            config, seed + share.first_slot, self.processes + (not server.remote), shared, acting=server.remote
        )
        try:
            pool = ProcessPool(
                workers, TRAINING, config, seed, self.B, PoolSettings.of(self), self.groups, exclusive, share.first_slot
            )
            return LiveSampler(
                self.spec,
                pool,
                config,
                seed,
                self.discount,
                self.journal_steps,
                server=server,
                share=share,
            )
        except BaseException:
            workers.close()
            raise


@dataclass(frozen=True)
class CpuSampler(WorkerSampler):
    """Settings of a sampler with workers that step and act, each for its share of the slots."""

    def __post_init__(self) -> None:
        if self.groups != 1:
            raise ConfigError(
                f"sampler.groups={self.groups} with CpuSampler, whose workers wait for nobody and have one group; "
                "use AlternatingSampler (--sampler alternating), or leave groups out"
            )
        super().__post_init__()

    @property
    def cores(self) -> int:
        """One for each worker: the learner waits meanwhile."""
        return self.workers

    def start_ahead(self) -> None:
        """Has the process of which the workers are forked import torch already; `build` takes it."""
        if self.processes > 1:
            start_ahead(ACTING, one_thread_environment())

    def build(
        self,
        env: EnvConfig | str | Callable[..., Any],
        seed: int = 0,
        *,
        share: Share = WHOLE,
        shared: SharedMemory | None = None,
    ) -> LiveSampler:
        """The live sampler, its workers started. `env` is an id, `module:qualname`, a callable or an EnvConfig.

        Args:
            share: its slots among those of several samplers; by default they are all there are.
            shared: memory that another process is to see the batches in.

        Raises:
            ConfigError: the environment cannot be made, or does not fit these settings.
            EnvWorkerError: the environment's own code raised while it was made.
        """
        config = as_env_config(env)
        return self.over_workers(config, seed, share, shared, WorkerActors())
