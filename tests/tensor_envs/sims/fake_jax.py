"""Stand-ins for JAX, Brax and MuJoCo Playground over NumPy: what the adapter of pure states uses, and the ring."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tensor_envs.sims.fakes import LIMIT, module


@dataclasses.dataclass
class State:
    """`State` of Playground and Brax, of all slots."""

    data: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict[str, Any]
    info: dict[str, Any]

    def replace(self, **changed: Any) -> State:
        return dataclasses.replace(self, **changed)


class RingEnv:
    """The ring as pure functions; `data` is the states of the slots, and a buffer that they share."""

    observation_size: Any = 3
    action_size = 1
    grouped, drawn = False, False

    def observe(self, state: Any) -> Any:
        flat = np.eye(3, dtype=np.float32)[state]
        return {"state": flat, "privileged_state": flat[:, :1]} if self.grouped else flat

    def reset(self, keys: Any) -> State:
        opening = (keys.sum(1) if self.drawn else keys[:, 1]).astype(np.int64) % 3
        zeros = np.zeros(len(keys), np.float32)
        info = {"AutoResetWrapper_preserve_info": zeros}
        return State((opening, np.zeros(99)), self.observe(opening), zeros, zeros, {"track": zeros}, info)

    def step(self, state: State, action: Any) -> State:
        before, shared = state.data
        after, done = (before + 1) % 3, (action[:, 0] > 0.5).astype(np.float32)
        info = {**state.info, "AutoResetWrapper_preserve_info": state.info["AutoResetWrapper_preserve_info"] + 1}
        paid = (before == 2).astype(np.float32)
        return State((after, shared + 1), self.observe(after), paid, done, {"track": paid * 0 + 0.5}, info)


class EpisodeWrapper:
    """Brax's: counts steps, and `done` includes the time limit, which `truncation` tells apart."""

    def __init__(self, env: Any, episode_length: int, action_repeat: int) -> None:
        self.env, self.episode_length, self.action_repeat = env, episode_length, action_repeat

    def reset(self, keys: Any) -> State:
        state = self.env.reset(keys)
        zeros = np.zeros(len(keys), np.float32)
        return state.replace(info={**state.info, "steps": zeros, "truncation": zeros})

    def step(self, state: State, action: Any) -> State:
        after = self.env.step(state, action)
        steps = state.info["steps"] + self.action_repeat
        over = steps >= self.episode_length
        info = {**after.info, "steps": steps, "truncation": np.where(over, 1 - after.done, 0 * after.done)}
        return after.replace(info=info, done=np.where(over, np.ones_like(after.done), after.done))


def split(key: Any, count: int = 2) -> Any:
    drawn = np.random.SeedSequence(key.tolist()).generate_state(count)
    return np.stack([drawn, np.full(count, key[1], np.uint32)], 1)


def tree_map(f: Callable[..., Any], x: Any, *more: Any) -> Any:
    if isinstance(x, dict):
        return {key: tree_map(f, x[key], *(y[key] for y in more)) for key in x}
    if isinstance(x, tuple):
        return tuple(tree_map(f, *xs) for xs in zip(x, *more))
    if isinstance(x, State):
        names = [field.name for field in dataclasses.fields(State)]
        return State(*(tree_map(f, getattr(x, name), *(getattr(y, name) for y in more)) for name in names))
    return f(x, *more)


def devices(kind: str = "cpu") -> list[str]:
    if kind != "cpu":
        raise RuntimeError(f"Unknown backend {kind}")
    return ["cpu:0"]


class Config:
    """Settings of a task, as a `ConfigDict` has them."""

    def __init__(self) -> None:
        self.episode_length, self.action_repeat, self.ctrl_dt = LIMIT, 1, 0.02

    def to_dict(self) -> dict[str, Any]:
        return vars(self)

    def get(self, name: str, default: Any) -> Any:
        return vars(self).get(name, default)

    def update_from_flattened_dict(self, given: dict[str, Any]) -> None:
        vars(self).update(given)


class Grouped(RingEnv):
    observation_size = {"state": (3,), "privileged_state": (1,)}  # noqa: RUF012
    grouped = True


class Drawn(RingEnv):
    drawn = True


ENVS: dict[str, type[RingEnv]] = {"Ring": RingEnv, "GroupedRing": Grouped, "DrawnRing": Drawn}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-ins where the adapter imports JAX, Brax and Playground from."""
    random = types.SimpleNamespace(PRNGKey=lambda seed: np.array([0, seed], np.uint32), split=split)
    module(
        monkeypatch,
        "jax",
        numpy=np,
        random=random,
        jit=lambda f: f,
        devices=devices,
        device_put=lambda x, device: x,
        lax=types.SimpleNamespace(cond=lambda which, yes, no, x: yes(x) if which else no(x)),
        tree=types.SimpleNamespace(map=tree_map),
        dlpack=types.SimpleNamespace(from_dlpack=lambda x: x.numpy()),
    )
    module(monkeypatch, "brax.envs", get_environment=lambda name: ENVS[name]())
    module(monkeypatch, "brax.envs.wrappers.training", EpisodeWrapper=EpisodeWrapper, VmapWrapper=lambda env: env)
    registry = types.SimpleNamespace(
        ALL_ENVS=tuple(ENVS), get_default_config=lambda name: Config(), load=lambda name, config: ENVS[name]()
    )
    module(monkeypatch, "mujoco_playground", registry=registry)
