"""Seats: which policy plays which agent, and in which column of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from penstock.core.errors import ConfigError, nearest, words_of
from penstock.core.noise import env_seed
from penstock.core.spec import SHARED, EnvSpec, Specs, describe

PolicyMap: TypeAlias = "Mapping[str, str] | Callable[[str, int, int], str]"
"""Policy id by agent, or a pure function (agent, number of the episode, its seed) -> policy id, called at reset."""

_ASKED = 64
"""Episodes for which a mapping function is called in advance, to find the agents that each policy plays."""


@dataclass(frozen=True)
class AgentSpecs:
    """Description of an environment of many agents."""

    specs: Mapping[str, EnvSpec]
    """Observation and action of each of its `possible_agents`, in their order."""
    turns: bool
    """Agents act one after the other (AEC), not all at once (Parallel)."""

    def to_plain(self) -> dict[str, Any]:
        """Numbers, text, lists and dicts; `from_plain` brings it back."""
        return {"specs": [[agent, spec.to_plain()] for agent, spec in self.specs.items()], "turns": self.turns}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> AgentSpecs:
        """Inverse of `to_plain`."""
        return AgentSpecs({agent: EnvSpec.from_plain(spec) for agent, spec in plain["specs"]}, bool(plain["turns"]))


@dataclass(frozen=True)
class Seating:
    """The seats of each policy in every environment; a column of a policy's batch is one seat of one environment.

    Seat i of policy p in environment e is column `e * seats[p] + i`. `seat_agents` makes and checks a seating;
    `Seating.alone` makes that of an environment of one agent.
    """

    policies: tuple[str, ...]
    seats: tuple[int, ...]
    """Seats of each policy in one environment."""
    specs: tuple[EnvSpec, ...]
    """EnvSpec of each policy, as its agent receives it; `spec.agents` is the policy's number of seats."""
    agents: tuple[str, ...]
    """The environment's `possible_agents`; empty in an environment of one agent, which gives that agent no name."""
    turns: bool
    mapping: PolicyMap

    @classmethod
    def alone(cls, spec: EnvSpec) -> Seating:
        """One seat, of the policy "shared", in an environment of one agent."""
        return cls((SHARED,), (1,), (spec,), (), False, {})

    @property
    def many(self) -> bool:
        """True for an environment of many agents: what users are given of its policies is then by policy id."""
        return bool(self.agents)

    @property
    def by_id(self) -> dict[str, EnvSpec]:
        """The spec of each policy, by its id."""
        return dict(zip(self.policies, self.specs))

    @property
    def for_build(self) -> Specs:
        """Argument of `Algorithm.build`: the EnvSpec of the one agent, or {policy id: EnvSpec}."""
        return self.by_id if self.many else self.specs[0]

    def most_episodes(self, T: int) -> int:
        """Episodes of one environment that can end in a batch of T rows, at most."""
        if not self.many:
            return T + 1
        return T * sum(self.seats) + 1 if self.turns else (T + 1) // 2  # one takes a move, or a step and a reset

    @property
    def fixed(self) -> bool:
        """Every agent has the same policy in all episodes: the mapping is a dict."""
        return isinstance(self.mapping, Mapping)

    def policy_of(self, agent: str, episode: int, seed: int) -> int:
        """Index of the policy that plays an agent in an episode. Raises ConfigError if the mapping names none."""
        if isinstance(self.mapping, Mapping):
            if agent not in self.mapping:
                raise ConfigError(
                    f"policy_mapping_fn names no policy for agent {agent!r}, only for {list(self.mapping)}; add "
                    f"{agent!r}: one of {list(self.policies)}"
                )
            name = self.mapping[agent]
        else:
            try:
                name = self.mapping(agent, episode, seed)
            except Exception as error:
                raise ConfigError(
                    f"policy_mapping_fn raised {words_of(error)} for agent {agent!r} in episode {episode}, seed {seed}"
                ) from error
        if name not in self.policies:
            raise ConfigError(
                f"policy_mapping_fn names {name!r} for agent {agent!r} in episode {episode}, seed {seed}; "
                f"{nearest(str(name), self.policies)}"
            )
        return self.policies.index(name)

    def deal(self, episode: int, seed: int) -> tuple[int, ...]:
        """Index of the policy of each of `agents` in an episode.

        Raises:
            ConfigError: the mapping names no policy, or is no pure function: two equal calls return two policies.
        """
        found = tuple(self.policy_of(agent, episode, seed) for agent in self.agents)
        if not self.fixed:
            for agent, policy in zip(self.agents, found):
                if (again := self.policy_of(agent, episode, seed)) != policy:
                    raise ConfigError(
                        f"policy_mapping_fn changes within an episode: it named {self.policies[policy]!r}, then "
                        f"{self.policies[again]!r} for agent {agent!r} in episode {episode}, seed {seed}; make it a "
                        "pure function of these three"
                    )
        return found


