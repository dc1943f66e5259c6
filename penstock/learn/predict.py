"""Prediction: the action of an agent for observations as the environment gives them, one or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device
from penstock.core.batch import Inputs, padded_rows
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec, moved_channels
from penstock.core.tree import Tree, tree_leaves, tree_map


def predict(
    agent: Agent,
    spec: EnvSpec,
    obs: Tree,
    state: Tree,
    prev_reward: float | np.ndarray[Any, Any],
    noise: Callable[[int], Tensor] | None,
    episode_start: Any = None,
) -> Any:
    """The action, and the new state if the agent has one, as `Policy.predict` returns them.

    Args:
        noise: makes uniforms [rows, noise_size]; None for the distribution's mode.
        episode_start: as `Policy.predict` has it.
    """
    if type(obs) is np.ndarray and state is None and isinstance(spec.action, LeafSpec):
        found = _by_kernel(agent, spec, obs, noise)
        if found is not None:
            return _as_env(spec.action, found, obs.ndim == 1)
    leaves, obs = _shown(agent, spec.obs, obs)
    arrays = _obs_arrays(leaves, obs, "obs")
    each = (leaves,) if isinstance(leaves, LeafSpec) else tree_leaves(leaves)
    leads = {x.shape[: x.ndim - len(leaf.shape)] for x, leaf in zip(arrays, each)}
    if len(leads) > 1 or len(next(iter(leads))) > 1:
        raise ConfigError(f"predict got leading dimensions {sorted(leads)}; expected none, or one [N] on every leaf")
    single = leads == {()}
    n = 1 if single else len(arrays[0])
    rows, device = padded_rows(n), agent_device(agent)
    index = iter(range(len(arrays)))

    def padded(leaf: Any) -> Tensor:
        x = np.zeros((rows, *leaf.shape), leaf.dtype)
        x[:n] = arrays[next(index)]
        return torch.from_numpy(x).to(device)

    def null_action() -> Tree:
        return _mapped(
            lambda leaf: torch.from_numpy(np.broadcast_to(leaf.null(), (rows, *leaf.shape)).copy()).to(device),
            spec.action,
        )

    agent_state, prev_action = _given(state, rows) if state is not None else (agent.initial_state(rows), None)
    rewards: Any = None
    first: Any = None
    if agent_state is not None or agent.fed:  # else the networks read the observation alone
        prev_action = null_action() if prev_action is None else prev_action
        rewards = torch.zeros(rows, device=device)
        rewards[:n] = torch.as_tensor(np.asarray(prev_reward, np.float32), device=device)
        first = torch.full((rows,), state is None, device=device)
    if episode_start is not None and state is not None:
        first[:n] = torch.from_numpy(_starts(episode_start, n)).to(device)
        agent_state = _begun(first, agent_state, agent.initial_state(rows))
        prev_action = _begun(first, prev_action, null_action())
        rewards[first] = 0.0
    with torch.inference_mode():
        inputs = Inputs(_mapped(padded, leaves), prev_action, rewards, first)
        chosen, _, agent_state = agent.act(inputs, agent_state, None if noise is None else noise(rows).to(device))
    action = _mapped(lambda leaf, a: _as_env(leaf, a[:n].cpu().numpy(), single), spec.action, chosen)
    return action if agent_state is None else (action, (agent_state, chosen))


def _by_kernel(
    agent: Agent, spec: EnvSpec, obs: np.ndarray[Any, Any], noise: Callable[[int], Tensor] | None
) -> np.ndarray[Any, Any] | None:
    """[N, *A] actions for observations [N, size] or [size] by one call of the native kernel; None if they need more."""
    leaf = spec.obs
    if obs.dtype != np.float32 or not isinstance(leaf, LeafSpec) or obs.shape[-1:] != leaf.shape or obs.ndim > 2:
        return None
    acting = agent.by_kernel(noise is not None)
    if acting is None:
        return None
    seen = np.ascontiguousarray(obs if obs.ndim == 2 else obs[None])
    return acting.once(seen, None if noise is None else noise(len(seen)).numpy(), spec.action.shape)


def _mapped(function: Callable[..., Any], spec: Tree, *others: Tree) -> Tree:
    """`tree_map`, which takes ten times as long for a leaf alone."""
    return function(spec, *others) if isinstance(spec, LeafSpec) else tree_map(function, spec, *others)


def _given(state: Any, rows: int) -> tuple[Tree, Tree]:
    """The parts of a state that an earlier call returned. Raises ConfigError for another one, or of other rows."""
    if not (isinstance(state, tuple) and len(state) == 2):
        raise ConfigError(
            f"predict: state is {state!r:.60} ({type(state).__name__}); expected what the call before returned beside "
            "the action, or None"
        )
    held = {len(x) for x in tree_leaves(state)}
    if held - {rows}:
        raise ConfigError(
            f"predict: state is of {min(held)} rows, padded to a multiple of 4, and obs of {rows}; expected the state "
            "that the call before returned for as many observations"
        )
    return state


def _starts(episode_start: Any, n: int) -> np.ndarray[Any, Any]:
    """[n] bool of a bool or an array of them. Raises ConfigError for anything else."""
    starts = np.asarray(episode_start)
    if starts.dtype != bool or starts.shape not in ((), (n,), (1,)):
        raise ConfigError(
            f"predict: episode_start is {starts.dtype}{list(starts.shape)}; expected bool[{n}], True for each row that "
            "begins an episode"
        )
    return np.broadcast_to(starts, (n,)).copy()


def _begun(first: Tensor, kept: Tree, begun: Tree) -> Tree:
    """Rows [N, ...] of `begun` where an episode starts, of `kept` elsewhere."""

    def rows(x: Tensor, y: Tensor) -> Tensor:
        y = y.to(x.device)
        return torch.where(first.view(-1, *[1] * (x.ndim - 1)), y, x)

    return tree_map(rows, kept, begun)


def _shown(agent: Agent, spec: Tree, obs: Any) -> tuple[Tree, Any]:
    """The spec and the observation without what only critics see, and as a Dict where a lone array was made one."""
    if not (agent.unseen and isinstance(spec, dict)):
        return spec, obs
    leaves = {key: leaf for key, leaf in spec.items() if key not in agent.unseen}
    if isinstance(obs, Mapping):
        return leaves, {key: x for key, x in obs.items() if key not in agent.unseen}
    return leaves, dict.fromkeys(leaves, obs) if len(leaves) == 1 else obs


def _obs_arrays(spec: Tree, obs: Any, where: str) -> list[np.ndarray[Any, Any]]:
    """The leaves of an observation or a batch of them, in the order of the spec's leaves."""
    if isinstance(spec, LeafSpec):
        try:
            x = np.asarray(obs)
        except ValueError as error:
            raise ConfigError(f"predict: {where} is no array: {error}; expected shape {list(spec.shape)}") from error
        if x.dtype == object or x.shape[max(x.ndim - len(spec.shape), 0) :] != spec.shape:
            moved = moved_channels(x.shape, spec.shape, "; its channels stand at the other end: ")
            raise ConfigError(
                f"predict: {where} is {x.dtype}{list(x.shape)}; expected {spec.dtype}{list(spec.shape)}, or a batch "
                f"[N, {', '.join(map(str, spec.shape))}]{moved}"
            )
        return [_cast(x, spec, where)]
    if isinstance(spec, dict):
        if not isinstance(obs, Mapping) or set(obs) != set(spec):
            seen = sorted(map(str, obs)) if isinstance(obs, Mapping) else type(obs).__name__
            raise ConfigError(f"predict: {where} is {seen}; expected a dict with keys {sorted(spec)}")
        return [x for key in sorted(spec) for x in _obs_arrays(spec[key], obs[key], f"{where}[{key!r}]")]
    if not isinstance(obs, tuple) or len(obs) != len(spec):
        raise ConfigError(f"predict: {where} is {type(obs).__name__}; expected a tuple of {len(spec)}")
    return [x for i, part in enumerate(spec) for x in _obs_arrays(part, obs[i], f"{where}[{i}]")]


