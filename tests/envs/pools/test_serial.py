import functools
import itertools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.core.noise import env_seed
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig
from penstock.envs.pools.serial import SerialPool
from penstock.envs.pools.settings import PoolSettings, Reset
from penstock.envs.toy import Counter, Masked, SeedEcho, Toy
from penstock.testing.pools import check_pool, echo_config
from penstock.testing.records import RecordCheck
from tests.params import pairs_first

SIZES = {"1-1": (1, 1), "1-5": (1, 5), "3-2": (3, 2), "5-7": (5, 7)}


@pytest.mark.parametrize(
    ("size", "nested", "reset"),
    [
        *pairs_first(SIZES, {"flat": False, "nested": True}, {"next_step": "next_step", "batch_end": "batch_end"}),
        *(
            pytest.param((17, 3), n, r, marks=pytest.mark.slow)
            for n in (False, True)
            for r in ("next_step", "batch_end")
        ),
    ],
)
def test_the_contract(size: tuple[int, int], nested: bool, reset: Reset):
    B, T = size
    for decorrelation in (0, 1, 25):

        def make(decorrelation: int = decorrelation) -> SerialPool:
            return SerialPool(echo_config(nested), 11, slice(2, 2 + B), PoolSettings(reset, decorrelation))

        assert make().groups == ((0, slice(0, B)),)
        check_pool(make, seed=11, slot=2, reset=reset, decorrelated=decorrelation > 0, T=T)


def test_the_contract_over_more_than_a_hundred_episodes():
    check_pool(lambda: SerialPool(echo_config(), 11, slice(7, 9)), seed=11, slot=7, T=450, batches=2)


def rows(pool: SerialPool, T: int, batches: int = 1, buffer: SampleBatch | None = None) -> list[SampleBatch]:
    """Copies of batches that are stepped with null actions."""
    out: list[SampleBatch] = []
    batch = buffer or allocate_batch(pool.spec, BatchSpec(T, pool.groups[-1].slots.stop), env_info=pool.info_keys)
    for _ in range(batches):
        pool.bind([batch])
        for t in range(T):
            pool.send(0, t)
            assert pool.recv() == 0
        out.append(batch.copy())
    return out


def pool_of(env: Callable[[], gym.Env], B: int = 2, checks: Any = "sampled", **settings: Any) -> SerialPool:
    return SerialPool(EnvConfig(env, checks=checks, info_keys=("key",)), 0, slice(0, B), PoolSettings(**settings))


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
def test_a_slot_with_an_episode_limit_idles_after_its_last(reset: Reset):
    pool = SerialPool(echo_config(), 0, slice(0, 4), PoolSettings(reset, episodes=[1, 2, 4, 0]))
    batches = rows(pool, 10, 7)
    valid, first, reward, obs = (
        np.concatenate([x[-10:] for x in leaves])
        for leaves in zip(*((batch.valid, batch.first, batch.reward, batch.obs) for batch in batches))
    )
    assert sum((batch.terminated | batch.truncated).sum(0) for batch in batches).tolist() == [1, 2, 4, 0]
    assert first.sum(0).tolist() == [0, 1, 3, 0]  # after the opening
    assert batches[0].first[0].tolist() == [True, True, True, False]
    for b in range(4):
        end = np.flatnonzero(valid[:, b])[-1] if b < 3 else 0
        assert end < 60
        assert not first[end:, b].any()
        assert not reward[end + 1 :, b].any()
        assert (obs[end:, b] == obs[end, b]).all()


def test_a_state_may_be_restored_into_another_buffer():
    pool = SerialPool(echo_config(), 5, slice(0, 3))
    used = allocate_batch(pool.spec, BatchSpec(4, 3), env_info=pool.info_keys)
    rows(pool, 4, 2, used)
    other = used.copy()
    assert pool.set_state(pool.get_state(), [other], [None] * 3) != []
    kept = used.copy()
    rows(pool, 4, 1, other)
    assert other.valid[1:].any()
    assert [x.tobytes() for x in tree_leaves(used)] == [x.tobytes() for x in tree_leaves(kept)]
    RecordCheck(3, seed=None, decorrelated=True).add(other[1:])


