"""`enjoy`: a policy is watched in a window, or where there is none, on video."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.core.errors import ConfigError, EnvWorkerError, MissingExtraError
from penstock.core.limits import require_whole
from penstock.envs.make import EnvConfig, as_env_config, with_added
from penstock.envs.shutdown import close_env
from penstock.run.checkpoints.load import load
from penstock.run.playing.evaluation import opened
from penstock.run.playing.evaluator import seated_for
from penstock.run.playing.show import Film, Window, WindowClosedError, can_open_window, play_shown
from penstock.run.playing.video import require_ffmpeg
from penstock.run.sharing.hub import SCHEME
from penstock.samplers.trackers.evaluation import EVAL_MAX_STEPS


class Watched(NamedTuple):
    """Where a policy was shown."""

    video: Path | None
    """None for a window."""
    why: str
    """The reason for a video that was not asked for."""


def enjoy(
    source: str | Path,
    episodes: int = 5,
    *,
    which: str = "last",
    env: Any = None,
    env_kwargs: Mapping[str, Any] | None = None,
    env_options: Mapping[str, Any] | None = None,
    seed: int | None = None,
    video: Path | None = None,
    trust: bool = False,
) -> Watched:
    """Shows deterministic episodes in a window by `render_mode="human"`, else writes them as a video.

    Args:
        source: a run, or with `env` also a policy's file or `hf:user/name`.
        video: a file to write instead of opening a window. The rest as in `ps.evaluate`.

    Raises:
        ConfigError: `env` is missing, or has other spaces. MissingExtraError: a video without the extra `video`.
    """
    require_whole(0, seed=seed)
    require_whole(1, episodes=episodes)
    name = str(source)
    if name.startswith(SCHEME) or Path(name).suffix == ".safetensors":
        if env is None:
            raise ConfigError(f"{name} holds a policy alone; name the environment that it plays: --env ID")
        policy, step, run_seed, settings, max_steps = load(name, which, trust=trust), 0, 0, None, EVAL_MAX_STEPS
        config, file = with_added(as_env_config(env), env_kwargs, env_options), Path(f"{Path(name).stem}.mp4")
    else:
        policy, step, exp, config = opened(source, which, env, env_kwargs, trust, env_options)
        run_seed, settings, max_steps = exp.run.seed, exp.sampler_settings, exp.run.eval_max_steps
        file = Path(source) / "videos" / f"{step:012d}.mp4"
    policy, config = seated_for(policy, config, run_seed, settings)
    how: tuple[int, int, int, int] = (run_seed if seed is None else seed, step, episodes, max_steps)
    why = "" if video is not None else _why_no_window(config)
    if video is None and not why:
        window = Window()
        try:
            play_shown(policy, with_added(config, {"render_mode": "human"}), *how, show=window)
            return Watched(None, "")
        except WindowClosedError:
            return Watched(None, "")
        except EnvWorkerError as error:
            if window.frames:
                raise
            why = f"no window could be opened ({error})"
            os.environ["SDL_VIDEODRIVER"] = "dummy"  # pygame needs a driver that works to draw frames, too
    try:
        require_ffmpeg()
    except MissingExtraError as error:
        if not why:
            raise
        raise ConfigError(f"{why}; a video in its place: {error}") from error
    film = Film(video or file)
    try:
        play_shown(policy, with_added(config, {"render_mode": "rgb_array"}), *how, show=film)
    finally:
        film.close()
    return Watched(video or file, why)


def _why_no_window(config: EnvConfig) -> str:
    """The reason why an environment cannot be shown in a window; "" if nothing is known against it."""
    if not can_open_window():
        return "there is no display (DISPLAY or WAYLAND_DISPLAY)"
    probe = config.make()
    modes = [str(mode) for mode in getattr(probe, "metadata", {}).get("render_modes") or ()]
    close_env(probe, config.name)
    return "" if "human" in modes else f"{config.name} draws no window: its render_modes are {modes}"
