"""Conformance suite for agents: acting is a pure function of a row, and `forward` agrees with the record of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent, check_agent_members
from penstock.agents.parameters import agent_device, parameters_of
from penstock.core.batch import Inputs, SampleBatch, padded_rows
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_paths, tree_structure
from penstock.envs.actions import action_noise_size, sample_action
from penstock.testing.records import expect, same

_TOLERANCE = (1e-4, 1e-5)
"""Relative and absolute, between acting row by row and one forward over a batch, which multiply by other kernels."""


def check_agent(
    agent: Agent | Callable[[EnvSpec, Any], Agent],
    spec: EnvSpec,
    settings: Any = None,
    *,
    T: int = 6,
    B: int = 16,
    seed: int = 0,
    explores: bool = True,
) -> None:
    """Raises AssertionError, with the row and the values seen, unless an agent acts and answers as samplers rely on.

    A copy of the agent acts T times for B slots on random observations, then once more in several ways: again, in
    parts, in reverse order, with other noise, and with other memories where `first`. Then `forward` and `values` see
    the record.

    Args:
        agent: an agent, or the `agent_fn(spec, settings)` of an algorithm.
        T: rows acted on. B: slots, at least 8.
        explores: other noise must lead to another action. False for exploration by parameters, such as noisy layers.

    Raises:
        ConfigError: the agent lacks a member. AssertionError: it breaks a promise.
    """
    given = agent if isinstance(agent, Agent) else agent(spec, settings)
    check_agent_members(given)
    n = padded_rows(max(B, 8))
    acting = _Watched(copy.deepcopy(given), spec, n)
    own, device = acting.agent, agent_device(given)

    size, rows = action_noise_size(spec.obs), (T + 1, n)
    drawn = sample_action(spec.obs, uniform(seed, Purpose.CHECK, 0, slice(0, n), T + 1, size).reshape(-1, size))
    obs = tree_map(lambda x: torch.from_numpy(x).to(device).unflatten(0, rows), drawn)
    first = torch.zeros(rows, dtype=torch.bool, device=device)
    first[0], first[T // 2, ::3] = True, True
    null = tree_map(lambda x: torch.as_tensor(x, device=device), spec.null_action)
    actions = tree_map(lambda x: x.expand(*rows, *x.shape).clone(), null)
    x = Inputs(obs, actions, torch.linspace(-1.0, 1.0, (T + 1) * n, device=device).view(rows), first)
    u = uniform(seed, Purpose.ACT, 0, slice(0, n), T + 2, own.noise_size)
    noise = torch.from_numpy(u).to(device)
    if own.env_ranks:
        noise[..., -1] = torch.arange(n, device=device)

    state = opening = acting.initial_state()
    infos: list[Any] = []
    for t in range(T):
        action, info, state = acting(_row(x, t), state, noise[t], f"row {t}")
        infos.append(info)
        expect(tree_structure(info) == tree_structure(infos[0]), f"row {t}", f"info {info}; row 0 had {infos[0]}")
        tree_map(lambda held, a, t=t: held[t + 1].copy_(a), x.prev_action, action)

    _check_acting(acting, _row(x, T), state, noise[T], noise[T + 1] if explores else None)
    _check_first(acting, _row(x, T), state, opening, noise[T], null)
    _check_forward(own, x, opening, tree_map(lambda *rows: torch.stack(rows).clone(), *infos))


class _Watched:
    """Wraps an agent to check the results of `act`, and that it leaves its inputs unchanged."""

    def __init__(self, agent: Agent, spec: EnvSpec, B: int) -> None:
        self.agent, self.spec, self.B = agent, spec, B
        agent.set_slots(B)

    def initial_state(self) -> Tree:
        """[B, ...] before an episode, with the same shapes and values for any number of slots."""
        state, fewer = self.agent.initial_state(self.B), self.agent.initial_state(4)
        for path, s, y in zip(tree_paths(state), tree_leaves(state), tree_leaves(fewer), strict=True):
            place, shapes = f"initial_state{path}", (tuple(s.shape), tuple(y.shape))
            expect(
                shapes == ((self.B, *s.shape[1:]), (4, *s.shape[1:])),
                place,
                f"shapes {shapes} for {self.B} and 4 slots; expected [B, ...]",
            )
            same(s[:4].cpu(), y.cpu(), place, "slot differs from that of fewer slots")
        return state

    def __call__(self, inputs: Inputs, state: Tree, noise: Tensor | None, place: str) -> tuple[Tree, Tree, Tree]:
        given = tree_map(torch.clone, (tuple(inputs), state, noise))
        before = [x.detach().clone() for x in parameters_of(self.agent).values()]
        generators = _generators()
        with torch.inference_mode():
            action, info, after = self.agent.act(Inputs(*given[0]), given[1], given[2])
        expect(_generators() == generators, place, "act drew from a global generator of torch, numpy or Python")
        _same(given, (tuple(inputs), state, noise), place, "act wrote to its inputs, state or noise")
        for (name, x), old in zip(parameters_of(self.agent).items(), before):
            same(x.detach().cpu(), old.cpu(), place, f"act changed {name}")
        self._check_shapes(action, info, after, state, len(inputs.first), place)
        return action, info, after

    def _check_shapes(self, action: Tree, info: Any, after: Tree, state: Tree, n: int, place: str) -> None:
        expect(isinstance(info, dict) and "env" not in info, place, f"info is {info!r}; expected a dict without 'env'")
        for path, x in zip(tree_paths(info), tree_leaves(info)):
            seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            expect(isinstance(x, Tensor) and x.shape[:1] == (n,), place, f"info{path} is {seen}; expected [{n}, ...]")
        kinds = [[(x.dtype, tuple(x.shape)) for x in tree_leaves(tree)] for tree in (after, state)]
        expect(kinds[0] == kinds[1], place, f"state after act {kinds[0]}; expected as before it {kinds[1]}")
        found, wanted = tree_structure(action), tree_structure(self.spec.action)
        expect(found == wanted, place, f"action is {found}; expected {wanted}")
        for path, leaf, a in zip(tree_paths(action), tree_leaves(self.spec.action), tree_leaves(action)):
            where = f"{place}, action{path}"
            expect(a.shape == (n, *leaf.shape), where, f"shape {tuple(a.shape)}; expected {(n, *leaf.shape)}")
            boxes = leaf.kind == "box"
            expect(a.dtype.is_floating_point == boxes, where, f"{a.dtype} for a {leaf.kind} leaf of {leaf.dtype}")
            low, size = np.asarray(leaf.start), np.asarray(leaf.sizes or 2)
            flat = a.cpu().numpy().reshape(n, -1)
            held = np.isfinite(flat) if boxes else (flat >= low) & (flat < low + size)
            held &= flat.astype(leaf.dtype) == flat  # the record stores the spec's dtype
            expect(bool(held.all()), where, f"{flat[~held][:1]} is no value of {leaf}")


def _check_acting(acting: _Watched, x: Inputs, state: Tree, noise: Tensor, other: Tensor | None) -> None:
    """A row must be a function of its own inputs, state and noise alone. `other`: noise that should change it."""
    for u, kind in ((noise, "with noise"), (None, "without noise")):
        whole = acting(x, state, u, kind)
        _same(acting(x, state, u, kind), whole, kind, "the same call returned something else")
        order = torch.arange(len(x.first), device=x.first.device)
        for rows in (order[:4], order[4:8], order[4:], order.flip(0)):
            few = tree_map(lambda v, rows=rows: v[rows], (tuple(x), state, u))
            shown = acting(Inputs(*few[0]), few[1], few[2], kind)
            _same(shown, tree_map(lambda v, rows=rows: v[rows], whole), kind, "a row depends on the rows beside it")
    if other is not None and acting.agent.noise_size:
        actions = [acting(x, state, u, "with noise")[0] for u in (noise, other)]
        moved = any(not torch.equal(a, b) for a, b in zip(*map(tree_leaves, actions)))
        expect(moved, "with noise", "other noise led to the same actions; is the noise used?")


def _check_first(acting: _Watched, x: Inputs, state: Tree, opening: Tree, noise: Tensor, null: Tree) -> None:
    """State, previous action and previous reward must count as null where `first`."""
    anew = x._replace(first=torch.ones_like(x.first))
    expected = acting(anew, opening, noise, "first")
    _same(acting(anew, state, noise, "first"), expected, "first", "an opening row depends on the state before it")
    blank = tree_map(lambda a, n: n.expand_as(a).clone(), x.prev_action, null)
    blank = anew._replace(prev_action=blank, prev_reward=torch.zeros_like(x.prev_reward))
    seen = acting(blank, opening, noise, "first")
    _same(seen, expected, "first", "an opening row depends on the action or reward before it")


def _check_forward(agent: Agent, x: Inputs, opening: Tree, info: dict[str, Any]) -> None:
    """A forward over the record must agree with it, where it has a distribution or values."""
    T, B = len(x.first) - 1, len(x.first[0])
    still = torch.zeros(T, B, dtype=torch.bool, device=x.first.device)
    batch = SampleBatch(x.obs, x.first, x.prev_action, x.prev_reward, still, still, ~still, info, opening, still)
    flat = opening is None
    acted = agent.needed(batch.inputs_t.flat() if flat else batch.inputs_t)
    out = agent(acted, opening)
    if hasattr(out, "dist") and "logp" in info:
        action = tree_map(lambda a: a.flatten(0, 1) if flat else a, batch.action)
        logp = out.dist.log_prob(action).detach().view(T, B)
        expect(
            torch.allclose(logp, info["logp"], *_TOLERANCE),
            "forward",
            f"log_prob {_worst(logp, info['logp'])} of the action that was recorded with it",
        )
    if hasattr(out, "value"):
        value, values = out.value.detach().view(T, B), agent.values(batch)
        expect(values.shape == (T + 1, B), "values", f"shape {tuple(values.shape)}; expected {(T + 1, B)}")
        expect(torch.allclose(values[:T], value, *_TOLERANCE), "values", f"{_worst(values[:T], value)} of forward")


def _row(x: Inputs, t: int) -> Inputs:
    return Inputs(*(tree_map(lambda leaf: leaf[t], part) for part in x))


def _same(got: Tree, expected: Tree, place: str, what: str) -> None:
    for path, x, y in zip(tree_paths(got), tree_leaves(got), tree_leaves(expected), strict=True):
        same(x.cpu(), y.cpu(), place, f"{what}{f' ({path})' if path else ''}")


def _worst(got: Tensor, expected: Tensor) -> str:
    at = int((got - expected).abs().argmax())
    return f"{float(got.flatten()[at]):.6g} in place of {float(expected.flatten()[at]):.6g}"


def _generators() -> tuple[Any, ...]:
    """States of the global generators, from which nothing may draw."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), keys.tobytes(), rest, torch.random.get_rng_state().numpy().tobytes()  # pyright: ignore