def test_restart_begins_again_and_evaluation_has_seeds_of_its_own():
    pool = SerialPool(echo_config(), 5, slice(0, 2))
    before = rows(pool, 9, 2)
    pool.restart(5)
    again = rows(pool, 9, 2)
    assert [x.tobytes() for x in tree_leaves(before)] == [x.tobytes() for x in tree_leaves(again)]
    pool.restart(6)
    assert SeedEcho.place_of(rows(pool, 2)[0].obs)[0][0].tolist() == [env_seed(6, 0, 0), env_seed(6, 1, 0)]
    evaluation = SerialPool(echo_config(), 6, slice(0, 2), PoolSettings(evaluation=True))
    seeds = SeedEcho.place_of(rows(evaluation, 2)[0].obs)[0][0].tolist()
    assert seeds == [env_seed(6, b, 0, evaluation=True) for b in range(2)] != [env_seed(6, b, 0) for b in range(2)]
    evaluation.restart(8)
    seeds = SeedEcho.place_of(rows(evaluation, 2)[0].obs)[0][0].tolist()
    assert seeds == [env_seed(8, b, 0, evaluation=True) for b in range(2)]


def test_decorrelation_takes_one_to_all_of_its_steps_each_with_an_action_of_its_own():
    for limit in (1, 3):
        pool = pool_of(lambda: Counter(None), 64, max_decorrelation_steps=limit)
        batch = allocate_batch(pool.spec, BatchSpec(1, 64))
        pool.bind([batch])
        taken = [[int(action) for action in actions] for actions, _ in pool.warmup()]
        assert {len(actions) for actions in taken} == {*range(1, limit + 1)}
        assert batch.obs[0, :, 0].tolist() == [len(actions) for actions in taken]
        assert batch.prev_action[0].tolist() == [actions[-1] for actions in taken]
        assert batch.prev_reward[0].tolist() == [len(actions) - 1 for actions in taken]
        assert [rewards for _, rewards in pool.warmup()] == [[*range(len(actions))] for actions in taken]
    openings = {(len(actions), actions[0]) for actions in taken}
    assert openings == {(n, a) for n in (1, 2, 3) for a in (0, 1)}, "the number of steps says which actions they are"


def test_decorrelation_takes_its_own_steps_in_every_slot_and_obeys_masks():
    class Legal(Masked):
        def act(self, action: Any) -> tuple[float, bool, bool]:
            assert self.observe()["action_mask"][action[0]] == 1
            return 0.0, self.t >= 5, False

    pool = pool_of(Legal, 24, max_decorrelation_steps=30)
    batch = allocate_batch(pool.spec, BatchSpec(1, 24))
    pool.bind([batch])
    taken = [len(actions) for actions, _ in pool.warmup()]
    assert [len(rewards) for _, rewards in pool.warmup()] == taken
    assert len({*taken}) > 4
    assert batch.first[0].tolist() == [n == 0 for n in taken]
    again = pool_of(Legal, 3, max_decorrelation_steps=30)
    again.bind([allocate_batch(pool.spec, BatchSpec(1, 3))])
    behind = SerialPool(EnvConfig(Legal), 0, slice(20, 24), PoolSettings(max_decorrelation_steps=30))
    behind.bind([allocate_batch(pool.spec, BatchSpec(1, 4))])
    assert [len(actions) for actions, _ in behind.warmup()] == taken[20:]
    assert [len(actions) for actions, _ in again.warmup()] == taken[:3]


def test_environments_that_fail_to_close_are_one_warning():
    class Closing(Counter):
        def close(self) -> None:
            raise RuntimeError("stuck")

    pool = pool_of(Closing, 3)
    with pytest.warns(UserWarning, match=r"^slot 0 and 2 more of .*Closing in close\(\): RuntimeError: stuck") as said:
        pool.close()
    assert len(said) == 1


