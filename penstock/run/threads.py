"""How many torch threads train fastest? Timed on a copy of the policy, before anything is learned."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from penstock.core.batch import SampleBatch
from penstock.core.machine import allowed_cpus
from penstock.learn.policy import Policy
from penstock.learn.train_ops import train_one_step

_REPEATS = 3


def fastest_threads(policy: Policy, sampler: Any) -> int:
    """The thread count among 1, 2, 4, ... that trains a batch in the least time; torch is left set to it.

    The batch is a stand-in in the shapes of the sampler's, so neither environments nor the policy are touched.
    """
    batch: SampleBatch = sampler.blank_batch()
    cores = len(allowed_cpus())
    candidates = [n for n in (1, 2, 4, 8, 16, 32) if n <= cores]
    best, best_s = 1, float("inf")
    for n in candidates:
        torch.set_num_threads(n)
        trial = copy.deepcopy(policy)
        train_one_step(trial, batch)  # sets running statistics and warms up
        durations: list[float] = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            train_one_step(trial, batch)
            durations.append(time.perf_counter() - started)
        if min(durations) < 0.95 * best_s:  # more threads must earn their keep
            best, best_s = n, min(durations)
    torch.set_num_threads(best)
    return best
