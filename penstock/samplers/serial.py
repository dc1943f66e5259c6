"""SerialSampler: environments and agent in this process, no concurrency at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Positive, Unit, Whole, check_settings
from penstock.core.spec import WHOLE, Share
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.pools.factory import pool_for
from penstock.envs.pools.native import require_next_step
from penstock.envs.pools.pool import EnvPool
from penstock.envs.pools.settings import PoolSettings, Reset
from penstock.samplers import PLAYING
from penstock.samplers.live import LiveSampler
from penstock.samplers.sampler import SamplerSettings
from penstock.samplers.tensors.factory import batched_pool
from penstock.workers.shares import WatchedMemory


@dataclass(frozen=True)
class SerialSampler(SamplerSettings):
    """Settings of a sampler that steps B environments here, one by one, or a batched one, of arrays or of tensors."""

    kept = PLAYING
    hosts_eval_env = True

    T: Count = 128
    """Time steps of a batch, usually 5 (A2C) to 2048 (PPO on one robot)."""
    B: Count = 16
    """Slots: environments stepped side by side, usually 1 to 64; with many agents each has a column for every seat."""
    reset: Reset = "next_step"
    """When a finished slot resets: in the next row, or (`batch_end`) in row 0 of the next batch, idling until then."""
    max_decorrelation_steps: Whole = 0
    """Each slot takes 1 to this many random steps before the first batch, so that episodes are not synchronised. Slots
    of a simulator begin at an age of as many instead, as far as its time limit is concerned."""
    discount: Unit | None = None
    """Discount of the logged discounted episode return, not of targets. None: the algorithm's, or 0.99 without one."""
    journal_steps: Whole = 100_000
    """Rows of actions kept to replay open episodes on resume; a longer episode is cut there, and the run says so."""
    start_timeout_s: Positive = 300.0
    """Seconds without an answer after which the check before a run, which plays the environment in another process,
    counts it as hung. Sampling itself has no limit."""

    def __post_init__(self) -> None:
        check_settings(self, "sampler.")

    def build(
        self,
        env: EnvConfig | str | Callable[..., Any],
        seed: int = 0,
        *,
        share: Share = WHOLE,
        shared: WatchedMemory | None = None,
    ) -> LiveSampler:
        """The live sampler. `env` is an id, `module:qualname`, a callable or an EnvConfig.

        Args:
            share: its slots among those of several samplers; by default they are all there are.
            shared: memory that another process reads activity in, and batches where it has a `memory_fd`.

        Raises:
            ConfigError: the environment cannot be made, or does not fit these settings.
        """
        config = as_env_config(env)
        journal_steps = self.journal_steps
        activity = None if shared is None else shared.activity
        pool: EnvPool | None = batched_pool(
            config, seed, self.B, share.first_slot, activity, self.max_decorrelation_steps
        )
        if pool is not None:
            try:
                self._require_plain(pool, config, shared)
            except ConfigError:
                pool.close()
                raise
            journal_steps = 0  # nothing can be replayed into a batched environment
        else:
            pool = pool_for(
                config,
                seed,
                slice(share.first_slot, share.first_slot + self.B),
                replace(
                    PoolSettings.of(self),
                    activity=activity,
                    episode_table=None if shared is None else shared.episode_table(self.B),
                    evaluation_table=None if shared is None else lambda B: shared.episode_table(B, True),
                ),
            )
        return LiveSampler(
            self.spec,
            pool,
            config,
            seed,
            self.discount,
            journal_steps,
            memory_fd=None if shared is None else shared.memory_fd,
            share=share,
        )

    def _require_plain(self, pool: EnvPool, config: EnvConfig, shared: WatchedMemory | None) -> None:
        """Raises ConfigError for settings that mean nothing to a batched environment."""
        require_next_step(self if pool.device is None else replace(self, max_decorrelation_steps=0))
        if pool.device is not None and shared is not None and shared.memory_fd is not None:
            raise ConfigError(
                f"{config.name} answers with tensors on {pool.device}, which no other process can see; use the "
                "SerialSampler itself, not in an AsyncSampler"
            )
