"""The seam between the one loop and whatever steps environments: here, in workers, or in a native library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.core.batch import SampleBatch
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree


class EnvPool(Protocol):
    """B slots that step in groups. The pool writes the environment's leaves of a batch, the loop writes the agent's.

    On `send(group, row)` a pool reads `action[row]` of the group's slots and, by the time `recv` returns that group,
    has written `obs[row+1]`, `first[row+1]`, `reward[row]`, `terminated[row]`, `truncated[row]`, `valid[row]` and the
    named env info. A slot whose episode ended ignores its next action and resets, or idles: that row is not valid and has
    reward 0.
    """

    spec: EnvSpec
    groups: tuple[slice, ...]
    """The slots of each group; consecutive, and together all of them."""
    info_keys: tuple[str, ...]
    """Keys of the env info that the pool writes where the batch has columns for them."""

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with a reset of all slots.

        Args:
            episodes: for each slot how many it plays before it idles for good; native pools play on.
        """
        ...

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        """For each slot the random actions of its current episode from before the first batch, and their rewards."""
        ...

    def bind(self, out: SampleBatch) -> None:
        """Makes `out` the batch to write, its row 0 being row T of the batch before, or a reset if there is none."""
        ...

    def send(self, group: int, row: int) -> None:
        """Steps the group's slots with the actions of this row, or begins to."""
        ...

    def recv(self) -> int:
        """The group whose step has finished; waits for it."""
        ...

    def close(self) -> None:
        """Ends the environments. A second call does nothing."""
        ...

    def get_state(self) -> dict[str, Any]:
        """What a resumed run needs of each slot besides the record: episode numbers and, where offered, env states."""
        ...

    def set_state(self, state: dict[str, Any], row: SampleBatch, journal: list[Tree | None]) -> list[int]:
        """Brings every slot back to where `get_state` found it; gives the slots that could not be.

        Args:
            row: the last batch written, whose row T each restored slot must show bit for bit.
            journal: for each slot the actions [L, *A] since its episode began, or None if they were not kept.
        """
        ...
