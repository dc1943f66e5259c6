"""GAIL and DAgger that teach themselves where they are built, for suites that know no run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import penstock as ps
from penstock.core.tree import tree_map
from penstock.datasets.episode import Episode

SMALL = ps.Net(hidden=(8,))


class Shown:
    """An EpisodeSource of arrays in memory."""

    name, fingerprint = "shown", "0"
    info: Mapping[str, tuple[str, tuple[int, ...]]] = {}

    def __init__(self, spec: ps.EnvSpec, obs: Any, action: Any, L: int) -> None:
        self.spec, self.lengths = spec, np.array([L])
        self._episode = Episode(obs, action, np.zeros(L, np.float32), terminated=True, truncated=False)

    def episode(self, i: int) -> Episode:
        assert i == 0
        return self._episode

    def verify(self, checks: Any = "sampled") -> None: ...

    def close(self) -> None: ...


def null_pairs(spec: ps.EnvSpec, L: int = 5) -> Shown:
    """L steps of null actions, in observations that are null but for floats, which differ from step to step."""

    def rows(n: int) -> Any:
        def leaf_rows(leaf: Any) -> Any:
            x = np.broadcast_to(leaf.null(), (n, *leaf.shape)).copy()
            steps = np.arange(n).astype(x.dtype).reshape(-1, *[1] * len(leaf.shape))
            return x + steps / n if x.dtype.kind == "f" else x

        return lambda leaf: leaf_rows(leaf).astype(leaf.dtype)

    return Shown(spec, tree_map(rows(L + 1), spec.obs), tree_map(rows(L), spec.action), L)


@dataclass(frozen=True)
class TaughtGAIL(ps.GAIL):
    """GAIL from null observations and actions."""

    def build(self, spec: Any, seed: int = 0, device: str = "cpu", total_steps: int | None = None) -> ps.Policy:
        policy = super().build(spec, seed, device, total_steps)
        self.teach(policy, null_pairs(spec))
        return policy


@dataclass(frozen=True)
class TaughtDAgger(ps.DAgger):
    """DAgger from an untrained policy, of a seed of its own."""

    expert_net: ps.Net = SMALL

    def build(self, spec: Any, seed: int = 0, device: str = "cpu", total_steps: int | None = None) -> ps.Policy:
        policy = super().build(spec, seed, device, total_steps)
        self.teach(policy, ps.PPO(net=self.expert_net).build(spec, seed=7))
        return policy
