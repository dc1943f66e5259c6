"""The hindsight view: transitions with their goal replaced by one that was reached later in the episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.core.batch import TrainBatch
from penstock.core.config import import_object
from penstock.core.errors import ConfigError, PenstockError, words_of
from penstock.core.spec import EnvSpec, LeafSpec, allocate, describe
from penstock.replay.columns import Array, Rows
from penstock.replay.storage import Storage
from penstock.replay.view import Transitions

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
GOALS = (f"['{ACHIEVED}']", f"['{DESIRED}']")
"""Their paths in the observation."""
RewardFn = Callable[[Array, Array, dict[str, Any]], Any]
"""(achieved_goal [N, *G] after a step, desired_goal [N, *G], {}) -> reward [N].

Or the pair of it and terminated [N] bool, where reaching a goal ends an episode."""
_STEP = 1e-5
"""Relative change of the difference of two goals that is above what rounding to float32 makes of it."""


class HindsightTransitions:
    """One-step transitions, k of k + 1 of them with another goal (Andrychowicz et al. 2017, strategy "future").

    The new goal is the one achieved after a row drawn evenly from the sample's own and those that follow it in its
    episode, as far as they are stored. It replaces `desired_goal` in both observations; the reward is computed anew,
    and so is the end of the episode, if `reward_fn` returns it; else it ends where it did. The last row of an episode
    has its own outcome as the only goal, so it stays an end.

    Args:
        plain: the transitions of which these are made.
        spec: a Dict observation with `achieved_goal` and `desired_goal`.

    Raises:
        ConfigError: more than one step, or previous rewards are fed, which belong to the old goal; no such
            observation; or `reward_fn` does not return [N] for zeros. From the first `read` for a policy: it rewards
            the goals of real rows otherwise than the environment did.
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
            seen = sorted(obs) if isinstance(obs, dict) else describe(obs)
            raise ConfigError(
                f"replay.hindsight with observations {seen}; expected a Dict with achieved_goal and desired_goal, two "
                "arrays of one shape"
            )
        self._plain, self.span, self._share, self._reward_fn = plain, plain.span, k / (k + 1), reward_fn
        self.compares = False
        """The next `read` compares the rewards of real rows with those of `reward_fn`; once."""
        self._zeros = [allocate(leaf, 2) for leaf in goals]
        if not isinstance(reward_fn, EnvReward) or reward_fn.ready:
            self._rewards(*self._zeros)

    def play_in(self, make: Callable[[], Any]) -> None:
        """Has goals rewarded by the environment that `make` makes, where `reward_fn` names its class.

        Raises:
            ConfigError: it has no compute_reward that works.
        """
        if isinstance(self._reward_fn, EnvReward):
            self._reward_fn.play_in(make)
            self._rewards(*self._zeros)

    @property
    def discount(self) -> float:
        return self._plain.discount

    def set_discount(self, discount: float) -> None:
        self._plain.set_discount(discount)

    def usable(self, storage: Storage, t: Rows) -> Array:
        return self._plain.usable(storage, t)

    def returns(self, storage: Storage, t: Rows, b: Rows) -> tuple[Array, Array, Rows]:
        """Like `Transitions.returns`, for the old goals."""
        return self._plain.returns(storage, t, b)

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array) -> TrainBatch:
        shown = self._plain.read(storage, t, b)
        if self.compares:
            self._compare(shown)
            self.compares = False
        changed = np.flatnonzero(noise[:, 0] < self._share)
        if not len(changed):
            return shown
        rows, slots = t[changed], b[changed]
        ahead = storage.last(rows, slots) - rows + 1
        at = rows + (noise[changed, 1] * ahead).astype(np.int64)
        goal = storage.seen_after(f"['{ACHIEVED}']", at, slots)
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
        try:
            found = self._reward_fn(achieved, desired, {})
        except PenstockError:
            raise
        except Exception as error:
            raise ConfigError(
                f"replay.reward_fn raised {words_of(error)} for achieved and desired goals of shape "
                f"{list(np.shape(achieved))} and info {{}}: no info is known of goals that were not pursued; name a "
                "function of batches of goals alone, or use hindsight=0"
            ) from error
        reward, terminated = found if isinstance(found, tuple) else (found, None)
        for name, x in (("reward", reward), ("terminated", terminated)):
            if x is not None and np.shape(x) != (len(achieved),):
                raise ConfigError(
                    f"replay.reward_fn gave {name} of shape {list(np.shape(x))} for {len(achieved)} goals; expected "
                    f"[{len(achieved)}]: it must take batches"
                )
        return np.asarray(reward, np.float32), None if terminated is None else np.asarray(terminated, bool)

    def _compare(self, shown: TrainBatch) -> None:
        """Raises ConfigError unless the goals that real rows had are rewarded as the environment rewarded them."""
        following: Any = shown.rows["next"]
        now: Any = shown.inputs.obs
        achieved, paid = following.obs[ACHIEVED], shown.rows["return"]
        atol = _STEP * max(1.0, *(float(np.abs(x).max(initial=0)) for x in (achieved, now[DESIRED])))
        scales = (1.0 - _STEP, 1.0 + _STEP, 1.0) if achieved.dtype.kind == "f" else (1.0,)
        differs, said = np.ones(len(paid), bool), paid
        for desired in (following.obs[DESIRED], now[DESIRED]):  # some environments change a goal as it is reached
            for scale in scales:  # at a threshold rounding decides, and replay may have rounded
                near = achieved if scale == 1.0 else (desired + (achieved - desired) * scale).astype(achieved.dtype)
                said = self._plain.clipped(self._rewards(near, desired)[0])
                differs &= ~np.isclose(said, paid, rtol=1e-3, atol=atol)
        if differs.any():
            row = int(np.argmax(differs))
            raise ConfigError(
                f"replay.reward_fn pays {said[row]:g} for achieved_goal {achieved[row].tolist()} and desired_goal "
                f"{now[DESIRED][row].tolist()}, where the environment paid {paid[row]:g}; {int(differs.sum())} of "
                f"{len(paid)} rows differ: name a function that pays as the environment does with its arguments and "
                "wrappers, give a wrapper that changes rewards a compute_reward of its own, or use hindsight=0"
            )


