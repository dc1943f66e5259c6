"""GpuSampler and its alternating forms: workers step environments, an ActionServer here acts for all of them.

One group is lockstep: the forward waits for the slowest worker, the workers wait for the forward. With two groups of
slots one is stepped while the other is served. `NoOverlapAlternatingSampler` never has both stepping, for environments
that would fight for the same cores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from penstock.agents.parameters import require_device
from penstock.core.errors import ConfigError, NativeEnvError
from penstock.core.placement import Placement
from penstock.core.spec import BatchSpec
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.pools.native import resized
from penstock.envs.pools.native_groups import NativeGroups
from penstock.envs.pools.serial import Reset
from penstock.samplers.action_server import ActionServer
from penstock.samplers.cpu import check_process_settings, start_workers
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import place_in
from penstock.samplers.stage import Crew
from penstock.workers.faults import FaultPolicy
from penstock.workers.pool import EVALUATION, TRAINING, ProcessPool


@dataclass(frozen=True)
class GpuSampler:
    """Settings of a sampler whose workers step and whose agent acts here, on any device, for all slots at once."""

    T: int = 128
    """Time steps of a batch, usually 5 (A2C) to 2048 (PPO on one robot)."""
    B: int = 16
    """Slots: environments stepped side by side, usually 16 to 1024."""
    workers: int = 2
    """Processes, usually one for each core but one; any number gives the same batches. Native batched environments step
    in threads of their own and have none: leave it as it is."""
    groups: int = 1
    """Groups of slots that take turns, 1 to 8; each worker has some slots of each."""
    overlap: bool = True
    """Groups may step at the same time; without it the next one starts when the one before has finished."""
    device: str | None = None
    """Where the agent acts: cpu, cuda or cuda:1. None for where it learns; elsewhere it gets a copy, refreshed for every
    batch."""
    cuda_graph: bool = True
    """On a CUDA device: launch each group's forward as one graph, which needs an agent without data-dependent steps."""
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
    """CPUs of each worker and of this process, as `penstock.run.affinity.plan` gives them; None leaves it to the kernel."""

    def __post_init__(self) -> None:
        check_process_settings(self)

    @property
    def spec(self) -> BatchSpec:
        """T and B."""
        return BatchSpec(self.T, self.B)

    def build(self, env: EnvConfig | str | Callable[..., Any], seed: int = 0, slab: int | None = None) -> LiveSampler:
        """The live sampler, its workers started. `env` is an id, `module:qualname`, a callable or an EnvConfig.

        Args:
            slab: descriptor of the shared memory to hold the batches, if another process is to see them.

        Raises:
            ConfigError: the environment cannot be made, or does not fit these settings.
            EnvWorkerError: the environment's own code raised while it was made.
        """
        config = as_env_config(env)
        if self.device is not None:
            require_device(self.device, "sampler.device")
        if resized(config, self.B) is not config:  # it takes `num_envs`
            return _over_native_groups(self, config, seed, slab)
        workers = start_workers(self, config, seed, self.workers + 1, slab)
        try:
            pool = ProcessPool(
                workers,
                TRAINING,
                config,
                seed,
                self.B,
                groups=self.groups,
                reset=self.reset,
                exclusive=not self.overlap,
                max_decorrelation_steps=self.max_decorrelation_steps,
            )
        except NativeEnvError:
            workers.close()
            return _over_native_groups(self, config, seed, slab)
        except BaseException:
            workers.close()
            raise

        def evaluation(B: int) -> ProcessPool:
            groups = min(self.groups, B)
            return ProcessPool(workers, EVALUATION, config, seed, B, groups=groups, exclusive=not self.overlap)

        server = ActionServer(self.device, self.cuda_graph)
        crew = Crew(
            evaluation,
            fill=server.serve,
            place=server.place,
            close=server.close,
            metrics=lambda: {**workers.faults.metrics(), **server.metrics()},
            faults=workers.faults.counts,
            refuse=lambda pool, slot, row, message: pool.disown(slot, row, message),
        )
        return LiveSampler(self.spec, pool, config, seed, self.discount, self.journal_steps, crew, self.device)


@dataclass(frozen=True)
class AlternatingSampler(GpuSampler):
    """`GpuSampler` with two groups of slots: one is stepped while the other is served."""

    groups: int = 2
    """Groups of slots that take turns, 2 to 8; each worker has some slots of each."""


@dataclass(frozen=True)
class NoOverlapAlternatingSampler(GpuSampler):
    """`AlternatingSampler` in which never two groups step at the same time."""

    groups: int = 2
    """Groups of slots that take turns, 2 to 8; each worker has some slots of each."""
    overlap: bool = False
    """Groups may step at the same time; without it the next one starts when the one before has finished."""


def _over_native_groups(settings: GpuSampler, config: EnvConfig, seed: int, slab: int | None) -> LiveSampler:
    """The live sampler over a native batched environment for each group, and no worker processes."""
    if settings.reset != "next_step" or settings.max_decorrelation_steps:
        raise ConfigError(
            "a native batched environment resets in the next step by itself; use reset='next_step' and "
            "max_decorrelation_steps=0"
        )
    default = next(f.default for f in fields(settings) if f.name == "workers")
    if settings.workers != default or settings.affinity is not None:
        raise ConfigError(
            f"sampler.workers={settings.workers} with {config.name}, a native batched environment, which steps in "
            "threads of its own and needs no worker processes; leave workers and affinity out"
        )
    pool = functools.partial(
        NativeGroups,
        config,
        seed,
        groups=settings.groups,
        exclusive=not settings.overlap,
        step_timeout_s=settings.step_timeout_s,
    )
    server = ActionServer(settings.device)
    place = None if slab is None else functools.partial(place_in, slab)
    crew = Crew(lambda B: pool(B, evaluation=True), settings.B, fill=server.serve, place=place, metrics=server.metrics)
    # No journal: nothing can be replayed into a native pool.
    return LiveSampler(settings.spec, pool(settings.B), config, seed, settings.discount, 0, crew, settings.device)
