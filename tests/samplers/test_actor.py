"""The loop of a CpuSampler's worker, run in this process: its rows, noise, parameters and recurrent states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.example_step import examples
from penstock.agents.parameters import parameters_of
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.noise import Purpose
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.pools.serial import SerialPool
from penstock.samplers.actor import DETERMINISTIC, Actor
from penstock.testing.pools import echo_config
from penstock.testing.samplers import EchoAgent, bits
from penstock.workers import control

T, SEED = 6, 3


class Parts:
    """An actor for some slots, with two buffers."""

    def __init__(self, slots: slice, agent: Any = None) -> None:
        b = slots.stop - slots.start
        self.pool = SerialPool(echo_config(), SEED, slots)
        self.agent = EchoAgent(self.pool.spec) if agent is None else agent(self.pool.spec)
        info, state = examples(self.agent, self.pool.spec)
        self.batches = [
            allocate_batch(self.pool.spec, BatchSpec(T, b), info, state, self.pool.info_keys) for _ in range(2)
        ]
        self.states = [tree_map(lambda x: x.numpy().copy(), self.agent.initial_state(b))]
        self.parameters = {name: x.detach().numpy().copy() for name, x in parameters_of(self.agent).items()}
        self.block = [0] * control.WORDS
        self.actor = Actor(self.pool, [self.agent], [self.parameters], [[batch] for batch in self.batches], self.states)

    def collect(self, itr: int, mode: int = Purpose.ACT, buffer: int = 0) -> SampleBatch:
        self.block[control.BUFFER] = buffer
        self.actor.collect(self.block, itr, mode)
        return self.batches[buffer]


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("b", [1, 3, 4])
def test_columns_are_those_of_a_serial_sampler_in_buffers_that_take_turns(b: int) -> None:
    """Slots 2 to 2 + b of six: noise and seeds are addressed by the slot's number, whoever acts for it."""
    sampler = ps.SerialSampler(T, 6).build(echo_config(), SEED)
    sampler.initialize(EchoAgent(sampler.spec))
    parts = Parts(slice(2, 2 + b))
    for itr in range(4):
        whole, _ = sampler.obtain_samples(itr)
        mine = parts.collect(itr, buffer=itr % 2)
        mine.version[...] = itr
        assert bits(mine) == bits(whole[:, 2 : 2 + b])


def test_without_noise_the_agent_is_told_so_and_with_it_by_purpose() -> None:
    parts = Parts(slice(0, 2))
    assert (parts.collect(0, DETERMINISTIC).info["noise"] == 0.5).all()
    acting = parts.collect(1, Purpose.ACT).info["noise"].copy()
    evaluating = parts.collect(1, Purpose.EVALUATE).info["noise"].copy()
    assert not (acting == evaluating).any()


def test_recurrent_states_stay_in_their_memory_and_go_on_with_the_next_batch() -> None:
    parts = Parts(slice(0, 3))
    places = [x.ctypes.data for x in tree_leaves(parts.states)]
    first = parts.collect(0, buffer=0)
    assert [x.ctypes.data for x in tree_leaves(parts.states)] == places
    after = tree_map(np.copy, parts.states)
    second = parts.collect(1, buffer=1)
    for x, y in zip(tree_leaves(second.state), tree_leaves(after)):
        assert x.tolist() == y.tolist()
    assert not tree_leaves(first.state)[0].any(), "the state before an episode"
    assert after[0]["age"].shape == (3,)
    assert after[0]["age"].any()
    parts.states[0]["age"][...] = 77  # the learner writes there, such as when a run is resumed
    assert parts.collect(2, buffer=0).state["age"].tolist() == [77, 77, 77]


def test_parameters_are_read_where_the_learner_writes_them() -> None:
    class Shows(EchoAgent):
        def act(self, inputs: Any, state: Any, noise: Any) -> Any:
            action, info, state = super().act(inputs, state, noise)
            return action, {**info, "parameter": self.unused.detach().expand(len(inputs.first))}, state

    parts = Parts(slice(0, 2), Shows)
    for itr in range(2):
        parts.parameters["unused"][...] = 5.0 + itr
        assert (parts.collect(itr).info["parameter"] == 5.0 + itr).all()


def test_rows_are_counted_as_soon_as_they_are_whole() -> None:
    """-1 before a command, 0 once row 0 shows the environments, t + 1 once row t has been stepped."""
    parts = Parts(slice(0, 2))
    seen: list[int] = []

    class Looks(EchoAgent):
        def act(self, inputs: Any, state: Any, noise: Any) -> Any:
            seen.append(parts.block[control.ROWS])
            return super().act(inputs, state, noise)

    parts.agent.act = Looks.act.__get__(parts.agent)
    parts.agent.__class__ = Looks
    parts.block[control.ROWS] = -1
    parts.collect(0)
    assert seen == list(range(T))
    assert parts.block[control.ROWS] == T


def test_an_actor_computes_in_one_thread() -> None:
    torch.set_num_threads(2)
    Parts(slice(0, 1))
    assert torch.get_num_threads() == 1
