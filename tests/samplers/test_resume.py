from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock.agents.networks import Net
from penstock.algos.ppo import PPO
from penstock.core.errors import CheckpointError, EnvWorkerError
from penstock.core.noise import env_seed
from penstock.envs.make import EnvConfig
from penstock.envs.pools.settings import Reset
from penstock.envs.pools.slot_envs import offers_state
from penstock.envs.toy import Counter, FaultEnv, SeedEcho, TMaze
from penstock.run.checkpoints.state_codec import decode, encode
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler
from penstock.testing.pools import echo_config
from penstock.testing.records import RecordCheck
from penstock.testing.samplers import EchoAgent, bits, check_resume
from tests.slow import slow


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
@pytest.mark.parametrize(("B", "T"), [(1, 4), (3, 5), *slow((1, 1), (6, 9))])
def test_the_contract(reset: Reset, B: int, T: int):
    for decorrelation in (0, 20):
        settings = SerialSampler(T=T, B=B, reset=reset, max_decorrelation_steps=decorrelation)
        check_resume(settings.build, nested=B == 3, before=2, after=3)


def stored(state: Any) -> Any:
    """The state as a checkpoint on disk gives it back."""
    return decode(encode(state))


def live(env: Any, T: int = 7, B: int = 4, seed: int = 5, recurrent: bool = False, **settings: Any) -> LiveSampler:
    sampler = SerialSampler(T=T, B=B, **settings).build(env, seed)
    net = Net(hidden=(8,), **({"recurrent": "lstm", "recurrent_size": 8, "prev_reward": True} if recurrent else {}))
    sampler.initialize(PPO(net=net).build(sampler.spec, 2).agent if recurrent else EchoAgent(sampler.spec))
    return sampler


ENVS: dict[str, Any] = {
    "CartPole": EnvConfig("CartPole-v1", {"max_episode_steps": 9}),
    "Pendulum": EnvConfig("Pendulum-v1", {"max_episode_steps": 9}),
    "memory": EnvConfig(TMaze, {"length": 4}),
    "tree": EnvConfig(SeedEcho, {"nested": True}, info_keys=("echo",)),
}


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("reset", ["next_step", *slow("batch_end")])
def test_a_recurrent_agent_goes_on_bit_by_bit_from_a_stored_state(env: str, reset: Reset):
    settings = {"recurrent": True, "reset": reset, "max_decorrelation_steps": 12}
    whole = live(ENVS[env], **settings)
    states, recorded = [], []
    for itr in range(8):
        states.append(stored(whole.state_dict()) if itr in (1, 3, 6) else None)
        batch, episodes = whole.obtain_samples(itr)
        recorded.append((bits(batch), episodes.return_.tolist(), episodes.discounted_return.tolist()))
    for start in (1, 3, 6):
        resumed = live(ENVS[env], **settings)
        resumed.load_state_dict(states[start])
        assert resumed.cut_slots == []
        for itr in range(start, 8):
            batch, episodes = resumed.obtain_samples(itr)
            assert (bits(batch), episodes.return_.tolist(), episodes.discounted_return.tolist()) == recorded[itr]


def test_a_state_is_a_copy_and_may_be_loaded_into_a_sampler_that_has_already_run():
    sampler = live(echo_config())
    sampler.obtain_samples(0)
    state = sampler.state_dict()
    kept = stored(state)
    expected = [bits(sampler.obtain_samples(itr)[0]) for itr in (1, 2)]
    for _ in range(2):
        sampler.load_state_dict(state)
        assert [bits(sampler.obtain_samples(itr)[0]) for itr in (1, 2)] == expected
    sampler.load_state_dict(kept)
    assert [bits(sampler.obtain_samples(itr)[0]) for itr in (1, 2)] == expected


def test_a_state_from_before_the_first_batch_starts_the_run():
    sampler, resumed = live(echo_config(), max_decorrelation_steps=5), live(echo_config(), max_decorrelation_steps=5)
    resumed.load_state_dict(stored(sampler.state_dict()))
    assert resumed.cut_slots == []
    assert bits(sampler.obtain_samples(0)[0]) == bits(resumed.obtain_samples(0)[0])


def test_another_number_of_slots_is_refused():
    sampler = live(echo_config(), B=4)
    sampler.obtain_samples(0)
    with pytest.raises(CheckpointError, match=r"the checkpoint holds 4 slots; this sampler has B=3"):
        live(echo_config(), B=3).load_state_dict(sampler.state_dict())


