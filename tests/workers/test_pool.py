"""The contract of an EnvPool, kept by one whose slots are stepped by worker processes."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.pools.pool import EnvPool
from penstock.envs.pools.settings import PoolSettings
from penstock.testing.pools import check_pool, echo_config
from penstock.workers.pool import TRAINING, ProcessPool
from tests.slow import slow

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]


@pytest.mark.parametrize(
    ("workers", "groups", "overlap", "nested", "reset", "steps"),
    [
        (2, 3, True, False, "batch_end", 9), (2, 2, False, True, "next_step", 9),
        *slow((1, 1, True, True, "next_step", 9), (3, 2, True, True, "batch_end", 0), (1, 1, True, False, "batch_end", 0),
              (2, 1, True, False, "next_step", 0), (2, 1, True, True, "batch_end", 9), (2, 3, True, True, "next_step", 0),
              (3, 2, True, False, "next_step", 9), (2, 2, False, False, "batch_end", 0)),
    ],
)  # fmt: skip
def test_the_pools_contract(workers: int, groups: int, overlap: bool, nested: bool, reset: Any, steps: int) -> None:
    settings = ps.GpuSampler(7, 7, workers, groups=groups, overlap=overlap, reset=reset, max_decorrelation_steps=steps)
    check_pool(
        lambda: _Attaching(settings, echo_config(nested)), seed=3, reset=reset, decorrelated=steps > 0, batches=4
    )


class _Attaching(EnvPool):
    """A ProcessPool that copies to and from the suite's buffers, which are not in shared memory."""

    def __init__(self, settings: Any, config: EnvConfig) -> None:
        self._workers = settings.start_workers(config, 3, 1, None)
        self._pool = ProcessPool(
            self._workers, TRAINING, config, 3, 7, PoolSettings.of(settings), settings.groups, not settings.overlap
        )
        self.specs, self.groups, self.info_keys = self._pool.specs, self._pool.groups, self._pool.info_keys
        self._shared: Any = None

    def restart(self, seed: int, episodes: Any = None) -> None:
        self._pool.restart(seed, episodes)

    def get_state(self) -> Any:
        return self._pool.get_state()

    def set_state(self, state: Any, outs: Any, journal: Any) -> list[int]:
        return self._pool.set_state(state, outs, journal)

    def for_evaluation(self, B: int) -> Any:
        return self._pool.for_evaluation(B)

    def bind(self, outs: Any) -> None:
        (out,) = outs
        if self._shared is None:
            self._shared, _ = self._pool.place([out.copy()], None)
        for x, y in zip(tree_leaves(self._shared[0]), tree_leaves(out)):
            x[-1] = self._last[id(x)] if hasattr(self, "_last") else y[-1]
        self._out = out
        self._pool.bind([self._shared[0]])
        for name in ("obs", "first", "prev_action", "prev_reward"):
            for x, y in zip(tree_leaves(getattr(out, name)), tree_leaves(getattr(self._shared[0], name))):
                x[0] = y[0]
        out.first[1:] = False
        for x, y in zip(tree_leaves(out.info.get("env")), tree_leaves(self._shared[0].info.get("env"))):
            x[...] = y

    def send(self, group: int, row: int) -> None:
        slots = self.groups[group].slots
        for x, y in zip(tree_leaves(self._shared[0].action), tree_leaves(self._out.action)):
            x[row, slots] = y[row, slots]
        self._sent = {**getattr(self, "_sent", {}), group: row}
        self._pool.send(group, row)

    def recv(self) -> int:
        group = self._pool.recv()
        row, slots, there, out = self._sent[group], self.groups[group].slots, self._shared[0], self._out
        for x, y in zip(tree_leaves((out.obs, out.first)), tree_leaves((there.obs, there.first))):
            x[row + 1, slots] = y[row + 1, slots]
        names = ("reward", "terminated", "truncated", "valid")
        for x, y in zip([*(getattr(out, n) for n in names), *tree_leaves(out.info.get("env"))],
                        [*(getattr(there, n) for n in names), *tree_leaves(there.info.get("env"))]):  # fmt: skip
            x[row, slots] = y[row, slots]
        self._last = {id(x): x[-1].copy() for x in tree_leaves(there)}
        return group

    def close(self) -> None:
        self._pool.close()
