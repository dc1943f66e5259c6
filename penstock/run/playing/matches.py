"""Matches: runs, a random or a scripted policy play each other, each side in every seat for as many episodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.agents.agent import Agent
from penstock.core.config import import_object
from penstock.core.errors import ConfigError
from penstock.core.limits import require_whole
from penstock.core.spec import describe
from penstock.envs.make import EnvConfig
from penstock.envs.seats import AgentSpecs, seat_agents
from penstock.run.entry import open_policy
from penstock.run.playing.evaluation import opened
from penstock.run.playing.opponents import Script, placed
from penstock.run.playing.sides import Side
from penstock.samplers.episodes import Episodes
from penstock.samplers.serial import SerialSampler
from penstock.workers.env_check import check_apart

RANDOM = "random"
_EVEN = 1e-9
"""Returns that differ by no more are a draw."""


@dataclass(frozen=True)
class Match:
    """Episodes of one side against another; numbers are of the first side."""

    sides: tuple[str, str]
    won: int
    drawn: int
    lost: int
    returns: tuple[float, float]
    """Mean return of a side's agents, summed over them, over all episodes."""
    points_by_seat: tuple[float, float]
    """Share of points (a win 1, a draw 1/2) where it played the first agent, and where the other side did."""

    @property
    def episodes(self) -> int:
        """How many were played."""
        return self.won + self.drawn + self.lost

    @property
    def points(self) -> float:
        """Points for each episode: 1 for a win, 1/2 for a draw."""
        return (self.won + self.drawn / 2) / self.episodes

    def turned(self) -> Match:
        """The same of the other side."""
        first, second = self.points_by_seat
        return Match(
            (self.sides[1], self.sides[0]),
            self.lost,
            self.drawn,
            self.won,
            (self.returns[1], self.returns[0]),
            (1.0 - second, 1.0 - first),
        )


def open_side(named: str | Script, which: str = "last", trust: bool = False) -> Side:
    """A side by its name: a run directory, `random`, or `module:function` of an observation; or such a function."""
    if not isinstance(named, str):
        return Side(getattr(named, "__qualname__", repr(named)), script=named)
    if named == RANDOM:
        return Side(named)
    if ":" in named and not Path(named).exists():
        script = import_object(named)
        if not callable(script):
            raise ConfigError(f"--against {named} is {script!r:.80}; expected a function of one observation")
        return Side(named, script=script)
    return Side(named, open_policy(Path(named), which, None, None, trust)[0])


def play(
    sides: tuple[Side, Side],
    config: EnvConfig,
    agents: AgentSpecs,
    episodes: int,
    *,
    seed: int = 0,
    deterministic: bool = True,
    slots: int = 16,
    max_steps: int = 27_000,
    first: Sequence[str] = (),
) -> Match:
    """A match of exactly this many episodes of the environment, half of them with the seats changed.

    The first side plays the agents `first`, by default every second one from the first on, and the other side the
    rest; then the other way round, in episodes of the same seeds. Warns where the sides get unequal roles by default.

    Raises:
        ConfigError: fewer than two agents or episodes, a side that does not fit an agent, or `first` names no agent or
            all of them.
    """
    require_whole(0, episodes=episodes, seed=seed)
    if len(agents.specs) < 2 or episodes < 2:
        raise ConfigError(
            f"a match of {episodes} episodes with {len(agents.specs)} agents; expected 2 or more of both, so that each "
            "side has an agent, in every seat"
        )
    names = list(agents.specs)
    if unknown := [name for name in first if name not in names]:
        raise ConfigError(f"the seats of the first side name {unknown[0]!r}; the agents are {names}")
    if set(first) == set(names):
        raise ConfigError(f"the seats of the first side are all agents, {names}; leave one of them to the other side")
    of_first = [name in first if first else k % 2 == 0 for k, name in enumerate(names)]
    if not first:
        _say_unequal(agents, of_first)
    results: list[np.ndarray[Any, Any]] = []  # returns [n, 2] of both sides, as first and as second
    for turned in (False, True):
        count = episodes // 2 if turned else episodes - episodes // 2
        how = {"deterministic": deterministic, "slots": slots, "max_steps": max_steps}
        side_of = [int(mine == turned) for mine in of_first]
        results.append(_returns(sides, config, agents, side_of, count, seed, how))
    both = np.concatenate(results)
    won, lost = both[:, 0] > both[:, 1] + _EVEN, both[:, 1] > both[:, 0] + _EVEN
    points = [_points(x) for x in results]
    return Match(
        (sides[0].name, sides[1].name),
        int(won.sum()),
        int((~won & ~lost).sum()),
        int(lost.sum()),
        (float(both[:, 0].mean()), float(both[:, 1].mean())),
        (points[0], points[1]),
    )


