"""What pools of environments of many agents have in common, whether their agents act at once or in turn."""

from __future__ import annotations

from typing import Any

from penstock.envs.pools.many.hosting import Account, AgentEnvs
from penstock.envs.pools.pool import EnvPool, lost_rewards
from penstock.envs.pools.settings import PoolSettings


class AgentsPool(EnvPool):
    """An `EnvPool` with environments of its own, whose episodes it keeps the account of.

    It is made with the arguments of `SimultaneousPool`.
    """

    host: AgentEnvs
    """The environments, and what is known of each."""
    account: Account
    """The account of their episodes."""
    settings: PoolSettings

    @property
    def first_slot(self) -> int:
        """Number of the first environment among those of all samplers of the run."""
        return self.host.slots.start

    def for_evaluation(self, B: int, first_slot: int = 0) -> EnvPool:
        make: Any = type(self)
        slots = slice(first_slot, first_slot + B)
        return make(self.host.config, self.host.seed, slots, self.settings.for_evaluation(B, self.host.mark))

    def limit(self, max_steps: int) -> None:
        self.host.ledger[:, 3] = max_steps

    def metrics(self) -> dict[str, float]:
        return lost_rewards(self.host.ledger)

    def close(self) -> None:
        self.host.close()
