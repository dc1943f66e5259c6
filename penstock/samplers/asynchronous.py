"""AsyncSampler: an inner sampler runs in a process of its own, and collects while the learner trains.

Batch k starts when training on batch k - 1 - depth is finished. With `weights="exact"` it acts with the parameters of
version k - depth (0 at first), so depth 0 is the synchronous sampler and every depth gives the same batches from run to
run; with `weights="newest"` it takes the parameters published last. Parameters are published as copies in a ring of
depth + 2 places: the place that is written is never one that may be read. The batches lie in a ring of as many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from penstock.core.errors import ConfigError
from penstock.core.limits import Positive, Whole, check_settings
from penstock.core.spec import WHOLE, BatchSpec, Share
from penstock.envs.make import EnvConfig, as_env_config
from penstock.samplers.async_live import AsyncLive
from penstock.samplers.cpu import CpuSampler
from penstock.samplers.gpu import AlternatingSampler, GpuSampler
from penstock.samplers.sampler import SamplerSettings
from penstock.samplers.serial import SerialSampler
from penstock.workers.faults import FaultPolicy, Faults
from penstock.workers.process import packed
from penstock.workers.supervisor import Workers

Weights = Literal["exact", "newest"]


@dataclass(frozen=True)
class AsyncSampler(SamplerSettings):
    """Settings of a sampler that collects while the learner trains."""

    kept = ("depth", "weights")

    inner: Any = SerialSampler()
    """Settings of the sampler that collects, in its own process."""
    depth: Whole = 1
    """Batches that the sampler may be ahead of the learner, usually 1; 0: it waits for the learner, as the inner
    one."""
    weights: Weights = "exact"
    """Parameters for batch k: `exact`: version k - depth, reproducible; `newest`: the latest available."""
    step_timeout_s: Positive = 60.0
    """Seconds without progress after which the sampling process counts as hung; its workers have their own limit."""
    start_timeout_s: Positive = 300.0
    """Seconds without progress while it starts and makes its environments, after which it counts as hung."""
    fault_policy: FaultPolicy = "auto"
    """If the sampling process itself dies: `auto` and `restart` start it again, every slot with its next episode;
    `raise` ends the run. Faults of its workers follow the inner sampler's fault policy."""

    def __post_init__(self) -> None:
        check_settings(self, "sampler.")
        if not isinstance(self.inner, SamplerSettings) or self.inner.inner is not None:
            raise ConfigError(
                f"sampler.inner={self.inner!r}; expected a synchronous sampler's settings, e.g. "
                "ps.CpuSampler(T=128, B=16, workers=2)"
            )
        if self.fault_policy == "drop":
            raise ConfigError(
                "sampler.fault_policy='drop' would leave no slot of an AsyncSampler; set it at the inner sampler"
            )

    @property
    def spec(self) -> BatchSpec:
        """T and B of the inner sampler."""
        return self.inner.spec

    @property
    def described(self) -> str:
        return f"{super().described}: {self.inner.described}" + (f", depth {self.depth}" if self.depth else "")

    @property
    def cores(self) -> int:
        """Cores for the inner sampler, and one for the learner that trains meanwhile."""
        return 1 + self.inner.cores

    def content(self) -> dict[str, Any]:
        """One that waits for the learner has checkpoints of its own form."""
        return super().content() | {"asynchronous": not self.depth}

    def build(
        self,
        env: EnvConfig | str | Callable[..., Any],
        seed: int = 0,
        *,
        share: Share = WHOLE,
    ) -> AsyncLive:
        """The live sampler, its process started. `env` is an id, `module:qualname`, a callable or an EnvConfig.

        Args:
            share: its slots among those of several samplers; by default they are all there are.

        Raises:
            ConfigError: the environment cannot be made, or does not fit these settings.
            EnvWorkerError: the environment's own code raised while it was made.
        """
        config = as_env_config(env)
        packed({f.name: getattr(config, f.name) for f in fields(config)})
        workers = Workers(
            1,
            seed,
            Faults(self.fault_policy),
            self.step_timeout_s,
            self.start_timeout_s,
            computing=2,
            module="penstock.samplers.async_process",
        )
        try:
            return AsyncLive(self, config, seed, workers, share)
        except BaseException:
            workers.close()
            raise


@dataclass(frozen=True)
class AsyncSerialSampler(AsyncSampler):
    """`AsyncSampler` around a SerialSampler: one process collects, this one trains."""

    inner: SerialSampler = SerialSampler()
    """Settings of the sampler that collects, in its own process."""


@dataclass(frozen=True)
class AsyncCpuSampler(AsyncSampler):
    """`AsyncSampler` around a CpuSampler: its workers step and act while this process trains."""

    inner: CpuSampler = CpuSampler()
    """Settings of the sampler that collects, in its own process tree."""


@dataclass(frozen=True)
class AsyncGpuSampler(AsyncSampler):
    """`AsyncSampler` around a GpuSampler: the action server has a process of its own."""

    inner: GpuSampler = GpuSampler()
    """Settings of the sampler that collects, in its own process tree."""


@dataclass(frozen=True)
class AsyncAlternatingSampler(AsyncSampler):
    """`AsyncSampler` around an AlternatingSampler."""

    inner: AlternatingSampler = AlternatingSampler()
    """Settings of the sampler that collects, in its own process tree."""