def check_cut(itrs: int, cut: list[int], **settings: Any) -> None:
    """Slots that are cut begin with a reset row into their next episode; the others go on bit by bit."""
    whole, resumed = live(echo_config(), **settings), live(echo_config(), **settings)
    for itr in range(itrs):
        batch, _ = whole.obtain_samples(itr)
    last = batch.copy()
    state = stored(whole.state_dict())
    resumed.load_state_dict(state)
    assert resumed.cut_slots == cut
    B = last.spec.B
    kept = [b for b in range(B) if b not in cut]
    episodes = list(state["pool"]["episode"])
    expected, ended = whole.obtain_samples(itrs)
    batch, finished = resumed.obtain_samples(itrs)
    for name in ("obs", "first", "prev_action", "prev_reward"):
        assert np.array_equal(getattr(batch, name)[0], getattr(last, name)[-1])
    for b in kept:
        assert bits(batch[:, b : b + 1]) == bits(expected[:, b : b + 1])
        assert finished.return_[finished.slot == b].tolist() == ended.return_[ended.slot == b].tolist()
    for b in cut:
        assert not batch.valid[0, b]
        assert batch.first[1, b]
        assert not batch.terminated[0, b]
        assert not batch.truncated[0, b]
        assert batch.reward[0, b] == 0
        assert SeedEcho.place_of(batch.obs[1, b])[0] == env_seed(5, b, episodes[b] + 1)


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
def test_an_episode_longer_than_the_journal_is_cut_and_named(reset: Reset):
    whole = live(echo_config(), T=3, B=8, journal_steps=4, reset=reset)
    for itr in range(5):
        batch, _ = whole.obtain_samples(itr)
    seeds, ages = SeedEcho.place_of(batch.obs[-1])
    lengths = SeedEcho.length_of(seeds)
    too_long = [b for b in range(8) if 4 < ages[b] < lengths[b]]
    assert 0 < len(too_long) < 8
    check_cut(5, too_long, T=3, B=8, journal_steps=4, reset=reset)
    check_cut(5, [], T=3, B=8, journal_steps=9, reset=reset)


class Carrying(SeedEcho):
    """What it shows depends on the episodes before, which only `get_state` can bring back; counts its steps."""

    taken = 0
    opened = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.carried = 0

    def get_state(self) -> dict[str, Any]:
        return {"t": self.t, "seed": self.seed, "carried": self.carried, "rng": self.np_random.bit_generator.state}

    def reset(self, **kwargs: Any) -> Any:
        self.opened = True
        return super().reset(**kwargs)

    def set_state(self, state: dict[str, Any]) -> None:
        assert self.opened, "many environments cannot be set to a state before their first reset"
        self.t, self.seed, self.carried = state["t"], state["seed"], state["carried"]
        self.np_random.bit_generator.state = state["rng"]

    def step(self, action: Any) -> Any:
        Carrying.taken += 1
        self.carried += int(action) + 1
        obs, reward, *rest = super().step(action)
        noise = float(self.np_random.random())
        return obs, reward + self.carried + noise, *rest


class Hidden(gym.Wrapper):
    """Has a counter of its own, which the state of the environment below does not hold."""

    get_state = set_state = None


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
def test_an_environments_own_state_is_used_where_it_offers_one(reset: Reset):
    config = EnvConfig(Carrying)
    whole, resumed = live(config, reset=reset, journal_steps=0), live(config, reset=reset, journal_steps=0)
    for itr in range(4):
        whole.obtain_samples(itr)
    state = stored(whole.state_dict())
    before = Carrying.taken
    resumed.load_state_dict(state)
    assert Carrying.taken == before
    assert resumed.cut_slots == []
    for itr in range(4, 9):
        (batch, episodes), (again, found) = whole.obtain_samples(itr), resumed.obtain_samples(itr)
        assert bits(batch) == bits(again)
        assert episodes.return_.tolist() == found.return_.tolist()


def test_the_state_below_a_wrapper_is_not_used_since_it_lacks_the_wrappers_own():
    config = EnvConfig(Carrying, wrappers=(Hidden,))
    sampler = live(config)
    sampler.obtain_samples(0)
    assert sampler.state_dict()["pool"]["snapshot"] == [None] * 4
    assert offers_state(Carrying())
    assert not offers_state(SimpleNamespace(get_state=dict))
    assert not offers_state(SimpleNamespace(set_state=dict))


def test_an_environment_that_is_not_reproducible_is_cut_and_counted():
    config = EnvConfig(FaultEnv, {"fault": "unseeded", "length": 50})
    check = live(config, T=3, B=3)
    check.obtain_samples(0)
    resumed = live(config, T=3, B=3)
    resumed.load_state_dict(stored(check.state_dict()))
    assert resumed.cut_slots == [0, 1, 2]
    batch, episodes = resumed.obtain_samples(1)
    assert not batch.valid[0].any()
    assert batch.first[1].all()
    assert batch.valid[1:].all()
    assert len(episodes) == 0
    for itr in range(2, 30):
        batch, episodes = resumed.obtain_samples(itr)
        assert (episodes.length == 50).all()
        assert (episodes.return_ == 50.0).all()


