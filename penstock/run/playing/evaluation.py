"""Evaluation of a policy: episodes, and video of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from penstock.core.errors import ConfigError, EnvWorkerError, PenstockError
from penstock.core.limits import require_whole
from penstock.core.noise import env_seed
from penstock.envs.make import EnvConfig, as_env_config, with_added
from penstock.envs.shutdown import close_env
from penstock.learn.policy_set import AnyPolicy
from penstock.run.entry import open_policy
from penstock.run.experiment import Experiment
from penstock.run.playing.evaluator import Evaluator, seated_for
from penstock.run.playing.video import VideoWriter
from penstock.samplers.episodes import Episodes
from penstock.samplers.trackers.evaluation import EVAL_MAX_STEPS, EVAL_SLOTS


def evaluate(
    policy: AnyPolicy | str | Path,
    env: str | Callable[..., Any] | EnvConfig | None = None,
    episodes: int = 20,
    *,
    deterministic: bool = True,
    seed: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    which: str = "last",
    slots: int | None = None,
    max_steps: int | None = None,
    trust: bool = False,
    env_options: Mapping[str, Any] | None = None,
) -> Episodes:
    """Plays exactly `episodes` episodes with a policy, in environments of their own: `.mean_return`, `.return_.std()`.

    Args:
        policy: of `ps.load`, of a result, or in training; or a run directory.
        env: an id, `module:qualname`, callable or EnvConfig; None, for a run: the environment of its evaluations.
        seed: of the episodes; None for the run's, else 0. Equal seeds are equal episodes.
        env_kwargs, env_options: added to those of the environment. which: of a run's checkpoints "last", "best", or a
            step as text.
        slots: largest number of environments side by side; None for the run's, else 16.
        max_steps: an episode is cut there, neither terminated nor longer; None for the run's, else 27,000.
        trust: allow importing and calling code that a run names; not needed for your own runs (docs/security.md).

    Raises:
        ConfigError: the environment's spaces are not those that the policy was built for.
    """
    if not isinstance(policy, AnyPolicy):
        rest: dict[str, Any] = {"max_steps": max_steps, "trust": trust, "env_options": env_options}
        return evaluate_run(policy, env, episodes, deterministic, seed, env_kwargs, which, slots, **rest)[0]
    require_whole(0, seed=seed)
    require_whole(1, episodes=episodes, slots=slots, max_steps=max_steps)
    if env is None:
        raise ConfigError("evaluate(policy) without env; pass what to play, e.g. evaluate(policy, 'CartPole-v1')")
    config = with_added(as_env_config(env), env_kwargs, env_options)
    policy, config = seated_for(policy, config, seed or 0)
    how = _limits(slots, max_steps, EVAL_SLOTS, EVAL_MAX_STEPS)
    evaluator = Evaluator(config, seed or 0, how["slots"])
    try:
        return evaluator.play(policy, 0, episodes, deterministic=deterministic, **how)
    finally:
        evaluator.close()


def evaluate_run(
    run_dir: str | Path,
    env: Any = None,
    episodes: int = 20,
    deterministic: bool = True,
    seed: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    which: str = "last",
    slots: int | None = None,
    max_steps: int | None = None,
    trust: bool = False,
    env_options: Mapping[str, Any] | None = None,
) -> tuple[Episodes, int]:
    """Like `evaluate`, with the policy of a run; returns the step of its checkpoint too."""
    require_whole(0, seed=seed)
    require_whole(1, episodes=episodes, slots=slots, max_steps=max_steps)
    policy, step, exp, config = opened(run_dir, which, env, env_kwargs, trust, env_options)
    policy, config = seated_for(policy, config, exp.run.seed, exp.sampler_settings)
    how = _limits(slots, max_steps, exp.run.eval_slots, exp.run.eval_max_steps)
    evaluator = Evaluator(config, exp.run.seed if seed is None else seed, exp.sampler_settings.spec.B)
    try:
        return evaluator.play(policy, step, episodes, deterministic=deterministic, **how), step
    finally:
        evaluator.close()


def _limits(slots: int | None, max_steps: int | None, usual_slots: int, usual_steps: int) -> dict[str, int]:
    return {
        "slots": usual_slots if slots is None else slots,
        "max_steps": usual_steps if max_steps is None else max_steps,
    }


def opened(
    run_dir: str | Path,
    which: str,
    env: Any,
    env_kwargs: Mapping[str, Any] | None,
    trust: bool,
    env_options: Mapping[str, Any] | None = None,
) -> tuple[AnyPolicy, int, Experiment, EnvConfig]:
    """Policy, step, experiment, and the environment to play in: `env`, else that of the run's evaluations."""
    policy, step, exp, config = open_policy(Path(run_dir), which, env, None, trust)
    config = exp.eval_env_config if env is None else config
    return policy, step, exp, with_added(config, env_kwargs, env_options)


