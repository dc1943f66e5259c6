"""Policies: several algorithms in one run, and which policy plays which agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from penstock.core.config import import_object, known_names
from penstock.core.errors import ConfigError, nearest
from penstock.core.limits import check_settings
from penstock.core.noise import policy_seed
from penstock.core.protocols import require_call, require_members
from penstock.core.spec import SHARED, BatchSpec, EnvSpec, Specs
from penstock.envs.agent_observations import with_joint_state
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.seats import AgentSpecs, seat_agents
from penstock.learn.algorithm import Algorithm, batch_of
from penstock.learn.policy_set import PolicySet


@dataclass(frozen=True)
class Policies:
    """Settings of several policies side by side; an Algorithm, so that it stands where `ps.PPO()` does.

    `run.*` limits count environment steps, once for all agents; `learning_starts`, replay ratios and minibatches of a
    policy count its own valid rows. An algorithm that brings a `training_step` of its own cannot be one of several.
    """

    __new__ = known_names
    fixed: ClassVar[frozenset[str]] = frozenset(("policy_mapping_fn", "seats", "policies_to_train", "min_rows"))

    algos: Mapping[str, Algorithm]
    """The algorithm of each policy by its id, e.g. {"a": ps.PPO(), "b": ps.DQN()}."""
    policy_mapping_fn: Mapping[str, str] | Callable[..., str] | str | None = None
    """Policy id by agent, or a pure function (agent, number of the episode, its seed) -> policy id, or the function's
    `module:name`. Called at each reset, for the whole episode. None: one policy plays all agents."""
    seats: Mapping[str, int] | None = None
    """Largest number of agents that a policy plays at once in one environment. None: counted from a dict mapping."""
    policies_to_train: tuple[str, ...] | None = None
    """Ids of the policies that learn; the others only act. None: all learn."""
    min_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """Least number of valid rows that a policy trains on, by policy id: {"boss": 64}. It keeps the rows of its batches
    until it has this many, and its minibatches are counted by valid rows. For policies that act rarely; usually their
    minibatch."""

    def __post_init__(self) -> None:
        if isinstance(self.policy_mapping_fn, str):
            object.__setattr__(self, "policy_mapping_fn", import_object(self.policy_mapping_fn))
        if isinstance(self.policies_to_train, list):
            object.__setattr__(self, "policies_to_train", tuple(self.policies_to_train))
        if not isinstance(self.algos, Mapping) or not self.algos:
            raise ConfigError(
                f"Policies(algos={self.algos!r:.80}); expected algorithms by policy id, e.g. {{'a': ps.PPO()}}"
            )
        check_settings(self)
        for name, algo in self.algos.items():
            if not isinstance(name, str) or not name or "/" in name:
                raise ConfigError(
                    f"Policies got the policy id {name!r}; expected a text without '/', which names files"
                )
            if isinstance(algo, type):
                raise ConfigError(f"policy {name!r} is {algo!r}; expected settings, did you mean {algo.__name__}()?")
            if isinstance(algo, (str, Mapping)):
                raise ConfigError(f"policy {name!r} is {algo!r:.80}; expected settings, e.g. ps.PPO(lr=3e-4)")
            require_members(algo, Algorithm, "docs/writing-an-algorithm.md")
            odd = next((x for x in ("training_step", "seat") if hasattr(algo, x)), None)
            if odd is not None:
                raise ConfigError(
                    f"policy {name!r}: {type(algo).__name__} has a {odd} of its own, by which it drives a whole run; "
                    "use it alone, algo=..., or an algorithm of functions only"
                )
        mapping = self.policy_mapping_fn
        if mapping is not None and not isinstance(mapping, Mapping):
            require_call("policy_mapping_fn", mapping, "agent", "episode", "seed", returns="a policy id")
        named = {
            "policy_mapping_fn": mapping.values() if isinstance(mapping, Mapping) else (),
            "seats": self.seats or (),
            "policies_to_train": self.policies_to_train or (),
            "min_rows": self.min_rows,
        }
        for what, names in named.items():
            for name in names:
                if name not in self.algos:
                    raise ConfigError(f"{what} names the policy {name!r}; {nearest(str(name), self.algos)}")
        if self.policies_to_train == ():
            raise ConfigError("policies_to_train=(); expected at least one policy id, or None for all")
        for name, count in (self.seats or {}).items():
            if type(count) is not int or count < 1:
                raise ConfigError(f"seats[{name!r}]={count!r}; expected 1 or more agents of an environment")
        for name, rows in self.min_rows.items():
            if type(rows) is not int or rows < 1:
                raise ConfigError(f"min_rows[{name!r}]={rows!r}; expected 1 or more rows, usually those of a minibatch")
            if name not in self.trained:
                raise ConfigError(f"min_rows names {name!r}, which is not in policies_to_train; leave it out")

    @property
    def batch(self) -> BatchSpec:
        """The larger T and the larger B of those that the policies in training would have."""
        specs = [batch_of(algo) for algo in self.trained.values()]
        return BatchSpec(max(spec.T for spec in specs), max(spec.B for spec in specs))

    @property
    def trained(self) -> dict[str, Algorithm]:
        """The algorithms of the policies that learn."""
        names = self.algos if self.policies_to_train is None else self.policies_to_train
        return {name: algo for name, algo in self.algos.items() if name in names}

    @property
    def takes_stale(self) -> bool:
        """True if every policy that learns does."""
        return all(getattr(algo, "takes_stale", False) for algo in self.trained.values())

    @property
    def takes_fragments(self) -> bool:
        """True if every policy that learns does."""
        return all(getattr(algo, "takes_fragments", False) for algo in self.trained.values())

    @property
    def discount(self) -> float | None:
        """The first policy's, for logged discounted returns; None if it has none."""
        return next((found for x in self.trained.values() if (found := getattr(x, "discount", None)) is not None), None)

    def build(self, spec: Specs, seed: int = 0, device: str = "cpu", total_steps: int | None = None) -> PolicySet:
        """The live policies.

        Args:
            spec: {policy id: EnvSpec}, as in `sampler.specs`; for an environment of one agent its EnvSpec.
            seed: the first policy's own; the others have seeds made of it.
            total_steps: environment steps that schedules run over in your own loop; a run sets it by itself.
        """
        specs: Mapping[str, EnvSpec]
        if isinstance(spec, EnvSpec):
            if len(self.algos) > 1:
                raise ConfigError(
                    f"Policies of {list(self.algos)} with an environment of one agent; expected one policy, or an "
                    "environment of many agents, e.g. pettingzoo:mpe2/simple_spread_v3"
                )
            specs = dict.fromkeys(self.algos, spec)
        elif len(self.algos) == 1 and list(spec) == [SHARED]:
            specs = dict.fromkeys(self.algos, spec[SHARED])  # of a sampler of an environment of one agent
        else:
            specs = spec
        if set(specs) != set(self.algos):
            raise ConfigError(f"Policies.build got specs of {list(specs)}; expected those of {list(self.algos)}")
        made = {
            name: algo.build(specs[name], seed=policy_seed(seed, i), device=device)
            for i, (name, algo) in enumerate(self.algos.items())
        }
        for name, policy in made.items():
            policy.clock.begin(total_steps)
            if name in self.min_rows and policy.replay_schedule is not None:
                raise ConfigError(
                    f"min_rows names {name!r}, and {type(self.algos[name]).__name__} draws its rows from a replay: "
                    "learning_starts and replay_ratio say when it trains; leave it out"
                )
        return PolicySet(made, list(self.trained), one_agent=isinstance(spec, EnvSpec), settings=self)

    def seat(self, env: EnvConfig | str | Callable[..., Any], agents: AgentSpecs | None = None) -> EnvConfig:
        """The environment with a seat for every agent, for `sampler.build`; unchanged if it has a single agent.

        If an algorithm has `observes_state` and `EnvConfig.state` is empty, agents are shown the joint observation.

        Args:
            agents: description of its agents, as in `penstock.check_env(env).agents`; None: an instance is made and
                asked.

        Raises:
            ConfigError: the mapping leaves out an agent or names an unknown one, seats are missing or too few, or a
                policy plays agents of different spaces.
        """
        config = as_env_config(env)
        agents = check_env(config, steps=1).agents if agents is None else agents
        if agents is None:
            return config
        if not config.state and any(getattr(algo, "observes_state", False) for algo in self.trained.values()):
            config, agents = replace(config, state="joint"), with_joint_state(agents, config.name)
        mapping: Any = self.policy_mapping_fn
        seating = seat_agents(agents, tuple(self.algos), mapping, self.seats)
        for name, algo in self.trained.items():
            if getattr(algo, "lockstep", False) and (seating.turns or not seating.fixed):
                seen = "whose agents take turns" if seating.turns else "with a policy_mapping_fn that is a function"
                raise ConfigError(
                    f"policy {name!r}: {type(algo).__name__} in {config.name}, {seen}; expected agents that all act in "
                    "each step, and the same ones in every episode: use PPO or MAPPO there"
                )
        if isinstance(seating.mapping, Mapping):
            for p, (name, count) in enumerate(zip(seating.policies, seating.seats)):
                played = [agent for agent in seating.agents if seating.policy_of(agent, 0, 0) == p]
                if count < len(played):
                    raise ConfigError(f"seats[{name!r}]={count}, and it plays {played}; expected {len(played)}")
        return replace(config, seating=seating)


def for_agents(algo: Any, agents: object) -> Any:
    """The algorithm for an environment: a plain one plays all agents of several by one policy, "shared".

    Args:
        agents: true for an environment of many agents.

    Raises:
        ConfigError: it brings a training_step of its own, which expects batches of one agent.
    """
    return Policies({SHARED: algo}) if agents and not hasattr(algo, "seat") else algo