class SeatAssignment:
    """Who sits where in one environment. A seat is free again once its agent has left it.

    If a policy has a seat for each of its agents, an agent has the same seat in every episode.
    """

    def __init__(self, seating: Seating) -> None:
        self._seating = seating
        self._dealt = seating.deal(0, 0) if seating.fixed else None
        self._at: dict[str, tuple[int, int]] = {}
        self._taken: set[tuple[int, int] | None] = set()
        self.policy: dict[str, int] = {}
        """Index of the policy of every possible agent in this episode."""
        self._home: dict[str, tuple[int, int]] = {}
        if self._dealt is not None:
            self._settle(self._dealt)

    def open(self, episode: int, seed: int) -> None:
        """Begins an episode: every seat is free, and policies are asked for anew."""
        self._at.clear()
        self._taken.clear()
        if self._dealt is None:
            self._settle(self._seating.deal(episode, seed))

    def sit(self, agent: str) -> tuple[int, int] | None:
        """Policy and seat of an agent that comes; None if its policy has no seat left."""
        policy, seat = home = self._home[agent]
        taken, seats = self._taken, self._seating.seats[policy]
        if seat >= seats or home in taken:
            home = next(((policy, i) for i in range(seats) if (policy, i) not in taken), None)
            if home is None:
                return None
        self.put(agent, *home)
        return home

    def put(self, agent: str, policy: int, seat: int) -> None:
        """Seats an agent where it sat before a run was resumed."""
        self._at[agent] = policy, seat
        self._taken.add((policy, seat))

    def of(self, agent: str) -> tuple[int, int]:
        """Policy and seat of an agent that sits."""
        return self._at[agent]

    def leave(self, agent: str) -> None:
        """Frees the agent's seat."""
        self._taken.discard(self._at.pop(agent, None))

    def why_none(self, agent: str) -> str:
        """A message for an agent without a seat."""
        policy = self.policy[agent]
        there = [name for name, (p, _) in self._at.items() if p == policy]
        return (
            f"agent {agent!r} finds no seat of policy {self._seating.policies[policy]!r}: "
            f"{_of(self._seating.seats[policy], 'seat')}, held by {there}; give it more, e.g. "
            f"seats={{{self._seating.policies[policy]!r}: {len(there) + 1}}}"
        )

    def _settle(self, dealt: Sequence[int]) -> None:
        count = [0] * len(self._seating.policies)
        for agent, policy in zip(self._seating.agents, dealt):
            self.policy[agent], self._home[agent] = policy, (policy, count[policy])
            count[policy] += 1


def seat_agents(
    found: AgentSpecs,
    policies: Sequence[str],
    mapping: PolicyMap | None = None,
    seats: Mapping[str, int] | None = None,
) -> Seating:
    """The seating of these policies in an environment.

    Args:
        mapping: policy of each agent; None: the one policy plays every agent.
        seats: number for each policy in one environment; counted from a dict `mapping`, needed with a function.

    Raises:
        ConfigError: a policy is unknown or plays no agent, agents of one policy have different spaces, or seats are
            missing or too few.
    """
    agents = tuple(found.specs)
    if mapping is None:
        if len(policies) != 1:
            raise ConfigError(
                f"policies {list(policies)} without a policy_mapping_fn; give one, e.g. "
                f"policy_mapping_fn={_example_of(policies, found)!r}, or a function (agent, episode, seed)"
            )
        mapping = dict.fromkeys(agents, policies[0])
    given = dict(seats or {})
    for name in given:
        if name not in policies:
            raise ConfigError(f"seats names the policy {name!r}; {nearest(name, policies)}")
    if isinstance(mapping, Mapping):
        for agent in mapping:
            if agent not in agents:
                raise ConfigError(f"policy_mapping_fn names agent {agent!r}; {nearest(str(agent), agents)}")
    elif not callable(mapping):
        raise ConfigError(
            f"policy_mapping_fn={mapping!r}; expected a dict of agent to policy id, or a function "
            "(agent, episode, seed) -> policy id"
        )
    draft = Seating(tuple(policies), (1,) * len(policies), (), agents, found.turns, mapping)
    episodes = 1 if draft.fixed else _ASKED
    dealt = [draft.deal(episode, env_seed(0, 0, episode)) for episode in range(episodes)]
    counts, specs = list[int](), list[EnvSpec]()
    for p, name in enumerate(policies):
        players = [agent for k, agent in enumerate(agents) if any(row[k] == p for row in dealt)]
        at_once = max(row.count(p) for row in dealt)
        count = given.get(name, at_once if draft.fixed or len(policies) == 1 else 0)
        if not players and draft.fixed:
            raise ConfigError(
                f"policy {name!r} plays no agent; leave it out, or name it in policy_mapping_fn for one of "
                f"{list(agents)}"
            )
        if count < 1:
            raise ConfigError(
                f"policy {name!r} has {_of(count, 'seat')}; policy_mapping_fn is a function, so say how many agents "
                f"each policy plays at once at most, e.g. seats={dict.fromkeys(policies, max(at_once, 1))!r}"
            )
        spec = _spec_of(name, players or list(agents), found.specs)
        counts.append(count)
        specs.append(replace(spec, agents=count))
    return replace(draft, seats=tuple(counts), specs=tuple(specs))


def _spec_of(policy: str, players: Sequence[str], specs: Mapping[str, EnvSpec]) -> EnvSpec:
    """The spec that all players of a policy have. Raises ConfigError where they differ."""
    first = specs[players[0]]
    for agent in players:
        if specs[agent] != first:
            raise ConfigError(
                f"policy {policy!r} plays {players[0]!r}, which sees {describe(first.obs)} and takes "
                f"{describe(first.action)}, and {agent!r}, which sees {describe(specs[agent].obs)} and takes "
                f"{describe(specs[agent].action)}; agents of one policy need equal spaces: give each kind a policy "
                "(ps.Policies), or pad them, e.g. by SuperSuit's pad_observations_v0 and pad_action_space_v0"
            )
    return first


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _example_of(policies: Sequence[str], found: AgentSpecs) -> dict[str, str]:
    """A mapping to show: one policy for each kind of spaces; if all agents are of one kind, policies alternate."""
    kinds = list(dict.fromkeys(found.specs.values()))
    places = {agent: kinds.index(spec) if len(kinds) > 1 else i for i, (agent, spec) in enumerate(found.specs.items())}
    return {agent: policies[place % len(policies)] for agent, place in places.items()}
