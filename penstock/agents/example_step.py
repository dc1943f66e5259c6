"""One step of an agent before any environment is stepped: examples of its info and state, and checks of its answers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.distributions import Categorical, Joint
from penstock.agents.parameters import agent_device
from penstock.core.batch import ROW_MULTIPLE, Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec, describe
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_paths, tree_structure

_ROWS = 4 * ROW_MULTIPLE
_RTOL, _ATOL = 1e-3, 1e-5  # kernels of an accelerator may add in another order


def examples(agent: Agent, spec: EnvSpec) -> tuple[Tree, Tree]:
    """Examples of the info that `act` records and of the recurrent state, one row without its leading dimension.

    Raises:
        ConfigError: `act` returned something else than (action, info, state) of the shapes that `spec` asks for.
    """
    inputs, state = _opening(agent, spec, ROW_MULTIPLE)
    noise = torch.full((ROW_MULTIPLE, agent.noise_size), 0.5, device=agent_device(agent))
    with torch.inference_mode():
        _, info, _ = _answer(agent, spec, inputs, state, noise)
    return tree_map(lambda x: x[0].detach().cpu().numpy(), info), tree_map(lambda x: x[0].detach().cpu().numpy(), state)


def check_acting(agent: Agent, spec: EnvSpec) -> None:
    """Raises ConfigError unless actions lie in the action space and follow from inputs, state and noise alone.

    Two calls of `act` with the same noise must return the same and draw from no global generator, else one seed leads
    to different runs. A few rows of null observations are acted on; nothing of the agent changes.
    """
    inputs, state = _opening(agent, spec, _ROWS)
    noise = (torch.arange(_ROWS, device=agent_device(agent)) + 0.5).div(_ROWS).unsqueeze(1).repeat(1, agent.noise_size)
    if agent.env_ranks:
        noise[:, -1] = torch.arange(_ROWS)
    name = type(agent).__name__
    with torch.inference_mode():
        once = _answer(agent, spec, inputs, state, noise)
        for path, leaf, a in zip(tree_paths(once[0]), tree_leaves(spec.action), tree_leaves(once[0])):
            _check_choices(f"act() of {name} chose action{path}", leaf, a.cpu().numpy())
        before = _generators(agent_device(agent))
        again = _answer(agent, spec, inputs, state, noise)
    drawn = [kind for kind, x in _generators(agent_device(agent)).items() if x != before[kind]]
    names = ("action", "info", "state")
    other = [
        f"{part}{path}"
        for part, xs, ys in zip(names, once, again)
        for path, x, y in zip(tree_paths(xs), tree_leaves(xs), tree_leaves(ys))
        if not torch.allclose(x.double(), y.double(), _RTOL, _ATOL, equal_nan=True)
    ]
    if not drawn and not other:
        return
    seen = f"drew from the global generator of {' and '.join(drawn)}" if drawn else f"returned another {other[0]}"
    raise ConfigError(
        f"act() of {name} {seen} in a second call with the same inputs, state and noise, so one seed would not lead to "
        "one run. Take all randomness from `noise` [B, noise_size], uniforms in (0, 1): the distributions in "
        "penstock.agents.distributions have sample(noise), those of torch.distributions and dropout draw by themselves"
    )


def _opening(agent: Agent, spec: EnvSpec, n: int) -> tuple[Inputs, Tree]:
    """Inputs of n rows of null observations that open episodes, and the state before them."""
    device = agent_device(agent)

    def rows(leaf: LeafSpec) -> Tensor:
        return torch.as_tensor(np.broadcast_to(leaf.null(), (n, *leaf.shape)).copy(), device=device)

    first = torch.ones(n, dtype=torch.bool, device=device)
    obs, action = tree_map(rows, spec.obs), tree_map(rows, spec.action)
    return Inputs(obs, action, torch.zeros(n, device=device), first), agent.initial_state(n)


def _answer(agent: Agent, spec: EnvSpec, inputs: Inputs, state: Tree, noise: Tensor) -> tuple[Tree, Tree, Tree]:
    """The answer of `act` to copies of its arguments. Raises ConfigError if it is of another form than it must be."""
    found: Any = agent.act(inputs, tree_map(torch.clone, state), noise.clone())
    place, n = f"act() of {type(agent).__name__} returned", len(inputs.first)
    if not isinstance(found, tuple) or len(found) != 3:
        seen = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        raise ConfigError(f"{place} {seen}; expected three, (action, info, state): an info to record may be {{}}")
    action, info, after = found
    if not isinstance(info, dict) or "env" in info:
        seen = f"of keys {sorted(info)}" if isinstance(info, dict) else f"of type {type(info).__name__}"
        raise ConfigError(f"{place} an info {seen}; expected a dict of tensors [B, ...] without the key 'env'")
    for name, tree, wanted in (("action", action, spec.action), ("state", after, state)):
        if tree_structure(tree) != tree_structure(wanted):
            raise ConfigError(f"{place} {name} of the form {tree_structure(tree)}; expected {tree_structure(wanted)}")
    for path, leaf, a in zip(tree_paths(action), tree_leaves(spec.action), tree_leaves(action)):
        if not isinstance(a, Tensor) or a.shape != (n, *leaf.shape):
            wanted = f"[B, {', '.join(map(str, leaf.shape))}]" if leaf.shape else "[B]"
            raise ConfigError(f"{place} action{path} {_shown(a)}; expected {wanted} for {describe(leaf)}, here B={n}")
        if leaf.kind != "box" and (a.is_floating_point() or a.is_complex()):
            raise ConfigError(f"{place} action{path} of {a.dtype}; expected an integer dtype for {describe(leaf)}")
    for name, tree in (("info", info), ("state", after)):
        for path, x in zip(tree_paths(tree), tree_leaves(tree)):
            if not isinstance(x, Tensor) or x.shape[:1] != (n,):
                raise ConfigError(f"{place} {name}{path} {_shown(x)}; expected a tensor [B, ...], here B={n}")
    return found


def _check_choices(place: str, leaf: LeafSpec, action: np.ndarray[Any, Any]) -> None:
    """Raises ConfigError for choices that a discrete leaf does not have."""
    if leaf.kind == "box":
        return
    low, size = np.asarray(leaf.start).reshape(-1), np.asarray(leaf.sizes or 2)
    flat = action.reshape(len(action), -1)
    beyond = (flat < low) | (flat >= low + size)
    if beyond.any():
        k = int(np.nonzero(beyond)[1][0])
        least, most = (np.broadcast_to(x, flat.shape[1:])[k] for x in (low, low + size - 1))
        raise ConfigError(
            f"{place} = {flat[beyond][0]}; expected {least} to {most}, as the action space is {describe(leaf)}: does "
            "the network have an output for each choice, and does the action count from the space's start?"
        )


def check_heads(agent: Agent, spec: EnvSpec) -> None:
    """Raises ConfigError if a categorical distribution of `forward` has other choices than the action space."""
    inputs, state = _opening(agent, spec, ROW_MULTIPLE)
    rows = inputs if state is None else Inputs(*(tree_map(lambda x: x.unsqueeze(0), part) for part in inputs))
    with torch.no_grad():
        dist = getattr(agent(agent.needed(rows), state), "dist", None)
    parts = dist.parts if isinstance(dist, Joint) else [dist]
    for path, leaf, part in zip(tree_paths(spec.action), tree_leaves(spec.action), parts):
        if leaf.kind != "discrete" or not isinstance(part, (Categorical, torch.distributions.Categorical)):
            continue
        logits = part.logp if isinstance(part, Categorical) else part.logits
        if logits.shape[-1] != leaf.sizes[0]:
            raise ConfigError(
                f"the head of {type(agent).__name__} has {logits.shape[-1]} choices for action{path}; the action space "
                f"is {describe(leaf)}: give it {leaf.sizes[0]} outputs"
            )


def _generators(device: torch.device) -> dict[str, Any]:
    """States of the generators that everything in the process shares, by library."""
    states = [torch.random.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    numpy: Any = np.random.get_state()
    return {
        "torch": [x.numpy().tobytes() for x in states],
        "numpy": [part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy],
        "Python's random": random.getstate(),
    }


def _shown(x: Any) -> str:
    return f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
