"""State of a policy: as data for a checkpoint, and the settings of another one, which it takes under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.parameters import misfit
from penstock.core.errors import CheckpointError, ConfigError
from penstock.learn.algorithm import Optimizers
from penstock.learn.step.gradients import UpdateCount
from penstock.learn.step.groups import load_optimizers, no_decay, taking_groups_of

if TYPE_CHECKING:
    from penstock.learn.policy import Policy


def state_of(policy: Policy) -> dict[str, Any]:
    """The body of `Policy.state_dict`."""
    count = policy.update_count
    count.settled()
    return {
        "agent": policy.agent.state_dict(),
        "optimizers": {name: optimizer.state_dict() for name, optimizer in policy.optimizers.items()},
        "counters": {
            "version": policy.version,
            "updates": count.taken,
            "skipped": count.skipped,
            "skips_in_a_row": count.in_a_row,
            "predictions": policy.predictions,
            "stale_rows": policy.stale_rows,
            "env_steps": policy.clock.env_steps,
            **({} if policy.rate is None else {"rate": policy.rate.value.item()}),
            **({"teacher": policy.teacher_digest} if policy.teacher else {}),
        },
        **({} if policy.replay_schedule is None else {"experience": policy.replay_schedule.state_dict()}),
    }


def load_state(policy: Policy, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """The body of `Policy.load_state_dict`."""
    if missing := [key for key in ("agent", "optimizers", "counters") if key not in state]:
        seen = f"a policy's state has {', '.join(list(state)[:5]) or 'nothing'} and no {' and no '.join(missing)}"
        raise CheckpointError(f"{seen}; expected one of state_dict(); parameters alone go into load_parameters()")
    if (taught := state["counters"].get("teacher", "")) != policy.teacher_digest:
        raise CheckpointError(
            f"{policy.teacher or 'the teacher'} is {policy.teacher_digest[:12] or 'missing'}, and the checkpoint was "
            f"written with {taught[:12] or 'none'} (sha256): it has changed, so the run cannot go on as if it had "
            "not stopped; put the old one back, or start anew with --init"
        )
    load_parameters(policy.agent, state["agent"])
    load_optimizers(policy.optimizers, state["optimizers"], lambda: _otherwise_grouped(policy))
    counters = state["counters"]
    policy.version, policy.predictions = counters["version"], counters["predictions"]
    policy.update_count = UpdateCount(counters["updates"], counters["skipped"], counters["skips_in_a_row"])
    policy.stale_rows = counters.get("stale_rows", 0)  # checkpoints before 0.2 have none
    policy.clock.env_steps = counters.get("env_steps", 0)
    if policy.rate is not None and "rate" in counters:  # else the run began with another lr
        policy.rate.value.fill_(counters["rate"])
        policy.set_rates()
    if policy.replay_schedule is not None:
        policy.replay_schedule.load_state_dict(state["experience"], arrays)
    if policy.clock.env_steps:
        policy.move_schedules(policy.clock.progress, policy.clock.env_steps)


def load_parameters(agent: Agent, parameters: Mapping[str, Tensor]) -> None:
    """The body of `Policy.load_parameters`."""
    try:
        agent.load_state_dict(dict(parameters))
    except RuntimeError as error:
        raise CheckpointError(
            f"the stored parameters do not fit this agent, {misfit(agent.state_dict(), parameters)}; "
            "were net (its widths, net.norm, net.block), spaces or the algorithm changed?"
        ) from error


def _otherwise_grouped(policy: Policy) -> Optimizers | None:
    """Optimizers with groups as if `weight_decay` were switched on or off, None of settings that have none."""
    own: Any = policy.settings
    if not hasattr(own, "weight_decay"):
        return None
    return policy.optimizer_fn(policy.agent, replace(own, weight_decay=float(no_decay(own))))


def taking_settings(policy: Policy, twin: Policy) -> Callable[[], None]:
    """The body of `Policy.taking_settings_of`."""
    own, theirs = ({name: p.shape for name, p in x.agent.named_parameters()} for x in (policy, twin))
    if own != theirs:
        raise ConfigError("the change needs other networks; start anew with it, init=RUN (--init)")
    made = twin.optimizer_fn(policy.agent, twin.settings)
    take_groups = taking_groups_of(policy.optimizers, made, no_decay(policy.settings) != no_decay(twin.settings))
    fresh = None if policy.replay_fn is None else policy.replay_fn(policy.agent, twin.settings)

    def take() -> None:
        if getattr(policy.algorithm, "lr", None) != getattr(twin.algorithm, "lr", None):
            policy.rate = twin.rate
        policy.algorithm, policy.scheduled = twin.algorithm, twin.scheduled
        policy.epochs, policy.minibatch = twin.epochs, twin.minibatch
        policy.max_grad_norm, policy.standardize = twin.max_grad_norm, twin.standardize
        policy.settings = twin.settings
        take_groups()
        policy.set_rates()
        if fresh is not None and policy.replay_schedule is not None:
            policy.replay_schedule.take_settings_of(fresh)
        policy.move_schedules(policy.progress, policy.env_steps)

    return take
