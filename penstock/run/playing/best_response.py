"""Exact exploitability: the gain of a best response to a policy, by a walk over every position of a small game.

The best response to a policy knows how it moves, and no more of the game than the agent whose place it takes: it
chooses by the observations and rewards of that agent so far. Positions that the agent cannot tell apart are walked
together, each with its chance (a belief); equal beliefs are walked once.

Exploitability is the mean, over the agents, of the best response's gain over the policy in that agent's place, while
the policy plays all others: NashConv / n (Lanctot et al. 2017, "A unified game-theoretic approach to multiagent
reinforcement learning", section 2). In a zero-sum game of two it is OpenSpiel's `exploitability`. At 0 no agent gains
by another policy.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.agents.distributions import Categorical
from penstock.core.batch import Inputs, padded_rows
from penstock.core.errors import ConfigError, EnvWorkerError, PenstockError, words_of
from penstock.core.noise import env_seed
from penstock.core.spec import MASK_KEY, EnvSpec, LeafSpec, describe
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.envs.agent_observations import AgentObservations
from penstock.envs.make import EnvConfig
from penstock.envs.seats import AgentSpecs
from penstock.envs.shutdown import close_env
from penstock.run.playing.copies import EnvCopies
from penstock.run.playing.opponents import RandomAgent
from penstock.run.playing.sides import Side

POSITIONS = 200_000
"""Moves that a walk tries at most; at 50 to 200 us each."""
TRAINED = "train an exploiter instead: --exploit-steps 100000"


class Exploitability(NamedTuple):
    """Mean undiscounted returns in each agent's place, where the policy plays all others."""

    agents: tuple[str, ...]
    best: tuple[float, ...]
    """Mean return of the best response, or of a trained exploiter, in each agent's place."""
    own: tuple[float, ...]
    """Mean return of the policy itself in that place."""

    @property
    def mean(self) -> float:
        """The exploitability; of a trained exploiter a lower bound, up to the noise of its episodes."""
        return fmean(best - own for best, own in zip(self.best, self.own))


def starts(seed: int, count: int) -> list[int]:
    """Seeds of the episodes that a walk is over. Raises ConfigError for none."""
    if count < 1:
        raise ConfigError(f"--episodes {count}; a walk, and an exploiter, need 1 or more")
    return [env_seed(seed, 0, episode, evaluation=True) for episode in range(count)]


def exploitability(
    side: Side,
    config: EnvConfig,
    agents: AgentSpecs,
    seeds: Sequence[int],
    *,
    deterministic: bool = True,
    positions: int = POSITIONS,
) -> Exploitability:
    """The exact exploitability of who plays all agents, over the episodes of these seeds, each as likely.

    All chance must come from the seed. Where cards are hidden, few seeds tell the best response more than a player
    could know: the result is too large, and right with one seed for each deal.

    Args:
        side: a memoryless policy, a script, or random play. agents: of `penstock.check_env(config)`.
        deterministic: the policy's likeliest moves; False: it draws them.
        positions: moves to try in one agent's place.

    Raises:
        ConfigError: agents that act at once, a recurrent policy, actions that are no Discrete, an environment that
            cannot be copied or draws from elsewhere, a game too large. EnvWorkerError: its own code raised.
    """
    if not agents.turns:
        raise ConfigError(f"{config.name}: agents act at once, and a walk takes games in turns; {TRAINED}")
    names = tuple(agents.specs)
    players = {
        name: _Player(name, side.agent(name, spec)[1], spec, deterministic) for name, spec in agents.specs.items()
    }
    env: Any = config.make()
    try:
        showing = AgentObservations(env, agents.specs, config.state, config.mask_key or MASK_KEY)
        walk = _Walk(env, config.name, players, showing, positions)
        walk.check_copies(seeds[0])
        best, own = zip(*(walk.values(name, seeds) for name in names))
        return Exploitability(names, best, own)
    except PenstockError:
        raise
    except Exception as error:
        raise EnvWorkerError(f"{config.name} in a walk over its positions: {words_of(error)}") from error
    finally:
        close_env(env, config.name)


