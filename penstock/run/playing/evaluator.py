"""Evaluator: plays evaluations in environments that no training sampler has made."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError
from penstock.core.spec import SHARED, EnvSpec, Share, describe
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import CallRecord
from penstock.envs.pools.native import makes_vector_env
from penstock.envs.seats import Seating
from penstock.learn.policies import Policies
from penstock.learn.policy_set import AnyPolicy, PolicySet, by_id, specs_of
from penstock.run.playing.opponents import WithoutState
from penstock.samplers.episodes import Episodes
from penstock.samplers.sampler import SamplerSettings
from penstock.samplers.serial import SerialSampler
from penstock.workers.env_check import check_apart


class Evaluator:
    """Plays episodes with the policy of any moment, in environments that are kept until `close`.

    Args:
        B: slots of a native batched environment, which may have no other number.
        settings: of a synchronous sampler with worker processes, which step the environments; None: this one does.
        how: further arguments of the sampler's `build`.
    """

    def __init__(
        self, config: EnvConfig, seed: int, B: int, settings: SamplerSettings | None = None, **how: Any
    ) -> None:
        # Its training slots are never stepped; they come after those that train, for factories that ask for `slot`.
        self._config = config
        serial = SerialSampler(T=1, B=B if makes_vector_env(config, B) else 1)
        self._sampler: Any = (settings or serial).build(config, seed, share=Share(B), **how)

    def play(self, policy: AnyPolicy, itr: int, episodes: int, **how: Any) -> Episodes:
        """Episodes as in `Sampler.evaluate_agent`, with a copy of the agent: one that trains is not touched.

        Raises:
            ConfigError: the policy was built for other observations or actions.
        """
        check_fits(self._config, self._config.seated(self._sampler.spec), policy)
        return self.play_agents({name: own.agent for name, own in by_id(policy).items()}, itr, episodes, **how)

    def recall(self, calls: Sequence[CallRecord]) -> None:
        """Has every environment begin with these calls."""
        self._sampler.take_evaluation_calls(calls)

    def play_agents(self, agents: Mapping[str, Agent], itr: int, episodes: int, **how: Any) -> Episodes:
        """Like `play`, with agents by policy id that fit these environments."""
        seating = self._config.seated(self._sampler.spec)
        agents = copy.deepcopy(dict(agents))
        if seating.many:
            for name, spec in seating.by_id.items():
                agents[name].spec = spec  # other seats than in training, which does not affect its observations
        if (device := self._sampler.pool.device) is not None:
            agents = {name: agent.to(device) for name, agent in agents.items()}
        self._sampler.initialize(agents)
        return self._sampler.evaluate_agent(itr, episodes, **how)

    def close(self) -> None:
        """Closes the environments."""
        self._sampler.shutdown()


def seated_for(
    policy: AnyPolicy, config: EnvConfig, seed: int, settings: SamplerSettings | None = None
) -> tuple[AnyPolicy, EnvConfig]:
    """The policy, and the environment to play it in, checked, with a seat for every agent where there are many.

    With many agents, a policy trained with one agent, or chosen from several, plays them all. Errors as in
    `check_apart`, with the time limits of the sampler's settings.
    """
    report = check_apart(config, seed, settings)
    if report.agents is None:
        check_fits(config, Seating.alone(report.spec), policy)
        return policy, config
    if not isinstance(policy, PolicySet):
        algorithm: Any = policy.algorithm
        policy = PolicySet({SHARED: policy}, [SHARED], settings=Policies({SHARED: algorithm}))
    return policy, policy.seat(config, report.agents)


def check_fits(config: EnvConfig, seating: Seating, policy: AnyPolicy) -> None:
    """Raises ConfigError unless an environment to evaluate in has the spaces that a policy was built for.

    There may be more agents or fewer, where nothing that the policy acts on depends on their number.
    """
    many = seating.many
    if many == isinstance(specs_of(policy), EnvSpec):
        kind = "many agents" if many else "one agent"
        raise ConfigError(f"{config.name} is an environment of {kind}, and the policy was built for another kind")
    for name, ours in by_id(policy).items():
        own, spec = seating.by_id[name] if many else seating.specs[0], ours.spec
        seen = [WithoutState.shown(ours.agent, x) if many else x.obs for x in (own, spec)]
        if seen[0] != seen[1] or own.action != spec.action:
            which = f" of the agents of policy {name!r}" if many else ""
            number = f" ({own.agents} agents at once, {spec.agents} there)" if own.agents != spec.agents else ""
            raise ConfigError(
                f"{config.name} has observation {describe(own.obs)}, action {describe(own.action)}{which}; the policy "
                f"was built for {describe(spec.obs)} and {describe(spec.action)}{number}: evaluate it in an "
                "environment with these spaces, or add the wrappers that make them"
            )
