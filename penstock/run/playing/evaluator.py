"""Evaluator: plays evaluations in environments that no training sampler has made."""

from __future__ import annotations

import copy
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, describe
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import makes_vector_env
from penstock.learn.policy import Policy
from penstock.samplers.episodes import Episodes
from penstock.samplers.serial import SerialSampler


class Evaluator:
    """Plays episodes in this process with the policy of any moment, in environments that are kept until `close`.

    Args:
        B: slots of a native batched environment, which may have no other number.
    """

    def __init__(self, config: EnvConfig, seed: int, B: int) -> None:
        # Its training slots are never stepped.
        self._config = config
        self._sampler = SerialSampler(T=1, B=B if makes_vector_env(config) else 1).build(config, seed)

    def play(self, policy: Policy, itr: int, episodes: int, **how: Any) -> Episodes:
        """Episodes as of `Sampler.evaluate_agent`, with a copy of the agent: one that trains is not touched.

        Raises:
            ConfigError: the policy was built for other observations or actions.
        """
        check_fits(self._config, self._sampler.spec, policy.spec)
        self._sampler.initialize(copy.deepcopy(policy.agent))
        return self._sampler.evaluate_agent(itr, episodes, **how)

    def close(self) -> None:
        """Closes the environments."""
        self._sampler.shutdown()


def check_fits(config: EnvConfig, found: EnvSpec, expected: EnvSpec) -> None:
    """Raises ConfigError unless an environment to evaluate in has the spaces that a policy was built for."""
    if found != expected:
        raise ConfigError(
            f"{config.name} has observation {describe(found.obs)}, action {describe(found.action)}; the policy was "
            f"built for {describe(expected.obs)} and {describe(expected.action)}: evaluate it in an environment with "
            "these spaces, or add the wrappers that make them"
        )