def test_closing_closes_every_environment_once_and_a_failed_start_closes_what_it_made():
    closed: list[int] = []
    made: list[int] = []

    class Closing(Counter):
        def __init__(self, limit: int = 10) -> None:
            super().__init__()
            made.append(len(made))
            self.number = made[-1]
            if self.number >= limit:
                raise RuntimeError("out of licences")

        def close(self) -> None:
            closed.append(self.number)

    pool = pool_of(Closing, 3)
    pool.close()
    pool.close()
    assert closed == [0, 1, 2]
    with pytest.raises(EnvWorkerError, match="out of licences"):
        pool_of(lambda: Closing(5), 4)
    assert closed == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="made a VectorEnv"):
        SerialPool(EnvConfig(lambda: CartPoleVectorEnv(num_envs=2)), 0, slice(0, 2))


class Given(Toy):
    """Returns what it was made with."""

    def __init__(self, space: spaces.Space[Any], obs: Any = None, reset_obs: Any = None, **result: Any) -> None:
        super().__init__(space, spaces.Discrete(2))
        self.obs, self.result = obs, {"reward": 0.5, "terminated": False, "truncated": False, "info": {}} | result
        self.reset_obs = obs if reset_obs is None else reset_obs

    def observe(self) -> Any:
        return self.obs if self.t else self.reset_obs

    def step(self, action: Any) -> Any:
        self.t += 1
        return (self.obs, *self.result.values())


class Frame(np.ndarray):
    """An array of another class."""


SCALAR = spaces.Box(-1, 1, (), np.float32)
VECTOR = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "obs", "stored"),
    [
        (SCALAR, np.float32(0.25), 0.25),
        (SCALAR, np.array(0.25, np.float32), 0.25),
        (VECTOR, np.array([0.25, 0.5], np.float32).view(Frame), np.array([0.25, 0.5])),
        (spaces.Discrete(3), 2, 2),
        (spaces.Discrete(3), np.int32(2), 2),
        (spaces.Discrete(3), np.array(2), 2),
        (spaces.Tuple([SCALAR, spaces.Discrete(3)]), (np.float32(0.25), np.int64(2)), (0.25, 2)),
    ],
)
def test_sound_observations_of_an_unusual_type_are_stored(space: Any, obs: Any, stored: Any):
    for decorrelation in (0, 3):
        ends = {"terminated": True} if not decorrelation else {}
        batch = rows(pool_of(lambda: Given(space, obs, **ends), max_decorrelation_steps=decorrelation), 3)[0]  # noqa: B023
        for x, y in zip(tree_leaves(batch.obs), tree_leaves(stored)):
            assert x.tolist() == np.broadcast_to(np.asarray(y, x.dtype), x.shape).tolist()


@pytest.mark.parametrize("reward", [True, np.float16(1), np.array(1.0), np.int8(1), 1, np.float32(1)])
@pytest.mark.parametrize("flag", [np.False_, False])
def test_sound_rewards_of_an_unusual_type_are_stored(reward: Any, flag: Any):
    obs = np.array([0.25, 0.5], np.float32)
    batch = rows(pool_of(lambda: Given(VECTOR, obs, reward=reward, truncated=flag)), 2)[0]
    assert batch.reward.tolist() == [[1.0, 1.0]] * 2
    assert batch.obs[1:].tolist() == [[[0.25, 0.5]] * 2] * 2


