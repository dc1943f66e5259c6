"""SimultaneousPool: every row is that of a plain loop, whoever comes, goes and plays for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.tree import tree_leaves
from penstock.envs.toy import EchoAgents
from tests.envs.pools.plain_loop import Driver, compare, seated


def turn_about(agent: str, episode: int, seed: int) -> str:
    return "a" if (int(agent[-1]) + episode) % 2 else "b"


SEATINGS: list[tuple[int, tuple[str, ...], Any, Any]] = [
    (1, ("s",), None, None),
    (2, ("s",), None, {"s": 3}),  # a seat that idles for ever
    (5, ("s",), None, None),
    (2, ("a", "b"), {"agent_0": "a", "agent_1": "b"}, None),
    (5, ("a", "b", "c"), {f"agent_{k}": "abcab"[k] for k in range(5)}, {"c": 2}),
    (3, ("a", "b"), turn_about, {"a": 2, "b": 2}),
]


@pytest.mark.parametrize("T", [1, 2, 5, 64])
@pytest.mark.parametrize(("K", "policies", "mapping", "seats"), SEATINGS)
def test_every_row_is_the_plain_loops(K: int, policies: Any, mapping: Any, seats: Any, T: int) -> None:
    config = seated(EchoAgents, policies, mapping, seats, kwargs={"agents": K}, checks="always", info_keys=("echo",))
    one, two = (Driver(config, 3, T, buffers, max_decorrelation_steps=0) for buffers in (1, 2))
    for _ in range(-(-90 // T)):
        for x, y in zip(tree_leaves(one.play(1).buffers[0]), tree_leaves(two.play(1).buffers[(two.k - 1) % 2])):
            x, y = np.nan_to_num(x), np.nan_to_num(y)
            assert x.tobytes() == y.tobytes()
    assert compare(one, config) > 100
    assert compare(two, config) > 100
