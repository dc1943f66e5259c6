"""SamplerShare: the sampler of one runner before it is made, as it travels to where the runner lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

import penstock.actors.note as note
from penstock.core import trace
from penstock.core.errors import ConfigError
from penstock.core.spec import WHOLE, BatchSpec, Share
from penstock.envs.ids import entries_to_ship, take_shipped
from penstock.envs.make import EnvConfig
from penstock.processes.serialization import ship, unship
from penstock.samplers.live import LiveSampler
from penstock.samplers.runners.activity import Activity
from penstock.samplers.serial import SerialSampler


class Maker(Protocol):
    """Makes the sampler of one runner, in the process where it is to live; it is pickled on its way there."""

    @property
    def env(self) -> EnvConfig:
        """The environment's settings, for messages and for what travels along."""
        ...

    @property
    def seed(self) -> int:
        """The run's seed."""
        ...

    @property
    def fragment(self) -> BatchSpec:
        """T and B of the sampler's batches."""
        ...

    @property
    def share(self) -> Share:
        """Its slots among those of the whole run."""
        ...

    def make(self) -> LiveSampler:
        """Returns the live sampler. Raises ConfigError or EnvWorkerError where it cannot be made."""
        ...


@dataclass(frozen=True)
class SamplerShare:
    """Settings of a synchronous sampler, its environment and its slots; a `Maker`."""

    settings: Any
    env: EnvConfig
    seed: int
    share: Share = WHOLE
    """Its slots among those of all samplers of the run."""

    @property
    def fragment(self) -> BatchSpec:
        """T and B of one batch."""
        return self.settings.spec

    def make(self) -> LiveSampler:
        """Returns the live sampler; it notes the activity of its environments where another process reads it."""
        words = note.watched()
        more: dict[str, Any] = {}
        if words is not None and isinstance(self.settings, SerialSampler):
            more["shared"] = Activity(words)
        live = self.settings.build(self.env, self.seed, share=self.share, **more)
        if not isinstance(live, LiveSampler):
            live.shutdown()
            raise ConfigError(
                f"a runner with sampler {type(self.settings).__name__}; expected a synchronous one, e.g. "
                "ps.CpuSampler(T=128, B=16, workers=2): rounds ahead are sampler.depth"
            )
        if live.pool.device is not None:
            live.shutdown()
            refuse_tensors(self.env, live.pool.device)
        return live


def refuse_tensors(env: EnvConfig, device: Any) -> None:
    """Raises ConfigError for an environment of tensors on a device; does nothing for one of arrays (None or "")."""
    if device:
        raise ConfigError(
            f"{env.name} answers with tensors on {device}, which do not leave their process; use ps.SerialSampler in "
            "place of runners"
        )


def shipped(maker: Maker) -> bytes:
    """A maker as bytes for `received`, with the environment's entry in Gymnasium's registry.

    Raises:
        ConfigError: it cannot be pickled.
    """
    name = maker.env.name
    return ship(
        (maker, entries_to_ship(name, maker.env.for_evaluation.name)),
        f"{name} or its settings cannot be sent to a runner",
        "give the environment as 'module:function', or make what it holds open inside that function",
    )


def received(data: bytes) -> Any:
    """The maker that `shipped` made these bytes of, in the process of its runner, which is set up for it."""
    torch.set_num_threads(1)
    maker, entry = unship(data, elsewhere=True)
    take_shipped(entry)
    trace.enter(f"runner {maker.share.first_slot // maker.fragment.B}")
    return maker
