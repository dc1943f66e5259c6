from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.agents.networks import Net
from penstock.algos.ppo import PPO
from penstock.core.batch import Inputs, SampleBatch, padded_rows
from penstock.core.noise import generator
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.pools.serial import SerialPool
from penstock.envs.toy import TMaze
from penstock.samplers.collector import GroupViews, collect
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler
from penstock.testing.pools import check_pool, echo_config
from penstock.testing.samplers import EchoAgent, bits, check_sampler


class Groups:
    """A pool of several groups that steps a group only when it gives it back, in an order of its own."""

    def __init__(self, config: EnvConfig, seed: int, sizes: tuple[int, ...], order: str) -> None:
        stops = np.cumsum(sizes).tolist()
        self.groups = tuple(slice(stop - size, stop) for size, stop in zip(sizes, stops))
        self._pools = [SerialPool(config, seed, slots) for slots in self.groups]
        self.spec, self.info_keys = self._pools[0].spec, self._pools[0].info_keys
        self._sent: list[tuple[int, int]] = []
        self._order, self._rng = order, generator(0, 7)  # pyright: ignore[reportArgumentType]

    def restart(self, seed: int, episodes: Any = None) -> None:
        for pool, slots in zip(self._pools, self.groups):
            pool.restart(seed, None if episodes is None else episodes[slots])

    def warmup(self) -> list[Any]:
        return [part for pool in self._pools for part in pool.warmup()]

    def bind(self, out: SampleBatch) -> None:
        assert not self._sent
        for pool, slots in zip(self._pools, self.groups):
            pool.bind(out[:, slots])

    def send(self, group: int, row: int) -> None:
        assert group not in [g for g, _ in self._sent], "sent twice without a recv"
        self._sent.append((group, row))

    def recv(self) -> int:
        at = {"first": 0, "last": -1, "any": int(self._rng.integers(len(self._sent)))}[self._order]
        group, row = self._sent.pop(at)
        self._pools[group].send(0, row)
        return group

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def get_state(self) -> dict[str, Any]:
        return {"pools": [pool.get_state() for pool in self._pools]}

    def set_state(self, state: dict[str, Any], row: SampleBatch, journal: list[Tree | None]) -> list[int]:
        return [slots.start + b for pool, slots, part in zip(self._pools, self.groups, state["pools"])
                for b in pool.set_state(part, row[:, slots], journal[slots])]  # fmt: skip


SIZES = [(1,), (1, 2), (3, 5), (4, 1, 4)]


def grouped(config: EnvConfig, seed: int, sizes: tuple[int, ...], order: str, T: int = 7) -> LiveSampler:
    pool = Groups(config, seed, sizes, order)
    return LiveSampler(BatchSpec(T, sum(sizes)), pool, config, seed, 0.99, 1000)


@pytest.mark.parametrize("order", ["first", "last", "any"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_pool_of_groups_keeps_both_contracts(sizes: tuple[int, ...], order: str):
    check_pool(lambda: Groups(echo_config(), 3, sizes, order), seed=3)
    check_sampler(lambda config, seed: grouped(config, seed, sizes, order), nested=order == "any")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_change_no_bit_of_a_recurrent_agents_batches(sizes: tuple[int, ...]):
    config = EnvConfig(TMaze, {"length": 5})
    one = SerialSampler(T=9, B=sum(sizes)).build(config, 4)
    agent = PPO(net=Net(recurrent="lstm", recurrent_size=16, hidden=(8,), prev_action=True)).build(one.spec, 4).agent
    samplers = [one, *(grouped(config, 4, sizes, order, T=9) for order in ("first", "last", "any"))]
    for sampler in samplers:
        sampler.initialize(agent)
    for itr in range(4):
        first, *rest = [bits(sampler.obtain_samples(itr)[0]) for sampler in samplers]
        assert all(other == first for other in rest)


class Watching(EchoAgent):
    """Keeps the shapes of what it is given."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.rows: set[tuple[int, ...]] = set()
        self.padding: list[Tensor] = []
        self.real = 0

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        assert torch.is_inference_mode_enabled()
        given = [*tree_leaves(tuple(inputs)), *tree_leaves(state), *([] if noise is None else [noise])]
        self.rows.add(tuple({len(x) for x in given}))
        self.padding += [x[self.real :].double() for x in tree_leaves(tuple(inputs))]
        return super().act(inputs, state, noise)


@pytest.mark.parametrize("B", [1, 2, 3, 4, 5, 8, 17])
@pytest.mark.parametrize("evaluation", [False, True])
def test_every_forward_has_a_multiple_of_four_rows_and_padding_stays_outside_the_record(B: int, evaluation: bool):
    sampler = SerialSampler(T=6, B=B).build(echo_config(nested=True), 0)
    agent = Watching(sampler.spec)
    sampler.initialize(agent)
    agent.rows, agent.real, agent.padding = set(), B, []
    if evaluation:
        sampler.evaluate_agent(0, B)
        assert agent.rows == {(4,), (padded_rows(min(B, 16)),)}
        return
    batch, _ = sampler.obtain_samples(0)
    assert agent.rows == {(padded_rows(B),)}
    assert all(len(x) == padded_rows(B) - B and not x.any() for x in agent.padding)
    assert all(x.shape[:2] == (6, B) for x in tree_leaves(batch.info))
    assert all(x.shape[0] == B for x in tree_leaves(batch.state))


def test_without_noise_the_agent_acts_deterministically_and_nothing_is_drawn():
    pool = SerialPool(echo_config(), 0, slice(0, 5))
    sampler = LiveSampler(BatchSpec(6, 5), pool, echo_config(), 0, 0.99, 0)
    agent = Watching(pool.spec)
    sampler.initialize(agent)
    batch = sampler.last_batch
    views = [GroupViews(batch, slots, pool.spec.null_action, torch.device("cpu")) for slots in pool.groups]
    collect(pool, agent, batch, views, [agent.initial_state(8)], None)
    assert (batch.info["noise"] == 0.5).all()
    assert (batch.action[batch.valid] == 2).all()


def test_invalid_rows_store_the_null_action_of_every_kind_whatever_the_agent_did():
    sampler = SerialSampler(T=30, B=4).build(echo_config(nested=True), 0)
    sampler.initialize(EchoAgent(sampler.spec))
    batch, _ = sampler.obtain_samples(0)
    assert 0 < (~batch.valid).sum() < batch.valid.sum()
    nulls = tree_map(lambda leaf: leaf.null(), sampler.spec.action)
    for x, null in zip(tree_leaves(batch.action), tree_leaves(nulls)):
        assert (x[~batch.valid] == null).all()
        assert (x[batch.valid] != null).any()
    assert not batch.reward[~batch.valid].any()


class Recorder(EchoAgent):
    """Keeps a copy of every previous action and reward that it was shown."""

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        action, info, state = super().act(inputs, state, noise)
        return (
            action,
            info | {"seen_action": inputs.prev_action.clone(), "seen_reward": inputs.prev_reward.clone()},
            state,
        )


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
def test_an_agent_acts_on_the_inputs_that_the_record_shows(reset: Any):
    sampler = SerialSampler(T=40, B=4, reset=reset).build("CartPole-v1", 3)
    sampler.initialize(Recorder(sampler.spec))
    opened = 0
    for itr in range(3):
        batch, _ = sampler.obtain_samples(itr)
        assert (batch.info["seen_action"] == batch.prev_action[:-1]).all()
        assert (batch.info["seen_reward"] == batch.prev_reward[:-1]).all()
        assert not batch.prev_action[batch.first].any()
        opened += int(batch.first.sum())
    assert opened > 4
    sampler.shutdown()
