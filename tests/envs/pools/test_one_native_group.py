from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import makes_vector_env
from penstock.envs.pools.native_groups import NativeGroups
from penstock.envs.toy import Counter, SeedEcho
from penstock.testing.pools import check_pool, echo_config
from penstock.testing.records import RecordCheck


def echoes(nested: bool, B: int) -> EnvConfig:
    return replace(echo_config(nested), env=lambda nested: SyncVectorEnv([lambda: SeedEcho(nested)] * B))


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 2), (8, 7)])
def test_the_contract(nested: bool, B: int, T: int):
    check_pool(lambda: NativeGroups(echoes(nested, B), 3, B), T=T)


def rows(pool: NativeGroups, T: int, batch: SampleBatch | None = None) -> SampleBatch:
    """A batch that is stepped with null actions; a new one unless one is given."""
    out = batch or allocate_batch(pool.spec, BatchSpec(T, pool.groups[-1].slots.stop), env_info=pool.info_keys)
    pool.bind([out])
    for t in range(T):
        pool.send(0, t)
        pool.recv()
    return out


def opening_seeds(pool: NativeGroups) -> list[int]:
    return SeedEcho.place_of(rows(pool, 1).obs)[0][0].tolist()


def test_seeds_depend_on_run_restart_and_purpose():
    def pool(seed: int, **settings: Any) -> NativeGroups:
        return NativeGroups(echoes(False, 2), seed, 2, **settings)

    one = pool(5)
    known = opening_seeds(one)
    assert known == opening_seeds(pool(5)) != opening_seeds(pool(6))
    assert opening_seeds(pool(5, evaluation=True)) != known
    rows(one, 5)
    one.restart(5)
    assert opening_seeds(one) == known
    one.restart(6)
    assert opening_seeds(one) == opening_seeds(pool(6))
    assert max(known) < 1 << 31


def test_a_resumed_pool_starts_anew_under_other_seeds_and_says_that_every_slot_is_cut():
    pool, check = NativeGroups(echoes(False, 3), 5, 3), RecordCheck(3, seed=None)
    batch = rows(pool, 4)
    check.add(batch)
    before = SeedEcho.place_of(batch.obs)[0][0].tolist()
    state = pool.get_state()
    batch.prev_action[...], batch.prev_reward[...] = 3, 7.0
    assert pool.set_state(state, batch, [None] * 3) == [0, 1, 2]
    rows(pool, 4, batch)
    assert not {*SeedEcho.place_of(batch.obs)[0][0].tolist()} & {*before}
    RecordCheck(3, seed=None).add(batch)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"has num_envs=3; sampler.B=4: make them equal"):
        NativeGroups(echoes(False, 3), 0, 4)
    with pytest.raises(ConfigError, match=r"made SeedEcho; expected a gymnasium.vector.VectorEnv"):
        NativeGroups(echo_config(), 0, 4)
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        env = lambda mode=mode: SyncVectorEnv([SeedEcho] * 2, autoreset_mode=mode)  # noqa: E731
        with pytest.raises(ConfigError, match="expected NEXT_STEP"):
            NativeGroups(EnvConfig(env), 0, 2)


def test_what_makes_a_batched_environment_is_found_by_making_one():
    assert makes_vector_env(echoes(False, 1))
    assert not makes_vector_env(echo_config())
    assert not makes_vector_env(EnvConfig("CartPole-v1"))
    assert makes_vector_env(EnvConfig("gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"))
    made: list[Bad] = []
    assert makes_vector_env(EnvConfig(lambda: made.append(Bad(fail)) or made[-1]))
    assert [env.closed for env in made] == [1]


