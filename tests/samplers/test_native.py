import sys
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.algos.ppo import PPO
from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native_groups import NativeGroups
from penstock.envs.toy import SeedEcho
from penstock.samplers.cpu import CpuSampler
from penstock.samplers.gpu import AlternatingSampler, GpuSampler, NoOverlapAlternatingSampler
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler
from penstock.testing.samplers import bits, check_sampler
from tests.slow import slow

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize(("B", "T"), [(5, 7), *slow((1, 5))])
def test_the_contract(nested: bool, B: int, T: int):
    def batched(config: EnvConfig) -> EnvConfig:
        return replace(config, env=lambda nested: SyncVectorEnv([lambda: SeedEcho(nested)] * B))

    check_sampler(SerialSampler(T=T, B=B).build, nested=nested, env=batched, seeded=False, batches=5)


def cartpole(B: int, T: int, limit: int = 40, seed: int = 0) -> LiveSampler:
    env = partial(CartPoleVectorEnv, num_envs=B, max_episode_steps=limit)
    sampler = SerialSampler(T=T, B=B).build(EnvConfig(env), seed)
    sampler.initialize(PPO().build(sampler.spec, 2).agent)
    return sampler


def successor(obs: Any, action: Any) -> Any:
    """Gymnasium's CartPole, Euler's method (Barto, Sutton and Anderson 1983)."""
    x, v, angle, spin = np.moveaxis(np.asarray(obs, np.float64), -1, 0)
    force = np.where(action == 1, 10.0, -10.0)
    part = (force + 0.05 * spin**2 * np.sin(angle)) / 1.1
    turn = (9.8 * np.sin(angle) - np.cos(angle) * part) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    push = part - 0.05 * turn * np.cos(angle) / 1.1
    return np.stack([x + 0.02 * v, v + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turn], -1)


@pytest.mark.parametrize("B", [64, 256])
def test_every_row_of_a_native_cartpole_obeys_record_and_physics(B: int):
    T = 33
    sampler = cartpole(B, T)
    ages, last = np.zeros(B, int), None
    counts = np.zeros(3, int)
    for itr in range(4):
        batch, episodes = sampler.obtain_samples(itr)
        for name in ("obs", "first", "prev_action", "prev_reward") if last is not None else ():
            assert np.array_equal(getattr(batch, name)[0], getattr(last, name)[-1])
        assert itr or batch.first[0].all()
        valid, first, ended = batch.valid, batch.first, batch.terminated | batch.truncated
        assert np.allclose(batch.obs[1:][valid], successor(batch.obs[:-1], batch.action)[valid], atol=1e-5)
        assert (np.abs(batch.obs[first]) <= 0.05).all()
        assert np.array_equal(first[1:], ~valid)
        assert np.array_equal(~valid[1:], ended[:-1])
        assert last is None or np.array_equal(~valid[0], last.terminated[-1] | last.truncated[-1])
        assert (batch.reward == valid).all()
        assert not batch.action[~valid].any()
        assert not ended[~valid].any()
        fallen = (np.abs(batch.obs[1:, :, 0]) > 2.4) | (np.abs(batch.obs[1:, :, 2]) > 12 * np.pi / 180)
        assert np.array_equal(batch.terminated[valid], fallen[valid])
        lengths = []
        for t in range(T):
            ages = np.where(valid[t], ages + 1, 0)
            assert np.array_equal(batch.truncated[t], valid[t] & (ages >= 40))
            lengths += ages[ended[t]].tolist()
        assert episodes.length.tolist() == episodes.return_.tolist() == lengths
        assert np.isclose(episodes.discounted_return, (1 - 0.99 ** np.array(lengths)) / 0.01).all()
        counts += batch.terminated.sum(), batch.truncated.sum(), valid.sum()
        last = batch.copy()
    assert counts[0] > 50
    assert counts[1] > 0
    sampler.shutdown()


def test_one_seed_gives_one_stream():
    streams = [[bits(sampler.obtain_samples(itr)[0]) for itr in range(3)]
               for sampler in (cartpole(8, 20, seed=3), cartpole(8, 20, seed=3), cartpole(8, 20, seed=4))]  # fmt: skip
    assert streams[0] == streams[1]
    assert streams[0][0] != streams[2][0]


