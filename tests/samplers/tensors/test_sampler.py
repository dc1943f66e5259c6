from __future__ import annotations

import collections
import functools
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.example_step import examples
from penstock.core.batch import SampleBatch, allocate_batch, as_arrays
from penstock.core.errors import ConfigError
from penstock.core.noise import Noise, Purpose
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.run.recording import record
from penstock.samplers import collector
from penstock.samplers.collector import collect, views_of
from penstock.samplers.runners.runner import Runner
from penstock.samplers.runners.share import SamplerShare
from penstock.samplers.tensors.views import TensorViews
from penstock.tensor_envs import CartPole
from penstock.tensor_envs.pool import TensorPool
from penstock.testing.samplers import bits, check_sampler
from penstock.workers.shares import SharedMemory
from tests.tensor_envs.echo import ArrayCartPole, TensorEcho

SMALL = ps.Net(hidden=(16,))


class AsArrays:
    """A sampler of tensors on the CPU, its batches as arrays of the same memory."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.spec, self.batch_spec = inner, inner.spec, inner.batch_spec
        self.initialize, self.evaluate_agent, self.shutdown = inner.initialize, inner.evaluate_agent, inner.shutdown

    def obtain_samples(self, itr: int) -> Any:
        batch, episodes = self.inner.obtain_samples(itr)
        assert all(isinstance(x, torch.Tensor) for x in tree_leaves(batch))
        return as_arrays(batch), episodes


@pytest.mark.parametrize(
    ("nested", "T", "B"),
    [
        (False, 5, 7),
        pytest.param(False, 7, 4, marks=pytest.mark.slow),
        pytest.param(True, 5, 7, marks=pytest.mark.slow),
    ],
)
def test_the_contract(nested: bool, T: int, B: int) -> None:
    def build(env: EnvConfig, seed: int) -> Any:
        return AsArrays(ps.SerialSampler(T, B).build(env, seed))

    check_sampler(build, nested=nested, env=lambda config: replace(config, env=TensorEcho), seeded=False)


def trained(env: Any, algo: Any, T: int, B: int, itrs: int) -> tuple[list[Any], Any]:
    """The bits of batches, episodes and evaluations of a short run, and its parameters."""
    sampler = ps.SerialSampler(T, B).build(EnvConfig(env), 5)
    policy = algo.build(sampler.spec, seed=5)
    sampler.initialize(policy.agent)
    found: list[Any] = []
    for itr in range(itrs):
        batch, episodes = sampler.obtain_samples(itr)
        found.append((bits(as_arrays(batch)), episodes.return_.tolist(), episodes.length.tolist()))
        ps.train_one_step(policy, batch)
    found.append(sampler.evaluate_agent(itrs, 5).return_.tolist())
    sampler.shutdown()
    return found, {name: x.tolist() for name, x in policy.agent.state_dict().items()}


@pytest.mark.parametrize(
    ("algo", "T", "B"),
    [
        (ps.PPO(epochs=2, minibatch=32, net=SMALL), 16, 6),
        (ps.PPO(epochs=2, minibatch=32, net=ps.Net(recurrent="lstm", recurrent_size=8, normalize_obs=True)), 16, 5),
        (ps.DQN(batch_size=16, learning_starts=32, net=SMALL, replay=ps.ReplaySettings(capacity=1_000)), 1, 4),
    ],
    ids=["ppo", "ppo-lstm-normalised", "dqn"],
)
def test_training_equals_that_on_the_same_environment_of_arrays_bit_for_bit(algo: Any, T: int, B: int) -> None:
    itrs = 4 if T > 1 else 40
    tensors, parameters = trained(lambda: CartPole(B, max_episode_steps=12), algo, T, B, itrs)
    arrays, expected = trained(lambda: ArrayCartPole(B, max_episode_steps=12), algo, T, B, itrs)
    assert tensors == arrays
    assert parameters == expected


HOST = (
    "cpu", "numpy", "item", "tolist", "nonzero", "unique", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "__iter__", "__contains__", "masked_select",
)  # fmt: skip


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Counts calls of everything that needs a tensor's values on the host."""
    counts: collections.Counter[str] = collections.Counter()

    def counted(name: str, known: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return known(*args, **kwargs)

        return call

    for name in HOST:
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    return counts


# relu: on a CPU tanh is numpy's, which reads what lies there already.
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_no_step_waits_for_the_device(waits: collections.Counter[str], memory: Any) -> None:
    net = ps.Net(hidden=(16,), activation="relu", recurrent=memory, recurrent_size=8)
    seen: list[dict[str, int]] = []
    for T in (2, 32):
        sampler = ps.SerialSampler(T, 6).build(EnvConfig(functools.partial(CartPole, max_episode_steps=5)), 1)
        sampler.initialize(ps.PPO(net=net).build(sampler.spec, 0).agent)
        sampler.obtain_samples(0)
        waits.clear()
        for itr in range(1, 6):
            sampler.obtain_samples(itr)
        seen.append(dict(waits))
        sampler.shutdown()
    assert seen[0] == seen[1], "a longer batch asked the host more often"
    assert sum(seen[1].values()) <= 5 * 8


def test_the_loop_needs_no_values_and_mixes_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device tensors have no values: whatever waits for one, or moves one to the CPU, raises."""

    class Nowhere(CartPole):
        def __init__(self, num_envs: int = 1) -> None:
            super().__init__(num_envs)
            self.device = torch.device("meta")

        def fresh(self) -> torch.Tensor:
            return torch.empty(self.num_envs, 4, device="meta")

    T, B = 8, 6
    pool = TensorPool(EnvConfig(Nowhere), 0, B)
    monkeypatch.setattr(pool, "_check", lambda out: None)  # which waits, once a batch
    halves = torch.full((T, B, 1), 0.5, device="meta")
    monkeypatch.setattr(collector, "rows_on", lambda device, *address: halves)  # there is no generator
    net = ps.Net(recurrent="gru", recurrent_size=8, normalize_obs=True)
    agent = ps.PPO(net=net).build(pool.spec, 0).agent
    info, state = examples(agent, pool.spec)
    agent.to("meta")
    batches, _ = pool.place([allocate_batch(pool.spec, BatchSpec(T, B), info, state, pool.info_keys)], None)
    views, states = views_of(pool, [agent], batches), [agent.initial_state(8)]
    for itr in range(2):
        collect(pool, [agent], batches, views, states, Noise(0, Purpose.ACT, itr))
    shown = [*views[0].noise(halves, slice(0, B)), *views[0].input(0)]
    assert {x.device.type for x in tree_leaves((batches, states, shown))} == {"meta"}
    assert pool._tick == 2 * T


def test_an_agent_elsewhere_is_refused() -> None:
    sampler = ps.SerialSampler(4, 4).build(CartPole)
    agent = ps.PPO(net=SMALL).build(sampler.spec, 0).agent
    sampler.initialize(agent)
    batch: SampleBatch = sampler._filled[0]  # pyright: ignore
    with pytest.raises(ConfigError) as caught:
        TensorViews(batch, slice(0, 4), sampler.spec.null_action, torch.device("meta"), 1)
    assert str(caught.value).startswith(
        "the agent is on meta and the environment's tensors are on cpu: every step would"
    )
    assert "use run.device='cpu' (--run.device cpu), or make the environment on meta" in str(caught.value)
    sampler.shutdown()


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        (
            ps.SerialSampler(4, 4, reset="batch_end"),
            "resets by itself, in the step after an end or in that of the end; use reset='next_step'",
        ),
        (ps.SerialSampler(4, 4, max_decorrelation_steps=3), "it has no method set_ages"),
        (ps.GpuSampler(4, 4), "answers with tensors on cpu, which stay there with SerialSampler alone"),
        (ps.AlternatingSampler(4, 4), "answers with tensors on cpu, which stay there with SerialSampler alone"),
    ],
    ids=["batch-end", "decorrelated", "gpu", "alternating"],
)
def test_settings_that_mean_another_pool_are_refused(sampler: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sampler.build("penstock.tensor_envs:CartPole")
    assert text in str(caught.value)


def test_an_environment_of_a_fixed_number_is_made_once() -> None:
    made: list[CartPole] = []
    make = lambda: made.append(CartPole(4)) or made[-1]  # noqa: E731
    sampler = ps.SerialSampler(4, 4).build(make)
    sampler.initialize(ps.PPO(net=SMALL).build(sampler.spec, 0).agent)
    sampler.obtain_samples(0)
    sampler.shutdown()
    assert [env.closed for env in made] == [True]
    with pytest.raises(ConfigError, match=r"num_envs=4; sampler\.B=3: make them equal"):
        ps.SerialSampler(4, 3).build(make)
    assert [env.closed for env in made] == [True, True]


def test_runners_are_refused_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps.RunnerSampler, "build", lambda *_, **__: pytest.fail("runners were started"))
    sampler = ps.RunnerSampler(runners=2, inner=ps.SerialSampler(4, 4))
    exp = ps.Experiment("penstock.tensor_envs:CartPole", ps.PPO(net=SMALL), sampler)
    with pytest.raises(
        ConfigError, match=r"tensors on cpu, which do not leave their process; use ps\.SerialSampler in"
    ):
        ps.train(exp)


def test_other_processes_are_refused() -> None:
    shared = SharedMemory(0, [0] * 6, (0, 0))  # of an AsyncSampler's process
    with pytest.raises(
        ConfigError, match="tensors on cpu, which no other process can see; use the SerialSampler itself"
    ):
        ps.SerialSampler(4, 4).build(CartPole, shared=shared)
    with pytest.raises(ConfigError, match=r"made a VectorEnv, .* use SerialSampler \(--sampler serial\)$"):  # workers
        EnvConfig(CartPole).make_one()
    share = SamplerShare(ps.SerialSampler(4, 4), EnvConfig(CartPole), 0, ps.Share(0, 4))
    with pytest.raises(
        ConfigError, match=r"which do not leave their process; use ps\.SerialSampler in place of runners"
    ):
        Runner(share)


def test_values_out_of_bounds_are_counted_and_told_of_once() -> None:
    class Far(CartPole):
        def observe(self, state: torch.Tensor) -> torch.Tensor:
            return state + torch.tensor([4.79, 0, 0, 0])

    sampler = ps.SerialSampler(8, 4).build(EnvConfig(Far))
    sampler.initialize(ps.PPO(net=SMALL).build(sampler.spec, 0).agent)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batches = [sampler.obtain_samples(itr)[0].copy() for itr in range(4)]
        sampler.evaluate_agent(0, 2)
    outside = sum(int(((x.obs[1:, :, 0].abs() > np.float32(4.8)) & x.valid).sum()) for x in batches)
    assert sampler.metrics()["env/out_of_bounds"] == outside > 0
    (text,) = [str(one.message) for one in said]
    assert "row" in text and "expected at most 4.8" in text
    sampler.shutdown()


def test_a_resumed_run_cuts_every_slot_and_goes_on() -> None:
    def build() -> Any:
        sampler = ps.SerialSampler(20, 8).build(EnvConfig(functools.partial(CartPole, max_episode_steps=40)), 0)
        sampler.initialize(ps.PPO(net=SMALL).build(sampler.spec, 0).agent)
        return sampler

    sampler, resumed = build(), build()
    sampler.obtain_samples(0)
    state = sampler.state_dict()
    assert all(isinstance(x, np.ndarray) for x in tree_leaves(state["row"]))
    resumed.load_state_dict(state)
    assert resumed.cut_slots == list(range(8))
    batch, episodes = resumed.obtain_samples(1)
    assert batch.first[0].all()
    assert (episodes.length <= 20).all()
    assert not torch.equal(batch.obs[0], sampler.obtain_samples(1)[0].obs[0])


def test_runs_are_stored_evaluated_recorded_and_resumed(tmp_path: Any) -> None:
    env, kwargs = "penstock.tensor_envs:CartPole", {"max_episode_steps": 20}
    exp = ps.Experiment(
        env,
        ps.PPO(net=SMALL, epochs=1),
        ps.SerialSampler(16, 8),
        ps.RunConfig(steps=1_000, eval_episodes=4, dir=tmp_path / "run", progress="off"),
        env_kwargs=kwargs,
    )
    with pytest.warns(UserWarning, match="a batched environment cannot be brought back into its episodes: a resumed"):
        result = ps.train(exp)
    assert 0 < result.metrics["eval/mean_reward"] <= 20
    assert len(ps.evaluate(tmp_path / "run", episodes=3)) == 3
    recording = record(tmp_path / "run", tmp_path / "dataset", 5)
    assert (recording.returns > 5).all()
    assert recording.steps == recording.returns.sum()  # a reward of 1 for each
    assert ps.resume(tmp_path / "run", {"run.steps": 1_500}).env_steps >= 1_500


def test_ppo_learns_on_tensors() -> None:
    sampler = ps.SerialSampler(T=32, B=64).build(EnvConfig(CartPole), 1)
    policy = ps.PPO(lr=2e-3, epochs=4, minibatch=512, net=SMALL).build(sampler.spec, seed=1)
    sampler.initialize(policy.agent)
    for itr in range(30):
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert sampler.evaluate_agent(0, 16).mean_return > 150
    sampler.shutdown()
