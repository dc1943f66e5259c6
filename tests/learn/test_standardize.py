from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.learn.rows.postprocess import as_tensors
from tests.learn.ranks import ThreadComm, batches_of, bounds, on_ranks

NET = ps.Net(hidden=(8,))
ALGOS = {
    "ppo": ps.PPO(net=NET),
    "a2c": ps.A2C(normalize_advantage=True, net=NET),
    "impala": ps.IMPALA(normalize_advantage=True, net=NET),
    "appo": ps.APPO(net=NET),
}


@pytest.mark.parametrize("name", ALGOS)
def test_the_advantage_alone_is_standardised_over_the_valid_rows(name: str) -> None:
    algo: Any = ALGOS[name]
    spec, (_, batch) = batches_of("CartPole-v1", algo, 32, 4, 2)
    tensors = as_tensors(batch, torch.device("cpu"))
    plain = replace(algo, normalize_advantage=False).build(spec, seed=5).postprocess(tensors)
    data = algo.build(spec, seed=5).postprocess(tensors)
    raw = plain["advantage"][tensors.valid].double()
    expected = (raw - raw.mean()) / raw.std()
    torch.testing.assert_close(data["advantage"][tensors.valid].double(), expected, rtol=1e-4, atol=1e-5)
    assert abs(float(raw.mean())) > 1e-3
    for other in set(data.rows) - {"advantage"}:
        assert torch.equal(data[other], plain[other]), other


def test_over_the_rows_of_all_learners_to_the_bits_of_one() -> None:
    algo = ALGOS["ppo"]
    spec, (_, batch) = batches_of("CartPole-v1", algo, 32, 6, 2)
    places = bounds((1, 3, 2))
    advantage = torch.randn(32, 6)

    def work(comm: ThreadComm) -> torch.Tensor:
        policy = algo.build(spec, seed=5)
        policy.join(comm)
        own, inner = places[comm.rank], policy.postprocess_fn
        policy.postprocess_fn = lambda *args: replace(
            data := inner(*args), rows={**data.rows, "advantage": advantage[:, own]}
        )
        return policy.postprocess(batch[:, own])["advantage"]

    whole = ps.ops.normalized(advantage, torch.from_numpy(batch.valid))
    assert torch.equal(torch.cat(on_ranks(3, work), 1), whole)


def test_a_row_that_is_no_number_for_each_row_is_refused() -> None:
    algo = ALGOS["ppo"]
    spec, (batch,) = batches_of("CartPole-v1", algo, 8, 2, 1)
    policy = algo.build(spec)
    inner = policy.postprocess_fn
    policy.postprocess_fn = lambda *args: replace(data := inner(*args), rows={**data.rows, "advantage": torch.zeros(2)})
    with pytest.raises(ps.ConfigError, match="advantage"):
        policy.postprocess(batch)
