"""Where an agent's parameters are, how they are named, copied and shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.agents.actor_critic import ActorCritic
from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.agents.parameters import (
    agent_device,
    copy_parameters,
    live_in,
    parameters_of,
    require_device,
    tensors_of,
)
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec

SPEC = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))


def agent() -> ActorCritic:
    return ActorCritic(SPEC, Net(hidden=(4,), normalize_obs=True))


def test_an_agent_is_where_its_parameters_are_or_on_the_cpu() -> None:
    assert agent_device(agent()).type == "cpu"
    assert agent_device(agent().to("meta")).type == "meta"
    assert agent_device(Agent()).type == "cpu"


def test_a_device_that_is_not_here_is_refused_by_the_setting_s_name() -> None:
    require_device("cpu", "run.device")
    absent = "cuda" if not torch.cuda.is_available() else "cuda:99"
    for name in (absent, "no_such_device"):
        with pytest.raises(
            ConfigError, match=rf"^run\.device='{name}' is not here: .*; use 'cpu'; a GPU is 'cuda', .*install"
        ):
            require_device(name, "run.device")


def test_parameters_are_all_that_acting_depends_on() -> None:
    own = parameters_of(agent())
    assert {"actor.mlp.layers.0.weight", "normalizer.moments.0.count", "value_head.bias"} <= own.keys()
    live = agent()
    parameters_of(live)["value_head.bias"].data.fill_(7.0)
    assert float(live.value_head.bias.detach()) == 7.0


def test_tensors_are_those_of_the_names_in_their_order() -> None:
    one = agent()
    one.register_module("nothing", None)
    one.register_buffer("mean", torch.zeros(1))
    one.add_module("again", one.actor)  # its parameters stand there once
    one.register_parameter("tied", one.value_head.bias)
    one.register_buffer("tied_buffer", one.get_buffer("mean"))
    named = list(parameters_of(one).values())
    assert len(tensors_of(one)) == len(named)
    assert all(x is y for x, y in zip(tensors_of(one), named))


def test_a_copy_has_the_same_numbers_and_its_own_memory() -> None:
    one, other = agent(), agent()
    copy_parameters(one, parameters_of(other))
    for name, x in parameters_of(other).items():
        assert torch.equal(x, parameters_of(one)[name]), name
        assert x.data_ptr() != parameters_of(one)[name].data_ptr()
    assert all(x.grad_fn is None for x in parameters_of(other).values())


def test_an_agent_that_lives_in_arrays_follows_them() -> None:
    one, other = agent(), agent()
    arrays = {name: np.ascontiguousarray(x.detach().numpy()).copy() for name, x in parameters_of(one).items()}
    live_in(other, arrays)
    for name, x in parameters_of(other).items():
        assert np.shares_memory(x.detach().numpy(), arrays[name]), name
        assert x.shape == parameters_of(one)[name].shape, name
    arrays["value_head.bias"][...] = 3.0
    assert float(other.value_head.bias.detach()) == 3.0
    assert float(one.value_head.bias.detach()) != 3.0
