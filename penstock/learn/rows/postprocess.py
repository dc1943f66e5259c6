"""Rows of a batch as a loss takes them: tensors, post-processed by the algorithm, checked and standardized."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.agents.distributions import moments
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves, tree_map
from penstock.learn.rows.minibatch import check_rows
from penstock.learn.rows.reset_rows import with_reset_rows
from penstock.native import library

if TYPE_CHECKING:
    from penstock.learn.policy import Policy

_ROUNDING = 1e-3
"""Log-probabilities of one policy differ by less, whatever computed them."""
_views: WeakKeyDictionary[SampleBatch, tuple[Sequence[Any], SampleBatch]] = WeakKeyDictionary()
"""A batch's leaves in containers, and the batch as tensors."""


def postprocessed(policy: Policy, batch: SampleBatch | TrainBatch) -> TrainBatch:
    """The body of `Policy.postprocess`."""
    if isinstance(batch, SampleBatch) and isinstance(batch.valid, np.ndarray):
        batch = as_tensors(batch, policy.device)
    if isinstance(batch, SampleBatch) and policy.partition is not None:
        policy.partition.fit(batch.spec.B)
    if isinstance(batch, SampleBatch) and batch.final is not None:
        batch = with_reset_rows(batch, policy.comm)
    if isinstance(batch, SampleBatch) and (max_lag := getattr(policy.settings, "max_lag", None)) is not None:
        fresh = batch.valid & (batch.version >= policy.version - max_lag)
        stale = int(batch.valid.sum() - fresh.sum())
        policy.stale_rows += policy.of_all(stale)
        batch = replace(batch, valid=fresh)
    if isinstance(batch, SampleBatch) and getattr(policy.settings, "recomputes_logp", False):
        batch = _with_own_logp(policy, batch)
    function = policy.postprocess_fn if policy.partition is None else policy.partition.known_to(policy.postprocess_fn)
    try:
        data = function(policy.agent, batch, policy.settings)
    except KeyError as error:
        if isinstance(batch, TrainBatch) or error.args[0] in batch.info:
            raise
        raise ConfigError(
            f"postprocess_fn asked for {error}, and batch.info holds {sorted(batch.info)}: act() of "
            f"{type(policy.agent).__name__} must return it in its info, (action, {{{error}: ...}}, state); keys of "
            "the environment's own stand in batch.info['env'], where info_keys names them"
        ) from error
    if not isinstance(data, TrainBatch):
        raise ConfigError(f"postprocess_fn returned {type(data).__name__}; expected a penstock.TrainBatch")
    _check_width(policy, data, batch)
    if isinstance(batch, TrainBatch):
        # A sample held by other learners is not valid here; keep that.
        data = data if data.valid is not None or batch.valid is None else replace(data, valid=batch.valid)
    else:
        if policy.rate is not None and (before := _moments(policy, batch)) is not None:
            data = replace(data, rows={**data.rows, "moments": before})
        if policy.standardize:
            check_rows(data)
        for name in policy.standardize:
            data = replace(data, rows={**data.rows, name: _standardized(policy, data[name], batch.valid)})
        if policy.partition is not None:
            data = replace(data, metrics=policy.partition.mean(data.metrics or {}, int(batch.valid.sum())))
    return data


def _standardized(policy: Policy, x: Any, valid: Tensor) -> Tensor:
    """[T, B] with mean 0 and deviation 1 over the valid rows of all learners."""
    if policy.partition is None:
        return ops.normalized(x, valid)
    return ops.normalized(policy.partition.gather(x), policy.partition.gather(valid))[:, policy.partition.local_slots]


def _check_width(policy: Policy, data: TrainBatch, batch: SampleBatch | TrainBatch) -> None:
    """Refuses rows [T, B, 1] or [N, 1], which broadcast with [T, B] or [N], unless some input has one element."""
    known = batch.rows if isinstance(batch, TrainBatch) else {}
    lead = 2 if batch.valid is not None and batch.valid.ndim == 2 else 1
    for name, x in data.rows.items():
        if not (isinstance(x, Tensor) and x.ndim == lead + 1 and x.shape[lead] == 1 and x is not known.get(name)):
            continue
        held = [leaf.shape for leaf in tree_leaves((policy.spec.obs, policy.spec.action)) if leaf.kind != "discrete"]
        info = [] if isinstance(batch, TrainBatch) else tree_leaves(batch.info)
        if not {(), (1,)}.intersection(held) and all(part.shape[2:] != (1,) for part in info):
            raise ConfigError(
                f"postprocess_fn returned rows[{name!r}] of shape {list(x.shape)}; expected {list(x.shape[:-1])}, "
                "a number for each row, as more would broadcast in the loss: squeeze(-1) it"
            )


def _with_own_logp(policy: Policy, batch: SampleBatch) -> SampleBatch:
    """The batch with the learner's own log-probabilities where the present parameters chose the action.

    Ratios to them start at exactly 1, whatever computed the recorded ones while acting. One that differs by more
    than rounding is of another policy, and stays.
    """
    if library.found is None or "logp" not in batch.info or not batch.valid.is_cpu:
        return batch
    fresh = batch.valid & (batch.version == policy.version)
    if not fresh.any():
        return batch
    flat = batch.state is None
    with torch.no_grad():
        found = policy.agent(batch.inputs_t.flat() if flat else batch.inputs_t, batch.state)
        if not hasattr(found, "dist"):  # of a forward that was replaced: it is the loss's to complain
            return batch
        action = tree_map(lambda x: x.flatten(0, 1), batch.action) if flat else batch.action
        own, recorded = found.dist.log_prob(action).reshape(batch.valid.shape), batch.info["logp"]
    alike = fresh & ((own - recorded).abs() < _ROUNDING)
    return replace(batch, info={**batch.info, "logp": torch.where(alike, own, recorded)})


@torch.no_grad()
def _moments(policy: Policy, batch: SampleBatch) -> Tensor | None:
    """[T, B, 2 A] moments of the policy before it is trained on the batch; None of those that are no Gaussian."""
    flat = batch.state is None
    found = moments(policy.agent(batch.inputs_t.flat() if flat else batch.inputs_t, batch.state).dist)
    return None if found is None else found.reshape(*batch.valid.shape, -1)


def as_tensors(batch: SampleBatch, device: torch.device) -> SampleBatch:
    """The batch with torch leaves: views of the same memory on the CPU, copies elsewhere.

    A sampler reuses its buffers, so views are cached as long as the buffer lives.
    """
    leaves = tree_leaves((batch.obs, batch.prev_action, batch.info, batch.state))  # the rest of a record cannot change
    known, tensors = _views.get(batch, ((), batch))
    if len(known) != len(leaves) or not all(map(operator.is_, known, leaves)):
        tensors = tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, batch)
        _views[batch] = leaves, tensors
    return tensors if device.type == "cpu" else tree_map(lambda x: x.to(device), tensors)
