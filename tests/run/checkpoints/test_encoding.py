from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.core.errors import CheckpointError
from penstock.run.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from tests.run.checkpoints.saved import POLICY, rewrite, save


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "uint16", "uint32", "uint64", "int64", "float16", "float64", "complex128", ">f4"],
)
def test_arrays_of_every_dtype_come_back_as_numpy(tmp_path: Path, dtype: str) -> None:
    x = (np.arange(12).reshape(3, 4) % 7).astype(dtype)[:, ::2]
    x.flags.writeable = False
    state = load_checkpoint(
        save_checkpoint(tmp_path, 1, {"x": x, "empty": x[:0], "scalar": np.array(x[0, 0])}, {})
    ).state
    for name, expected in (("x", x), ("empty", x[:0]), ("scalar", np.array(x[0, 0]))):
        assert state[name].dtype == expected.dtype
        assert state[name].shape == expected.shape
        np.testing.assert_array_equal(state[name], expected)
    state["x"][...] = 0


def test_nested_plain_values_and_tensors_come_back(tmp_path: Path) -> None:
    state = {
        "optim": {0: {"betas": (0.9, 0.999), "exp_avg": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))}},
        "list": [1, -(2**127), 0.1, float("inf"), True, None, "é"],
        "scalars": {"f": np.float32(0.5), "d": np.float64(0.1), "i": np.uint64(2**64 - 1), "b": np.True_},
    }
    path = save_checkpoint(tmp_path, 7, state, POLICY)
    loaded = load_checkpoint(path)
    assert loaded.step == 7
    assert loaded.path == path == tmp_path / "checkpoints" / "000000000007"
    assert loaded.state["list"] == state["list"]
    assert loaded.state["scalars"] == {"f": 0.5, "d": 0.1, "i": 2**64 - 1, "b": True}
    assert [type(v) for v in loaded.state["scalars"].values()] == [float, float, int, bool]
    assert loaded.state["optim"][0]["betas"] == (0.9, 0.999)
    assert type(loaded.state["optim"][0]["exp_avg"]) is torch.Tensor
    assert torch.equal(loaded.state["optim"][0]["exp_avg"], torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(load_file(path / "policy.safetensors")["w"], POLICY["w"])
    torch.load(path / "state.pt", weights_only=True)


class Custom:
    pass


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"learner": [{"x": Custom()}]}, r"state\['learner'\]\[0\]\['x'\] is .*Custom"),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has the key \(1, 2\)"),
        ({"a": np.array([None])}, r"state\['a'\] is numpy.ndarray"),
        ({"a": {"__numpy__": 1}}, r"key '__numpy__'"),
        ({"a": torch.float32}, r"state\['a'\] is torch.dtype"),
        ({"a": 1 << 5000}, r"state\['a'\] is builtins.int"),
    ],
)
def test_other_values_are_refused_by_their_path(tmp_path: Path, state: dict[str, Any], where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        save_checkpoint(tmp_path, 1, state, {})
    assert not (tmp_path / "checkpoints").exists()


def test_a_forged_object_array_is_not_followed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    forged = {"__numpy__": "|O", "shape": [1], "bytes": torch.full((8,), 65, dtype=torch.uint8)}
    rewrite(path, forged)
    with pytest.raises(CheckpointError, match="dtype object is not allowed"):
        load_checkpoint(path)