OK = np.zeros(2, np.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"reward": 1e39}, "reward: got 1e+39, expected a finite number that fits float32"),
        ({"reward": float("-inf")}, "reward: got -inf"),
        ({"info": {"key": "abc"}}, "info['key']: got str, expected one number"),
        ({"info": {"key": np.zeros(2)}}, "info['key']: got ndarray, expected one number"),
        ({"info": 5}, "info: got int 5, expected a dict"),
        ({"info": None}, "info: got NoneType, expected a dict"),
        ({"truncated": 1}, "truncated: got int 1, expected a bool"),
    ],
)
def test_an_unsound_result_is_named(result: dict[str, Any], text: str):
    with pytest.raises(EnvContractError) as caught:
        rows(pool_of(lambda: Given(VECTOR, OK, **result)), 1)
    assert "slot 0 of" in str(caught.value)
    assert "in step() at episode 0, step 0, seed " in str(caught.value)
    assert text in str(caught.value)
    assert "last action 0" in str(caught.value)


@pytest.mark.parametrize(
    ("space", "obs", "text"),
    [
        (VECTOR, np.zeros(3, np.float32), "obs: got shape [3], expected [2]"),
        (VECTOR, np.zeros(2), "obs: got dtype float64, expected float32"),
        (VECTOR, [0.0, 0.0], "obs: got list"),
        (VECTOR, np.full(2, np.nan, np.float32), "obs: got nan"),
        (spaces.Discrete(3), np.array(1.5), "obs: got float64 np.float64(1.5), expected an integer"),
        (spaces.Discrete(3), 3, "obs: got 3, expected 0 to 2"),
    ],
)
def test_an_unsound_observation_is_named(space: Any, obs: Any, text: str):
    sound = space.sample() * 0
    for first, then, phase in ((obs, sound, "reset"), (sound, obs, "step")):
        with pytest.raises(EnvContractError) as caught:
            rows(pool_of(lambda then=then, first=first: Given(space, then, first), checks="always"), 1)
        assert f"in {phase}() at episode 0, step 0" in str(caught.value)
        assert text in str(caught.value)
        with pytest.raises(EnvContractError) as caught:
            env = lambda then=then, first=first: Given(space, then, first)  # noqa: E731
            rows(pool_of(env, checks="always", max_decorrelation_steps=1), 1)
        assert f"in {phase}() at episode 0, step 0" in str(caught.value)


@pytest.mark.parametrize("nested", [False, True])
def test_values_out_of_bounds_pass_where_bounds_are_not_checked(nested: bool):
    bad: Any = np.full(2, 7, np.float32)
    space: Any = spaces.Dict({"a": spaces.Tuple((VECTOR, SCALAR))}) if nested else VECTOR
    obs = {"a": (bad, np.array(7, np.float32))} if nested else bad
    for checks in ("sampled", "always", "finite", "off"):
        for decorrelation in (0, 3):
            pool = pool_of(lambda: Given(space, obs), checks=checks, max_decorrelation_steps=decorrelation)
            if checks != "always":
                assert all((x == 7).all() for x in tree_leaves(rows(pool, 70)[0].obs))
                continue
            with pytest.raises(EnvContractError, match=r"in reset\(\) at episode 0, step 0, .*got 7.0"):
                rows(pool, 1)


def test_a_reset_that_returns_no_pair_is_named():
    class NoInfo(Counter):
        def reset(self, **_: Any) -> Any:
            return super().reset()[0]

    with pytest.raises(EnvContractError, match=r"in reset\(\) at episode 0, step 0, .*expected a tuple \(obs, info\)"):
        rows(pool_of(NoInfo), 1)


class NanFrom(Counter):
    """Episodes of 10 steps; NaN in one row, counted over episodes, of which each has 11 with its reset."""

    def __init__(self, row: int) -> None:
        super().__init__(terminate_at=10)
        self.row, self.calls = row, -1

    def observe(self) -> Any:
        self.calls += 1
        return super().observe() if self.calls != self.row + 1 else np.array([np.nan], np.float32)


@pytest.mark.parametrize(("row", "place"), [(63, "step() at episode 5, step 8"), (127, "step() at episode 11, step 6")])
def test_values_are_checked_in_one_row_of_64(row: int, place: str):
    for checks, at, found in (("sampled", row, True), ("sampled", row - 1, False), ("off", row, False),
                              ("always", row - 1, True)):  # fmt: skip
        pool = pool_of(lambda at=at: NanFrom(at), checks=checks)
        if not found:
            rows(pool, 200)
            continue
        with pytest.raises(EnvContractError, match="obs: got nan") as caught:
            rows(pool, 200)
        assert at != row or place in str(caught.value)


