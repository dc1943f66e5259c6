"""An algorithm made to suit environment and sampler: who plays whom, and whether it learns from what is collected."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.agents.preparation import RewardScaler
from penstock.core.errors import ConfigError
from penstock.core.spec import Specs
from penstock.envs.check import EnvReport
from penstock.envs.make import EnvConfig
from penstock.learn.policies import for_agents
from penstock.learn.policy import Policy
from penstock.learn.policy_set import AnyPolicy, PolicySet, each
from penstock.replay.hindsight import HindsightTransitions
from penstock.run.experiment import Experiment
from penstock.samplers.offline import check_teacher
from penstock.samplers.sampler import SamplerSettings


def seated(algo: Any, config: EnvConfig, report: EnvReport) -> tuple[EnvConfig, Specs]:
    """The environment with a seat for every agent, and {policy id: EnvSpec}; of one agent as it is, and its EnvSpec.

    Args:
        algo: of an environment of many agents one with `seat`, as `penstock.Policies`.
    """
    if report.agents is None:
        return config, report.spec
    config = algo.seat(config, report.agents)
    assert config.seating is not None
    return config, dict(zip(config.seating.policies, config.seating.specs))


def suited(exp: Experiment, report: EnvReport) -> tuple[Any, EnvConfig, Specs]:
    """The algorithm of an experiment as it plays in its environment, the environment with seats, and its specs.

    Args:
        report: of `check_env` on the experiment's environment.
    """
    algo = for_agents(exp.algo, report.agents)
    return algo, *seated(algo, exp.env_config, report)


def reward_goals(policy: AnyPolicy, config: EnvConfig, settings: SamplerSettings) -> None:
    """Has hindsight ask the environment that a run trains in what other goals are worth, where that is its class.

    Its slot comes after those that train and that of an evaluator, for factories that ask for one.
    """
    for own in each(policy).values():
        view = None if own.replay_schedule is None else own.replay_schedule.replay.view
        if isinstance(view, HindsightTransitions):
            view.play_in(partial(config.make, settings.spec.B + 1))


def check_sources(algo: Any, settings: SamplerSettings, policy: AnyPolicy) -> None:
    """Raises ConfigError for an algorithm that does not learn from the batches of its sampler.

    Of several policies each that learns is looked at; the message names the one.
    """
    algos: Mapping[str, Any] = getattr(algo, "algos", {}) if isinstance(policy, PolicySet) else {}
    for name, own in each(policy).items():
        try:
            check_teacher(algos.get(name, algo), settings, own.replay_schedule is not None)
            check_stale(algos.get(name, algo), settings, own)
        except ConfigError as error:
            raise ConfigError(f"policy {name!r}: {error}" if name else str(error)) from None


def check_stale(algo: Any, settings: SamplerSettings, policy: Policy) -> None:
    """Raises ConfigError for an algorithm that does not learn from the stale batches or fragments of its sampler."""
    depth, name = settings.depth, type(algo).__name__
    if settings.mode == "ready":
        why, instead = "", "mode='rounds', or IMPALA or APPO"
        if not getattr(algo, "takes_fragments", False):
            why = f"{name} learns from whole batches, whose slots follow each other from one to the next"
        elif policy.replay_schedule is not None:
            why = f"{name} keeps a replay, whose slots follow each other from one batch to the next"
            instead = "mode='rounds'"
        elif any(isinstance(module, RewardScaler) for module in policy.agent.modules()):
            why = "net.normalize_reward keeps a running return of each slot from one batch to the next"
            instead = "mode='rounds', or net.normalize_reward=False"
        if why:
            raise ConfigError(
                f"sampler.mode='ready' makes a batch of the runner that is ready first, and {why}; use {instead}"
            )
    elif depth and not getattr(algo, "takes_stale", False):
        raise ConfigError(
            f"sampler.depth={depth} with {name}, which learns from nothing but batches of its present policy; use "
            "depth=0, a synchronous sampler, or PPO, APPO or IMPALA"
        )
