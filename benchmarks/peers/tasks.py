"""Environments of `strength.py`, the same for both sides, with a record of training episodes; penstock is not needed.

A task is `SUITE/NAME`: `classic/CartPole-v1`, `mujoco/HalfCheetah-v5`, `minatar/breakout`, `bsuite/catch/0`. MinAtar's
games are its package's own, with minimal actions, sticky ones at 0.1, at most 5,000 steps and bits as floats. Those of
bsuite (Osband et al. 2020, arXiv:1908.03568) are version 0.3.6's, flat observations in float32.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

BINS = 20
"""Points of a learning curve."""


class Record:
    """Training episodes of all environments of a process, in the order in which they end."""

    def __init__(self, episodes: int | None = None) -> None:
        self.steps = 0
        self.ends: list[tuple[int, float]] = []
        """(environment steps so far, return)."""
        self.episodes = episodes
        """How many count; later ones are not recorded."""
        self.bsuite: list[Recorded] = []
        """Environments of bsuite."""
        self.solved_at: int | None = None
        """The first episode after which the share of bad ones is below deep sea's threshold."""

    @property
    def full(self) -> bool:
        """True once the episodes that count are over."""
        return self.episodes is not None and len(self.ends) >= self.episodes

    def curve(self, steps: int) -> list[list[float]]:
        """[step, mean return of the episodes that ended since the point before], for points that have some."""
        ends, width = self.ends, steps / BINS
        found = [[r for s, r in ends if i * width < s <= (i + 1) * width] for i in range(BINS)]
        return [[round((i + 1) * width), round(statistics.fmean(rs), 4)] for i, rs in enumerate(found) if rs]

    def late(self, steps: int) -> float | None:
        """Mean return of the training episodes of the last tenth of the steps."""
        last = [r for s, r in self.ends if 0.9 * steps < s <= steps]
        return statistics.fmean(last) if last else None


class Recorded(gym.Wrapper):  # pyright: ignore[reportMissingTypeArgument]
    """An environment whose steps and returns are recorded."""

    info: Mapping[str, float] = {}
    """bsuite's own sums after the last episode that ended and counts: sums of steps know no end of an episode."""

    def __init__(self, env: gym.Env[Any, Any], record: Record) -> None:
        super().__init__(env)
        self._record, self._return = record, 0.0
        if isinstance(env, Bsuite):
            record.bsuite.append(self)

    def reset(self, **kwargs: Any) -> Any:
        self._return = 0.0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        row = self.env.step(action)
        record = self._record
        if not record.full:
            record.steps += 1
            self._return += float(row[1])
            if row[2] or row[3]:
                record.ends.append((record.steps, self._return))
                if isinstance(self.env, Bsuite):
                    self.info = dict(self.env.raw.bsuite_info())
                    _ended(record, self.env.name)
        return row


def make(task: str, record: Record | None = None) -> gym.Env[Any, Any]:
    """A new environment of a task, recorded if a record is given."""
    suite, _, name = task.partition("/")
    env: gym.Env[Any, Any]
    if suite == "minatar":
        from minatar.gym import register_envs

        game = f"MinAtar/{''.join(word.title() for word in name.split('_'))}-v1"
        if game not in gym.registry:
            register_envs()
        raw = gym.make(game, max_episode_steps=5_000)
        floats = gym.spaces.Box(0.0, 1.0, raw.observation_space.shape, np.float32)
        env = gym.wrappers.TransformObservation(raw, lambda obs: obs.astype(np.float32), floats)
    else:
        env = Bsuite(name) if suite == "bsuite" else gym.make(name)
    return env if record is None else Recorded(env, record)


def play(act: Callable[[Any, Any, bool], tuple[Any, Any]], env: gym.Env[Any, Any], episodes: int) -> float:
    """Mean return of episodes seeded from 10,000 on; `act` takes (obs, state, start) and returns (action, state)."""
    returns: list[float] = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=10_000 + episode)
        state, start, over, total = None, True, False, 0.0
        while not over:
            action, state = act(obs, state, start)
            obs, reward, terminated, truncated, _ = env.step(action)
            start, over, total = False, terminated or truncated, total + float(reward)
        returns.append(total)
    return statistics.fmean(returns)


def measured(part: dict[str, Any], record: Record, act: Callable[[Any, Any, bool], tuple[Any, Any]]) -> dict[str, Any]:
    """What a row of `strength.py` has of a run that is over: learning curve, scores."""
    steps = part["steps"] if record.episodes is None else record.steps
    row: dict[str, Any] = {"steps": record.steps, "episodes": len(record.ends), "curve": record.curve(steps)}
    if part["task"].startswith("bsuite/"):
        measure = bsuite_measure(part["task"].removeprefix("bsuite/"), record)
        return {**row, "bsuite": {key: round(value, 4) for key, value in measure.items()}}
    env = make(part["task"])
    last = play(act, env, part["plays"]) if part["plays"] else None
    return {**row, "late": record.late(record.steps), "last": last}