class EnvReward:
    """The `compute_reward` of an environment: of one made by `play_in` if it is of that class, else without arguments.

    The outermost wrapper that has a `compute_reward` is asked. Another process makes the environment anew.

    Args:
        cls: None for any class, which only `play_in` can make.
    """

    def __init__(self, path: str, cls: type | None) -> None:
        self._path, self._cls = path, cls
        self._make: Callable[[], Any] | None = None
        self._call: RewardFn | None = None

    @property
    def ready(self) -> bool:
        """False if the class needs arguments and `play_in` has not been called yet."""
        return self._make is not None or self._is_bare()

    def play_in(self, make: Callable[[], Any]) -> None:
        """Takes what makes the environment of a run."""
        self._make, self._call = make, None

    def __call__(self, achieved: Array, desired: Array, info: dict[str, Any]) -> Any:
        if self._call is None:
            self._call = self._found()
        return self._call(achieved, desired, info)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_call": None}

    def _found(self) -> RewardFn:
        layers: list[Any] = [] if self._make is None else [self._make()]
        while layers and (below := getattr(layers[-1], "env", None)) is not None:
            layers.append(below)
        if self._cls is None or any(isinstance(layer, self._cls) for layer in layers):
            calls = [call for layer in layers if (call := getattr(layer, "compute_reward", None)) is not None]
            if calls:
                return calls[0]
        if self._cls is None:
            what = f"{type(layers[-1]).__name__} has no" if layers else "there is no environment yet that has a"
            raise ConfigError(
                f"replay.hindsight without replay.reward_fn, and {what} compute_reward(achieved_goal, desired_goal, "
                "info); name what rewards another goal: reward_fn='module:function', or 'module:Env'"
            )
        if not self._is_bare():
            raise ConfigError(
                f"replay.reward_fn={self._path!r} needs arguments, which only the environment of a run has, and "
                f"{'there is none yet' if not layers else f'that one is a {type(layers[-1]).__name__}'}; name a "
                "function of goals, or train the environment of this class"
            )
        return self._cls().compute_reward

    def _is_bare(self) -> bool:
        """True if the class can be called without arguments."""
        if self._cls is None:
            return False
        try:
            inspect.signature(self._cls).bind()
        except (TypeError, ValueError):
            return False
        return True


def find_reward_fn(path: str) -> RewardFn:
    """The function at `module:name`, or the `EnvReward` of a class; "": of whatever environment is played."""
    if not path:
        return EnvReward(path, None)
    found = import_object(path)
    if isinstance(found, type) and callable(getattr(found, "compute_reward", None)):
        return EnvReward(path, found)
    if isinstance(found, type) or not callable(found):
        raise ConfigError(
            f"replay.reward_fn={path!r} is no function, and no class that has compute_reward(achieved_goal, "
            "desired_goal, info)"
        )
    return found
