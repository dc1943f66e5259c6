"""`play_by_hand`: a person plays an environment by the keyboard, and the episodes may become a dataset."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.spec import EnvSpec
from penstock.core.tree import tree_map
from penstock.datasets.episode import Episode
from penstock.datasets.writer import DatasetWriter
from penstock.envs.make import EnvConfig, with_added
from penstock.envs.shutdown import close_env
from penstock.run.playing.show import called, can_open_window, frame_of, frame_rate, require_screen
from penstock.run.signals import die_of, ending_signals, handling
from penstock.workers.env_check import check_apart

_KEYS: dict[str, tuple[dict[str, Any], Any]] = {
    "CartPole": ({"left": 0, "right": 1}, None),
    "MountainCar": ({"left": 0, "right": 2}, 1),
    "Acrobot": ({"left": 0, "right": 2}, 1),
    "LunarLander": ({"left": 1, "up": 2, "right": 3}, 0),
    "FrozenLake": ({"left": 0, "down": 1, "right": 2, "up": 3}, None),
    "CliffWalking": ({"up": 0, "right": 1, "down": 2, "left": 3}, None),
    "Taxi": ({"down": 0, "up": 1, "right": 2, "left": 3, "p": 4, "d": 5}, None),
}
"""Keys of Gymnasium's environments by their id without version, and the action without a key; None: it waits.

