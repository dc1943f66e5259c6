"""Slot start-up: decorrelation before the first batch; in a resumed run restoring, by a state or by replay."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.core.batch import SampleBatch
from penstock.core.errors import EnvWorkerError
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import MASK_KEY
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.pools.pool import OpenEpisode, PoolState
from penstock.envs.pools.slot_envs import offers_state
from penstock.envs.pools.values import write_tree

if TYPE_CHECKING:
    from penstock.envs.pools.serial import SerialPool

_DIGESTED = 1024
"""Elements of an observation's array that are digested at most; of larger ones every nth is."""


def start(pool: SerialPool, out: SampleBatch, limit: int) -> list[tuple[list[Tree], list[float]]]:
    """Row 0 of the first batch: a reset of every slot that takes part, then up to `limit` random steps if it is not 0.

    Returns:
        for each slot the random actions of its open episode and their rewards.
    """
    host = pool.host
    before: list[tuple[list[Tree], list[float]]] = [([], [])] * len(host.envs)
    for b, idle in enumerate(host.idle):
        if not idle:
            pool.open_row_0(out, b)
            if limit:
                before[b] = random_steps(pool, out, b, host.seed, host.slots.start + b, limit)
    return before


def random_steps(
    pool: SerialPool, out: SampleBatch, b: int, seed: int, slot: int, limit: int
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
        if pool.host.over[b]:
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
            pool.host.finish(b)
    return actions, rewards


def restore(pool: SerialPool, state: PoolState, row: SampleBatch, journal: Sequence[OpenEpisode | None]) -> list[int]:
    """See `EnvPool.set_state`."""
    host, lost = pool.host, list[int]()
    host.begin_restore(state)
    for b, env in enumerate(host.envs):
        target = tree_map(lambda x, b=b: x[-1, b], row.obs)
        if state.snapshot[b] is not None and offers_state(env):
            pool.reset_env(b, again=True)
            host.repeat(b)
            env.set_state(state.snapshot[b])
        elif not state.ended[b] and ((episode := journal[b]) is None or not replay(pool, b, episode, target)):
            lost.append(b)
    host.end_restore(state, lost)
    return lost


def replay(pool: SerialPool, b: int, episode: OpenEpisode, target: Tree) -> bool:
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
            pool.host.repeat(b, k - 1)
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
    """[B, T, n] view of an array [T, B, ...], for its digest."""
    flat = x.reshape(*x.shape[:2], -1)
    return flat[:, :, :: max(1, -(-flat.shape[2] // _DIGESTED))].swapaxes(0, 1)


def checksums(views: Sequence[npt.NDArray[Any]], before: Sequence[int]) -> list[int]:
    """The digest of one slot with the next row added, by `thinned` views [1, 1, n] of observation and reward."""
    return [zlib.crc32(view.tobytes(), n) for view, n in zip(views, before)]
