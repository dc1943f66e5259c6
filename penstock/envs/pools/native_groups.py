"""NativeGroups: native batched environments in groups that take turns, one stepping while another is served."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch, carry_over
from penstock.core.errors import ConfigError
from penstock.core.noise import env_seed
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import NativeEnv
from penstock.envs.pools.pool import EnvPool, Group, OpenEpisode, PoolState


class NativeGroups(EnvPool):
    """An `EnvPool` of `groups` VectorEnvs of about B / groups environments each, served in the order they were sent.

    With one group each step is a single call of the environment's `step`. A factory that accepts `num_envs` is asked
    for a group's share; any other must make that many. Each takes one seed for all its environments, so batches depend
    on B and `groups`, and a resumed run cannot bring its episodes back: this pool stands outside placement invariance
    and exact resume.

    Args:
        first_slot: number of the first slot among those of all samplers of the run, of which seeds are a function.
        exclusive: never two groups step at the same time; the next begins when the one before has finished.
        step_timeout_s: how long gymnasium's AsyncVectorEnv may take for a step; other libraries have no such limit.
        activity: words of which the third counts steps, for a process that watches this one.

    Raises:
        ConfigError: the environments do not fit, or, with two groups or more, cannot step in two halves.
    """

    def __init__(
        self,
        config: EnvConfig,
        seed: int,
        B: int,
        groups: int = 1,
        evaluation: bool = False,
        *,
        first_slot: int = 0,
        exclusive: bool = False,
        step_timeout_s: float = 60.0,
        activity: Any = None,
    ) -> None:
        if not 1 <= groups <= B:
            raise ConfigError(f"groups={groups} of sampler.B={B} slots; expected 1 to {B}")
        edges = [g * B // groups for g in range(groups + 1)]
        self.groups = tuple(Group(0, slice(a, b)) for a, b in zip(edges, edges[1:]))
        self.info_keys = config.all_info_keys
        self.evaluation, self.remote = evaluation, groups > 1
        self.wait_s = 0.0
        """Seconds spent waiting for environments."""
        self._B, self._first_slot, self._exclusive = B, first_slot, exclusive
        self._activity = [0] * 3 if activity is None else activity
        self._again = partial(
            NativeGroups, config, groups=groups, evaluation=True, exclusive=exclusive,
            step_timeout_s=step_timeout_s, activity=self._activity,
        )  # fmt: skip
        self._sent: deque[tuple[int, int]] = deque()
        self._envs: list[NativeEnv] = []
        self.restart(seed)
        try:
            for g, (_, slots) in enumerate(self.groups):
                own = NativeEnv(config, self._seed_of(g), slots, B, groups > 1, step_timeout_s, first_slot, evaluation)
                self._envs.append(own)
        except BaseException:
            self.close()
            raise
        self.spec = self._envs[0].spec
        self.specs = (self.spec,)

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with a reset of all; environments play on without limit."""
        self._seed, self._restarts = seed, 0
        self._out: SampleBatch | None = None

    def evaluation_slots(self, wanted: int) -> int:
        """As many as in training: the factory may make no other number."""
        return self._B

    def for_evaluation(self, B: int, first_slot: int = 0) -> NativeGroups:
        return self._again(self._seed, B, first_slot=first_slot)

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        (out,) = outs
        previous, self._out = self._out, out
        self._sent.clear()
        if previous is None:
            for g, env in enumerate(self._envs):
                env.open(out, self._seed_of(g))
        else:
            carry_over(previous, out)
        for column in tree_leaves(out.info.get("env")) if isinstance(out.info, dict) else []:
            column[...] = np.nan

    def send(self, group: int, row: int) -> None:
        assert self._out is not None
        self._activity[2] += 1
        self._sent.append((group, row))
        if not self._exclusive or len(self._sent) == 1:
            started = time.perf_counter()
            self._envs[group].begin(self._out, row)
            self.wait_s += time.perf_counter() - started

    def recv(self) -> int:
        assert self._out is not None
        started = time.perf_counter()
        group, row = self._sent.popleft()
        self._envs[group].finish(self._out, row)
        self.wait_s += time.perf_counter() - started
        if self._exclusive and self._sent:
            following, row = self._sent[0]
            self._envs[following].begin(self._out, row)
        return group

    def close(self) -> None:
        """Ends the environments. A second call does nothing."""
        while self._envs:
            self._envs.pop().close()

    def get_state(self) -> PoolState:
        return PoolState(restarts=self._restarts)

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        """Native environments cannot be restored: all start anew under another seed, and every slot counts as cut."""
        self._restarts, self._out = state.restarts + 1, None
        return list(range(self._B))

    def _seed_of(self, group: int) -> int:
        """31 bits with room for a seed for each environment after it: native libraries keep seeds in a C int."""
        slots = self.groups[group].slots
        seed = env_seed(self._seed, self._first_slot + slots.start, self._restarts, self.evaluation) >> 1
        return min(seed, (1 << 31) - 1 - (slots.stop - slots.start))
