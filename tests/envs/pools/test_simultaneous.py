"""SimultaneousPool: every row is that of a plain loop, whoever comes, goes and plays for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.tree import tree_leaves
from penstock.envs.toy import EchoAgents
from tests.envs.pools.plain_loop import SEATINGS, Driver, compare, seated


@pytest.mark.parametrize(("K", "policies", "mapping", "seats", "T"), SEATINGS)
def test_every_row_is_the_plain_loops(K: int, policies: Any, mapping: Any, seats: Any, T: int) -> None:
    config = seated(EchoAgents, policies, mapping, seats, kwargs={"agents": K}, checks="always", info_keys=("echo",))
    one, two = (Driver(config, 3, T, buffers, max_decorrelation_steps=0) for buffers in (1, 2))
    for _ in range(-(-90 // T)):
        for x, y in zip(tree_leaves(one.play(1).buffers[0]), tree_leaves(two.play(1).buffers[(two.k - 1) % 2])):
            x, y = np.nan_to_num(x), np.nan_to_num(y)
            assert x.tobytes() == y.tobytes()
    assert compare(one, config) > 100
    assert compare(two, config) > 100
