"""`check_agents`: plays a throw-away environment of many agents and reports whether it keeps the contract.

Every agent gets a policy of its own, and the pools play: they look at all that they look at in a run. What only a
second look finds is looked for here: memory that changes after it was returned, rewards for nobody, other bits from the
same seeds and actions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import EnvContractError, EnvWorkerError
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import MASK_KEY, BatchSpec, EnvSpec
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.contract import describe_violation
from penstock.envs.make import EnvConfig
from penstock.envs.pools.many.agent_envs import seating_of
from penstock.envs.pools.simultaneous import SimultaneousPool
from penstock.envs.pools.slot_envs import offers_state
from penstock.envs.pools.turns import TurnPool
from penstock.envs.seats import AgentSpecs, seat_agents

_PRELUDE_STEPS = 3
"""Steps of another episode before the replay, so that state carried over from one episode to the next shows."""
_OTHER = 1 << 40
"""Added to the seed of the prelude."""


class AgentsReport(NamedTuple):
    """The findings of `check_agents`."""

    reproducible: bool
    has_state: bool
    reset_s: float
    step_s: float
    out_of_bounds: str | None


def check_agents(config: EnvConfig, found: AgentSpecs, seed: int, steps: int) -> AgentsReport:
    """Plays the given number of random steps twice, the second time after another episode.

    Raises:
        EnvContractError, EnvWorkerError: as the pools do, with agent, slot and episode.
    """
    agents = tuple(found.specs)
    seating = seat_agents(found, agents, {agent: agent for agent in agents})
    watches: list[_Watch] = []

    def watched(env: Any) -> Any:
        watches.append(_Watch(env, found.turns, config))
        return env

    own = replace(config, seating=seating, wrappers=(*config.wrappers, watched))
    try:
        first, again, has_state = _twice(own, seed, steps)
    except EnvWorkerError as error:
        if isinstance(error.__cause__, EnvContractError):  # a watch's own
            raise error.__cause__ from None
        raise
    watch = watches[0]
    outside = None if config.checks in ("off", "finite") else _out_of_bounds(first, seating.specs, agents)
    step_s, reset_s = (statistics.median(x or [0.0]) for x in (watch.step_s, watch.reset_s))
    return AgentsReport(_bits(again) == _bits(first), has_state, reset_s, step_s, outside)


def _twice(config: EnvConfig, seed: int, steps: int) -> tuple[list[SampleBatch], list[SampleBatch], bool]:
    """The batches of two plays from the same seed, and whether the environment offers its state."""
    cls = TurnPool if seating_of(config).turns else SimultaneousPool
    pool = cls(config, seed, slice(0, 1))
    try:
        first = _play(pool, seed, steps)
        has_state = offers_state(pool.host.envs[0])
    finally:
        pool.close()
    pool = cls(config, seed + _OTHER, slice(0, 1))
    try:
        _play(pool, seed + _OTHER, _PRELUDE_STEPS)
        pool.restart(seed)
        return first, _play(pool, seed, steps), has_state
    finally:
        pool.close()


def _play(pool: SimultaneousPool | TurnPool, seed: int, steps: int) -> list[SampleBatch]:
    """The batches after the given number of environment steps, or moves."""
    outs = [
        allocate_batch(spec, BatchSpec(steps, n), None, None, pool.info_keys) for spec, n in zip(pool.specs, pool.seats)
    ]
    sizes = [action_noise_size(spec.action) for spec in pool.specs]
    noise = [uniform(seed, Purpose.CHECK, p, slice(0, 1), steps, n)[:, 0] for p, n in enumerate(sizes)]
    pool.bind(outs)
    for t in range(steps):
        for p, out in enumerate(outs):
            slots, rows = pool.pending(p) if isinstance(pool, TurnPool) else ([0], [t])
            for b, c in zip(slots, rows):
                mask = out.obs[MASK_KEY][c, b][None] if isinstance(out.obs, dict) and MASK_KEY in out.obs else None
                mask = mask if mask is None or mask.any() else None  # an idle seat
                drawn = sample_action(pool.specs[p].action, noise[p][t][None], mask)
                tree_assign(out.action, (c, b), tree_map(lambda x: x[0], drawn))
        for p in range(len(outs)):
            pool.send(p, t)
    return outs


def _bits(outs: list[SampleBatch]) -> list[bytes]:
    parts = [(x.obs, x.first, x.reward, x.terminated, x.truncated, x.valid) for x in outs]
    return [np.nan_to_num(x).tobytes() for x in tree_leaves(parts)]


def _out_of_bounds(outs: list[SampleBatch], specs: tuple[EnvSpec, ...], agents: tuple[str, ...]) -> str | None:
    for out, spec, agent in zip(outs, specs, agents):
        for t in np.flatnonzero(out.valid[:, 0]).tolist():
            obs = tree_map(lambda x, t=t: x[t + 1, 0], out.obs)
            if message := describe_violation(obs, spec.obs, "obs"):
                return f"agent {agent!r}, row {t}: {message}"
    return None


class _Watch:
    """Times an environment's calls, and at each call checks that its earlier answers have not changed."""

    def __init__(self, env: Any, turns: bool, config: EnvConfig) -> None:
        self._env, self._name, self._compares = env, config.name, config.checks != "off"
        self.reset_s, self.step_s = list[float](), list[float]()
        self._given: list[tuple[str, Any, Any]] = []
        env.reset = self._timed(env.reset, self.reset_s)
        env.step = self._timed(env.step, self.step_s)
        if turns:
            env.last, env.observe = self._kept(env.last), self._seen(env.observe)

    def _timed(self, call: Callable[..., Any], durations: list[float]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            durations.append(time.perf_counter() - started)
            self._compare(call.__name__)
            if self._compares and isinstance(result, tuple) and result and isinstance(result[0], Mapping):
                self._given = [(str(agent), obs, _copied(obs)) for agent, obs in result[0].items()]
            return result

        return timed

    def _kept(self, last: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*args: Any, **kwargs: Any) -> Any:
            result = last(*args, **kwargs)
            self._compare("last")
            if isinstance(result, tuple) and result:
                self._keep(self._env.agent_selection, result[0])
            return result

        return kept

    def _seen(self, observe: Callable[..., Any]) -> Callable[..., Any]:
        def seen(agent: Any) -> Any:
            obs = observe(agent)
            self._compare("observe")
            self._keep(agent, obs)
            return obs

        return seen

    def _keep(self, agent: Any, obs: Any) -> None:
        if self._compares:
            self._given = [(str(agent), obs, _copied(obs))]

    def _compare(self, method: str) -> None:
        for agent, obs, before in self._given:
            if _raw(obs) != _raw(before):
                raise EnvContractError(
                    f"slot 0 of {self._name} in {method}() at episode {len(self.reset_s) - 1}, agent {agent!r}: the "
                    "observation that was returned before has changed; return new memory at every step (obs.copy()), "
                    "or wrap an environment that is not yours (--wrappers penstock.envs.wrappers:copy_obs): whoever "
                    "keeps it would keep something else"
                )


def _raw(obs: Tree) -> Any:
    """The bytes of the arrays; None for anything else, which does not change or is refused."""
    if isinstance(obs, Mapping):
        return {str(key): _raw(below) for key, below in obs.items()}
    if isinstance(obs, tuple):
        return [_raw(below) for below in obs]
    return obs.tobytes() if isinstance(obs, np.ndarray) else None


def _copied(obs: Any) -> Any:
    """A copy of the arrays; returns a value that the contract refuses as it is, as it may not be copyable."""
    if isinstance(obs, Mapping):
        return {key: _copied(below) for key, below in obs.items()}
    if isinstance(obs, tuple):
        return tuple(map(_copied, obs))
    return obs.copy() if isinstance(obs, np.ndarray) else obs
