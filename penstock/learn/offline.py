"""The replay of a policy that learns from a dataset: all of it is in reach from the first gradient step."""

from __future__ import annotations

import warnings
from typing import Any

from penstock.core.batch import as_arrays
from penstock.learn.policy import Policy, as_tensors


def plan_whole(policy: Any, sampler: Any) -> None:
    """Makes room for the sampler's dataset in the policy's replay, before `policy.prepare`; warns if it is too small.

    A sampler without a dataset, and a replay that gives each sample once, stay as they are.
    """
    schedule = getattr(policy, "replay_schedule", None)
    if schedule is None or not hasattr(sampler, "each_once") or schedule.replay.settings.index == "fifo":
        return
    capacity = schedule.replay.settings.capacity
    if sampler.steps <= capacity:
        schedule.replay.least = sampler.rows_once
    else:
        warnings.warn(
            f"replay.capacity={capacity:,} for a dataset of {sampler.steps:,} steps: gradient steps draw from the "
            f"steps played last; use --algo.replay.capacity {sampler.steps} to draw from all of them",
            stacklevel=3,
        )


def fill(policy: Any, sampler: Any) -> None:
    """Fills a replay that `plan_whole` made room in with every episode of the dataset, before the run's first step."""
    schedule = getattr(policy, "replay_schedule", None)
    if schedule is None or not schedule.replay.least or schedule.whole or schedule.collected:
        return
    assert isinstance(policy, Policy)
    for batch in sampler.each_once():
        arrays = as_arrays(batch)
        tensors = as_tensors(arrays, policy.device)
        schedule.replay.append(arrays, policy.agent.terminal(tensors).cpu().numpy())
        policy.observe(tensors)
    schedule.whole = True
