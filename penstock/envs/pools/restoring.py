"""Slot start-up: decorrelation before the first batch; snapshot, and restoring by replay, in a resumed run."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SampleBatch
from penstock.core.errors import EnvWorkerError
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import MASK_KEY, EnvSpec
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.pools.pool import OpenEpisode, PoolState

_DIGESTED = 1024
"""Elements of an observation's array that are digested at most; of larger ones every nth is."""


def has_state(env: Any) -> bool:
    """True if the outermost wrapper can save and restore its state; one below it would lack the wrapper's own."""
    return callable(getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))


class Slots(Protocol):
    """Slots that can be stepped one by one, outside a batch."""

    spec: EnvSpec
    envs: list[Any]
    ended: list[bool]
    idle: list[bool]
    left: list[Any]
    episode: list[int]
    began: list[int]
    tick: int

    @property
    def reset_ahead(self) -> frozenset[int]: ...

    to_env: Callable[[Tree], Sequence[Any]]

    def open_row_0(self, out: SampleBatch, b: int) -> None: ...
    def reset_env(self, b: int, again: bool = False) -> Any: ...
    def step_checked(self, b: int, action: Any) -> tuple[Any, Any, Any, Any]: ...
    def write_checked(self, obs_row: Tree, b: int, obs: Any, phase: str, action: Any = None) -> None: ...
    def finish(self, b: int) -> None: ...


def start(
    pool: Slots, out: SampleBatch, seed: int, first_slot: int, limit: int
) -> list[tuple[list[Tree], list[float]]]:
    """Row 0 of the first batch: a reset of every slot that takes part, then up to `limit` random steps if it is not 0.

    Returns:
        for each slot the random actions of its open episode and their rewards.
    """
    before: list[tuple[list[Tree], list[float]]] = [([], [])] * len(pool.envs)
    for b in range(len(pool.envs)):
        if not pool.idle[b]:
            pool.open_row_0(out, b)
            if limit:
                before[b] = random_steps(pool, out, b, seed, first_slot + b, limit)
    return before


def random_steps(
    pool: Slots, out: SampleBatch, b: int, seed: int, slot: int, limit: int
) -> tuple[list[Tree], list[float]]:
    """Takes 1 to `limit` random steps in slot b, which is open, and leaves row 0 of `out` where they end.

    Args:
        slot: the slot's global number, which addresses the noise. A mask in the observation is obeyed.

    Returns:
        actions and rewards of the episode that is open in the end.
    """
    n = action_noise_size(pool.spec.action)
    u = uniform(seed, Purpose.DECORRELATE, 0, slice(slot, slot + 1), limit + 1, max(n, 1))[:, 0]
    actions: list[Tree] = []
    rewards: list[float] = []
    for noise in u[1 : 2 + int(u[0, 0] * limit)]:
        if pool.ended[b]:
            pool.open_row_0(out, b)
            actions, rewards = [], []
            continue
        mask = out.obs[MASK_KEY][0, b][None] if isinstance(out.obs, dict) and MASK_KEY in out.obs else None
        action = sample_action(pool.spec.action, noise[None], mask)
        env_action = pool.to_env(action)[0]
        obs, reward, terminated, truncated = pool.step_checked(b, env_action)
        pool.write_checked(tree_map(lambda x: x[0], out.obs), b, obs, "step", env_action)
        actions.append(tree_map(lambda x: x[0], action))
        rewards.append(float(reward))
        tree_assign(out.prev_action, (0, b), action, 0)
        out.first[0, b], out.prev_reward[0, b] = False, reward
        if terminated or truncated:
            pool.finish(b)
    return actions, rewards


def snapshot(pool: Slots) -> PoolState:
    """The state of every slot between two batches, with that of its environment where it offers one."""
    ahead = pool.reset_ahead
    states = [env.get_state() if has_state(env) and b not in ahead else None for b, env in enumerate(pool.envs)]
    return PoolState(
        episode=[n - (b in ahead) for b, n in enumerate(pool.episode)],
        ended=list(pool.ended),
        idle=list(pool.idle),
        left=[None if left == math.inf else left for left in pool.left],
        began=list(pool.began),
        snapshot=states,
        tick=pool.tick,
    )


def restore(pool: Slots, state: PoolState, row: SampleBatch, journal: Sequence[OpenEpisode | None]) -> list[int]:
    """The inverse of `snapshot`; see `EnvPool.set_state`."""
    pool.episode, pool.ended, pool.idle = list(state.episode), list(state.ended), list(state.idle)
    pool.left = [math.inf if left is None else left for left in state.left]
    pool.tick = state.tick
    lost: list[int] = []
    for b, env in enumerate(pool.envs):
        target = tree_map(lambda x, b=b: x[-1, b], row.obs)
        if state.snapshot[b] is not None and has_state(env):
            pool.reset_env(b, again=True)
            env.set_state(state.snapshot[b])
        elif not pool.ended[b] and ((episode := journal[b]) is None or not replay(pool, b, episode, target)):
            lost.append(b)
            pool.ended[b] = True  # the next row of this slot resets into its next episode
    pool.began = list(state.began)
    return lost


def replay(pool: Slots, b: int, episode: OpenEpisode, target: Tree) -> bool:
    """Replays the episode of slot b from its seed; True if it leads to the same again, bit for bit.

    That is to observations and rewards of the same digest, to no end, and last to the observation `target`.
    """
    obs_row = tree_map(lambda x: np.zeros_like(x)[None], target)
    reward_row = np.zeros(1, np.float32)
    views = [thinned(x[None]) for x in (*tree_leaves(obs_row), reward_row)]
    digest = [0] * len(views)

    def show(k: int, obs: Any, reward: Any) -> None:
        nonlocal digest
        write_tree(obs_row, 0, obs)
        reward_row[0] = reward
        if k >= episode.unseen:
            digest = checksums(views, digest)

    try:
        show(0, pool.reset_env(b, again=True), 0.0)
        for k, env_action in enumerate(pool.to_env(episode.actions), 1):
            obs, reward, terminated, truncated = pool.step_checked(b, env_action)
            if terminated or truncated:
                return False
            show(k, obs, reward)
    except (EnvWorkerError, IndexError, KeyError, TypeError, ValueError):
        return False  # the episode went well before, so this is one more way of not being reproducible
    if episode.digest and list(episode.digest) != digest:
        return False
    pairs = zip(tree_leaves(obs_row), tree_leaves(target))
    return all(x[0].tobytes() == np.ascontiguousarray(y).tobytes() for x, y in pairs)


def thinned(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[B, T, n] view of what is digested of an array [T, B, ...]."""
    flat = x.reshape(*x.shape[:2], -1)
    return flat[:, :, :: max(1, -(-flat.shape[2] // _DIGESTED))].swapaxes(0, 1)


def checksums(views: Sequence[npt.NDArray[Any]], before: Sequence[int]) -> list[int]:
    """The digest of one slot with the next row added, by `thinned` views [1, 1, n] of observation and reward."""
    return [zlib.crc32(view.tobytes(), n) for view, n in zip(views, before)]


def write_tree(row: Tree, b: int, obs: Any) -> bool:
    """Writes one slot's observation, known to be sound, into a row [B, *O]."""
    if isinstance(row, dict):
        for key, below in row.items():
            write_tree(below, b, obs[key])
    elif isinstance(row, tuple):
        for below, part in zip(row, obs):
            write_tree(below, b, part)
    else:
        row[b] = obs
    return True
