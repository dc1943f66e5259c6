"""Remarks on an environment for the first lines of a run: its masks, and wrappers with running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from penstock.core.spec import MASK_KEY
from penstock.envs.make import EnvConfig
from penstock.envs.wrappers import ActionMask, masks_itself, why_unmasked

_MOST_LAYERS = 100


def mask_note(config: EnvConfig, env: Any) -> str:
    """Remark on an environment's `action_masks()`: that it masks actions, or why it is not asked; "" without it.

    Args:
        env: as `config` makes it.
    """
    if config.mask_key is not None or not isinstance(env, gym.Env) or not masks_itself(env):
        return ""
    if isinstance(env, ActionMask):
        return (
            f"{config.name} masks its actions by action_masks(), shown as obs[{MASK_KEY!r}]; --env-mask '' "
            "(env_mask='') leaves them unmasked"
        )
    why = why_unmasked(env)
    return f"action_masks() of {config.name} is not asked: {why}" if MASK_KEY not in why else ""


def stateful_note(config: EnvConfig, env: Any) -> str:
    """A warning about wrappers with running statistics, such as gymnasium's NormalizeObservation; "" if there are none.

    Args:
        env: as `config` makes it, of one agent, of many or batched.
    """
    found: dict[str, str] = {}
    for layer in _layers(env):
        own = vars(layer) if hasattr(layer, "__dict__") else {}
        running = [name for name, value in {**own, "": layer}.items() if _is_running(value)]
        for name in running if getattr(layer, "update_running_mean", True) else ():
            found[type(layer).__name__] = "normalize_reward" if "ret" in name or "rew" in name else "normalize_obs"
    if not found:
        return ""
    ours = list(dict.fromkeys(found.values()))
    options = ", ".join(f"--algo.net.{name.replace('_', '-')} True" for name in ours)
    return (
        f"{config.name} is wrapped in {' and '.join(found)}, whose statistics outlive episodes: every slot has its "
        "own, no checkpoint keeps them, and each evaluation begins with empty ones, so that eval/mean_reward, the best "
        "checkpoint and a resumed run are of another environment than the one that was learned; take it out and use "
        f"{' and '.join(f'net.{name}=True' for name in ours)} ({options}), which is saved with the networks"
    )


def _is_running(value: Any) -> bool:
    """True for an object with a running mean, as numbers: arrays and tables have methods of these names."""
    own = getattr(value, "__dict__", {})
    return {"mean", "count"} <= own.keys() and ("var" in own or "std" in own) and not callable(own["mean"])


def _layers(env: Any) -> Iterator[Any]:
    """An environment, those it wraps, and the members of a batch, as far as they are in this process."""
    for _ in range(_MOST_LAYERS):
        yield env
        for part in getattr(env, "envs", ()) if isinstance(env, gym.vector.SyncVectorEnv) else ():
            yield from _layers(part)
        own = vars(env) if hasattr(env, "__dict__") else {}
        below = next((own[name] for name in ("env", "aec_env", "par_env") if name in own), None)
        if below is None:
            return
        env = below
