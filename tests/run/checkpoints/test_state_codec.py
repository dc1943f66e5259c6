from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.core.errors import CheckpointError
from penstock.run.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from penstock.run.checkpoints.state_codec import decode, encode
from tests.core.test_wire import LEAVES, assert_same
from tests.run.checkpoints.saved import POLICY, rewrite, save

DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.uint16, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def raw(x: torch.Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (1, 1, 7), (2, 3, 4, 5)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8)
    x = (
        (x % 2 if dtype is torch.bool else x).view(dtype).reshape(shape)
        if x.numel()
        else torch.empty(shape, dtype=dtype)
    )
    for given in (x, x.transpose(0, -1) if shape else x, x[::2] if shape else x, x.expand(3, *shape)):
        found = decode(encode({"x": given}))["x"]
        assert type(found) is torch.Tensor and found.dtype == dtype and found.shape == given.shape
        assert raw(found) == raw(given)


def test_a_tensor_keeps_its_order_in_memory() -> None:
    images = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    found = decode(encode([images, images.permute(3, 0, 2, 1)]))
    assert found[0].stride() == images.stride() and torch.equal(found[0], images)
    assert found[1].stride() == images.permute(3, 0, 2, 1).stride()


def test_tensors_are_of_their_own_and_without_history() -> None:
    whole = torch.arange(1000.0, requires_grad=True)
    data = encode(
        {
            "part": whole[3:5] * 2,
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "turned": torch.ones(2, dtype=torch.cfloat).conj(),
        }
    )
    assert len(data) < 400
    found = decode(data)
    assert found["part"].tolist() == [6.0, 8.0] and not found["part"].requires_grad
    assert type(found["parameter"]) is torch.Tensor and not found["turned"].is_conj()
    found["part"] += 1


def test_every_value_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    state = {
        "optim": {0: {"betas": (0.9, 0.999), "exp_avg": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))}},
        "leaves": LEAVES,
    }
    path = save_checkpoint(tmp_path, 7, state, POLICY)
    loaded = load_checkpoint(path)
    assert loaded.step == 7
    assert loaded.path == path == tmp_path / "checkpoints" / "000000000007"
    assert_same(loaded.state["leaves"], LEAVES)
    assert loaded.state["optim"][0]["betas"] == (0.9, 0.999)
    assert torch.equal(loaded.state["optim"][0]["exp_avg"], torch.ones(2, dtype=torch.bfloat16))
    assert torch.equal(load_file(path / "policy.safetensors")["w"], POLICY["w"])
    assert np.load(path / "state.npy", allow_pickle=False).dtype == np.uint8


class Custom:
    pass


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"learner": [{"x": Custom()}]}, r"state\['learner'\]\[0\]\['x'\] is .*Custom"),
        ({"a": np.array([None])}, r"state\['a'\] is numpy.ndarray"),
        ({"a": torch.float32}, r"state\['a'\] is torch.dtype"),
        ({"a": torch.zeros(2, 2).to_sparse()}, r"state\['a'\] is torch.Tensor"),
        ({"a": 1 << 9000}, r"state\['a'\] is builtins.int"),
    ],
)
def test_other_values_are_refused_by_their_path(tmp_path: Path, state: dict[str, Any], where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        save_checkpoint(tmp_path, 1, state, {})
    with pytest.raises(CheckpointError, match=where):
        encode(state)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"state is torch\.Tensor"):
        encode(torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"$array": ["|O", [1], 0]}', "dtype object"),
        (b'{"$array": ["<f4", [10000000000000], 0]}', "takes 40,000,000,000,000 bytes"),
        (b'{"$own": [["load", [1], [0]], {"$array": ["|u1", [4], 0]}]}', "dtype 'load'"),
        (b'{"$own": [["float32", [10000000000000], [0]], {"$array": ["|u1", [4], 0]}]}', "shape"),
        (b'{"$own": [["float32", [1], [7]], {"$array": ["|u1", [4], 0]}]}', "not allowed"),
        (b'{"$own": [["float32", [-1, 0], [0, 1]], {"$array": ["|u1", [0], 0]}]}', "negative"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "recursion"),
        (b'{"a": 1', "delimiter"),
    ],
)
def test_a_forged_state_is_refused_by_its_file(tmp_path: Path, text: bytes, said: str) -> None:
    path = save(tmp_path, 1)
    rewrite(path, text)
    with pytest.raises(CheckpointError, match=rf"state\.json is as its manifest says, but cannot be read: .*{said}"):
        load_checkpoint(path)