class _Player:
    """The moves of one agent and their chances, by observation."""

    def __init__(self, name: str, agent: Agent, spec: EnvSpec, deterministic: bool) -> None:
        if not isinstance(spec.action, LeafSpec) or spec.action.kind != "discrete":
            raise ConfigError(f"agent {name!r} has {describe(spec.action)}; a walk needs a Discrete action; {TRAINED}")
        if agent.initial_state(1) is not None:
            raise ConfigError(f"{type(agent).__name__} of agent {name!r} is recurrent: a walk forgets paths; {TRAINED}")
        self._agent, self._spec, self._leaf = copy.deepcopy(agent).cpu(), spec, spec.action
        self._deterministic = deterministic
        self._known: dict[bytes, list[tuple[int, float]]] = {}

    def legal(self, obs: Tree) -> list[int]:
        """Every move that the mask allows; all of them where it allows none, or there is none."""
        moves = np.arange(self._leaf.sizes[0])
        if isinstance(obs, dict) and MASK_KEY in obs and np.any(obs[MASK_KEY]):
            moves = np.flatnonzero(np.asarray(obs[MASK_KEY]))
        return [int(move) + int(self._leaf.start) for move in moves]  # pyright: ignore[reportArgumentType]

    def moves(self, obs: Tree) -> list[tuple[int, float]]:
        """The moves that it may make, each with its chance."""
        key = _bytes(obs)
        if key not in self._known:
            self._known[key] = self._asked(obs)
        return self._known[key]

    def _asked(self, obs: Tree) -> list[tuple[int, float]]:
        legal = self.legal(obs)
        if isinstance(self._agent, RandomAgent):
            return [(move, 1.0 / len(legal)) for move in legal]
        rows = padded_rows(1)

        def repeated(leaf: LeafSpec, x: Any) -> torch.Tensor:
            array = np.asarray(x, leaf.dtype).reshape(leaf.shape)
            return torch.from_numpy(np.broadcast_to(array, (rows, *leaf.shape)).copy())

        null = repeated(self._leaf, self._leaf.null())
        inputs = Inputs(tree_map(repeated, self._spec.obs, obs), null, torch.zeros(rows), torch.ones(rows).bool())
        with torch.inference_mode():
            if self._deterministic or self._agent.noise_size == 0:
                return [(int(self._agent.act(inputs, None, None)[0][0]), 1.0)]
            dist = getattr(self._agent(inputs), "dist", None)
        if not isinstance(dist, Categorical):
            raise ConfigError(
                f"{type(self._agent).__name__} does not say the chances of its moves: leave out --stochastic, or "
                f"{TRAINED}"
            )
        chances = dist.logp[0].double().exp()
        return [(move, p) for move in legal if (p := float(chances[move - dist.start])) > 0.0]


class _Values(NamedTuple):
    """Mean returns from somewhere on: of the best response, and of the policy itself."""

    best: float
    own: float


class _Outcome(NamedTuple):
    """Outcome of a move: the return until the agent's next turn, and its position there."""

    chance: float
    earned: float
    obs: Tree = None
    env: Any = None
    """None: its episode is over."""


