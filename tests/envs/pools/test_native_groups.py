from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import resized
from penstock.envs.pools.native_groups import NativeGroups
from penstock.envs.toy import SeedEcho
from penstock.testing.pools import check_pool, echo_config
from penstock.testing.records import RecordCheck
from tests.params import pairs_first


class Halved(SyncVectorEnv):
    """A SyncVectorEnv in two halves; `log` says which halves were called when, `late` steps in the second half."""

    log: list[tuple[str, int]]

    def __init__(self, num_envs: int, nested: bool = False, log: Any = None) -> None:
        super().__init__([lambda: SeedEcho(nested)] * num_envs)
        self.log, self.waiting = [] if log is None else log, False

    def send(self, actions: Any) -> None:
        assert not self.waiting, "two steps at once"
        self.waiting, self.actions = True, actions
        self.log.append(("send", id(self)))

    def recv(self) -> Any:
        assert self.waiting, "nothing was sent"
        self.waiting = False
        self.log.append(("recv", id(self)))
        return super().step(self.actions)

    def reset(self, **kwargs: Any) -> Any:
        assert not self.waiting, "reset while a step is under way"
        return super().reset(**kwargs)

    def step(self, actions: Any) -> Any:
        self.send(actions)
        return self.recv()


class Asynchronous(AsyncVectorEnv):
    def __init__(self, num_envs: int, nested: bool = False) -> None:
        super().__init__([partial(SeedEcho, nested)] * num_envs)


def config(env: Callable[..., Any], nested: bool = False) -> EnvConfig:
    return replace(echo_config(nested), env=env)


SHARES = {"2-2-1": (2, 2, 1), "5-2-7": (5, 2, 7), "8-2-7": (8, 2, 7), "7-3-5": (7, 3, 5), "3-1-4": (3, 1, 4)}


@pytest.mark.parametrize(
    ("shares", "nested", "exclusive"),
    pairs_first(SHARES, {"flat": False, "nested": True}, {"beside": False, "exclusive": True}),
)
def test_the_contract(shares: tuple[int, int, int], nested: bool, exclusive: bool):
    B, groups, T = shares
    check_pool(lambda: NativeGroups(config(Halved, nested), 3, B, groups, exclusive=exclusive), T=T)


def test_the_contract_over_processes():
    check_pool(lambda: NativeGroups(config(Asynchronous), 3, 4, 2), T=5, batches=4)


def begun(pool: NativeGroups, T: int, rows: int = 0) -> SampleBatch:
    """A bound batch of null actions of which every group has played `rows`."""
    out = allocate_batch(pool.spec, BatchSpec(T, pool.groups[-1].slots.stop), env_info=pool.info_keys)
    pool.bind([out])
    for t in range(rows):
        for g in range(len(pool.groups)):
            pool.send(g, t)
        for _ in pool.groups:
            pool.recv()
    return out


@pytest.mark.parametrize(
    ("B", "groups", "shares"), [(16, 2, [8, 8]), (5, 2, [2, 3]), (7, 3, [2, 2, 3]), (2, 2, [1, 1])]
)
def test_groups_share_the_slots_and_a_factory_is_asked_for_its_share(B: int, groups: int, shares: list[int]):
    pool = NativeGroups(config(Halved), 0, B, groups)
    assert [s.stop - s.start for _, s in pool.groups] == shares
    pool.close()


def test_groups_step_side_by_side_in_the_order_sent_unless_told_otherwise():
    for exclusive in (False, True):
        log: list[tuple[str, int]] = []

        def halved(num_envs: int, nested: bool, log: Any = log) -> Halved:  # no partial, whose list would be copied
            return Halved(num_envs, nested, log)

        pool = NativeGroups(config(halved), 0, 4, 2, exclusive=exclusive)
        begun(pool, 3)
        pool.send(1, 0)
        pool.send(0, 0)
        order = [pool.recv()]
        pool.send(1, 1)
        order += [pool.recv(), pool.recv()]
        assert order == [1, 0, 1]
        overlapping = ["send", "send", "recv", "send", "recv", "recv"]
        assert [what for what, _ in log] == (["send", "recv"] * 3 if exclusive else overlapping)
        pool.close()


def test_seeds_differ_between_groups_and_are_those_of_the_run():
    def seeds(seed: int, **settings: Any) -> list[int]:
        pool = NativeGroups(config(Halved), seed, 4, 2, **settings)
        return SeedEcho.place_of(begun(pool, 1).obs)[0][0].tolist()

    known = seeds(5)
    assert len({*known}) == 4
    assert max(known) < 1 << 31
    assert known == seeds(5)
    assert not {*known} & {*seeds(6), *seeds(5, evaluation=True)}


def test_a_restart_or_restored_state_or_close_waits_for_what_is_under_way():
    pool = NativeGroups(config(Halved), 5, 4, 2)
    first = begun(pool, 3, rows=2)
    opening = first.obs["place"][0].copy() if isinstance(first.obs, dict) else first.obs[0].copy()
    pool.send(0, 2)
    pool.send(1, 2)
    pool.recv()
    pool.restart(5)
    again = begun(pool, 2, rows=2)
    assert np.array_equal(again.obs[0], opening)
    RecordCheck(4, seed=None).add(again)
    pool.restart(5)
    batch = begun(pool, 2)
    pool.send(1, 0)
    state = pool.get_state()
    assert pool.set_state(state, batch, [None] * 4) == [0, 1, 2, 3]
    RecordCheck(4, seed=None).add(begun(pool, 2, rows=2))
    begun(pool, 2)
    pool.send(1, 0)
    pool.close()
    pool.close()


