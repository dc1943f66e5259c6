"""Train operations: what happens to a batch between sampler and optimizer."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.core.batch import SampleBatch
from penstock.core.tree import tree_map
from penstock.learn.algorithm import ResultDict
from penstock.learn.experience import train_on_replay
from penstock.learn.minibatch import minibatches
from penstock.learn.policy import Policy


def train_one_step(policy: Policy, batch: SampleBatch) -> ResultDict:
    """Post-processes a batch and takes epochs x minibatches gradient steps on it, or trains from replay.

    Running statistics (normalisers) are updated afterwards, so a batch is trained with those it was collected with;
    the first batch of a policy that has any only sets them. With replay they are updated first: samples are of many batches.

    Returns:
        `train/...` metrics, each the mean over the gradient steps.

    Raises:
        NonFiniteError: see `Policy.learn_on_batch`.
    """
    if policy.experience is not None:
        return _with_totals(policy, train_on_replay(policy, batch))
    tensors = as_tensors(batch, policy.device)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = defaultdict(int)
    results: ResultDict = {}
    if not policy.agent.needs_statistics:
        data = policy.postprocess(tensors)
        for minibatch in minibatches(data, policy.minibatch, policy.shuffler(), policy.epochs):
            loss = policy.update(minibatch)
            for name, value in (loss.metrics if loss is not None else {}).items():
                sums[name] = sums[name] + value if name in sums else value
                counts[name] += 1
        results = {f"train/{name}": float(total) / counts[name] for name, total in sums.items()}
        results |= {f"train/{name}": float(value) for name, value in (data.metrics or {}).items()}
    policy.agent.observe(tensors)
    policy.version += 1
    return _with_totals(policy, results)


def _with_totals(policy: Policy, results: ResultDict) -> ResultDict:
    results["train/n_updates"] = float(policy.updates)
    if policy.skipped:
        results["train/skipped_updates"] = float(policy.skipped)
    if (lr := getattr(policy.settings, "lr", None)) is not None:
        results["train/learning_rate"] = float(lr)
    return results


class TrainingStep(NamedTuple):
    """What one iteration did."""

    metrics: ResultDict
    episodes: Any
    env_steps: int
    sample_s: float
    train_s: float


def training_step(policy: Policy, sampler: Any, itr: int) -> TrainingStep:
    """One iteration of a synchronous algorithm: sample a batch, train on it."""
    started = time.perf_counter()
    batch, episodes = sampler.obtain_samples(itr)
    sampled = time.perf_counter()
    env_steps = batch.env_steps
    metrics = train_one_step(policy, batch)
    return TrainingStep(metrics, episodes, env_steps, sampled - started, time.perf_counter() - sampled)


def as_tensors(batch: SampleBatch, device: torch.device) -> SampleBatch:
    """The batch with torch leaves: views of the same memory on the CPU, copies elsewhere."""
    return tree_map(lambda x: torch.from_numpy(x).to(device) if isinstance(x, np.ndarray) else x.to(device), batch)