class _Walk:
    """Values of a game for one agent after the other."""

    def __init__(
        self, env: Any, name: str, players: dict[str, _Player], showing: AgentObservations, positions: int
    ) -> None:
        self._env, self._name, self._players, self._showing, self._most = env, name, players, showing, positions
        self._agent, self._tried = "", 0
        self._known: dict[tuple[tuple[bytes, float], ...], _Values] = {}
        self._copies = EnvCopies(name, TRAINED)

    def check_copies(self, seed: int) -> None:
        """Raises ConfigError unless each move of an episode of first legal moves has the same outcome in a copy."""
        env, moves = self._env, 0
        env.reset(seed=seed)
        while env.agents and moves < self._most:
            obs, _, agent, ended = self._turn(env)
            copied, moves = self._copies.copy(self._copies.stored(env)), moves + 1
            for each in (env, copied):
                each.step(None if ended else self._players[agent].legal(obs)[0])
            if list(env.agents) != list(copied.agents) or (env.agents and self._seen(env) != self._seen(copied)):
                raise ConfigError(
                    f"a copy of {self._name} goes on otherwise than it does: some of its state, or of its chance, lies "
                    f"outside of it; draw from a generator of its own that reset(seed=) seeds, or {TRAINED}"
                )

    def _seen(self, env: Any) -> tuple[Any, ...]:
        obs, *rest = self._turn(env)
        return _bytes(obs), *rest

    def values(self, agent: str, seeds: Sequence[int]) -> _Values:
        """The mean returns in an agent's place."""
        self._agent, self._tried = agent, 0
        self._known.clear()
        outcomes: list[_Outcome] = []
        for seed in seeds:
            self._env.reset(seed=seed)
            self._play_on(self._copies.copy(self._copies.stored(self._env)), 1.0 / len(seeds), 0.0, outcomes)
        try:
            return self._worth(outcomes)
        except RecursionError as error:
            raise ConfigError(f"{self._name}: a game of too many moves for a walk; {TRAINED}") from error

    def _worth(self, outcomes: list[_Outcome]) -> _Values:
        best = own = sum(x.chance * x.earned for x in outcomes)
        groups: dict[tuple[bytes, float], list[_Outcome]] = {}
        for x in outcomes:
            if x.env is not None:
                groups.setdefault((_bytes(x.obs), x.earned), []).append(x)
        for alike in groups.values():
            chance = sum(x.chance for x in alike)
            found = self._valued(alike, chance)
            best, own = best + chance * found.best, own + chance * found.own
        return _Values(best, own)

    def _valued(self, alike: list[_Outcome], chance: float) -> _Values:
        """Returns from positions that the agent cannot tell apart, which have this chance together."""
        belief: dict[bytes, list[Any]] = {}
        for x in alike:
            stored = self._copies.stored(x.env)
            belief.setdefault(hashlib.blake2b(stored, digest_size=16).digest(), [stored, 0.0])[1] += x.chance / chance
        key = tuple(sorted((at, round(p, 12)) for at, (_, p) in belief.items()))
        if key not in self._known:
            player, obs = self._players[self._agent], alike[0].obs
            legal, chosen, worths = player.legal(obs), player.moves(obs), dict[int, _Values]()
            for move in {*legal, *(move for move, _ in chosen)}:
                outcomes: list[_Outcome] = []
                for stored, of_position in belief.values():
                    self._after(stored, move, of_position, 0.0, outcomes)
                worths[move] = self._worth(outcomes)
            best = max(worths[move].best for move in legal)
            self._known[key] = _Values(best, sum(p * worths[move].own for move, p in chosen))
        return self._known[key]

    def _after(self, stored: bytes, move: int, chance: float, earned: float, outcomes: list[_Outcome]) -> None:
        self._tried += 1
        if self._tried > self._most:
            raise ConfigError(
                f"{self._name} has more than {self._most:,} positions to walk over: fewer starts (--episodes) if its "
                f"deals differ, the likeliest moves instead of --stochastic, or {TRAINED}"
            )
        env = self._copies.copy(stored)
        env.step(move)
        self._play_on(env, chance, earned, outcomes)

    def _play_on(self, env: Any, chance: float, earned: float, outcomes: list[_Outcome]) -> None:
        """Lets the others move until the agent's next turn, by every way that has a chance."""
        while env.agents:
            obs, reward, agent, ended = self._turn(env)
            earned += reward if agent == self._agent else 0.0
            if ended:
                env.step(None)
            elif agent == self._agent:
                outcomes.append(_Outcome(chance, earned, obs, env))
                return
            else:
                stored = self._copies.stored(env)
                for move, p in self._players[agent].moves(obs):
                    self._after(stored, move, chance * p, earned, outcomes)
                return
        outcomes.append(_Outcome(chance, earned))

    def _turn(self, env: Any) -> tuple[Tree, float, str, bool]:
        """The agent to act: its observation, reward since its last turn, name, and whether it has ended."""
        agent = env.agent_selection
        obs, reward, terminated, truncated, info = env.last()
        ended = bool(terminated or truncated)
        if self._showing.anything and not ended:
            joint = {a: env.observe(a) for a in env.agents} if self._showing.state == "joint" else {}
            obs = self._showing.show(
                agent, obs, info, self._showing.state_of(env, joint) if self._showing.state else None
            )
        return obs, float(reward), agent, ended


def _bytes(obs: Tree) -> bytes:
    return b"".join(np.asarray(x).tobytes() for x in tree_leaves(obs))