class Bsuite(gym.Env[Any, Any]):
    """One environment of bsuite, by its id."""

    def __init__(self, name: str) -> None:
        import bsuite

        logging.getLogger("absl").setLevel(logging.ERROR)
        self.raw: Any = bsuite.load_from_id(name)
        shape = self.raw.observation_spec().shape
        self.observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (int(np.prod(shape)),), np.float32)
        self.action_space: Any = gym.spaces.Discrete(self.raw.action_spec().num_values)
        self.name = name

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:  # of the environment, and of the noise around it
            inner: Any = getattr(self.raw, "_env", None)
            for i, owner in enumerate(one for one in (self.raw, inner) if hasattr(one, "_rng")):
                owner._rng = np.random.RandomState((seed + i) % 2**32)
        return self._flat(self.raw.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        row = self.raw.step(int(action))
        over = bool(row.last())
        return self._flat(row), float(row.reward or 0.0), over and row.discount == 0, over and row.discount != 0, {}

    @staticmethod
    def _flat(row: Any) -> Any:
        return np.asarray(row.observation, np.float32).reshape(-1).copy()


def _ended(record: Record, name: str) -> None:
    """Notes when deep sea is solved (`deep_sea/analysis.py`, find_solution; 0.8 and from episode 100 on if stochastic)."""
    episodes = len(record.ends)
    if record.solved_at is None and name.startswith("deep_sea"):
        stochastic = name.startswith("deep_sea_stochastic")
        bad = sum(env.info.get("total_bad_episodes", 0) for env in record.bsuite) / episodes
        if bad < (0.8 if stochastic else 0.9) and episodes >= 100 * stochastic:
            record.solved_at = episodes


def bsuite_measure(name: str, record: Record) -> dict[str, float]:
    """What the score of an id is made from: `x`, per episode, and for some `good`, 1 or 0.

    `x` is the regret divided by that of the baseline, or the mean return of discounting_chain. Sources: the
    `analysis.py` of each experiment in bsuite 0.3.6.
    """
    experiment, episodes = name.partition("/")[0], len(record.ends)
    infos = [env.info for env in record.bsuite if env.info]
    total = {key: sum(info[key] for info in infos) for key in infos[0]}
    base = experiment.removesuffix("_noise").removesuffix("_scale")
    if base in ("catch", "bandit"):
        return {"x": total["total_regret"] / episodes / {"catch": 1.6, "bandit": 0.5}[base]}
    if experiment.startswith("memory"):
        return {"x": (episodes - total["total_perfect"]) / episodes / 0.5}
    if experiment.startswith("umbrella"):
        return {"x": total["total_regret"] / episodes}
    if base == "cartpole":
        best = max(info["best_episode"] for info in infos)
        return {"x": 1 - total["raw_return"] / episodes / 1000, "good": float(best > 500)}
    if base == "cartpole_swingup":
        best = max(info["best_episode"] for info in infos)
        return {"x": 1 - sum(r for _, r in record.ends) / episodes / 700, "good": float(best > 100)}
    if base == "mountain_car":
        return {"x": (-100 - total["raw_return"] / episodes) / 1000}
    if base == "discounting_chain":
        return {"x": sum(r for _, r in record.ends) / episodes}
    env: Any = record.bsuite[0].env
    found, size = record.solved_at, env.raw._size  # deep_sea, deep_sea_stochastic
    return {"x": float(found or -1), "good": float(found is not None and found < 2**size + 100)}


def bsuite_score(experiment: str, measures: Sequence[tuple[Any, dict[str, float]]]) -> float:
    """Score 0 to 1 of an experiment, from (value of the setting that it sweeps, measure) of each of its ids."""
    xs = [measure["x"] for _, measure in measures]
    if experiment.startswith(("memory", "umbrella")):
        return statistics.fmean(x < (0.75 if experiment.startswith("memory") else 0.5) for x in xs)
    if experiment.startswith("deep_sea"):
        return statistics.fmean(measure["good"] for _, measure in measures)
    if experiment == "discounting_chain":
        return _clip(1 - 10 * (1.1 - statistics.fmean(xs)))
    base = experiment.removesuffix("_noise").removesuffix("_scale")
    if base != experiment:  # utils/plotting.py, score_by_scaling: half mean, half mean less deviation
        levels = list(dict.fromkeys(level for level, _ in measures))
        scores = [bsuite_score(base, [one for one in measures if one[0] == level]) for level in levels]
        mean = statistics.fmean(scores)
        return 0.5 * (_clip(mean) + _clip(mean - statistics.pstdev(scores)))
    if experiment == "cartpole_swingup":  # by height
        return statistics.fmean(0.5 * (_clip(1 - measure["x"]) + measure["good"]) for _, measure in measures)
    ratio = _clip(1 - statistics.fmean(xs))  # utils/plotting.py, ave_regret_score
    if experiment == "cartpole":
        return 0.5 * (ratio + statistics.fmean(measure["good"] for _, measure in measures))
    return ratio


def _clip(x: float) -> float:
    return min(max(x, 0.0), 1.0)