@pytest.mark.parametrize(
    "how", ["ends early", "raises", "breaks its contract", "shows something else", "shows nothing", "shows too much"]
)
def test_a_replay_that_goes_another_way_is_cut(how: str):
    replaying = False

    class Turning(Counter):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            if replaying and self.t == 2:
                if how == "raises":
                    raise RuntimeError("the arm fell off")
                if how == "breaks its contract":
                    return obs, "abc", terminated, truncated, info
                if how == "ends early":
                    return obs, reward, True, truncated, info
                shown = {"shows nothing": None, "shows too much": np.zeros((2, 2), np.float32)}.get(how, obs + 1)
                return shown, reward, terminated, truncated, info
            return obs, reward, terminated, truncated, info

    sampler, resumed = (live(lambda: Turning(terminate_at=9), T=2, B=2) for _ in range(2))
    sampler.obtain_samples(0)
    state = stored(sampler.state_dict())
    replaying = True
    resumed.load_state_dict(state)
    assert resumed.cut_slots == [0, 1]
    replaying = False
    batch, _ = resumed.obtain_samples(1)
    assert batch.valid.tolist() == [[False] * 2, [True] * 2]
    assert batch.obs[:, 0, 0].tolist() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("what", ["observation", "reward", "nothing"])
@pytest.mark.parametrize("decorrelation", [0, 5])
def test_a_replay_that_differs_on_the_way_is_cut_though_it_arrives(what: str, decorrelation: int):
    off = 0.0

    class Later(Counter):
        """Shows the same as before again after step 40, where something else may happen in between."""

        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            if self.t == 40 and what == "observation":
                obs = obs + np.float32(off)
            return obs, reward + off * (self.t == 40 and what == "reward"), *rest

    def made() -> LiveSampler:
        return live(EnvConfig(Later, {"terminate_at": 99}), T=10, B=2, max_decorrelation_steps=decorrelation)

    sampler, resumed = made(), made()
    for itr in range(6):
        sampler.obtain_samples(itr)
    state = stored(sampler.state_dict())
    off = 0.25
    resumed.load_state_dict(state)
    assert resumed.cut_slots == ([] if what == "nothing" else [0, 1])


def test_an_observation_out_of_bounds_that_training_let_pass_is_restored():
    class Grows(Counter):
        def observe(self) -> Any:
            return super().observe() - 5 * (self.t == 3)  # below its space

    config = EnvConfig(Grows, {"terminate_at": 9}, checks="finite")
    sampler, resumed = live(config, T=3, B=2), live(config, T=3, B=2)
    sampler.obtain_samples(0)
    assert (sampler.last_batch.obs[3] == -2).all()
    resumed.load_state_dict(stored(sampler.state_dict()))
    assert resumed.cut_slots == []


def test_a_record_after_resume_obeys_every_rule_of_the_record():
    config = echo_config()
    sampler = live(config)
    check = RecordCheck(4, seed=5, acted=True)
    for itr in range(12):
        check.add(sampler.obtain_samples(itr)[0])
        if itr % 3 == 2:
            state = stored(sampler.state_dict())
            sampler = live(config)
            sampler.load_state_dict(state)


class Saving(FaultEnv):
    """Offers its state."""

    def get_state(self) -> dict[str, Any]:
        return {"t": self.t, "rng": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.t, self.np_random.bit_generator.state = state["t"], state["rng"]


@pytest.mark.parametrize("env", [FaultEnv, Saving])
def test_faults_after_resume_name_episode_and_step_as_if_there_had_been_no_cut(env: Any):
    messages = []
    for cut in (False, True):
        config = EnvConfig(env, {"length": 10})
        sampler = live(config, T=4, B=2, max_decorrelation_steps=3)
        for itr in range(6):
            sampler.obtain_samples(itr)
        if cut:
            state = stored(sampler.state_dict())
            sampler = live(config, T=4, B=2, max_decorrelation_steps=3)
            sampler.load_state_dict(state)
        pool: Any = sampler.pool
        faulty = pool.host.envs[1]
        faulty.fault, faulty.at = "raise_in_step", faulty.steps + 2
        with pytest.raises(EnvWorkerError, match="the arm fell off") as caught:
            for itr in range(6, 9):
                sampler.obtain_samples(itr)
        messages.append(str(caught.value).splitlines()[0])
    assert messages[0] == messages[1]
    assert "slot 1 of" in messages[0]