class Bare(gym.vector.VectorEnv):
    """Counts to nine, with settings of its own."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    made: list[int]

    def __init__(self, num_envs: int = 3) -> None:
        self.num_envs, self.closed = num_envs, 0
        self.single_observation_space, self.single_action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        zero = np.zeros(self.num_envs)
        return np.zeros((self.num_envs, 1), np.float32), zero, zero.astype(bool), zero.astype(bool), {}

    def close(self, **_: Any) -> None:
        self.closed += 1


class InHalves(Bare):
    def send(self, actions: Any) -> None:
        self.actions = actions

    def recv(self) -> Any:
        return Bare.step(self, self.actions)

    def step(self, actions: Any) -> Any:
        self.send(actions)
        return self.recv()


class StepChanged(InHalves):
    def step(self, actions: Any) -> Any:
        return super().step(actions)


class FirstReady(InHalves):
    batch_size = 1


class Wrapped(gym.vector.VectorWrapper):
    pass


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (Bare, "cannot step beside another group: it steps in one call only; use one group"),
        (CartPoleVectorEnv, "it steps in one call only"),
        (StepChanged, "overrides step() and not send() and recv()"),
        (FirstReady, "returns the first batch_size=1 of num_envs=2 that are ready"),
        (lambda: InHalves(3), "num_envs=3; sampler.B=4 gives this group 2: let the factory accept num_envs"),
        (partial(InHalves, num_envs=3), "num_envs=3; sampler.B=4 gives this group 2"),
        (lambda num_envs: Wrapped(InHalves(num_envs)), "a wrapper hides its halves"),
        (SeedEcho, "made SeedEcho; expected a gymnasium.vector.VectorEnv"),
        (lambda num_envs: SyncVectorEnv([SeedEcho] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP), "expected NEXT_STEP"),
    ],
)  # fmt: skip
def test_what_cannot_take_turns_is_refused_with_the_reason(env: Any, text: str):
    with pytest.raises(ConfigError) as caught:
        NativeGroups(EnvConfig(env), 0, 4, 2)
    assert text in str(caught.value)


@pytest.mark.parametrize("groups", [0, 5, -1])
def test_there_are_as_many_groups_as_slots_at_most(groups: int):
    with pytest.raises(ConfigError, match=r"sampler.B=4 slots; expected 1 to 4"):
        NativeGroups(EnvConfig(InHalves), 0, 4, groups)


@pytest.mark.parametrize(
    ("env", "kwargs", "asked"),
    [
        (InHalves, {}, 2),
        (InHalves, {"num_envs": 4}, 2),
        (InHalves, {"num_envs": 3}, 3),
        (partial(InHalves, num_envs=4), {}, 2),
        (partial(InHalves, num_envs=3), {}, 3),
        ("tests_of_nothing:InHalves", {}, None),
        ("CartPole-v1", {}, None),
        (lambda **settings: InHalves(**settings), {}, None),
        (lambda **settings: InHalves(**settings), {"num_envs": 4}, 2),
        ("gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv", {}, 2),
    ],
)
def test_a_number_of_environments_that_was_given_stays_unless_it_is_that_of_all(env: Any, kwargs: Any, asked: Any):
    made = resized(EnvConfig(env, kwargs), 2, 4)
    keywords = env.keywords if isinstance(env, partial) else {}
    assert {**keywords, **made.kwargs}.get("num_envs") == asked


def test_when_the_second_group_does_not_fit_the_first_is_closed():
    made: list[Bare] = []

    def two_then_three(num_envs: int) -> Bare:
        made.append(InHalves(num_envs + len(made)))
        return made[-1]

    with pytest.raises(ConfigError):
        NativeGroups(EnvConfig(two_then_three), 0, 4, 2)
    assert [env.closed for env in made] == [1, 1]


def test_an_error_in_either_half_carries_its_traceback():
    class Fails(InHalves):
        half = "send"

        def send(self, actions: Any) -> None:
            if self.half == "send":
                raise RuntimeError("the arm fell off")

        def recv(self) -> Any:
            raise RuntimeError("the leg fell off")

    class FailsLater(Fails):
        half = "recv"

    for env, text in ((Fails, "the arm fell off\nTraceback"), (FailsLater, "the leg fell off\nTraceback")):
        pool = NativeGroups(EnvConfig(env), 0, 4, 2)
        with pytest.raises(EnvWorkerError, match=text):
            begun(pool, 2, rows=1)
        pool.close()


@pytest.mark.slow
def test_an_error_in_a_process_of_gymnasium_is_an_error_of_the_environment():
    pool = NativeGroups(EnvConfig(HangingVector), 0, 2, 2, step_timeout_s=2.0)
    with pytest.raises(EnvWorkerError, match="TimeoutError"):
        begun(pool, 2, rows=1)
    processes = [p for env in pool._envs for p in env._env.processes]  # pyright: ignore
    pool.close()
    assert not any(process.is_alive() for process in processes)


class Hanging(SeedEcho):
    def step(self, action: Any) -> Any:
        import time

        time.sleep(30)
        return super().step(action)


class HangingVector(AsyncVectorEnv):
    def __init__(self, num_envs: int) -> None:
        super().__init__([Hanging] * num_envs)


def test_actions_are_copied_before_a_step_begins():
    pool = NativeGroups(EnvConfig(InHalves), 0, 4, 2)
    batch = begun(pool, 2)
    pool.send(0, 0)
    sent: Any = pool._envs[0]._env.actions  # pyright: ignore
    assert not any(np.shares_memory(sent, x) for x in tree_leaves(batch))
