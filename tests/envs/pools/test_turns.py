"""TurnPool: every turn is that of a plain loop, in a random order, with ends and rewards off turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.tree import tree_leaves
from penstock.envs.toy import EchoTurns
from tests.envs.pools.plain_loop import SEATINGS, Driver, compare, seated


@pytest.mark.parametrize(("K", "policies", "mapping", "seats", "T"), SEATINGS)
def test_every_row_is_the_plain_loops(K: int, policies: Any, mapping: Any, seats: Any, T: int) -> None:
    checks = "always" if T == 2 else "sampled"  # rows that are looked at one by one are not written together
    config = seated(EchoTurns, policies, mapping, seats, kwargs={"agents": K}, checks=checks, info_keys=("echo",))
    one, two = (Driver(config, 3, T, buffers) for buffers in (1, 2))
    for _ in range(-(-120 // T)):
        one.play(1)
        two.play(1)
        names = ("obs", "first", "prev_action", "prev_reward", "terminated", "truncated", "valid", "info")
        for x, y in zip(one.buffers[0], two.buffers[(two.k - 1) % 2]):
            for a, b in zip(*(tree_leaves([getattr(out, name) for name in names]) for out in (x, y))):
                assert np.nan_to_num(a).tobytes() == np.nan_to_num(b).tobytes()
    taken = compare(one, config)
    assert taken > 80
    assert compare(two, config) == taken
    held = sum(len(found["held"]) for found in one.pool.get_state().snapshot)
    assert one.moves == taken + held  # no turn is lost: it is a row, or open


class OneArray(EchoTurns):
    """Shows everything in one array, which it writes anew."""

    shown: Any = None

    def observe(self, agent: str) -> Any:
        if self.shown is None:
            self.shown = np.zeros(6, np.float32)
        self.shown[:] = super().observe(agent)
        return self.shown


@pytest.mark.parametrize("T", [3, 40])
def test_rows_are_written_before_the_environment_goes_on(T: int) -> None:
    config = seated(OneArray, kwargs={"agents": 3})
    driver = Driver(config, 3, T).play(-(-120 // T))
    assert compare(driver, config) > 80