def test_evaluation_counts_the_first_episodes_of_each_slot_and_leaves_training_alone():
    quiet, evaluating = cartpole(8, 20, limit=500), cartpole(8, 20, limit=500)
    for itr in range(3):
        batch, _ = quiet.obtain_samples(itr)
        again, _ = evaluating.obtain_samples(itr)
        assert bits(batch) == bits(again)
        for count in (1, 5, 20):
            episodes = evaluating.evaluate_agent(itr, count)
            assert np.bincount(episodes.slot, minlength=8).tolist() == [count // 8 + (b < count % 8) for b in range(8)]
            assert (episodes.length > 5).all()
    many = evaluating.evaluate_agent(0, 20)
    assert many.return_.tolist() == evaluating.evaluate_agent(0, 20).return_.tolist()
    assert many.return_.tolist() != evaluating.evaluate_agent(1, 20).return_.tolist()
    pool: Any = evaluating._evaluation.pool  # pyright: ignore
    assert isinstance(pool, NativeGroups)
    evaluating.shutdown()
    assert not pool._envs


def test_a_resumed_run_cuts_every_slot_and_keeps_a_sound_record():
    sampler, resumed = cartpole(8, 20), cartpole(8, 20)
    sampler.obtain_samples(0)
    state = sampler.state_dict()
    assert not any(slot["actions"] is not None and len(slot["actions"]) for slot in state["journal"])
    resumed.load_state_dict(state)
    assert resumed.cut_slots == list(range(8))
    batch, episodes = resumed.obtain_samples(1)
    assert batch.first[0].all()
    assert not batch.prev_action[0].any()
    assert not batch.prev_reward[0].any()
    assert (np.abs(batch.obs[0]) <= 0.05).all()
    assert (episodes.length <= 20).all()
    assert not np.array_equal(batch.obs[0], sampler.obtain_samples(1)[0].obs[0])


@pytest.mark.parametrize(
    ("settings", "env", "text"),
    [
        ({"B": 6}, partial(CartPoleVectorEnv, num_envs=8), "num_envs=8; sampler.B=6: make them equal"),
        ({"B": 8, "reset": "batch_end"}, partial(CartPoleVectorEnv, num_envs=8), "use reset='next_step'"),
        ({"B": 8, "max_decorrelation_steps": 3}, partial(CartPoleVectorEnv, num_envs=8), "max_decorrelation_steps=0"),
        *[({"B": 2}, partial(SyncVectorEnv, [SeedEcho] * 2, autoreset_mode=mode), "state it in metadata['autoreset_mode']")
          for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)],
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_cure(settings: dict[str, Any], env: Any, text: str):
    with pytest.raises(ConfigError) as caught:
        SerialSampler(T=4, **settings).build(EnvConfig(env))
    assert text in str(caught.value)


def test_the_spec_is_that_of_one_environment():
    sampler = cartpole(8, 2)
    assert isinstance(sampler.spec, EnvSpec)
    assert sampler.spec.obs.shape == (4,)
    batch: SampleBatch = sampler.obtain_samples(0)[0]
    assert batch.obs.shape == (3, 8, 4)


class Halved(SyncVectorEnv):
    """A SyncVectorEnv in two halves."""

    def __init__(self, num_envs: int = 1, nested: bool = False) -> None:
        super().__init__([lambda: SeedEcho(nested)] * num_envs)

    def send(self, actions: Any) -> None:
        self.actions = actions

    def recv(self) -> Any:
        return super().step(self.actions)


@pytest.mark.parametrize("nested", [False, *slow(True)], ids=["flat", "nested"])
@pytest.mark.parametrize(
    "sampler", [GpuSampler(T=5, B=4), AlternatingSampler(T=7, B=4), AlternatingSampler(T=5, B=7, groups=3, device="cpu"),
                NoOverlapAlternatingSampler(T=5, B=6)], ids=["one", "two", "three", "exclusive"]
)  # fmt: skip
def test_the_contract_in_groups_that_take_turns(sampler: GpuSampler, nested: bool):
    check_sampler(sampler.build, nested=nested, env=lambda config: replace(config, env=Halved), seeded=False, batches=5)


def test_groups_play_alike_under_one_seed_and_say_how_long_they_waited():
    def batches(seed: int) -> list[Any]:
        sampler = AlternatingSampler(T=9, B=6).build(EnvConfig(Halved), seed)
        sampler.initialize(PPO().build(sampler.spec, 2).agent)
        found = [bits(sampler.obtain_samples(itr)[0]) for itr in range(3)]
        assert 0.0 < sampler.metrics()["sampler/env_wait"] < 1.0
        waited = sampler.metrics()
        assert len(sampler.evaluate_agent(0, 12)) == 12
        assert sampler.metrics() == waited
        sampler.shutdown()
        return found

    assert batches(3) == batches(3)
    assert batches(3)[0] != batches(4)[0]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("sampler", "env", "text"),
    [
        (AlternatingSampler(T=4, B=4), CartPoleVectorEnv, "cannot step beside another group"),
        (AlternatingSampler(T=4, B=8, workers=3), Halved, "sampler.workers=3 with"),
        (GpuSampler(T=4, B=4, workers=1), Halved, "needs no worker processes; leave workers and affinity out"),
        (GpuSampler(T=4, B=4, reset="batch_end"), Halved, "use reset='next_step'"),
        (GpuSampler(T=4, B=4, max_decorrelation_steps=2), Halved, "max_decorrelation_steps=0"),
        (CpuSampler(T=4, B=4), Halved, "GpuSampler, or AlternatingSampler for two groups"),
    ],
)
def test_settings_that_mean_worker_processes_are_refused(sampler: Any, env: Any, text: str):
    with pytest.raises(ConfigError) as caught:
        sampler.build(EnvConfig(env))
    assert text in str(caught.value)