def _cast(x: np.ndarray[Any, Any], leaf: LeafSpec, where: str) -> np.ndarray[Any, Any]:
    """The values in the dtype of the record. Raises ConfigError if that changes them, and for choices that are none."""
    dtype = np.dtype(leaf.dtype)
    if x.dtype == dtype:
        cast = x
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            cast = x.astype(dtype)
            # Floats are rounded to floats, as environments do it; nothing may be cut off or overflow.
            kept = np.isfinite(cast) == np.isfinite(x) if dtype.kind == "f" else cast == x
        if not kept.all():
            hint = " (images in [0, 1]? give them as the environment does)" if leaf.is_image and x.max() <= 1.0 else ""
            raise ConfigError(
                f"predict: {where} is {x.dtype}, and {x[~kept].flat[0]} is no {leaf.dtype}; expected observations as "
                f"the environment gives them, {leaf.dtype}{list(leaf.shape)}{hint}"
            )
    if leaf.kind != "box":
        low = np.reshape(leaf.start, leaf.shape if np.ndim(leaf.start) else ())
        sizes = np.reshape(leaf.sizes, leaf.shape) if leaf.sizes else 2
        wrong = (cast < low) | (cast >= low + sizes)
        if wrong.any():
            at = np.argwhere(wrong)[0][cast.ndim - len(leaf.shape) :]
            index = tuple(map(int, at))
            least, count = np.broadcast_to(low, leaf.shape)[index], np.broadcast_to(sizes, leaf.shape)[index]
            raise ConfigError(
                f"predict: {where}{list(index) or ''} is {cast[wrong].flat[0]}; expected {least} to "
                f"{least + count - 1}, the values of its space"
            )
    return cast


def _as_env(leaf: Any, action: np.ndarray[Any, Any], single: bool) -> Any:
    if leaf.kind == "box":
        action = np.clip(action, leaf.bound("low"), leaf.bound("high"))
    action = action.astype(leaf.dtype)
    return (action[0] if leaf.shape else action[0].item() if leaf.kind != "box" else action[0]) if single else action
