"""Several samplers that share a run's slots: together they give the bits of one, and their messages name global slots."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.core.noise import env_seed
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.toy import TMaze
from penstock.run.recording import record
from penstock.testing.samplers import bits
from tests.slow import slow

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

T = 12
PLACES: dict[str, Callable[[int], Any]] = {
    "serial": lambda B: ps.SerialSampler(T, B, max_decorrelation_steps=9),
    "serial-batch-end": lambda B: ps.SerialSampler(T, B, reset="batch_end"),
    "cpu": lambda B: ps.CpuSampler(T, B, workers=2, max_decorrelation_steps=9),
    "gpu": lambda B: ps.GpuSampler(T, B, workers=2),
    "alternating": lambda B: ps.AlternatingSampler(T, B, workers=2),
    "no-overlap": lambda B: ps.NoOverlapAlternatingSampler(T, B, workers=2),
    "async": lambda B: ps.AsyncSampler(ps.SerialSampler(T, B), depth=1),
    "async-cpu": lambda B: ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2), depth=0),
}
CASES: dict[str, tuple[Any, Any]] = {
    "lstm": (EnvConfig(TMaze, {"length": 4}), ps.PPO(net=ps.Net(recurrent="lstm", recurrent_size=8, hidden=(8,)))),
    "ladder": ("CartPole-v1", ps.DQN(ladder="ape-x", epsilon=0.4, learning_starts=0, net=ps.Net(hidden=(8,)))),
}

QUICK = [("serial", "lstm"), ("serial", "ladder"), ("serial-batch-end", "lstm"), ("cpu", "ladder"),
         ("alternating", "ladder")]  # fmt: skip


def started(settings: Any, env: Any, algo: Any, **place: Any) -> Any:
    sampler = settings.build(env, 7, **place)
    policy = algo.build(sampler.spec, seed=7)
    policy.set_progress(0.5, 100)
    sampler.initialize(policy.agent)
    return sampler


@pytest.mark.parametrize(
    ("place", "case"),
    [*QUICK, *slow(*((place, case) for place in PLACES for case in CASES if (place, case) not in QUICK))],
)
def test_two_samplers_of_eight_slots_equal_one_of_sixteen(place: str, case: str) -> None:
    env, algo = CASES[case]
    samplers = [
        started(PLACES[place](16), env, algo),
        started(PLACES[place](8), env, algo, share=ps.Share(0, 16)),
        started(PLACES[place](8), env, algo, share=ps.Share(8, 16)),
    ]
    try:
        explored = set[bytes]()
        for itr in range(4):
            (whole, episodes), *halves = [sampler.obtain_samples(itr) for sampler in samplers]
            for at, (half, own) in zip((0, 8), halves):
                assert bits(half) == bits(whole[:, at : at + 8])
                mine = (at <= episodes.slot) & (episodes.slot < at + 8)
                assert own.return_.tobytes() == episodes.return_[mine].tobytes()
                assert (own.slot + at).tolist() == episodes.slot[mine].tolist()
            explored |= {x.tobytes() for x in whole.action.T}
        assert len(explored) > 16, "slots act alike"
        one, *others = [sampler.evaluate_agent(4, 5) for sampler in samplers]
        assert all(other.return_.tolist() == one.return_.tolist() for other in others)
    finally:
        for sampler in samplers:
            sampler.shutdown()


def test_two_offline_samplers_deal_episodes_as_one(tmp_path: Path) -> None:
    run = ps.RunConfig(steps=600, seed=1, dir=str(tmp_path / "run"), progress="off")
    ps.train(ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T=32, B=4), run))
    record(tmp_path / "run", tmp_path / "data", episodes=25, deterministic=False)
    algo = ps.BC()

    def make(B: int, **place: Any) -> Any:
        return started(ps.OfflineSampler(str(tmp_path / "data"), T=40, B=B), "CartPole-v1", algo, **place)

    samplers = [make(7), make(3, share=ps.Share(0, 7)), make(4, share=ps.Share(3, 7))]
    for itr in range(9):
        whole, *halves = [sampler.obtain_samples(itr)[0] for sampler in samplers]
        for at, half in zip((0, 3), halves):
            assert bits(half) == bits(whole[:, at : at + half.spec.B])
        if itr == 4:  # in the middle of episodes and passes
            resumed = make(4, share=ps.Share(3, 7))
            resumed.load_state_dict(samplers[2].state_dict())
            samplers[2].shutdown()
            samplers[2] = resumed
    assert samplers[0].metrics()["sampler/passes"] > 2
    for sampler in samplers:
        sampler.shutdown()


def test_native_pools_of_two_samplers_play_other_episodes() -> None:
    env = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
    samplers = [started(ps.SerialSampler(T, 4), env, ps.PPO(), share=ps.Share(at, 8)) for at in (0, 4)]
    first, second = (sampler.obtain_samples(0)[0].obs[0] for sampler in samplers)
    assert not np.isclose(first, second).any()
    for sampler in samplers:
        sampler.shutdown()


class Fails(gym.Wrapper):  # pyright: ignore
    """Raises in the third step of the episodes of one slot only: that with the seed given."""

    def __init__(self, env: Any, seed: int, dies: bool = False) -> None:
        super().__init__(env)
        self._of, self._steps, self._dies = seed, -1, dies

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._steps = 0 if seed == self._of else -1
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._steps += self._steps >= 0
        if self._steps == 3 and self._dies:
            os._exit(7)
        if self._steps == 3:
            raise ValueError("boiler burst")
        return self.env.step(action)


@pytest.mark.parametrize("place", ["serial", "cpu", "alternating"])
def test_messages_name_the_slot_among_all(place: str) -> None:
    settings = PLACES[place](4) if place == "alternating" else type(PLACES[place](4))(T, 4)
    config = EnvConfig("CartPole-v1", wrappers=(lambda env: Fails(env, env_seed(7, 13, 0)),))
    sampler = started(settings, config, ps.PPO(), share=ps.Share(12, 16))
    try:
        with pytest.raises(
            EnvWorkerError, match=r"slot 13 of CartPole-v1 in step\(\) at episode 0, step 2, .*boiler burst"
        ):
            sampler.obtain_samples(0)
    finally:
        sampler.shutdown()


@pytest.mark.parametrize("kind", [ps.CpuSampler, ps.AlternatingSampler])
def test_a_death_names_the_slot_among_all(kind: Any) -> None:
    config = EnvConfig("CartPole-v1", wrappers=(lambda env: Fails(env, env_seed(7, 13, 0), dies=True),))
    sampler = started(kind(T, 4, fault_policy="raise"), config, ps.PPO(), share=ps.Share(12, 16))
    try:
        with pytest.raises(
            EnvWorkerError, match=r"slot 13 of CartPole-v1 in step\(\) at episode 0, step 2, .*exit code 7"
        ):
            sampler.obtain_samples(0)
    finally:
        sampler.shutdown()


class Blind(gym.Wrapper):  # pyright: ignore
    """Shows a NaN in the third step of the second episode, which sampled checks let pass."""

    episodes = steps = 0

    def reset(self, **kwargs: Any) -> Any:
        self.episodes, self.steps = self.episodes + 1, 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        obs, *rest = self.env.step(action)
        self.steps += 1
        return (obs * np.float32(np.nan) if (self.episodes, self.steps) == (2, 3) else obs), *rest


def test_a_late_violation_names_the_slot_among_all() -> None:
    config = EnvConfig("CartPole-v1", wrappers=(Blind,))
    sampler = started(ps.SerialSampler(60, 1), config, ps.PPO(), share=ps.Share(13, 16))
    with pytest.raises(EnvContractError, match=r"slot 13 of CartPole-v1"):
        for itr in range(5):
            sampler.obtain_samples(itr)
    sampler.shutdown()


def test_environments_are_closed_where_the_place_is_refused() -> None:
    closed: list[int] = []

    class Closes(gym.Wrapper):  # pyright: ignore
        def close(self) -> None:
            closed.append(1)
            super().close()

    with pytest.raises(ConfigError, match="total_slots=2"):
        ps.SerialSampler(T, 3).build(EnvConfig("CartPole-v1", wrappers=(Closes,)), share=ps.Share(0, 2))
    assert len(closed) == 3


@pytest.mark.parametrize(("first", "total"), [(8, 12), (0, 7)])
def test_slots_outside_of_all_are_refused(first: int, total: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"first_slot={first} and B=8 .*total_slots={total}; expected total_slots of"
    ):
        ps.SerialSampler(T, 8).build("CartPole-v1", share=ps.Share(first, total))


@pytest.mark.parametrize(
    "share", [(-1, 4), ("a", 3), (1.5, 16), (None, 3), (0, "x"), (0, float("inf")), (0, 1 << 40), (True, None)]
)
def test_a_share_is_of_whole_numbers(share: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^Share\((first|total)_slots?=.*; expected a whole number from 0 to 16,777,216"
    ):
        ps.Share(*share)


def test_a_share_of_numpys_numbers_is_one_of_pythons() -> None:
    share = ps.Share(np.int64(4), np.int64(16))  # pyright: ignore[reportArgumentType]
    assert share == ps.Share(4, 16) and type(share.first_slot) is type(share.total_slots) is int
    assert share.part(2, 12) == ps.Share(6, 16) and ps.Share(4).part(0, 3) == ps.Share(4, 7)


def test_no_slot_shares_its_noise() -> None:
    from penstock.core.noise import Noise, Purpose

    one, two = Noise(3, Purpose.ACT, 5), Noise(3, Purpose.ACT, 5, first_slot=4)
    assert tree_leaves(one.rows(6, 8, 2)[:, 4:])[0].tobytes() == two.rows(6, 4, 2).tobytes()
    assert one.rows(6, 8, 3, ranks=True)[0, :, -1].tolist() == list(range(8))
    assert not (one.rows(6, 8, 2) == one.rows(6, 8, 2, policy=1)).any()
