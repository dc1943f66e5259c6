"""Episodes that are shown while a policy plays them: on video, or in a window."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from penstock.core.errors import ConfigError, EnvWorkerError, PenstockError, words_of
from penstock.core.machine import drawing_unseen, has_display
from penstock.core.noise import env_seed
from penstock.envs.make import EnvConfig, with_added
from penstock.envs.shutdown import close_env
from penstock.learn.policy_set import AnyPolicy
from penstock.run.plan import Plan
from penstock.run.playing.eval_workers import divided
from penstock.run.playing.evaluator import Evaluator
from penstock.run.playing.video import VideoWriter

Show = Callable[[Any], None]
"""Shows an environment as it is; called after each reset and step."""
_LOOK_S = 0.05
_UNSEEN = ("dummy", "offscreen")


def can_open_window() -> bool:
    """False without a display, unless SDL_VIDEODRIVER names where else pygame draws."""
    return has_display() or bool(os.environ.get("SDL_VIDEODRIVER"))


def require_screen(pygame: Any) -> None:
    """Raises EnvWorkerError if pygame, unasked, draws where nobody sees it, as it does without an answering display."""
    if (driver := pygame.display.get_driver()) in _UNSEEN and driver != os.environ.get("SDL_VIDEODRIVER"):
        raise EnvWorkerError(f"the display does not answer; pygame would draw unseen, by its driver {driver!r}")


def _drawing_pygame() -> Any:
    """The module pygame if it has a window open, else None."""
    pygame: Any = sys.modules.get("pygame")
    is_open = pygame is not None and pygame.display.get_init() and pygame.display.get_surface() is not None
    return pygame if is_open else None


class WindowClosedError(PenstockError):
    """The one who watches has closed the window, or pressed q."""


class Film:
    """Adds a frame to a video at every call; needs the extra `video`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: VideoWriter | None = None

    def __call__(self, env: Any) -> None:
        self._writer = write_frame(env, self._writer, self._path)

    def close(self) -> None:
        """Ends the video."""
        if self._writer is not None:
            self._writer.close()


class Window:
    """Waits until the next frame of `render_mode="human"` is due; where pygame draws, space pauses and q ends.

    Raises WindowClosedError, from a call, at the end by hand.
    """

    def __init__(self) -> None:
        self.frames = 0
        self._due = 0.0

    def __call__(self, env: Any) -> None:
        if (pygame := _drawing_pygame()) is not None:
            require_screen(pygame)
            self._obey(pygame)
        self.frames += 1
        if (left_s := self._due - time.monotonic()) > 0:
            time.sleep(left_s)
        self._due = time.monotonic() + 1 / frame_rate(env)

    def _obey(self, pygame: Any) -> None:
        paused = False
        while True:
            for event in pygame.event.get((pygame.QUIT, pygame.KEYDOWN)):
                if event.type == pygame.QUIT or event.key in (pygame.K_q, pygame.K_ESCAPE):
                    raise WindowClosedError("closed")
                paused ^= event.key == pygame.K_SPACE
            if not paused:
                return
            time.sleep(_LOOK_S)


