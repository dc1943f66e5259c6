"""Environment fault messages, shared by all pools."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.core.spec import EnvSpec, describe
from penstock.core.tree import Tree, tree_map
from penstock.envs.contract import LARGEST_REWARD, describe_step_violation, describe_violation


class Watched(Protocol):
    """The part of a pool that a check of its last row reads."""

    spec: EnvSpec
    episode: list[int]
    began: list[int]
    tick: int

    def row_is_sound(self, row: Tree, /) -> bool: ...
    def where(self, b: int, phase: str) -> str: ...


def check_values(pool: Watched, obs_row: Tree, rewards: list[Any], actions: Sequence[Any], everyone: bool) -> None:
    """Raises for a value that is not finite or out of its space in a row, first episodes only unless `everyone`."""
    if not math.hypot(*rewards) < LARGEST_REWARD:
        for b, reward in enumerate(rewards):
            refuse_reward(pool.where(b, "step"), reward, actions[b])
    if pool.row_is_sound(obs_row):
        return
    for b, episode in enumerate(pool.episode):
        if everyone or episode == 0:
            phase, action = ("step", actions[b]) if pool.tick > pool.began[b] else ("reset", None)
            refuse_obs(pool.where(b, phase), tree_map(lambda x, b=b: x[b], obs_row), pool.spec.obs, action)


def fail(where: str, error: BaseException, action: Any, result: Any = None, info_keys: Sequence[str] = ()) -> NoReturn:
    """Raises for an exception out of an environment, or out of the handling of its `result`.

    Args:
        where: names slot, environment, method, episode, step and seed. action: the last one, None if there was none.
    """
    ours = error.__traceback__ is not None and error.__traceback__.tb_next is None and result is not None
    if ours and (message := describe_step_violation(result) or _describe_info(result, info_keys)):
        raise EnvContractError(f"{where}: {message}{last(action)}") from error
    text = "".join(traceback.format_exception(error))
    raise EnvWorkerError(f"{where}: {type(error).__name__}: {error}{last(action)}\n{text}") from error


def refuse_step(where: str, result: Any, action: Any) -> None:
    """Raises if the answer of `step`, the observation left out, breaks the contract."""
    if message := describe_step_violation(result):
        raise EnvContractError(f"{where}: {message}{last(action)}")


def refuse_obs(where: str, obs: Any, spec: Tree, action: Any) -> None:
    """Raises if an observation breaks its spec."""
    if message := describe_violation(obs, spec, "obs"):
        raise EnvContractError(f"{where}: {message}{last(action)}")


def refuse_reward(where: str, reward: Any, action: Any) -> None:
    """Raises if a reward is not finite in float32."""
    if not -LARGEST_REWARD < reward < LARGEST_REWARD:
        raise EnvContractError(
            f"{where}: reward: got {reward}, expected a finite number that fits float32; look for a "
            f"division by zero{last(action)}"
        )


def one_spec(specs: Sequence[EnvSpec], name: str) -> EnvSpec:
    """The one spec that all instances of an environment have. Raises ConfigError where they differ."""
    for spec in specs:
        if spec != specs[0]:
            raise ConfigError(
                f"{name} differs between instances: one shows {describe(specs[0].obs)} and takes "
                f"{describe(specs[0].action)}, another shows {describe(spec.obs)} and takes {describe(spec.action)}; "
                "make its spaces the same in every instance"
            )
    return specs[0]


def slot_at(name: str, evaluation: bool, slot: int, phase: str, episode: int, step: int, seed: int) -> str:
    """Start of a message: slot, environment, method, episode, step and seed."""
    kind = "evaluation slot" if evaluation else "slot"
    return f"{kind} {slot} of {name} in {phase}() at episode {episode}, step {step}, seed {seed}"


def last(action: Any) -> str:
    """End of a message: the last action, if there was one."""
    if action is None:
        return ""
    text = repr(action.item() if isinstance(action, np.generic) else action)
    return f"; last action {text if len(text) <= 200 else text[:200] + '...'}"


def _describe_info(result: Any, keys: Sequence[str]) -> str | None:
    info: dict[str, Any] = result[4]
    for key in keys:
        number = isinstance(info.get(key, 0), (bool, int, float, np.generic, np.ndarray))
        if not number or np.ndim(info.get(key, 0)):
            kind = type(info[key]).__name__
            return f"info[{key!r}]: got {kind}, expected one number; return one, or drop {key!r} from info_keys"
    return None
