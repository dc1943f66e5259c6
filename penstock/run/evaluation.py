"""Evaluation of a trained policy: episodes and video of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.noise import env_seed
from penstock.envs.closing import close_env
from penstock.envs.pools.native import makes_vector_env
from penstock.run.entry import open_policy
from penstock.run.video import VideoWriter
from penstock.samplers.episodes import Episodes
from penstock.samplers.serial import SerialSampler
from penstock.workers.checking import check_apart


def evaluate(
    run_dir: str | Path,
    episodes: int = 20,
    *,
    which: str = "last",
    deterministic: bool = True,
    seed: int | None = None,
    env: Any = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Episodes, int]:
    """Plays exactly `episodes` episodes with the policy of a run; returns them and the step of its checkpoint.

    Args:
        which: "last", "best" by evaluation, or a step as text.
        env: the environment again, where it could not be stored (a lambda). env_kwargs: added to the run's.
    """
    if episodes < 1:
        raise ConfigError(f"episodes={episodes}; expected at least 1")
    policy, step, exp, config = open_policy(Path(run_dir), which, env, env_kwargs)
    check_apart(config, exp.run.seed, exp.sampler_settings)
    B = exp.sampler_settings.spec.B if makes_vector_env(config) else 1  # its training slots are never stepped
    sampler = SerialSampler(T=1, B=B).build(config, exp.run.seed if seed is None else seed)
    try:
        sampler.initialize(policy.agent)
        return sampler.evaluate_agent(step, episodes, deterministic), step
    finally:
        sampler.shutdown()


def record_video(
    run_dir: str | Path,
    episodes: int = 3,
    *,
    which: str = "last",
    env: Any = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> Path:
    """Records a video of deterministic episodes, one after the other; returns its path. Needs the extra `video`.

    Raises:
        ConfigError: the environment cannot render RGB frames. MissingExtraError: no ffmpeg.
    """
    kwargs = {**(env_kwargs or {}), "render_mode": "rgb_array"}
    policy, step, exp, config = open_policy(Path(run_dir), which, env, kwargs)
    path = Path(run_dir) / "videos" / f"{step:012d}.mp4"
    check_apart(config, exp.run.seed, exp.sampler_settings)
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
            state, reward, ended = None, 0.0, False
            while not ended:
                writer = _write_frame(live, writer, path)
                answer = policy.predict(obs, state, prev_reward=float(reward))
                action, state = answer if policy.recurrent else (answer, None)
                obs, reward, terminated, truncated, _ = live.step(action)
                ended = bool(terminated or truncated)
            writer = _write_frame(live, writer, path)
    finally:
        close_env(live, config.name)
        if writer is not None:
            writer.close()
    return path


def _write_frame(env: Any, writer: VideoWriter | None, path: Path) -> VideoWriter:
    try:
        frame = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"cannot render: {error}. For the classic environments: pip install 'penstock[video]'"
        ) from error
    if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.dtype != np.uint8:
        raise ConfigError(
            f"render() gave {type(frame).__name__}; expected uint8 [H, W, 3]: the environment must know "
            "render_mode='rgb_array'"
        )
    if writer is None:
        fps = int(env.metadata.get("render_fps", 30) or 30)
        writer = VideoWriter(path, fps, (frame.shape[0], frame.shape[1]))
    writer.write(frame)
    return writer
