"""OfflineSampler: plays the episodes of a dataset back into the record, so that any algorithm can learn from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Unit, check_settings
from penstock.core.machine import free_memory
from penstock.core.spec import WHOLE, EnvSpec, Share
from penstock.datasets.episode import EpisodeSource, check_spec
from penstock.datasets.reader import open_dataset
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.pools.native import makes_vector_env
from penstock.samplers.live import LiveSampler
from penstock.samplers.offline_live import OfflineLive
from penstock.samplers.sampler import SamplerSettings
from penstock.samplers.serial import SerialSampler
from penstock.workers.shares import SharedMemory


def check_teacher(algo: object, sampler: SamplerSettings, kept: str | None) -> None:
    """Raises ConfigError if an algorithm cannot learn from this source of steps: a dataset, or its own policy.

    Args:
        kept: dataset in the replay that it learns from, by whichever policy the steps were chosen; None without replay.
    """
    name, offline = type(algo).__name__, getattr(algo, "offline", False)
    if offline and not (isinstance(sampler, OfflineSampler) or kept):
        beside = "" if kept is None else "; or keep one beside its own steps: --algo.replay.dataset DIR"
        raise ConfigError(
            f"{name} learns from the actions of others, and {type(sampler).__name__} would show it its own; use "
            f"ps.OfflineSampler(DIR), --sampler offline --sampler.dataset DIR{beside}"
        )
    if isinstance(sampler, OfflineSampler) and not offline and kept is None:
        raise ConfigError(
            f"{name} learns from the actions of its present policy, and a dataset has those of others; use BC, MARWIL, "
            "IQL, ReBRAC or CQL, or an algorithm with replay. One of your own says so by `offline = True`"
        )


@dataclass(frozen=True)
class OfflineSampler(SamplerSettings):
    """Settings of a sampler that plays back a dataset; it steps the environment for evaluations only."""

    kept = ("discount",)
    hosts_eval_env = True

    dataset: str = ""
    """Folder of a dataset, as `penstock record RUN --dataset DIR` or Minari (HDF5) writes it."""
    T: Count = 128
    """Time steps of a batch, usually 1 to 1000; returns are bootstrapped where a batch cuts an episode."""
    B: Count = 16
    """Slots: episodes played side by side, usually 1 to 64."""
    shuffle: bool = True
    """Shuffle the episodes anew in each pass over the data, by the run's seed; else play them as recorded."""
    verify: bool = True
    """Read the full dataset once before training, so that a damaged file is found before and not hours later."""
    discount: Unit | None = None
    """Discount of the logged discounted episode return, not of targets. None: the algorithm's, or 0.99 without one."""

    def __post_init__(self) -> None:
        check_settings(self, "sampler.")

    def build(
        self,
        env: EnvConfig | str | Callable[..., Any],
        seed: int = 0,
        *,
        share: Share = WHOLE,
        shared: SharedMemory | None = None,
    ) -> OfflineLive:
        """The live sampler. `env` is an id, `module:qualname`, a callable or an EnvConfig.

        Args:
            share: its slots among those of several samplers, to which episodes are dealt in turn.

        Raises:
            ConfigError: no dataset, a damaged or half-written one, or one of other spaces than the environment's.
        """
        if shared is not None:
            raise ConfigError(
                "an OfflineSampler inside an AsyncSampler: reading a dataset leaves nothing to overlap; use "
                "the OfflineSampler itself"
            )
        if not self.dataset:
            raise ConfigError(
                "sampler.dataset is empty; expected the folder of a dataset: ps.OfflineSampler('data/a'), "
                "--sampler offline --sampler.dataset data/a"
            )
        config = as_env_config(env)
        with ExitStack() as stack:
            source = stack.enter_context(closing(self._opened(config)))
            B = self.B if makes_vector_env(config) else 1  # the training slots of this sampler are never stepped
            evaluator = SerialSampler(T=1, B=B, discount=self.discount).build(config, seed)
            stack.callback(evaluator.shutdown)
            live = self._live(source, config, evaluator.spec, evaluator, seed, share)
            stack.pop_all()
            return live

    def replayed(self, config: EnvConfig, spec: EnvSpec, seed: int, share: Share) -> OfflineLive:
        """The live sampler without environments, for a replay that keeps the dataset: it plays no evaluations.

        Args:
            spec: of the environment that `config` makes. The others, and errors: as for `build`.
        """
        with ExitStack() as stack:
            live = self._live(stack.enter_context(closing(self._opened(config))), config, spec, None, seed, share)
            stack.pop_all()
            return live

    def _opened(self, config: EnvConfig) -> EpisodeSource:
        return open_dataset(Path(self.dataset).expanduser(), config.drop, config.text)

    def _live(
        self,
        source: EpisodeSource,
        config: EnvConfig,
        spec: EnvSpec,
        evaluator: LiveSampler | None,
        seed: int,
        share: Share,
    ) -> OfflineLive:
        """The live sampler of a dataset that fits the environment and, with `verify`, is whole."""
        check_spec(source.spec, spec, f"dataset {self.dataset}", config.name)
        self._check_room(source)
        if self.verify:
            source.verify(config.checks)
        return OfflineLive(self.spec, source, spec, evaluator, seed, self.shuffle, self.discount, share)

    def _check_room(self, source: EpisodeSource) -> None:
        """Raises ConfigError if the info columns of a batch, in the shapes of the dataset, do not fit into memory."""
        row = sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in source.info.values())
        if (needed := self.spec.size * row) > (free := free_memory()):
            raise ConfigError(
                f"dataset {source.name}: its info columns take {row:,} bytes a step, {needed / 1e9:,.1f} GB in a batch "
                f"of T={self.T}, B={self.B}; free is {free / 1e9:,.1f} GB: use a smaller T or B"
            )
