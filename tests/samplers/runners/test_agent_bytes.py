"""Weights and fragments as bytes: what is packed comes out again, whatever the arrays look like."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from penstock.agents.parameters import pack_parameters, parameters_of, unpack_parameters
from penstock.core.errors import ConfigError
from penstock.core.tree import pack_leaves, unpack_leaves
from penstock.samplers.runners.agent_bytes import pack_agent, unpack_agent


def odd_agent(fill: float) -> Any:
    """Arrays of 12, 1 and 8 bytes, one of them transposed, one without dimensions."""
    agent: Any = nn.Module()
    agent.register_parameter("turned", nn.Parameter(torch.arange(6.0).reshape(2, 3).t() + fill))
    agent.register_parameter("three", nn.Parameter(torch.arange(3.0) - fill))
    agent.register_buffer("flag", torch.tensor(fill > 0))
    agent.register_buffer("count", torch.tensor(int(fill), dtype=torch.int64))
    return agent


@pytest.mark.parametrize("travelled", [list, b"".join], ids=["list", "bytes"])
def test_parameters_and_buffers_come_out_as_they_went_in(travelled: Any) -> None:
    one, other = odd_agent(7.0), odd_agent(0.0)
    unpack_parameters(travelled(pack_parameters(one)), other)
    for name, x in parameters_of(one).items():
        assert torch.equal(x, parameters_of(other)[name]), name
    assert not parameters_of(other)["turned"].is_contiguous()


ODD: dict[str, Any] = {
    "a column": lambda fill: torch.full((4, 3), fill)[:, 1],
    "bfloat16": lambda fill: torch.full((3,), fill, dtype=torch.bfloat16),
    "bfloat16 without dimensions": lambda fill: torch.tensor(fill, dtype=torch.bfloat16),
    "no elements": lambda fill: torch.full((0, 2), fill),
    "complex": lambda fill: torch.full((2,), fill, dtype=torch.complex64),
}


@pytest.mark.parametrize("travelled", [list, b"".join], ids=["list", "bytes"])
@pytest.mark.parametrize("kind", sorted(ODD))
def test_parameters_that_are_no_contiguous_array_of_numpy_travel(kind: str, travelled: Any) -> None:
    one: Any = nn.Module()
    other: Any = nn.Module()
    for agent, fill in ((one, 7.0), (other, 0.0)):
        agent.register_parameter("x", nn.Parameter(ODD[kind](fill)))
    unpack_parameters(travelled(pack_parameters(one)), other)
    assert torch.equal(parameters_of(other)["x"], parameters_of(one)["x"])


def test_packed_parameters_are_the_agents_own_memory_in_the_order_of_their_names() -> None:
    linear: Any = nn.Linear(30, 20)
    packed = pack_parameters(linear)
    assert [x.size for x in packed] == [30 * 20 * 4, 20 * 4]
    with torch.no_grad():
        linear.bias.fill_(3.0)
    assert packed[1].view(np.float32).tolist() == [3.0] * 20


def test_weights_of_another_size_are_refused() -> None:
    agent = odd_agent(0.0)
    with pytest.raises(ValueError, match=r"the weights have 24 bytes; expected 45, .*same settings"):
        unpack_parameters(bytes(24), agent)
    packed = pack_parameters(agent)
    with pytest.raises(ValueError, match=r"the weights have 45 bytes; expected 45, .*4 arrays"):
        unpack_parameters([packed[1], packed[0], *packed[2:]], agent)


@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "orthogonal"])
def test_an_agent_with_parametrised_layers_travels(kind: str) -> None:
    agent: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in agent:
        getattr(parametrizations, kind)(layer)
    other, x = unpack_agent(pack_agent(agent)), torch.ones(2, 3)
    assert [parametrize.type_before_parametrizations(layer) for layer in other] == [nn.Linear, nn.Linear]
    assert torch.equal(other.eval()(x), agent.eval()(x))
    with torch.no_grad():
        for p in agent.parameters():
            p.mul_(1.5).add_(0.1)
    assert not torch.equal(other(x), agent(x))
    unpack_parameters(b"".join(pack_parameters(agent)), other)
    assert torch.equal(other(x), agent(x))
    parametrize.remove_parametrizations(other[0], "weight")
    assert type(other[0]) is nn.Linear


def test_an_agent_that_holds_something_open_is_refused() -> None:
    agent: Any = nn.Linear(3, 3)
    agent.lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"the agent Linear cannot be sent to a runner \(TypeError: .*lock.*first used"
    ):
        pack_agent(agent)


@pytest.mark.parametrize("T", [3, 90_000])
def test_rows_come_out_as_they_went_in(T: int) -> None:
    rng = np.random.default_rng(0)
    rows = {"obs": rng.normal(size=(T, 2)).astype(np.float32), "first": rng.random((T, 2)) < 0.5}
    out = {"obs": np.zeros((T, 4), np.float32), "first": np.zeros((T, 4), bool)}
    packed = pack_leaves(rows)
    assert isinstance(packed, bytes) == (T == 3)
    unpack_leaves(packed, {name: x[:, 1:3] for name, x in out.items()})
    for name, x in rows.items():
        assert np.array_equal(out[name][:, 1:3], x)
        assert not out[name][:, [0, 3]].any()
