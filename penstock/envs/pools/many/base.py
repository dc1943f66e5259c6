"""What pools of environments of many agents have in common, whether their agents act at once or in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.core.batch import SampleBatch
from penstock.core.spec import MASK_KEY
from penstock.envs.make import EnvConfig
from penstock.envs.pools.many.hosting import Account, AgentEnvs
from penstock.envs.pools.pool import EnvPool, Group, PoolState, lost_rewards
from penstock.envs.pools.settings import PoolSettings
from penstock.envs.pools.values import action_reader


class AgentsPool(EnvPool):
    """An `EnvPool` of one group for each policy over environments of its own, whose episodes it keeps the account of.

    Args:
        config: with its seating. slots: numbers of the environments among those of all samplers of the run.
    """

    def __init__(self, config: EnvConfig, slots: slice, settings: PoolSettings) -> None:
        self.host = host = AgentEnvs(config, slots, settings, self.takes_turns)
        E, seating = len(host.envs), host.seating
        self.settings, self.evaluation = settings, settings.evaluation
        self.specs, self.seats, self.info_keys = host.specs, seating.seats, host.info_keys
        self.groups = tuple(Group(p, slice(0, E * n)) for p, n in enumerate(self.seats))
        self.account = Account(E, seating.agents, self.info_keys, settings.discount)
        self._to_env = [action_reader(spec.action, dtypes) for spec, dtypes in zip(self.specs, host.action_dtypes())]
        self._masked = [host.refused != "any" and isinstance(x.obs, dict) and MASK_KEY in x.obs for x in self.specs]
        self._outs: Sequence[SampleBatch] = ()
        self._sent, self._given = 0, -1

    @property
    def first_slot(self) -> int:
        """Number of the first environment among those of all samplers of the run."""
        return self.host.slots.start

    def for_evaluation(self, B: int, first_slot: int = 0) -> EnvPool:
        make: Any = type(self)
        slots = slice(first_slot, first_slot + B)
        return make(self.host.config, self.host.seed, slots, self.settings.for_evaluation(B, self.host.mark))

    def prepare(self) -> None:
        """With `batch_end`: resets ended environments before the next batch is asked for, while others compute."""
        self.host.prepare()

    def restored(self, state: PoolState, restore: Callable[[int, Any], bool]) -> list[int]:
        """Goes on from a state; returns the environments that `restore(e, snapshot)` did not bring to where they were."""
        self.host.set_state(state)
        lost = [e for e, found in enumerate(state.snapshot) if not restore(e, found)]
        self.host.set_state(state, lost)
        return lost

    def recv(self) -> int:
        self._given = (self._given + 1) % len(self.groups)
        return self._given

    def limit(self, max_steps: int) -> None:
        self.host.ledger[:, 3] = max_steps

    def metrics(self) -> dict[str, float]:
        return lost_rewards(self.host.ledger)

    def close(self) -> None:
        self.host.close()
