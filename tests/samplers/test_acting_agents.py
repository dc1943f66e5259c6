"""The agent of a live sampler before and after `initialize` and `shutdown`, and examples of the rows it records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.example_step import examples
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.envs.seats import Seating
from penstock.samplers.acting_agents import ActingAgents
from penstock.testing.samplers import EchoAgent

SPEC = EnvSpec(LeafSpec("box", (3,), "float32", -1.0, 1.0), LeafSpec("discrete", (), "int64", sizes=(4,)))
OTHER = EnvSpec(LeafSpec("box", (2,), "float32", -1.0, 1.0), SPEC.action)


def installed(first_slot: int = 0, total_slots: int | None = None) -> ActingAgents:
    return ActingAgents(Seating.alone(SPEC), BatchSpec(5, 2), ("score",), ps.Share(first_slot, total_slots))


def test_before_initialize_and_after_shutdown_there_is_no_agent() -> None:
    sampler = installed()
    first = r"^the sampler has no agent yet; call sampler\.initialize\(policy\.agent\) first$"
    with pytest.raises(ConfigError, match=first):
        _ = sampler.agent
    with pytest.raises(ConfigError, match=first):
        sampler.blank_batch()
    agent = EchoAgent(SPEC)
    sampler.take(agent)
    assert sampler.agent is agent
    sampler.close()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^the sampler was shut down; build another$"):
            _ = sampler.agent
        sampler.close()


@pytest.mark.parametrize("method", ["obtain_samples", "evaluate_agent"])
def test_a_live_sampler_says_so(method: str) -> None:
    sampler = ps.SerialSampler(4, 2).build("CartPole-v1")
    with pytest.raises(ConfigError, match="has no agent yet"):
        getattr(sampler, method)(0)
    sampler.initialize(EchoAgent(sampler.spec))
    sampler.shutdown()
    with pytest.raises(ConfigError, match="was shut down; build another"):
        getattr(sampler, method)(0)


def test_an_agent_for_another_environment_is_refused_and_not_kept() -> None:
    sampler = installed()
    with pytest.raises(ConfigError, match=r"the agent was built for EnvSpec\(.*\(2,\).*; this sampler's .*\(3,\)"):
        sampler.take(EchoAgent(OTHER))
    with pytest.raises(ConfigError, match="has no agent yet"):
        _ = sampler.agent


@pytest.mark.parametrize(("first", "total", "slots"), [(0, None, 2), (6, None, 8), (6, 8, 8), (6, 20, 20), (0, 2, 2)])
def test_the_agent_learns_of_the_slots_of_all_samplers(first: int, total: int | None, slots: int) -> None:
    class Listens(EchoAgent):
        def set_slots(self, total: int) -> None:
            heard.append(total)

    heard: list[int] = []
    sampler = installed(first, total)
    sampler.take(Listens(SPEC))
    assert sampler.total_slots == slots
    assert heard == [slots]


@pytest.mark.parametrize(("first", "total"), [(0, 1), (7, 8)])
def test_slots_outside_of_all_are_refused(first: int, total: int | None) -> None:
    with pytest.raises(
        ConfigError, match=rf"first_slot={first} and B=2 make slots {first} to {first + 1}, beyond total_s"
    ):
        installed(first, total)


def test_examples_are_one_row_of_what_the_agent_is_shown_remembers_and_records() -> None:
    shown = installed().take(EchoAgent(SPEC))
    assert {*shown} == {"obs", "action", "info", "state"}
    assert shown["obs"].shape == (3,) and shown["obs"].dtype == np.float32
    assert shown["action"] == 0 and shown["action"].shape == ()
    assert shown["info"]["noise"].tolist() == [0.5]
    assert shown["info"]["shown"]["first"].item() is True
    assert shown["info"]["shown"]["obs"].tolist() == [0.0, 0.0, 0.0]
    assert shown["state"]["age"].item() == 0
    assert shown["state"]["age"].dtype == np.int64


def test_the_example_of_an_observation_is_one_of_its_choices() -> None:
    spec = EnvSpec(LeafSpec("discrete", (), "int64", sizes=(4,), start=3), SPEC.action)
    info, _ = examples(EchoAgent(spec), spec)
    assert info["shown"]["obs"] == 3


@pytest.mark.parametrize(("records", "said"), [({"env": 0}, r"of keys \['env'\]"), ([1], "of type list")])
def test_what_cannot_be_recorded_is_refused(records: Any, said: str) -> None:
    class Records(EchoAgent):
        def act(self, inputs: Any, state: Any, noise: Any) -> Any:
            action, _, state = super().act(inputs, state, noise)
            return action, records, state

    with pytest.raises(
        ConfigError, match=rf"Records returned an info {said}; expected a dict .* without the key 'env'"
    ):
        examples(Records(SPEC), SPEC)


def test_examples_leave_no_gradient_and_no_inference_mode_behind() -> None:
    examples(EchoAgent(SPEC), SPEC)
    assert not torch.is_inference_mode_enabled()


def test_batches_have_room_for_all_that_is_recorded_and_only_a_blank_one_is_valid() -> None:
    sampler = installed()
    sampler.take(EchoAgent(SPEC))
    (batch,), blank = sampler.allocate(), sampler.blank_batch()
    for each in (batch, blank):
        assert each.spec == (5, 2)
        assert each.obs.shape == (6, 2, 3)
        assert each.info["noise"].shape == (5, 2, 1)
        assert each.info["env"]["score"].shape == (5, 2)
        assert each.state["age"].shape == (2,)
    assert not batch.valid.any()
    assert blank.valid.all()
    assert not blank.obs.any()


class RecordsAParameter(EchoAgent):
    def act(self, inputs: Any, state: Any, noise: Any) -> Any:
        action, info, state = super().act(inputs, state, noise)
        return action, {**info, "log_std": self.unused.expand(len(inputs.first))}, state


def test_an_agent_may_record_a_parameter() -> None:
    sampler = ps.SerialSampler(4, 2).build("CartPole-v1")
    agent = RecordsAParameter(sampler.spec)
    with torch.no_grad():
        agent.unused.fill_(0.25)
    assert sampler.initialize(agent)["info"]["log_std"].item() == 0.25
    batch, _ = sampler.obtain_samples(0)
    assert (batch.info["log_std"] == 0.25).all()
    sampler.shutdown()
