"""GpuSampler and its alternating forms: workers step environments, an ActionServer here acts for all of them.

One group is lockstep: the forward waits for the slowest worker, the workers wait for the forward. With two groups of
slots one is stepped while the other is served. `NoOverlapAlternatingSampler` never has both stepping, for environments
that would fight for the same cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from penstock.agents.parameters import require_device
from penstock.core.errors import ConfigError, NativeEnvError
from penstock.core.spec import WHOLE, Share
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.pools.native import require_next_step, resized
from penstock.envs.pools.native_groups import NativeGroups
from penstock.samplers.action_server import ActionServer
from penstock.samplers.cpu import WorkerSampler
from penstock.samplers.live import LiveSampler
from penstock.workers.shares import SharedMemory


@dataclass(frozen=True)
class GpuSampler(WorkerSampler):
    """Settings of a sampler with workers that step while the agent acts here, on any device, for all slots at once."""

    overlap: bool = True
    """True: groups may step at the same time. False: each group starts when the one before has finished."""
    device: str | None = None
    """Device on which the agent acts: cpu, cuda or cuda:1. None: the learner's device, or the CPU in an AsyncSampler.
    On another device a copy of the agent acts, refreshed for every batch."""
    cuda_graph: bool = True
    """On a CUDA device: launch each group's forward as one graph, which needs an agent without data-dependent steps."""

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
        if self.device is not None:
            require_device(self.device, "sampler.device")
        if resized(config, self.B) is not config:  # it takes `num_envs`
            return self._native_groups(config, seed, share, shared)
        try:
            server = ActionServer(self.device, self.cuda_graph)
            return self.over_workers(config, seed, share, shared, server, not self.overlap)
        except NativeEnvError:
            return self._native_groups(config, seed, share, shared)

    def _native_groups(self, config: EnvConfig, seed: int, share: Share, shared: SharedMemory | None) -> LiveSampler:
        """The live sampler over a native batched environment for each group, and no worker processes."""
        require_next_step(self)
        default = next(f.default for f in fields(self) if f.name == "workers")
        if self.workers != default or self.affinity is not None:
            raise ConfigError(
                f"sampler.workers={self.workers} with {config.name}, a native batched environment, which steps in "
                "threads of its own and needs no worker processes; leave workers and affinity out"
            )
        pool = NativeGroups(
            config,
            seed,
            self.B,
            self.groups,
            exclusive=not self.overlap,
            step_timeout_s=self.step_timeout_s,
            first_slot=share.first_slot,
            activity=None if shared is None else shared.activity,
        )
        return LiveSampler(
            self.spec,
            pool,
            config,
            seed,
            self.discount,
            0,
            server=ActionServer(self.device, self.cuda_graph),
            memory_fd=None if shared is None else shared.memory_fd,
            share=share,
        )


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
    """True: groups may step at the same time. False: each group starts when the one before has finished."""