class Bad(gym.vector.VectorEnv):
    """Two counters that go wrong in step 3, or in the reset, or in closing."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, change: Callable[[list[Any]], Any], in_reset: bool = False) -> None:
        self.num_envs, self.change, self.in_reset = 2, change, in_reset
        self.single_observation_space, self.single_action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
        self.closed = 0

    def reset(self, **_: Any) -> Any:
        self.t = 0
        result = [np.zeros((2, 1), np.float32), {}]
        return tuple(self.change(result) or result) if self.in_reset else tuple(result)

    def step(self, actions: Any) -> Any:
        self.t += 1
        result = [np.full((2, 1), self.t % 9, np.float32), np.ones(2), np.zeros(2, bool), np.zeros(2, bool), {}]
        return tuple(self.change(result) or result) if self.t == 3 else tuple(result)

    def close(self, **_: Any) -> None:
        self.closed += 1


class Ends(Bad):
    """Ends in every step, and goes on to give rewards and ends where it should reset."""

    def step(self, actions: Any) -> Any:
        obs, reward, _, _, info = super().step(actions)
        return obs, reward, np.ones(2, bool), np.ones(2, bool), info


def test_what_is_answered_in_a_reset_row_is_not_recorded():
    batch = rows(NativeGroups(EnvConfig(Ends, {"change": lambda result: None}), 0, 2), 5)
    assert batch.valid[:, 0].tolist() == [True, False, True, False, True]
    for x in (batch.reward, batch.terminated, batch.truncated):
        assert np.array_equal(x.astype(bool), batch.valid)
    assert np.array_equal(batch.first[1:], ~batch.valid)


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (spaces.Box(-1, 1, (2,)), [[-1, 0.5], [1, 1]]),
        (spaces.Box(np.array([-3, 0], np.float32), np.array([1, 9], np.float32)), [[-3, 0.5], [1, 9]]),
        (spaces.Box(0, np.inf, (2,)), [[0, 0.5], [5, 50]]),
        (spaces.Box(-np.inf, 1, (2,)), [[-5, 0.5], [1, 1]]),
        (spaces.Box(-np.inf, np.inf, (2,)), [[-5, 0.5], [5, 50]]),
    ],
)
def test_boxes_are_clipped_for_the_environment_alone(space: spaces.Box, given: list[list[float]]):
    seen: list[Any] = []

    class Sees(Bad):
        def __init__(self) -> None:
            super().__init__(lambda result: None)
            self.single_action_space = space

        def step(self, actions: Any) -> Any:
            seen.append(actions)
            return super().step(actions)

    pool = NativeGroups(EnvConfig(Sees), 0, 2)
    batch = allocate_batch(pool.spec, BatchSpec(1, 2))
    pool.bind([batch])
    batch.action[0] = chosen = [[-5, 0.5], [5, 50]]
    pool.send(0, 0)
    assert seen[0].tolist() == given
    assert batch.action[0].tolist() == chosen


def put(index: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda result: result.__setitem__(index, value)


def fail(_: list[Any]) -> None:
    raise RuntimeError("the arm fell off")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put(0, np.zeros((2, 2), np.float32)), "an observation of float32[2, 2]; expected float32[2, 1]"),
        (put(0, np.zeros((1, 1), np.float32)), "an observation of float32[1, 1]; expected float32[2, 1]"),
        (put(0, np.zeros((2, 1))), "an observation of float64[2, 1]; expected float32[2, 1]"),
        (put(0, {"a": np.zeros((2, 1), np.float32)}), "the observation's structure is"),
        (put(0, 0.0), "an observation of float[]"),
        (put(1, np.ones((2, 1))), "reward: got shape [2, 1], expected [2], one for each environment"),
        (put(1, np.array([1.0, np.nan])), "slot 1 of"),
        (put(1, np.array([1.0, np.inf])), "reward is inf; expected a finite number"),
        (put(2, False), "terminated: got shape []"),
        (put(3, np.zeros(3, bool)), "truncated: got shape [3]"),
    ],
)
def test_a_broken_contract_is_named(change: Any, text: str):
    pool = NativeGroups(EnvConfig(Bad, {"change": change}), 0, 2)
    with pytest.raises(EnvContractError) as caught:
        rows(pool, 4)
    assert text in str(caught.value)
    assert "in step(), 2 steps after the reset" in str(caught.value)


@pytest.mark.parametrize(("in_reset", "place"), [(False, "in step(), 2 steps"), (True, "in reset(), 0 steps")])
def test_exceptions_carry_their_traceback(in_reset: bool, place: str):
    pool = NativeGroups(EnvConfig(Bad, {"change": fail, "in_reset": in_reset}), 0, 2)
    for _ in range(2):
        with pytest.raises(EnvWorkerError, match="RuntimeError: the arm fell off\nTraceback") as caught:
            rows(pool, 4)
        assert place in str(caught.value)
        assert "in fail" in str(caught.value)
        pool.restart(1)


def test_values_are_checked_early_then_in_one_row_of_64_or_always():
    class NanAt(Bad):
        def __init__(self, at: int) -> None:
            super().__init__(lambda result: None)
            self.at = at

        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            return (obs * np.nan if self.t - 1 == self.at else obs, *rest)

    for checks, at, found in (("sampled", 1, True), ("sampled", 63, False), ("sampled", 64, True), ("off", 64, False),
                              ("always", 63, True)):  # fmt: skip
        pool = NativeGroups(EnvConfig(NanAt, {"at": at}, checks=checks), 0, 2)
        if not found:
            rows(pool, 70)
            continue
        with pytest.raises(EnvContractError, match=f"slot 0 of .*NanAt in step.., {at} steps .*obs: got nan"):
            rows(pool, 70)


def test_closing_twice_closes_once_and_a_refused_environment_is_closed():
    pool = NativeGroups(EnvConfig(Bad, {"change": fail}), 0, 2)
    env: Any = pool._envs[0]._env  # pyright: ignore
    pool.close()
    pool.close()
    assert env.closed == 1
    made: list[Bad] = []
    with pytest.raises(ConfigError):
        NativeGroups(EnvConfig(lambda: made.append(Bad(fail)) or made[-1]), 0, 3)
    assert made[0].closed == 1


def test_actions_and_observations_share_no_memory_with_the_environment():
    seen: list[Any] = []

    class Keeps(Bad):
        def step(self, actions: Any) -> Any:
            seen.append(actions)
            return super().step(actions)

    pool = NativeGroups(EnvConfig(Keeps, {"change": lambda result: None}), 0, 2)
    batch = rows(pool, 4)
    assert not any(np.shares_memory(x, y) for x in seen for y in tree_leaves(batch))


def test_infos_that_some_environments_report_are_recorded_for_those():
    class Reports(Counter):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, _ = super().step(action)
            return obs, reward, terminated, truncated, {"height": 2.5} if self.t == 2 else {}

    pool = NativeGroups(
        EnvConfig(lambda: SyncVectorEnv([lambda: Reports(3), lambda: Reports(9)]), info_keys=("height",)), 0, 2
    )
    batch = rows(pool, 7)
    known = ~np.isnan(batch.info["env"]["height"])
    assert known[:, 0].tolist() == [False, True, False, False, False, True, False]
    assert known[:, 1].tolist() == [False, True, False, False, False, False, False]
    assert (batch.info["env"]["height"][known] == 2.5).all()
    assert np.isnan(batch.info["env"]["is_success"]).all()


def test_infos_without_a_mask_count_for_all():
    def report(result: list[Any]) -> None:
        result[4] = {"height": np.array([1.5, 2.5])}

    batch = rows(NativeGroups(EnvConfig(Bad, {"change": report}, info_keys=("height",)), 0, 2), 4)
    assert batch.info["env"]["height"][2].tolist() == [1.5, 2.5]
    assert np.isnan(batch.info["env"]["height"][[0, 1, 3]]).all()