They come before the environment's own, of which MountainCar's are codes of pygame 1.
"""
_CHOICES = "0123456789abcdefghijklmnopqrstuvwxyz"
_DIRECTIONS = (("left", "right"), ("down", "up"), ("a", "d"), ("s", "w"))
"""Keys of the first numbers of a box: its lower bound, its upper one."""


class Played(NamedTuple):
    """What a person played."""

    returns: list[float]
    steps: int
    dataset: str
    """Path and number of episodes of the dataset; "" without one."""
    stopped_by: int
    """The number of the signal that ended it; 0 for the window."""


class _Ended(Exception):
    """A signal came."""


def play_by_hand(
    config: EnvConfig,
    *,
    keys: Mapping[str, Any] | None = None,
    noop: Any = None,
    fps: int | None = None,
    seed: int | None = None,
    dataset: Path | None = None,
    append: bool = False,
) -> Played:
    """Opens a window in which the keyboard plays, until it is closed; by `gymnasium.utils.play`.

    Args:
        keys: action by key, a character or left, right, up, down, space; None for the environment's own, or those of
            `_KEYS`, or by the action space. noop: the action without a key; None waits for one.
        dataset: a folder for the episodes, the unfinished last one as truncated.

    Raises:
        ConfigError: no display, no such key, an action outside the space, or nothing to draw. MissingExtraError: no
            pygame. EnvWorkerError: the environment raised; the episodes before are kept.
    """
    if not can_open_window():
        raise ConfigError(
            "play needs a window, and there is no display (DISPLAY or WAYLAND_DISPLAY); play it elsewhere"
        )
    try:
        import pygame
        from gymnasium.utils.play import play
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise MissingExtraError("pygame", "classic") from error
    report = check_apart(config)
    if report.agents is not None:
        raise ConfigError(f"{config.name} is an environment of many agents; one keyboard plays one agent")
    config = with_added(config, {"render_mode": "rgb_array"})
    live = config.make()
    stopped: list[int] = []
    try:
        if isinstance(live, gymnasium.vector.VectorEnv):
            raise ConfigError(f"{config.name} is a batch of environments; give the one environment")
        actions, noop = _actions(live, config.name, keys, noop)
        with contextlib.ExitStack() as stack:
            stack.callback(pygame.quit)
            pygame.display.init()
            require_screen(pygame)
            codes = {_code(pygame, key): action for key, action in actions.items()}
            called(config, live.reset, seed=seed)
            frame_of(live)  # before a window opens
            note = lambda number: die_of(number) if stopped else stopped.append(number)  # noqa: E731
            stack.enter_context(handling(ending_signals(), note))
            writer = None
            if dataset is not None:
                how: Any = {"env": config.name, "append": append, "made_by": {"played": "by hand"}}
                writer = stack.enter_context(DatasetWriter(dataset, report.spec, **how))
            hand = _ByHand(live, config, report.spec, writer, seed, stopped, next(iter(codes.values())))
            with contextlib.suppress(_Ended):
                rate = frame_rate(live) if fps is None else fps
                play(hand, fps=rate, keys_to_action=codes, noop=noop, wait_on_player=noop is None)
            hand.end(truncated=True)
    except pygame.error as error:
        raise ConfigError(f"play: pygame opens no window ({error})") from error
    finally:
        close_env(live, config.name)
    kept = "" if writer is None else f"{dataset}, {writer.episodes:,} episodes"
    return Played(hand.returns, hand.steps, kept, stopped[0] if stopped else 0)


class _ByHand(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keeps the steps of an episode and writes it where it ends; a reset begins the next one by its own seed."""

    def __init__(
        self,
        env: Any,
        config: EnvConfig,
        spec: EnvSpec,
        writer: DatasetWriter | None,
        seed: int | None,
        stopped: list[int],
        first: Any,
    ) -> None:
        super().__init__(env)
        self._config, self._spec, self._writer, self._stopped = config, spec, writer, stopped
        self._seeds = itertools.repeat(None) if seed is None else itertools.count(seed)
        self._rows: list[tuple[Any, Any, float]] = []  # each step's observation before it, action and reward
        self._obs: Any = None
        self._next: int | None = None
        self._action = first
        self.returns: list[float] = []
        self.steps = 0

    def reset(self, **_: Any) -> Any:
        if self._rows or self._obs is None:
            self.end(truncated=True)
            self._next = next(self._seeds)
        self._obs, info = called(self._config, self.env.reset, seed=self._next)
        return self._obs, info

    def render(self) -> Any:
        if self._stopped:
            raise _Ended
        return self.env.render()

    def step(self, action: Any) -> Any:
        if action is not None:  # else keys that mean nothing together: the last action goes on
            self._action = action
        before = self._obs
        obs, reward, terminated, truncated, info = called(self._config, self.env.step, self._action)
        self._obs = obs
        self._rows.append((before, self._action, float(reward)))
        self.steps += 1
        if terminated or truncated:
            self.end(bool(truncated), bool(terminated))
        return obs, reward, terminated, truncated, info

    def end(self, truncated: bool, terminated: bool = False) -> None:
        """Ends the episode, if it has a step."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        obs, actions, rewards = zip(*rows)
        self.returns.append(sum(rewards))
        print(f"episode {len(self.returns):,}: return {self.returns[-1]:,.2f}, {len(rows):,} steps", flush=True)
        if self._writer is not None:
            seen, done = _stacked(self._spec.obs, [*obs, self._obs]), _stacked(self._spec.action, actions)
            self._writer.append(Episode(seen, done, np.array(rewards, np.float32), terminated, truncated))
            self._writer.flush()
        self._obs = None


def _stacked(spec: Any, rows: Any) -> Any:
    return tree_map(lambda leaf, *xs: np.stack([np.asarray(x, leaf.dtype) for x in xs]), spec, *rows)


def _actions(
    env: gymnasium.Env[Any, Any], name: str, keys: Mapping[str, Any] | None, noop: Any
) -> tuple[dict[Any, Any], Any]:
    """Actions by key or combination of keys, and the action without one. Raises ConfigError."""
    space = env.action_space
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        raise ConfigError(f"{name} has the action space {space}; by keys one plays Discrete, MultiDiscrete or Box")
    if keys is None:
        found, usual = _usual_keys(env, re.sub(r"-v\d+$", "", name.rpartition("/")[2].rpartition(":")[2]))
        noop = usual if noop is None else noop
    else:
        found = dict(keys)
    cast: Any = (lambda x: x) if isinstance(space, spaces.Discrete) else (lambda x: np.asarray(x, space.dtype))
    for key, action in (*found.items(), *([] if noop is None else [("no key", noop)])):
        try:
            inside = space.contains(cast(action))
        except (TypeError, ValueError):
            inside = False
        if not inside:
            raise ConfigError(f"play: {key} is the action {action!r}, which is not in {space}")
    if not found:
        raise ConfigError(f"play: no key for an action of {space}; say which: --keys left=0 right=1")
    return {key: cast(action) for key, action in found.items()}, None if noop is None else cast(noop)


def _usual_keys(env: gymnasium.Env[Any, Any], name: str) -> tuple[dict[Any, Any], Any]:
    space: Any = env.action_space
    if name in _KEYS and isinstance(space, spaces.Discrete):
        return _KEYS[name]
    if env.has_wrapper_attr("get_keys_to_action"):
        own = dict(env.get_wrapper_attr("get_keys_to_action")())
        return {key: action for key, action in own.items() if key != ()}, own.get((), getattr(space, "start", None))
    if isinstance(space, spaces.Discrete):
        return {key: int(space.start) + i for i, key in enumerate(_CHOICES[: int(space.n)])}, None
    if not isinstance(space, spaces.Box):
        return {}, None
    low, high = (np.where(np.isfinite(x), x, y) for x, y in ((space.low, -1.0), (space.high, 1.0)))
    rest = np.clip(np.zeros(space.shape), low, high)
    single: dict[tuple[str, ...], Any] = {}
    for i, pair in zip(range(rest.size), _DIRECTIONS):
        for key, bound in zip(pair, (low, high)):
            single[(key,)] = np.where(np.arange(rest.size).reshape(rest.shape) == i, bound, rest)
    both = {
        (*a, *b): np.where(single[a] != rest, single[a], single[b])
        for a, b in itertools.combinations(single, 2)
        if not any({*a, *b} == {*pair} for pair in _DIRECTIONS)
    }
    return single | both, rest


def _code(pygame: Any, key: Any) -> tuple[int, ...]:
    """Codes of a key or combination of keys. Raises ConfigError for an unknown one."""
    if isinstance(key, int):
        return (key,)
    names = [key] if isinstance(key, str) else list(key)
    try:
        return tuple(x if isinstance(x, int) else pygame.key.key_code(x) for x in names)
    except (ValueError, TypeError, pygame.error) as error:
        raise ConfigError(f"play: {key!r} is no key; expected a character, or left, right, up, down, space") from error