def test_a_bad_value_in_a_reset_is_said_to_come_from_the_reset():
    with pytest.raises(EnvContractError, match=r"in reset\(\) at episode 3, step 0, .*obs: got nan"):
        rows(pool_of(lambda: NanFrom(32), checks="always"), 200)


class Strict(gym.Env[Any, Any]):
    """Takes choices of its space's dtype alone."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, nested: bool) -> None:
        choice = gym.spaces.Discrete(3, start=1, dtype=np.int32)
        self.action_space = gym.spaces.Dict({"b": choice, "a": gym.spaces.MultiBinary(2)}) if nested else choice

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), repr(action)
        return np.zeros(1, np.float32), 0.0, False, False, {"is_success": np.array([True])}


@pytest.mark.parametrize("nested", [False, True])
def test_choices_come_in_the_spaces_own_dtype_and_one_element_is_a_number(nested: bool):
    env = functools.partial(Strict, nested)
    check_env(env)
    pool = pool_of(env)
    (batch,) = rows(pool, 2)
    choice: Any = batch.action["b"] if nested else batch.action
    assert choice.dtype == np.int64  # as before there were other dtypes
    assert np.array(batch.info["env"]["is_success"]).tolist() == [[1.0, 1.0], [1.0, 1.0]]


class Overwriting(Toy):
    """Those of a kind share one array, which each step and reset writes anew; every third answer is of another class."""

    def __init__(self, number: int, shared: np.ndarray[Any, Any]) -> None:
        super().__init__(spaces.Box(-np.inf, np.inf, shared.shape, np.float32), spaces.Discrete(2))
        self.number, self.shared = number, shared

    def observe(self) -> Any:
        self.shared[...] = 100 * self.number + self.t
        return self.shared if self.t % 3 else self.shared.view(Frame)

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observe(), 0.0, False, False, {}


@pytest.mark.parametrize("shape", [(2, 3), (200, 3)], ids=["small", "large"])
def test_an_observation_is_taken_before_another_environment_writes_over_it(shape: tuple[int, ...]):
    shared, made = np.zeros(shape, np.float32, order="F"), itertools.count()
    (batch,) = rows(pool_of(lambda: Overwriting(next(made), shared), B=3), 7)
    expected = np.arange(8)[:, None] + 100 * np.arange(3)
    assert (batch.obs == expected.reshape(8, 3, 1, 1)).all()


class Ending(Overwriting):
    """As `Overwriting`, in episodes of two steps."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observe(), 0.0, self.t == 2, False, {}


def test_an_opening_ahead_of_its_batch_is_taken_before_another_environment_writes_over_it():
    shared, made = np.zeros((2, 3), np.float32), itertools.count()
    pool = pool_of(lambda: Ending(next(made), shared), B=3, reset="batch_end")
    rows(pool, 2)
    pool.host.prepare()
    (batch,) = rows(pool, 2)
    assert batch.first[1].all() and (batch.obs[1] == 100 * np.arange(3).reshape(3, 1, 1)).all()
    # Messages count the steps from the row that shows the opening, by the episode table too if this process dies.
    assert "in step() at episode 1, step 0, seed" in pool.host.where(0, "step")
    assert pool.host.episode_table[:, :3].tolist() == [[1, -1, 3]] * 3


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.uint64, np.bool_])
def test_small_observations_of_every_dtype_are_stored(dtype: Any):
    space = spaces.Box(0, 1, (2, 2), dtype)
    obs = np.array([[0, 1], [1, 1]], dtype)
    (batch,) = rows(pool_of(lambda: Given(space, obs)), 3)
    assert batch.obs.dtype == dtype
    assert (batch.obs == obs).all()
