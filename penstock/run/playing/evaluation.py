"""Evaluation of a policy: episodes, and video of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.limits import require_whole
from penstock.envs.make import EnvConfig, as_env_config, with_added
from penstock.learn.policy_set import AnyPolicy
from penstock.run.entry import open_policy
from penstock.run.experiment import Experiment
from penstock.run.playing.evaluator import Evaluator, seated_for
from penstock.run.playing.show import Film, play_shown
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
    film = Film(path)
    try:
        play_shown(policy, config, exp.run.seed, step, episodes, exp.run.eval_max_steps, film)
    finally:
        film.close()
    return path
