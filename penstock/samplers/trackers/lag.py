"""Lag: the training steps between acting and learning, by the version of each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.batch import SampleBatch


def lags(batches: Sequence[SampleBatch], version: int) -> dict[str, float]:
    """`sampler/lag`, mean, min and max over valid rows of the training steps since each was acted; {} without rows.

    Rows of a batch differ where agents take turns: a turn that was open at its end closes in the next.

    Args:
        batches: one of each policy. version: training steps that are finished.
    """
    lag = version - np.concatenate([batch.version[batch.valid] for batch in batches])
    if not len(lag):
        return {}
    found = {"lag": lag.mean(), "lag_min": lag.min(), "lag_max": lag.max()}
    return {f"sampler/{name}": float(x) for name, x in found.items()}
