from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_map
from penstock.envs.spaces import env_spec
from penstock.envs.toy import Counter
from penstock.samplers.episodes import Episodes
from penstock.samplers.tensors.tracker import TensorStats
from penstock.samplers.trackers.evaluation_episodes import EvaluationEpisodes
from penstock.samplers.trackers.slots import EpisodeStats

SPEC, CPU = env_spec(Counter()), torch.device("cpu")


def streams(T: int, B: int, batches: int, seed: int = 0) -> list[SampleBatch]:
    """Batches of random episodes, one after the other, as a pool that resets in the next step writes them."""
    random = np.random.default_rng(seed)
    found: list[SampleBatch] = []
    ended, first = np.zeros(B, bool), np.ones(B, bool)
    for _ in range(batches):
        batch = allocate_batch(SPEC, BatchSpec(T, B), env_info=("height", "is_success"))
        for t in range(T):
            batch.first[t] = first
            batch.valid[t] = ~ended
            batch.terminated[t] = ~ended & (random.random(B) < 0.1)
            batch.truncated[t] = ~ended & (random.random(B) < 0.1)
            batch.reward[t] = np.where(ended, 0, random.normal(size=B))
            batch.info["env"]["height"][t] = np.where(~ended & (random.random(B) < 0.4), random.normal(size=B), np.nan)
            first, ended = ended, batch.terminated[t] | batch.truncated[t]
        batch.first[T] = first
        found.append(batch)
    return found


def as_tensors(batch: SampleBatch) -> SampleBatch:
    return tree_map(torch.from_numpy, batch)


def alike(one: Episodes, other: Episodes) -> None:
    for name in ("length", "slot", "terminated"):
        x, y = getattr(one, name), getattr(other, name)
        assert x.dtype == y.dtype
        assert np.array_equal(x, y)
    for name in ("return_", "discounted_return"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-12)
    assert one.columns.keys() == other.columns.keys()
    for key, x in one.columns.items():
        np.testing.assert_array_equal(x, other.columns[key])


@pytest.mark.parametrize(("T", "B"), [(1, 4), (5, 1), (16, 7)])
def test_sums_equal_those_of_arrays_over_batches_and_through_a_checkpoint(T: int, B: int) -> None:
    plain, sums, count = EpisodeStats(B, 0.97), TensorStats(B, 0.97, CPU), 0
    for k, batch in enumerate(streams(T, B, 200 // T)):
        if k == 5:
            restored = TensorStats(B, 0.97, CPU)
            restored.load_state_dict(sums.state_dict())
            sums = restored
        expected, found = plain.update(batch), sums.update(as_tensors(batch))
        alike(expected, found)
        count += len(found)
        ours, theirs = sums.state_dict(), plain.state_dict()
        np.testing.assert_allclose(ours["return"], theirs["return"], atol=1e-12)
        assert np.array_equal(ours["length"], theirs["length"])
    assert count > 20


@pytest.mark.parametrize(("T", "limit"), [(1, 3), (5, 4), (16, 40)])
def test_evaluations_are_cut_as_those_of_arrays(T: int, limit: int) -> None:
    B = 5
    counts = [4, 3, 3, 0, 3]
    plain, other = (
        EvaluationEpisodes(counts, EpisodeStats(B, 0.9), limit),
        EvaluationEpisodes(counts, TensorStats(B, 0.9, CPU), limit),
    )
    for batch in streams(T, B, 400 // T, seed=1):
        tensors = as_tensors(batch.copy())
        plain.add([batch])
        other.add([tensors])
        assert np.array_equal(batch.truncated, tensors.truncated.numpy())
        assert (plain.over, plain.left) == (other.over, other.left)
        alike(plain.found, other.found)
        if plain.over:
            break
    assert plain.over


def test_info_keys_that_never_come_are_said_once() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sums: Any = TensorStats(7, 1.0, CPU)
        for batch in streams(16, 7, 20):
            batch.info["env"]["height"][...] = np.nan
            sums.update(as_tensors(batch))
    (text,) = [str(one.message) for one in said]
    assert text.startswith("info_keys 'height' (--info-keys): no step has reported that in the first 20 episodes")
