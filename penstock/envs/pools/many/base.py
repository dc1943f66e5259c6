"""What pools of environments of many agents have in common, whether their agents act at once or in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.envs.pools.many.hosting import Account, AgentEnvs
from penstock.envs.pools.pool import EnvPool


class AgentsPool(EnvPool):
    """An `EnvPool` with environments of its own, whose episodes it keeps the account of.

    It is made with the arguments of `SimultaneousPool`.
    """

    host: AgentEnvs
    """The environments, and what is known of each."""
    account: Account
    """The account of their episodes."""
    _evaluation_ledger: Callable[[int], Any] | None

    @property
    def first_slot(self) -> int:
        """Number of the first environment among those of all samplers of the run."""
        return self.host.slots.start

    def for_evaluation(self, B: int, first_slot: int = 0) -> EnvPool:
        make: Any = type(self)
        return make(
            self.host.config,
            self.host.seed,
            slice(first_slot, first_slot + B),
            evaluation=True,
            mark=self.host.mark,
            ledger=None if self._evaluation_ledger is None else self._evaluation_ledger(B),
            discount=self.account.discount,
        )

    def limit(self, max_steps: int) -> None:
        self.host.ledger[:, 3] = max_steps

    def close(self) -> None:
        self.host.close()
