from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.agents.networks import Net
from penstock.algos.ppo import PPO
from penstock.core.batch import Inputs, SampleBatch, padded_rows
from penstock.core.noise import Noise, Purpose, generator
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.pools.pool import PER_SLOT, EnvPool, Group, PoolState
from penstock.envs.pools.serial import SerialPool
from penstock.envs.toy import TMaze
from penstock.samplers.collector import GroupViews, collect
from penstock.samplers.live import Buffers, LiveSampler
from penstock.samplers.serial import SerialSampler
from penstock.testing.pools import check_pool, echo_config
from penstock.testing.samplers import EchoAgent, bits, check_sampler
from tests.slow import slow


class Groups(EnvPool):
    """A pool of several groups that steps a group only when it gives it back, in an order of its own."""

    def __init__(self, config: EnvConfig, seed: int, sizes: tuple[int, ...], order: str) -> None:
        stops = np.cumsum(sizes).tolist()
        self._settings = config, sizes, order
        self._slots = [slice(stop - size, stop) for size, stop in zip(sizes, stops)]
        self.groups = tuple(Group(0, slots) for slots in self._slots)
        self._pools = [SerialPool(config, seed, slots) for slots in self._slots]
        self.specs, self.info_keys = self._pools[0].specs, self._pools[0].info_keys
        self._sent: list[tuple[int, int]] = []
        self._order, self._rng = order, generator(0, 7)  # pyright: ignore[reportArgumentType]

    def restart(self, seed: int, episodes: Any = None) -> None:
        for pool, slots in zip(self._pools, self._slots):
            pool.restart(seed, None if episodes is None else episodes[slots])

    def warmup(self) -> list[Any]:
        return [part for pool in self._pools for part in pool.warmup()]

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        assert not self._sent
        for pool, slots in zip(self._pools, self._slots):
            pool.bind([outs[0][:, slots]])

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

    def for_evaluation(self, B: int) -> EnvPool:
        return self._pools[0].for_evaluation(B)

    def get_state(self) -> PoolState:
        whole = self._pools[0].get_state()
        for pool in self._pools[1:]:
            part = pool.get_state()
            for name in PER_SLOT:
                getattr(whole, name).extend(getattr(part, name))
        return whole

    def set_state(self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[Any]) -> list[int]:
        return [
            slots.start + b
            for pool, slots in zip(self._pools, self._slots)
            for b in pool.set_state(state.of(slots), [outs[0][:, slots]], journal[slots])
        ]


SIZES = [(1,), (1, 2), (3, 5), (4, 1, 4)]
GROUPED = [((1,), "last"), ((3, 5), "first"), ((4, 1, 4), "any")]


def grouped(config: EnvConfig, seed: int, sizes: tuple[int, ...], order: str, T: int = 7) -> LiveSampler:
    pool = Groups(config, seed, sizes, order)
    return LiveSampler(BatchSpec(T, sum(sizes)), pool, config, seed, 0.99, 1000)


@pytest.mark.parametrize(
    ("sizes", "order"),
    [*GROUPED, *slow(*((s, order) for s in SIZES for order in ("first", "last", "any") if (s, order) not in GROUPED))],
    ids=str,
)
def test_a_pool_of_groups_keeps_both_contracts(sizes: tuple[int, ...], order: str):
    check_pool(lambda: Groups(echo_config(), 3, sizes, order), seed=3)
    check_sampler(lambda config, seed: grouped(config, seed, sizes, order), nested=order == "any", batches=5)


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
        self.padding += [] if noise is None else [noise[self.real :] - 0.5]
        return super().act(inputs, state, noise)


class Forgetful(Watching):
    """A `Watching` without memory."""

    def initial_state(self, B: int) -> Tree:
        return None

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        action, info, _ = super().act(inputs, EchoAgent.initial_state(self, len(inputs.first)), noise)
        return action, info, None


@pytest.mark.parametrize("B", [1, 2, 3, 4, 5, 8, 17])
@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("kind", [Watching, Forgetful])
def test_every_forward_has_a_multiple_of_four_rows_and_padding_stays_outside_the_record(
    B: int, evaluation: bool, kind: type[Watching]
):
    sampler = SerialSampler(T=6, B=B).build(echo_config(nested=True), 0)
    agent = kind(sampler.spec)
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


