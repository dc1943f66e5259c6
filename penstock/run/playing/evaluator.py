"""Evaluator: plays evaluations in environments that no training sampler has made."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.spec import SHARED, EnvSpec, Specs, describe
from penstock.envs.check import EnvReport
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import makes_vector_env
from penstock.learn.policies import Policies
from penstock.learn.policy_set import AnyPolicy, PolicySet, agents_of, specs_of
from penstock.samplers.episodes import Episodes
from penstock.samplers.serial import SerialSampler


class Evaluator:
    """Plays episodes in this process with the policy of any moment, in environments that are kept until `close`.

    Args:
        B: slots of a native batched environment, which may have no other number.
    """

    def __init__(self, config: EnvConfig, seed: int, B: int) -> None:
        # Its training slots are never stepped; they come after those that train, for factories that ask for `slot`.
        self._config = config
        self._sampler = SerialSampler(T=1, B=B if makes_vector_env(config, B) else 1).build(config, seed, first_slot=B)

    def play(self, policy: AnyPolicy, itr: int, episodes: int, **how: Any) -> Episodes:
        """Episodes as of `Sampler.evaluate_agent`, with a copy of the agent: one that trains is not touched.

        Raises:
            ConfigError: the policy was built for other observations or actions.
        """
        seating = self._config.seating
        found = self._sampler.spec if seating is None else dict(zip(seating.policies, seating.specs))
        check_fits(self._config, found, specs_of(policy))
        agents = copy.deepcopy(agents_of(policy))
        if (device := self._sampler.pool.device) is not None:
            agents = (
                {name: agent.to(device) for name, agent in agents.items()}
                if isinstance(agents, Mapping)
                else agents.to(device)
            )
        self._sampler.initialize(agents)
        return self._sampler.evaluate_agent(itr, episodes, **how)

    def close(self) -> None:
        """Closes the environments."""
        self._sampler.shutdown()


def seated_for(policy: AnyPolicy, config: EnvConfig, report: EnvReport) -> tuple[AnyPolicy, EnvConfig]:
    """The policy and the environment to play it in, with a seat for every agent where there are many.

    One policy, of a run in an environment of one agent or one of several, then plays them all.
    """
    if report.agents is None:
        return policy, config
    if not isinstance(policy, PolicySet):
        algorithm: Any = policy.algorithm
        policy = PolicySet({SHARED: policy}, [SHARED], settings=Policies({SHARED: algorithm}))
    return policy, policy.seat(config, report.agents)


def check_fits(config: EnvConfig, found: Specs, expected: Specs) -> None:
    """Raises ConfigError unless an environment to evaluate in has the spaces that a policy was built for."""
    if isinstance(found, EnvSpec) != isinstance(expected, EnvSpec):
        kind = "one agent" if isinstance(found, EnvSpec) else "many agents"
        raise ConfigError(f"{config.name} is an environment of {kind}, and the policy was built for another kind")
    theirs = {"": found} if isinstance(found, EnvSpec) else found
    ours = {"": expected} if isinstance(expected, EnvSpec) else expected
    for name, spec in ours.items():
        own = theirs[name]
        if (own.obs, own.action) != (spec.obs, spec.action):
            which = f" of the agents of policy {name!r}" if name else ""
            raise ConfigError(
                f"{config.name} has observation {describe(own.obs)}, action {describe(own.action)}{which}; the policy "
                f"was built for {describe(spec.obs)} and {describe(spec.action)}: evaluate it in an environment with "
                "these spaces, or add the wrappers that make them"
            )
        if own.agents != spec.agents:
            raise ConfigError(
                f"policy {name!r} plays {own.agents} agents of {config.name} at once, and was built for {spec.agents}; "
                "evaluate it in an environment with as many"
            )
