"""Environment fault messages, shared by all pools."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, words_of
from penstock.core.spec import EnvSpec, LeafSpec, describe
from penstock.core.tree import Tree
from penstock.envs.contract import LARGEST_REWARD, Values, describe_step_violation, describe_violation


def fail(
    where: str,
    error: BaseException,
    action: Any,
    result: Any = None,
    info_keys: Sequence[str] = (),
    spec: LeafSpec | None = None,
) -> NoReturn:
    """Raises the error for an exception in an environment, or in the handling of its `result`.

    Args:
        where: names slot, environment, method, episode, step and seed. action: the last one, None if there was none.
        spec: of the action, if it is one leaf, to say if the agent chose an action outside the space.
    """
    if isinstance(error, EnvWorkerError):  # of a wrapper, which knows no slot, unless it was raised here
        if str(error).startswith(where.partition(" of ")[0]):
            raise error
        raise type(error)(f"{where}: {error}{last(action)}") from error
    ours = error.__traceback__ is not None and error.__traceback__.tb_next is None and result is not None
    if ours and (message := describe_step_violation(result) or _describe_info(result, info_keys)):
        raise EnvContractError(f"{where}: {message}{last(action)}") from error
    text = "".join(traceback.format_exception(error))
    raise EnvWorkerError(f"{where}: {words_of(error)}{last(action)}{_beyond(action, spec)}\n{text}") from error


def refuse_step(where: str, result: Any, action: Any) -> None:
    """Raises if the answer of `step`, the observation left out, breaks the contract."""
    if message := describe_step_violation(result):
        raise EnvContractError(f"{where}: {message}{last(action)}")


def refuse_obs(where: str, obs: Any, spec: Tree, action: Any, values: Values) -> None:
    """Raises if an observation breaks its spec, in its values as far as `values` says."""
    if message := describe_violation(obs, spec, "obs", values):
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
    return f"{slot_name(name, evaluation, slot)} in {phase}() at episode {episode}, step {step}, seed {seed}"


def slot_name(name: str, evaluation: bool, slot: int) -> str:
    """A slot of the environment of this name."""
    return f"{'evaluation slot' if evaluation else 'slot'} {slot} of {name}"


def last(action: Any) -> str:
    """End of a message: the last action, if there was one."""
    if action is None:
        return ""
    text = repr(action.item() if isinstance(action, np.generic) else action)
    return f"; last action {text if len(text) <= 200 else text[:200] + '...'}"


def _beyond(action: Any, spec: LeafSpec | None) -> str:
    """A remark if the agent chose an action outside a discrete space: then the environment is not at fault."""
    if spec is None or spec.kind != "discrete" or action is None:
        return ""
    message = describe_violation(action, spec, "action")
    return f", which the agent chose ({message}): does its network have {spec.sizes[0]} outputs?" if message else ""


def _describe_info(result: Any, keys: Sequence[str]) -> str | None:
    info: dict[str, Any] = result[4]
    for key in keys:
        number = isinstance(info.get(key, 0), (bool, int, float, np.generic, np.ndarray))
        if not number or np.size(info.get(key, 0)) != 1:
            kind = type(info[key]).__name__
            other = "keep it under another key" if key == "is_success" else f"drop {key!r} from info_keys"
            return f"info[{key!r}]: got {kind}, expected one number, which is recorded; return one, or {other}"
    return None