class Remembering(EchoAgent):
    """Returns the inputs themselves as its state, and records the one that it is given."""

    def initial_state(self, B: int) -> Tree:
        return torch.zeros(B)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        action, _, _ = super().act(inputs, super().initial_state(len(state)), noise)
        return action, {"before": state.clone()}, inputs.prev_reward


@pytest.mark.parametrize("B", [3, 4])
def test_a_state_that_is_a_view_of_the_inputs_stays_as_it_was(B: int):
    sampler = SerialSampler(T=12, B=B).build(echo_config(), 0)
    sampler.initialize(Remembering(sampler.spec))
    batch, _ = sampler.obtain_samples(0)
    assert batch.prev_reward.any()
    np.testing.assert_array_equal(batch.info["before"][1:], batch.prev_reward[:-2])


def test_without_noise_the_agent_acts_deterministically_and_nothing_is_drawn():
    pool = SerialPool(echo_config(), 0, slice(0, 5))
    sampler = LiveSampler(BatchSpec(6, 5), pool, echo_config(), 0, 0.99, 0)
    agent = Watching(pool.spec)
    sampler.initialize(agent)
    batch = sampler.last_batch
    null, cpu = pool.spec.null_action, torch.device("cpu")
    views = [GroupViews(batch, slots, null, cpu, agent.noise_size) for _, slots in pool.groups]
    collect(pool, [agent], [batch], views, [agent.initial_state(8)], None)
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


class Team(EnvPool):
    """Two policies, each with slots, an environment and a batch of its own, served in either order."""

    info_keys: tuple[str, ...] = ()
    seats = (1, 1)

    def __init__(self, pools: Sequence[SerialPool], last_first: bool) -> None:
        self._pools, self._last_first = pools, last_first
        self.specs = tuple(pool.specs[0] for pool in pools)
        self.groups = tuple(Group(policy, pool.groups[0].slots) for policy, pool in enumerate(pools))
        self._sent: list[int] = []

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        for pool, out in zip(self._pools, outs, strict=True):
            pool.bind([out])

    def send(self, group: int, row: int) -> None:
        self._pools[group].send(0, row)
        self._sent.append(group)

    def recv(self) -> int:
        return self._sent.pop(-1 if self._last_first else 0)


@pytest.mark.parametrize("last_first", [False, True])
def test_each_group_is_served_by_its_policys_agent_into_its_policys_batch(last_first: bool):
    configs = EnvConfig(TMaze, {"length": 4}), EnvConfig("Pendulum-v1")
    settings = PPO(net=Net(recurrent="lstm", recurrent_size=8, hidden=(8,))), PPO(net=Net(hidden=(8,)))
    sizes, T = (5, 3), 9

    def made(seeds: tuple[int, int]) -> tuple[Any, ...]:
        pools = [SerialPool(c, s, slice(0, B)) for c, s, B in zip(configs, seeds, sizes)]
        agents = [algo.build(pool.spec, seed=2).agent for algo, pool in zip(settings, pools)]
        own = [Buffers(pool, {"shared": agent}, BatchSpec(T, B)) for pool, agent, B in zip(pools, agents, sizes)]
        return pools, agents, own

    pools, agents, own = made((3, 4))
    alone_pools, alone_agents, alone = made((3, 4))
    batches = [part.batches[0] for part in own]
    views = [part.views[0][0] for part in own]
    states = [part.states[0] for part in own]
    team = Team(pools, last_first)
    for itr in range(3):
        noise = Noise(6, Purpose.ACT, itr)
        collect(team, agents, batches, views, states, noise)
        for policy, (pool, agent, part) in enumerate(zip(alone_pools, alone_agents, alone)):
            of_policy = noise._replace(purpose=Purpose.ACT + (policy << 32))
            collect(pool, [agent], part.batches, part.views[0], part.states, of_policy)
            assert bits(batches[policy]) == bits(part.batches[0])
    assert batches[0].valid.all() != batches[1].valid.all() or batches[0].spec.B != batches[1].spec.B
