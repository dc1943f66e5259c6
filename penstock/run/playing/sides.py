"""Sides: who plays agents of a game, by the policies of a run, by a script or at random."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, describe
from penstock.learn.policy import Policy
from penstock.learn.policy_set import AnyPolicy, by_id, trained_policies
from penstock.run.playing.opponents import RandomAgent, ScriptedAgent, WithoutState


@dataclass(frozen=True)
class Side:
    """One who plays: the policies of a run, or an opponent without one."""

    name: str
    policy: AnyPolicy | None = None
    script: Any = None
    """The function of a scripted one; None with no policy: it acts at random."""

    def agent(self, name: str, spec: EnvSpec) -> tuple[str, Agent]:
        """The policy that plays an agent, by a name of its own, and what acts for it.

        Raises:
            ConfigError: it was built for other observations or actions.
        """
        if self.policy is None:
            own = RandomAgent(spec) if self.script is None else ScriptedAgent(spec, self.script, self.name)
            return f"{describe(spec.obs)}, {describe(spec.action)}", own
        id_, policy = playing(self.policy, name)
        shown = WithoutState.shown(policy.agent, policy.spec)
        if policy.spec.obs != spec.obs and (shown, policy.spec.action) == (spec.obs, spec.action):
            return id_, WithoutState(policy.agent, spec)
        if (policy.spec.obs, policy.spec.action) != (spec.obs, spec.action):
            raise ConfigError(
                f"{self.name} was built for observation {describe(policy.spec.obs)}, action "
                f"{describe(policy.spec.action)}, and agent {name!r} has {describe(spec.obs)}, {describe(spec.action)}"
                f"{_chosen(self.policy, name)}"
            )
        return id_, policy.agent


def playing(policy: AnyPolicy, agent: str) -> tuple[str, Policy]:
    """Who of a run plays an agent, by its id: by the run's mapping where it is a dict, else the first that learns."""
    mapping = getattr(policy.settings, "policy_mapping_fn", None)
    if isinstance(mapping, Mapping) and agent in mapping:
        return mapping[agent], by_id(policy)[mapping[agent]]
    return next(iter(trained_policies(policy).items()))


def _chosen(policy: AnyPolicy, agent: str) -> str:
    """How an error ends where one of several policies was chosen for an agent that no mapping as a dict names."""
    ids, settings = list(by_id(policy)), policy.settings
    if len(ids) < 2 or not hasattr(settings, "policy_mapping_fn"):
        return ""
    mapping = getattr(settings, "policy_mapping_fn", None)
    if isinstance(mapping, Mapping) and agent in mapping:
        return ""
    return (
        f": only a policy_mapping_fn that is a dict says here which of {ids} plays an agent, else the first "
        "that learns does; train with a dict"
    )