def record_video(
    run_dir: str | Path,
    episodes: int = 3,
    *,
    which: str = "last",
    env: Any = None,
    env_kwargs: Mapping[str, Any] | None = None,
    trust: bool = False,
    env_options: Mapping[str, Any] | None = None,
) -> Path:
    """Records a video of deterministic episodes, one after the other; returns its path. Needs the extra `video`.

    An episode without an end is cut after the run's `eval_max_steps`.

    Raises:
        ConfigError: the environment cannot render RGB frames. MissingExtraError: no ffmpeg.
    """
    require_whole(1, episodes=episodes)
    kwargs = {**(env_kwargs or {}), "render_mode": "rgb_array"}
    policy, step, exp, config = opened(run_dir, which, env, kwargs, trust, env_options)
    path = Path(run_dir) / "videos" / f"{step:012d}.mp4"
    policy, config = seated_for(policy, config, exp.run.seed, exp.sampler_settings)
    if config.seating is not None:
        return _film(policy, config, exp, step, episodes, path)
    live = config.make()
    if isinstance(live, gymnasium.vector.VectorEnv):
        live.close()
        raise ConfigError(
            f"{config.name} is a batch of environments, which has no single picture; give the one "
            "environment: record_video(run_dir, env=...)"
        )
    writer: VideoWriter | None = None
    try:
        for episode in range(episodes):
            obs, _ = live.reset(seed=env_seed(exp.run.seed, 0, episode, evaluation=True))
            state, reward = None, 0.0
            for _ in range(exp.run.eval_max_steps):
                writer = _write_frame(live, writer, path)
                answer = policy.predict(obs, state, prev_reward=float(reward))
                action, state = answer if policy.recurrent else (answer, None)
                obs, reward, terminated, truncated, _ = live.step(action)
                if terminated or truncated:
                    break
            writer = _write_frame(live, writer, path)
    finally:
        close_env(live, config.name)
        if writer is not None:
            writer.close()
    return path


def _film(policy: AnyPolicy, config: EnvConfig, exp: Experiment, step: int, episodes: int, path: Path) -> Path:
    """Like `record_video`, for many agents: the episodes of an evaluation, with a frame for each reset and step."""
    filming = Filming(path)
    evaluator = Evaluator(replace(config, wrappers=(*config.wrappers, filming)), exp.run.seed, 1)
    try:
        evaluator.play(policy, step, episodes, slots=1, max_steps=exp.run.eval_max_steps)
    except EnvWorkerError:
        if filming.error is not None:
            raise filming.error from None
        raise
    finally:
        evaluator.close()
        filming.close()
    return path


class Filming:
    """A wrapper that adds a frame to a video after each reset and step of the environment that it is given."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: VideoWriter | None = None
        self.error: PenstockError | None = None
        """The exception of filming itself, which the environment's host reports as an error of the environment."""

    def __call__(self, env: Any) -> Any:
        """The same environment, filmed from now on."""
        for name in ("reset", "step"):
            setattr(env, name, functools.partial(self._filmed, env, getattr(env, name)))
        return env

    def _filmed(self, env: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        try:
            self._writer = _write_frame(env, self._writer, self._path)
        except PenstockError as error:
            self.error = error
            raise
        return found

    def close(self) -> None:
        """Ends the video."""
        if self._writer is not None:
            self._writer.close()


def _write_frame(env: Any, writer: VideoWriter | None, path: Path) -> VideoWriter:
    try:
        frame = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"cannot render: {error}. For the classic environments: pip install 'penstock[video]'"
        ) from error
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
    if writer is None:
        fps = int(env.metadata.get("render_fps", 30) or 30)
        writer = VideoWriter(path, fps, (frame.shape[0], frame.shape[1]))
    writer.write(frame)
    return writer