def play_all(sides: Sequence[Side], config: EnvConfig, agents: AgentSpecs, episodes: int, **how: Any) -> list[Match]:
    """Matches of every two of the sides; arguments as in `play`."""
    pairs = [(sides[i], sides[j]) for i in range(len(sides)) for j in range(i + 1, len(sides))]
    return [play(pair, config, agents, episodes, **how) for pair in pairs]


def match_runs(
    run_dir: str | Path,
    against: Sequence[str | Script],
    episodes: int = 100,
    *,
    env: Any = None,
    env_kwargs: Mapping[str, Any] | None = None,
    which: str = "last",
    seed: int | None = None,
    deterministic: bool = True,
    slots: int | None = None,
    max_steps: int | None = None,
    first: Sequence[str] = (),
    trust: bool = False,
    env_options: Mapping[str, Any] | None = None,
) -> list[Match]:
    """Matches of a run against each opponent, and of these against each other, in the run's evaluation environment.

    Args:
        against: run directories, `random`, and functions of an observation or their `module:function`.
        which: checkpoint of every run.
        env, env_kwargs, env_options, seed, slots, max_steps: as in `penstock.evaluate`. first: as in `play`.

    Raises:
        ConfigError: an environment of one agent, an unknown name, or see `play`.
    """
    policy, _, exp, config = opened(run_dir, which, env, env_kwargs, trust, env_options)
    report = check_apart(config, exp.run.seed, exp.sampler_settings)
    if report.agents is None:
        raise ConfigError(f"{config.name} is an environment of one agent; a match needs one of two or more")
    sides = [Side(str(run_dir), policy), *(open_side(name, which, trust) for name in against)]
    names = [side.name for side in sides]
    if len(set(names)) < len(names):
        raise ConfigError(f"--against names an opponent twice: {names}")
    return play_all(
        sides,
        config,
        report.agents,
        episodes,
        seed=exp.run.seed if seed is None else seed,
        deterministic=deterministic,
        slots=exp.run.eval_slots if slots is None else slots,
        max_steps=exp.run.eval_max_steps if max_steps is None else max_steps,
        first=first,
    )


def _say_unequal(agents: AgentSpecs, of_first: Sequence[bool]) -> None:
    """Warns if the agents of the two sides are not as many of each kind of spaces."""
    kinds = {name: f"{describe(spec.obs)}, {describe(spec.action)}" for name, spec in agents.specs.items()}
    sides = [[name for name, mine in zip(kinds, of_first) if mine == own] for own in (True, False)]
    if len({tuple(sorted(kinds[name] for name in side)) for side in sides}) == 1:
        return
    alike = [[name for name in kinds if kinds[name] == kind] for kind in dict.fromkeys(kinds.values())]
    team = min(alike, key=len) if len(alike) > 1 else sides[1]
    warnings.warn(
        f"the sides play unequal roles: one {sides[0]}, the other {sides[1]}, then the other way round. Returns of a "
        f"side are summed, so a win may be that of its role; say who is one side, e.g. first={team} (--seats "
        f"{' '.join(team)})",
        stacklevel=3,
    )


def _points(returns: np.ndarray[Any, Any]) -> float:
    ahead = returns[:, 0] - returns[:, 1]
    return float(np.where(np.abs(ahead) <= _EVEN, 0.5, ahead > 0).mean())


def _returns(
    sides: tuple[Side, Side],
    config: EnvConfig,
    agents: AgentSpecs,
    side_of: Sequence[int],
    episodes: int,
    seed: int,
    how: Mapping[str, Any],
) -> np.ndarray[Any, Any]:
    """[episodes, 2] returns of both sides' agents, summed.

    Args:
        side_of: of each agent the side that plays it, 0 or 1.
    """
    mapping: dict[str, str] = {}
    acting: dict[str, Agent] = {}
    for (name, spec), side in zip(agents.specs.items(), side_of):
        id_, agent = sides[side].agent(name, spec)
        mapping[name] = f"{'AB'[side]} {id_}"
        acting[mapping[name]] = agent
    seating = seat_agents(agents, tuple(acting), mapping)
    copies = {id_: placed(agent, spec) for spec, (id_, agent) in zip(seating.specs, acting.items())}
    sampler = SerialSampler(T=1, B=1).build(replace(config, seating=seating), seed)
    try:
        sampler.initialize(copies)
        found: Episodes = sampler.evaluate_agent(0, episodes, **how)
    finally:
        sampler.shutdown()
    assert found.parts is not None
    own = np.array(side_of)
    return np.stack([found.parts.return_[:, own == side].sum(1) for side in (0, 1)], 1)
