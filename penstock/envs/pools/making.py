"""`pool_for`: the pool in this process that fits an environment, of one agent or of many."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, TypeAlias

from penstock.envs.make import EnvConfig
from penstock.envs.pools.serial import Reset, SerialPool
from penstock.envs.pools.simultaneous import SimultaneousPool
from penstock.envs.pools.turns import TurnPool

LocalPool: TypeAlias = SerialPool | SimultaneousPool | TurnPool


def pool_for(
    config: EnvConfig,
    seed: int,
    slots: slice,
    *,
    reset: Reset = "next_step",
    max_decorrelation_steps: int = 0,
    episodes: Sequence[int] | None = None,
    evaluation: bool = False,
    mark: MutableSequence[int] | None = None,
    ledger: Any = None,
    evaluation_ledger: Callable[[int], Any] | None = None,
    discount: float = 0.99,
    journal_steps: int = 100_000,
) -> LocalPool:
    """The pool for these environments: by `config.seating` one of many agents, else a SerialPool.

    Args:
        discount, journal_steps: of pools of many agents, which keep the account of their episodes, and the actions to
            replay them, themselves. The others are as of `SerialPool`, a slot being an environment.
    """
    common: dict[str, Any] = {
        "reset": reset,
        "max_decorrelation_steps": max_decorrelation_steps,
        "episodes": episodes,
        "evaluation": evaluation,
        "mark": mark,
        "ledger": ledger,
        "evaluation_ledger": evaluation_ledger,
    }
    if config.seating is None:
        return SerialPool(config, seed, slots, **common)
    cls = TurnPool if config.seating.turns else SimultaneousPool
    return cls(config, seed, slots, **common, discount=discount, journal_steps=journal_steps)
