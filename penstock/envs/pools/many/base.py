"""Base of the pools of environments of many agents, which act at once or in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch, carry_over
from penstock.core.spec import MASK_KEY
from penstock.core.tree import tree_assign, tree_leaves, tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall
from penstock.envs.pools.many.agent_envs import AgentEnvs, EpisodeRecorder
from penstock.envs.pools.pool import EnvPool, Group, Ints, PoolState, lost_rewards
from penstock.envs.pools.settings import PoolSettings
from penstock.envs.pools.values import action_reader


class AgentsPool(EnvPool):
    """An `EnvPool` with one group for each policy, which owns its environments and accounts for their episodes.

    Args:
        config: with its seating. slots: numbers of the environments among those of all samplers of the run.
    """

    def __init__(self, config: EnvConfig, slots: slice, settings: PoolSettings) -> None:
        self.host = host = AgentEnvs(config, slots, settings, self.takes_turns)
        E, seating = len(host.envs), host.seating
        self.settings, self.evaluation = settings, settings.evaluation
        self.calls = host.calls
        self.specs, self.seats, self.info_keys = host.specs, seating.seats, host.info_keys
        self.groups = tuple(Group(p, slice(0, E * n)) for p, n in enumerate(self.seats))
        self.recorder = EpisodeRecorder(E, seating.agents, self.info_keys, settings.discount)
        self._to_env = [action_reader(spec.action, dtypes) for spec, dtypes in zip(self.specs, host.action_dtypes())]
        self._masked = [host.refused != "any" and isinstance(x.obs, dict) and MASK_KEY in x.obs for x in self.specs]
        self._outs: Sequence[SampleBatch] = ()
        self._sent, self._given = 0, -1

    def for_evaluation(self, B: int, first_slot: int = 0) -> EnvPool:
        make: Any = type(self)
        slots = slice(first_slot, first_slot + B)
        return make(
            self.host.config.for_evaluation, self.host.seed, slots, self.settings.for_evaluation(B, self.host.activity)
        )

    def open_batch(self, outs: Sequence[SampleBatch], first: bool) -> None:
        """Makes `outs` the batches to write: row 0 is row T of those before, or empty, as are others."""
        previous, self._outs = self._outs, outs
        self.log = self.recorder.bind(self.host.seating.most_episodes(outs[0].spec.T))
        for p, out in enumerate(outs):
            if first:
                tree_map(lambda x: x[0].fill(0), out.obs)
                out.first[0], out.prev_reward[0] = False, 0.0
                tree_assign(out.prev_action, 0, self.specs[p].null_action)
            else:
                carry_over(previous[p], out)
            out.first[1:] = False
            for x in (out.reward, out.terminated, out.truncated, out.valid):
                x.fill(0)
            for column in tree_leaves(out.info.get("env")) if isinstance(out.info, dict) else ():
                column.fill(np.nan)

    def restored(self, state: PoolState, restore: Callable[[int, Any], bool]) -> list[int]:
        """Goes on from a state; returns the environments that `restore(e, snapshot)` did not bring back."""
        self.host.begin_restore(state)
        lost = [e for e, found in enumerate(state.snapshot) if not restore(e, found)]
        self.host.end_restore(state, lost)
        return lost

    def recv(self) -> int:
        self._given = (self._given + 1) % len(self.groups)
        return self._given

    def limit(self, max_steps: int) -> None:
        self.host.episode_table[:, 3] = max_steps

    def newest_episodes(self) -> Ints:
        return self.host.episode_table[:, 0].copy()

    def metrics(self) -> dict[str, float]:
        return lost_rewards(self.host.episode_table)

    def close(self) -> None:
        self.host.close()

    def call(self, call: EnvCall, slots: Sequence[int]) -> list[Answer]:
        return self.host.call(call, slots)

    def recall(self, calls: Sequence[Sequence[CallRecord]]) -> None:
        self.host.recall(calls)