class Shown:
    """A wrapper that shows the environment that it is given after each reset and step; a film ends as it closes."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self.error: PenstockError | None = None
        """The exception of showing itself, which the environment's host reports as an error of the environment."""

    def __call__(self, env: Any) -> Any:
        """The same environment, shown from now on."""
        for name in ("reset", "step"):
            setattr(env, name, functools.partial(self._shown, env, getattr(env, name)))
        env.close = functools.partial(self._closed, env.close)
        return env

    def _closed(self, close: Callable[[], Any]) -> None:
        try:
            if isinstance(self._show, Film):
                self._show.close()
        finally:
            close()

    def _shown(self, env: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        try:
            self._show(env)
        except PenstockError as error:
            self.error = error
            raise
        return found


def play_shown(
    policy: AnyPolicy, config: EnvConfig, seed: int, step: int, episodes: int, max_steps: int, show: Show
) -> None:
    """Plays deterministic episodes, one after the other, and shows each reset and step.

    Args:
        config: with a seat for every agent where there are many. step: that the policy was trained for. max_steps: an
            episode is cut there.

    Raises:
        ConfigError: a batch of environments. EnvWorkerError: the environment raised.
    """
    if config.seating is not None:
        shown = Shown(show)
        evaluator = Evaluator(replace(config, wrappers=(*config.wrappers, shown)), seed, 1)
        try:
            evaluator.play(policy, step, episodes, slots=1, max_steps=max_steps)
        except EnvWorkerError:
            if shown.error is not None:
                raise shown.error from None
            raise
        finally:
            evaluator.close()
        return
    live = config.make()
    if isinstance(live, gymnasium.vector.VectorEnv):
        live.close()
        raise ConfigError(
            f"{config.name} is a batch of environments, which has no single picture; give the one environment: "
            "record_video(run_dir, env=...), --env"
        )
    try:
        for episode in range(episodes):
            obs, _ = called(config, live.reset, seed=env_seed(seed, 0, episode, evaluation=True))
            show(live)
            state, reward = None, 0.0
            for _ in range(max_steps):
                answer = policy.predict(obs, state, prev_reward=float(reward))
                action, state = answer if policy.recurrent else (answer, None)
                obs, reward, terminated, truncated, _ = called(config, live.step, action)
                show(live)
                if terminated or truncated:
                    break
    finally:
        close_env(live, config.name)


def film_policy(plan: Plan, policy: AnyPolicy, itr: int, path: Path, give_up: Callable[[], bool]) -> None:
    """Films an episode of a policy in training, which does not notice: a worker process plays it in its evaluations'
    environment, with the time limits of the run's sampler.

    Args:
        give_up: ends the episode early where it says so.

    Raises:
        PenstockError: the environment does not render, or failed.
    """
    filming = Shown(Film(path))
    config = with_added(plan.eval_env, {"render_mode": "rgb_array"})
    config = replace(config, wrappers=(*config.wrappers, filming))
    evaluator = Evaluator(config, plan.seed, 1, divided(plan, 1))
    try:
        evaluator.play(policy, itr, 1, slots=1, max_steps=plan.exp.run.eval_max_steps, give_up=give_up)
    finally:
        evaluator.close()


def called(config: EnvConfig, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of an environment's method. Raises EnvWorkerError if that raises."""
    try:
        return method(*args, **kwargs)
    except PenstockError:
        raise
    except Exception as error:
        raise EnvWorkerError(f"{config.name} in {method.__name__}(): {words_of(error)}") from error


def frame_rate(env: Any) -> int:
    """Frames a second by the environment's metadata, else 30."""
    return max(int(env.metadata.get("render_fps", 30) or 30), 1)


def frame_of(env: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The picture that `render()` returns, [H, W, 3] uint8. Raises ConfigError that says what to change."""
    try:
        with drawing_unseen():
            frame = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"cannot render: {error}. For the classic environments: pip install 'penstock[video]'"
        ) from error
    except Exception as error:
        raise EnvWorkerError(f"render() raised {words_of(error)}") from error
    if not isinstance(frame, np.ndarray):
        raise ConfigError(
            f"render() gave {type(frame).__name__}; expected an array, uint8 [H, W, 3]: the environment must know "
            "render_mode='rgb_array'"
        )
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
        grey = "repeat grey in 3 channels" if frame.ndim == 2 or frame.shape[-1] == 1 else ""
        floats = "floats from 0 to 1 times 255 are uint8" if frame.dtype.kind == "f" else ""
        cures = [cure for cure in (grey, floats) if cure]
        cure = f"; in a wrapper, {', '.join(cures)}" if cures else ""
        raise ConfigError(f"render() gave {frame.dtype} {list(frame.shape)}; expected uint8 [H, W, 3]{cure}")
    return frame


def write_frame(env: Any, writer: VideoWriter | None, path: Path) -> VideoWriter:
    """Adds a frame to a video, which the first one begins."""
    frame = frame_of(env)
    if writer is None:
        writer = VideoWriter(path, frame_rate(env), (frame.shape[0], frame.shape[1]))
    writer.write(frame)
    return writer
