"""The view in hindsight: transitions whose goal is replaced by one that was reached later in the episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.core.batch import TrainBatch
from penstock.core.config import import_object
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec, allocate
from penstock.replay.columns import Array, Rows
from penstock.replay.storage import Storage
from penstock.replay.view import Transitions

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
GOALS = (f"['{ACHIEVED}']", f"['{DESIRED}']")
"""Their paths in the observation."""
RewardFn = Callable[[Array, Array, dict[str, Any]], Any]
"""(achieved_goal [N, *G] after a step, desired_goal [N, *G], {}) -> reward [N].

Or the pair of it and terminated [N] bool, where reaching a goal ends an episode."""


class HindsightTransitions:
    """One-step transitions, k of k + 1 of them with another goal (Andrychowicz et al. 2017, strategy "future").

    The new goal is the one achieved after a row drawn evenly from the sample's own and those that follow it in its
    episode, as far as they are stored. It replaces `desired_goal` in both observations; the reward is computed anew,
    and so is the end of the episode, if `reward_fn` returns it; else it ends where it did. The last row of an episode
    has its own outcome as the only goal, so it stays an end whatever the reason was.

    Args:
        plain: the transitions of which these are made.
        spec: a Dict observation with `achieved_goal` and `desired_goal`.

    Raises:
        ConfigError: more than one step, or previous rewards are fed, which belong to the old goal; no such
            observation; or `reward_fn` does not return [N] for zeros.
    """

    stride, episodes, seats = 1, True, 1
    noise = 2
    """Uniforms for a sample: one decides on replacing the goal, one picks the row it comes from."""

    def __init__(self, plain: Transitions, spec: EnvSpec, reward_fn: RewardFn, k: int = 4) -> None:
        if plain.n_step != 1:
            raise ConfigError(
                f"replay.hindsight with n_step={plain.n_step}; the rewards between belong to the old goal: use n_step=1"
            )
        if "prev_reward" in plain.fed:
            raise ConfigError(
                "replay.hindsight with net.prev_reward, a reward for the goal that was; use net.prev_reward=False"
            )
        if k < 1:
            raise ConfigError(f"hindsight k={k}; expected 1 or more")
        obs: Any = spec.obs
        goals = [
            x for name in (ACHIEVED, DESIRED) if isinstance(obs, dict) and isinstance(x := obs.get(name), LeafSpec)
        ]
        if len(goals) < 2 or goals[0].shape != goals[1].shape:
            seen = sorted(obs) if isinstance(obs, dict) else type(obs).__name__
            raise ConfigError(
                f"replay.hindsight with observations {seen}; expected a Dict with achieved_goal and desired_goal, two "
                "arrays of one shape"
            )
        self._plain, self.span, self._share, self._reward_fn = plain, plain.span, k / (k + 1), reward_fn
        self._rewards(*(allocate(leaf, 2) for leaf in goals))

    def usable(self, storage: Storage, t: Rows) -> Array:
        return self._plain.usable(storage, t)

    def returns(self, storage: Storage, t: Rows, b: Rows) -> tuple[Array, Array, Rows]:
        """As `Transitions.returns`, for the old goals."""
        return self._plain.returns(storage, t, b)

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array) -> TrainBatch:
        shown = self._plain.read(storage, t, b)
        changed = np.flatnonzero(noise[:, 0] < self._share)
        if not len(changed):
            return shown
        rows, slots = t[changed], b[changed]
        ahead = storage.last(rows, slots) - rows + 1
        at = rows + (noise[changed, 1] * ahead).astype(np.int64)
        goal = storage.obs_leaf(f"['{ACHIEVED}']", storage.places(at + 1, slots))
        following: Any = shown.rows["next"]
        for obs in (shown.inputs.obs, following.obs):
            obs[DESIRED][changed] = goal
        reward, terminated = self._rewards(following.obs[ACHIEVED][changed], goal)
        out: Any = shown.rows
        out["return"][changed] = self._plain.clipped(reward)
        if terminated is not None:
            out["discount"][changed] = np.where(terminated, 0.0, self._plain.discount).astype(np.float32)
        return shown

    def _rewards(self, achieved: Array, desired: Array) -> tuple[Array, Array | None]:
        """[N] rewards, and [N] bool ends of episodes, None if the function returns none."""
        found = self._reward_fn(achieved, desired, {})
        reward, terminated = found if isinstance(found, tuple) else (found, None)
        for name, x in (("reward", reward), ("terminated", terminated)):
            if x is not None and np.shape(x) != (len(achieved),):
                raise ConfigError(
                    f"replay.reward_fn gave {name} of shape {list(np.shape(x))} for {len(achieved)} goals; expected "
                    f"[{len(achieved)}]: it must take batches"
                )
        return np.asarray(reward, np.float32), None if terminated is None else np.asarray(terminated, bool)


def find_reward_fn(path: str) -> RewardFn:
    """The function at `module:name`; of a class, the `compute_reward` of an instance made without arguments."""
    found = import_object(path)
    if isinstance(found, type):
        found = getattr(found(), "compute_reward", None)
    if not callable(found):
        raise ConfigError(
            f"replay.reward_fn={path!r} is no function, and no class that has compute_reward(achieved_goal, "
            "desired_goal, info)"
        )
    return found
