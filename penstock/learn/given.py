"""Checks the arguments of training functions, a policy and a sampler's batch; errors say what is needed instead."""

from __future__ import annotations

from typing import Any

from penstock.core.batch import MultiAgentBatch, SampleBatch, TrainBatch, batches_of
from penstock.core.errors import ConfigError
from penstock.learn.policy_set import AnyPolicy, PolicySet


def check_given(policy: Any, batch: Any, what: str = "train_one_step") -> None:
    """Raises ConfigError unless these are a live policy, and a batch of at least one row that it may learn from."""
    several = isinstance(policy, PolicySet)
    if not isinstance(policy, AnyPolicy):
        raise ConfigError(f"{what} got {_policy_text(policy)}")
    if what == "train_on_replay" and (several or policy.replay_schedule is None):
        one = "policies by id; expected one of them, policies[id], and its own batch, batch[id]"
        none = f"a policy of {type(policy.settings).__name__}, which has no replay; use train_one_step"
        raise ConfigError(f"{what} got {one if several else none}")
    if not isinstance(batch, SampleBatch) and not (several and isinstance(batch, MultiAgentBatch)):
        raise ConfigError(f"{what} got {_batch_text(batch)}")
    for name, part in batches_of(batch).items():
        if 0 in part.valid.shape:
            whose = f" of policy {name!r}" if name else ""
            raise ConfigError(
                f"{what} got a batch{whose} of T={part.valid.shape[0]}, B={part.valid.shape[1]}; expected at least one "
                "row of one slot: is a slice of it empty?"
            )


def _policy_text(given: Any) -> str:
    """Describes the value given instead of a policy, and what to pass."""
    kind = type(given).__name__
    if isinstance(given, type):
        return f"the class {given.__name__}; expected a live policy: policy = ps.{given.__name__}().build(sampler.spec)"
    if callable(getattr(given, "build", None)):
        return f"settings, {kind}(...); expected a live policy: policy = algo.build(sampler.spec), once before the loop"
    if hasattr(given, "policy"):
        return f"{kind}; expected a live policy: its own, given.policy"
    return f"{kind} in place of the policy; expected what algo.build(sampler.spec) returns, then the batch"


def _batch_text(given: Any) -> str:
    """Describes the value given instead of a batch, and what to pass."""
    if isinstance(given, MultiAgentBatch):
        return (
            f"a MultiAgentBatch of the policies {sorted(given)} for one Policy, which learns from its own batch: "
            "train_one_step(policies, batch) with the PolicySet that ps.Policies builds, or "
            "train_one_step(policies[name], batch[name]) for each name"
        )
    if isinstance(given, TrainBatch):
        return (
            "a TrainBatch, which is post-processed; expected the SampleBatch, or use policy.learn_on_batch(minibatch)"
        )
    hint = "; obtain_samples returns (batch, episodes)" if isinstance(given, tuple) else ""
    return f"{type(given).__name__}; expected the SampleBatch of a sampler{hint}"
