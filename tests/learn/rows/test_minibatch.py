from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.learn.rows.minibatch import minibatches, valid_rows


def numbered(T: int, B: int, invalid: tuple[tuple[int, int], ...] = (), recurrent: bool = False) -> TrainBatch:
    """Row (t, b) holds the number B t + b in every leaf."""
    number = torch.arange(T * B).reshape(T, B)
    valid = torch.ones(T, B, dtype=torch.bool)
    for t, b in invalid:
        valid[t, b] = False
    inputs = Inputs({"x": number.unsqueeze(-1).float(), "y": number}, number, None, number % 2 == 0)
    state = {"h": torch.arange(B).unsqueeze(-1).float()} if recurrent else None
    return TrainBatch(inputs, {"a": number, "b": {"c": -number}}, valid, state, {"metric": torch.tensor(1.0)})


def numbers(part: TrainBatch) -> list[int]:
    """The rows of a flat minibatch, after checking that every leaf tells the same."""
    n = part["a"]
    assert torch.equal(part["b"]["c"], -n)
    assert torch.equal(part.inputs.obs["x"].squeeze(-1), n.float())
    assert torch.equal(part.inputs.obs["y"], n)
    assert torch.equal(part.inputs.prev_action, n)
    assert torch.equal(part.inputs.first, n % 2 == 0)
    assert part.inputs.prev_reward is None
    return n.tolist()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


HOLES = ((0, 0), (2, 1), (4, 2), (4, 0), (3, 1))


@pytest.mark.parametrize("invalid", [(), HOLES])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 14, 15, 100])
def test_every_valid_row_is_in_one_part(size: int, invalid: Any):
    data = numbered(5, 3, invalid)
    parts = [numbers(part) for part in minibatches(data, size, rng())]
    rows = [3 * t + b for t in range(5) for b in range(3) if (t, b) not in invalid]
    assert sorted(n for part in parts for n in part) == rows
    assert [n for part in parts for n in part] != rows
    assert len(parts) == min(max(round(15 / size), 1), len(rows))  # however many rows are valid
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_parts_know_no_mask_state_or_metrics():
    for part in minibatches(numbered(5, 3, HOLES), 4, rng()):
        assert part.valid is None
        assert part.state is None
        assert part.metrics is None


def test_without_a_size_the_whole_is_one_part_in_order():
    (part,) = minibatches(numbered(5, 3, HOLES), None, rng())
    assert numbers(part) == [1, 2, 3, 4, 5, 6, 8, 9, 11, 13]
    assert numbers(valid_rows(numbered(2, 2))) == [0, 1, 2, 3]


def test_the_order_is_a_function_of_the_generator_and_changes_by_epoch():
    def orders(seed: int, epochs: int) -> list[list[int]]:
        return [numbers(part) for part in minibatches(numbered(8, 4), 32, rng(seed), epochs)]

    three = orders(0, 3)
    assert three == orders(0, 3)
    assert three[:1] == orders(0, 1)
    assert three[0] != orders(1, 1)[0]
    assert len({tuple(order) for order in three}) == 3
    assert all(sorted(order) == list(range(32)) for order in three)


def test_every_row_goes_to_every_place():
    firsts = [numbers(next(minibatches(numbered(2, 2), 4, rng(seed))))[0] for seed in range(60)]
    assert set(firsts) == {0, 1, 2, 3}


def test_nothing_valid_gives_no_part():
    data = numbered(2, 2, ((0, 0), (0, 1), (1, 0), (1, 1)))
    assert list(minibatches(data, 2, rng(), epochs=3)) == []
    assert list(minibatches(data, None, rng(), epochs=3)) == []


@pytest.mark.parametrize(("size", "parts"), [(5, 6), (10, 3), (12, 2), (30, 1), (100, 1), (7, 4)])
def test_recurrent_parts_are_whole_columns(size: int, parts: int):
    data = numbered(5, 6, HOLES, recurrent=True)
    assert data.valid is not None
    seen: list[int] = []
    got = list(minibatches(data, size, rng()))
    assert len(got) == parts == round(30 / size) or size > 30
    for part in got:
        assert part.valid is not None
        columns = [int(h) for h in part.state["h"].flatten()]
        assert part["a"].shape == (5, len(columns))
        assert torch.equal(part["a"], data["a"][:, columns])
        assert torch.equal(part["b"]["c"], data["b"]["c"][:, columns])
        assert torch.equal(part.inputs.obs["x"], data.inputs.obs["x"][:, columns])
        assert torch.equal(part.inputs.first, data.inputs.first[:, columns])
        assert torch.equal(part.valid, data.valid[:, columns])
        seen += columns
    assert sorted(seen) == list(range(6))
    sizes = [part["a"].shape[1] for part in got]
    assert max(sizes) - min(sizes) <= 1


def test_recurrent_order():
    def orders(seed: int, size: int | None, epochs: int = 1) -> list[list[float]]:
        parts = minibatches(numbered(3, 8, recurrent=True), size, rng(seed), epochs)
        return [part.state["h"].flatten().tolist() for part in parts]

    assert orders(0, None) == [list(range(8))]
    assert orders(0, 24, 2) == orders(0, 24, 2)
    assert orders(0, 24) != orders(1, 24)
    first, second = orders(0, 24, 2)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(8))


def test_a_recurrent_part_holds_at_least_a_column():
    parts = list(minibatches(numbered(8, 3, recurrent=True), 4, rng()))
    assert [part["a"].shape for part in parts] == [(8, 1)] * 3
    assert sorted(int(part.state["h"]) for part in parts) == [0, 1, 2]


def test_arrays_of_another_shape_are_named():
    """[B, T] and [T+1, B] have as many rows, or more, and would be trained on in a wrong order."""
    data, number = numbered(5, 3), torch.arange(15.0).reshape(5, 3)
    cases = {
        r"rows\['a'\] of shape \[3, 5\]; expected \[T, B, ...\] with T=5, B=3.*transposed": {"a": number.T},
        r"rows\['a'\] of shape \[6, 3\].*T\+1 observations": {"a": torch.zeros(6, 3)},
        r"rows\['b'\]\['c'\] of shape \[15\]": {"b": {"c": number.flatten()}},
        r"rows\['a'\] of type ndarray": {"a": number.numpy()},
    }
    for message, rows in cases.items():
        with pytest.raises(ConfigError, match=message):
            next(minibatches(replace(data, rows={**data.rows, **rows}), 4, rng()))
    late = data.inputs._replace(prev_action=torch.zeros(6, 3))
    with pytest.raises(ConfigError, match=r"inputs\['prev_action'\] of shape \[6, 3\]"):
        next(minibatches(replace(data, inputs=late), 4, rng()))
    with pytest.raises(ConfigError, match=r"valid is type NoneType; expected bool \[T, B\]: pass batch.valid"):
        next(minibatches(replace(data, valid=None), 4, rng()))
