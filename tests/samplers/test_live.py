"""A live sampler: its evaluations, which leave training alone, and the pools that it refuses."""

import copy
from typing import Any, ClassVar

import numpy as np
import pytest

import penstock as ps
from penstock.agents.networks import Net
from penstock.algos.ppo import PPO
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.protocols import members
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.pools.pool import EnvPool
from penstock.envs.pools.serial import SerialPool
from penstock.envs.pools.settings import Reset
from penstock.envs.toy import Counter, SeedEcho
from penstock.run.checkpoints.state_codec import encode
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler
from penstock.testing.pools import echo_config
from penstock.testing.samplers import EchoAgent, bits

COUNTS = [1, 5, 16, 20, 33]
SAMPLERS: dict[str, Any] = {
    "serial": SerialSampler(T=1, B=4),
    "cpu": ps.CpuSampler(T=1, B=4, workers=2),
    "gpu": ps.GpuSampler(T=1, B=4, workers=2),
    "alternating": ps.AlternatingSampler(T=1, B=4, workers=2),
}


class Logged(SeedEcho):
    """Keeps the seeds that each instance was reset with, and whether it was closed."""

    made: ClassVar[list["Logged"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []
        self.closed = 0
        Logged.made.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert seed is not None
        self.seeds.append(seed)
        return super().reset(seed=seed)

    def close(self) -> None:
        self.closed += 1


def live(env: Any, **settings: Any) -> LiveSampler:
    sampler = SerialSampler(**{"T": 5, "B": 3, **settings}).build(env, 7)
    sampler.initialize(EchoAgent(sampler.spec))
    return sampler


@pytest.mark.parametrize("name", SAMPLERS)
def test_agents_that_are_taken_later_play_the_evaluations_from_then_on(name: str) -> None:
    """The environments are kept, and so were the first agents once."""
    played: list[list[float]] = []
    for later in (1, 0):
        sampler = SAMPLERS[name].build("CartPole-v1", 0)
        agents = [PPO(net=Net(hidden=(4,))).build(sampler.spec, seed=seed).agent for seed in (0, 3)]
        for agent in agents[1 - later :]:
            sampler.initialize(agent)
            played.append(sampler.evaluate_agent(3, 8).return_.tolist())
        sampler.shutdown()
    first, second, alone = played
    assert first != second
    assert second == alone


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_first_k_episodes_of_each_slot_and_no_more(count: int, deterministic: bool):
    Logged.made = []
    sampler = live(Logged)
    sampler.obtain_samples(0)
    training = len(Logged.made)
    episodes = sampler.evaluate_agent(4, count, deterministic)
    slots = min(count, 16)
    envs = Logged.made[training:]
    assert len(envs) == slots
    assert len(episodes) == count
    for b, env in enumerate(envs):
        share = count // slots + (b < count % slots)
        assert len(env.seeds) == share
        mine = episodes.slot == b
        assert episodes.length[mine].tolist() == [SeedEcho.length_of(seed) for seed in env.seeds]
        assert episodes.terminated[mine].tolist() == [bool(SeedEcho.end_of(seed)[0]) for seed in env.seeds]
        assert episodes.columns["is_success"][mine].tolist() == [seed % 2 for seed in env.seeds]
    seeds = [seed for env in envs for seed in env.seeds]
    assert len({*seeds}) == count
    assert not {*seeds} & {seed for env in Logged.made[:training] for seed in env.seeds}
    sampler.shutdown()
    assert all(env.closed == 1 for env in Logged.made)


def test_environments_are_kept_while_their_number_stays_and_closed_when_it_changes():
    Logged.made = []
    sampler = live(Logged)
    training = len(Logged.made)
    for itr, count in enumerate((5, 5, 7, 40, 40, 5)):
        sampler.evaluate_agent(itr, count)
    assert len(Logged.made) - training == 5 + 7 + 16 + 5
    assert [env.closed for env in Logged.made[training:]] == [1] * 28 + [0] * 5
    sampler.shutdown()
    sampler.shutdown()
    assert all(env.closed == 1 for env in Logged.made)


@pytest.mark.parametrize("count", [1, 5, 20, 33])
def test_short_episodes_are_not_favoured(count: int):
    """Slot b's episodes have 3 steps if b is even, else 90: counting whichever ends first would see only 3s."""
    made: list[int] = []

    def make() -> Counter:
        made.append(len(made))
        return Counter(terminate_at=(90, 3)[(made[-1] - training) % 2 == 0])

    training = 4  # one to see whether it is a batched environment, and three for the sampler
    sampler = live(make)
    episodes = sampler.evaluate_agent(0, count)
    slots = min(count, 16)
    shares = [count // slots + (b < count % slots) for b in range(slots)]
    long = sum(share for b, share in enumerate(shares) if b % 2)
    assert sorted(episodes.length.tolist()) == [3] * (count - long) + [90] * long
    assert episodes.mean_length == pytest.approx((3 * (count - long) + 90 * long) / count)
    assert (episodes.return_ == episodes.length * (episodes.length - 1) / 2).all()
    assert np.array_equal(episodes.slot % 2, episodes.length == 90)


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
def test_training_goes_on_as_if_there_had_been_no_evaluation(reset: Reset):
    settings = {"reset": reset, "max_decorrelation_steps": 9}
    net = Net(hidden=(8,), recurrent="gru", recurrent_size=8)
    samplers = [SerialSampler(T=6, B=5, **settings).build(echo_config(), 3) for _ in range(2)]
    agent = PPO(net=net).build(samplers[0].spec, 1).agent
    for sampler in samplers:
        sampler.initialize(agent)
    evaluating = samplers[1]
    for itr in range(3):
        for count, deterministic in ((1, True), (20, False)):
            before = encode(evaluating.state_dict()) if itr else None
            live_bits = bits(evaluating.last_batch)
            parameters = [x.clone() for x in agent.parameters()]
            evaluating.evaluate_agent(itr, count, deterministic)
            assert bits(evaluating.last_batch) == live_bits
            assert before is None or encode(evaluating.state_dict()) == before
            assert all((x == y).all() for x, y in zip(parameters, agent.parameters()))
        (one, episodes), (two, found) = (sampler.obtain_samples(itr) for sampler in samplers)
        assert bits(one) == bits(two)
        assert episodes.return_.tolist() == found.return_.tolist()


def test_an_evaluation_is_a_function_of_seed_itr_and_parameters_not_of_what_came_before():
    one, two = live(echo_config()), live(echo_config())
    one.obtain_samples(0)
    one.evaluate_agent(3, 7)
    for itr, deterministic in ((0, True), (5, False), (5, True)):
        first, second = one.evaluate_agent(itr, 9, deterministic), two.evaluate_agent(itr, 9, deterministic)
        assert [x.tolist() for x in tree_leaves((first.return_, first.slot))] == [
            x.tolist() for x in tree_leaves((second.return_, second.slot))
        ]
    again = copy.deepcopy(one.evaluate_agent(5, 9))
    assert again.return_.tolist() != one.evaluate_agent(6, 9).return_.tolist()
    assert again.return_.tolist() != one.evaluate_agent(5, 9, deterministic=False).return_.tolist()


def test_only_a_stochastic_evaluation_draws_noise_and_new_noise_in_every_chunk():
    class Listens(EchoAgent):
        heard: ClassVar[list[Any]] = []

        def act(self, inputs: Any, state: Any, noise: Any) -> Any:
            Listens.heard.append(None if noise is None else noise[:4].clone())
            return super().act(inputs, state, noise)

    sampler = live(EnvConfig(Counter, {"terminate_at": 150}))
    sampler.initialize(Listens(sampler.spec))
    sampler.evaluate_agent(0, 4)  # makes the environments and an example of what is recorded
    for deterministic in (True, False):
        Listens.heard = []
        sampler.evaluate_agent(0, 4, deterministic)
        heard = Listens.heard
        assert len(heard) == 3 * 64
        assert all((noise is None) == deterministic for noise in heard)
        assert deterministic or len({noise.numpy().tobytes() for noise in heard}) == len(heard)


def test_a_recurrent_agent_starts_each_evaluation_without_a_memory():
    class Remembers(EchoAgent):
        ages: ClassVar[list[int]] = []

        def act(self, inputs: Any, state: Any, noise: Any) -> Any:
            action, info, state = super().act(inputs, state, noise)
            Remembers.ages.append(int(info["held"]["age"].max()))
            return action, info, state

    sampler = live(EnvConfig(Counter, {"terminate_at": 6}))
    agent = Remembers(sampler.spec)
    sampler.initialize(agent)
    for example in (1, 0):  # what is recorded is found out by an example, once
        Remembers.ages = []
        sampler.evaluate_agent(0, 4)
        assert Remembers.ages[example : 6 + example] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("max_steps", [64, 90, 100, 128, 200])
def test_an_evaluation_cuts_what_never_ends_and_counts_it(max_steps: int):
    made: list[int] = []

    def make() -> Counter:
        made.append(len(made))
        return Counter(terminate_at=None if made[-1] == 5 else 100)  # the second slot of the evaluation

    found = live(make).evaluate_agent(0, 10, slots=4, max_steps=max_steps)
    assert np.bincount(found.slot).tolist() == [3, 3, 2, 2]
    endless = found.slot == 1
    assert found.length[endless].tolist() == [max_steps] * 3
    assert found.length[~endless].tolist() == [min(max_steps, 100)] * 7
    assert found.terminated.tolist() == (~endless & (max_steps >= 100)).tolist()
    assert found.return_.tolist() == [n * (n - 1) / 2 for n in found.length.tolist()]


def test_a_limit_that_nothing_reaches_changes_nothing():
    a, b, c = (
        live(EnvConfig(Counter, {"terminate_at": 30})).evaluate_agent(3, 9, max_steps=n) for n in (30, 31, 10**6)
    )
    assert a.length.tolist() == b.length.tolist() == c.length.tolist() == [30] * 9
    assert a.slot.tolist() == b.slot.tolist() == c.slot.tolist()
    assert a.terminated.all()


@pytest.mark.parametrize("wrong", [{"episodes": 0}, {"slots": 0}, {"max_steps": 0}])
def test_nothing_to_evaluate_is_refused(wrong: dict[str, int]):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=0"):
        live(Counter).evaluate_agent(0, **wrong)  # pyright: ignore


def test_environments_that_cannot_be_made_again_do_not_leave_closed_ones_in_use():
    made: list[int] = []

    def make() -> Counter:
        made.append(len(made))
        if made[-1] == 8:
            raise RuntimeError("no simulator licence")
        return Counter()

    sampler = live(make)
    assert len(sampler.evaluate_agent(0, 3)) == 3
    with pytest.raises(EnvWorkerError, match="no simulator licence"):
        sampler.evaluate_agent(0, 4)
    assert len(sampler.evaluate_agent(0, 3)) == 3


WITHOUT_DEFAULT = {
    "specs": "specs: tuple[EnvSpec, ...]",
    "groups": "groups: tuple[Group, ...]",
    "info_keys": "info_keys: tuple[str, ...]",
    "restart": "restart(seed: int, episodes: Sequence[int] | None = None) -> None",
    "bind": "bind(outs: Sequence[SampleBatch]) -> None",
    "send": "send(group: int, row: int) -> None",
    "recv": "recv() -> int",
    "get_state": "get_state() -> PoolState",
    "set_state": "set_state(state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]) -> list[int]",
    "for_evaluation": "for_evaluation(B: int, first_slot: int = 0) -> EvaluationSource",
    "close": "close() -> None",
}
"""The members that every pool of one's own must write, as its error shows them."""
WITH_DEFAULT = {
    *("broken", "evaluation", "place", "invalidate", "evaluation_slots", "warmup", "newest_episodes", "metrics"),
    *("calls", "call", "recall"),
    *("seats", "takes_turns", "log", "device", "pending", "finished", "limit"),
}


def own_pool(without: str | None, base: type) -> Any:
    """A pool over a SerialPool with every member but for one; if it inherits, without those that have a default."""
    inner = SerialPool(echo_config(), 7, slice(0, 3))
    names = {*WITHOUT_DEFAULT} | (set() if base is EnvPool else WITH_DEFAULT)
    written = {name: getattr(inner, name) for name in names - {without}}
    methods = {name: staticmethod(x) if callable(x) else x for name, x in written.items()}
    return type("Mine", (base,), {**methods, "__module__": "mine"})()


def over(pool: Any) -> LiveSampler:
    return LiveSampler(BatchSpec(5, 3), pool, echo_config(), 7, 0.99, 100)


def test_the_table_above_has_every_member_of_a_pool():
    assert {*members(EnvPool)} == {*WITHOUT_DEFAULT} | WITH_DEFAULT


@pytest.mark.parametrize("base", [EnvPool, object], ids=["inherits", "stands alone"])
def test_a_pool_of_ones_own_needs_no_more_than_what_has_no_default(base: type):
    sampler, same = over(own_pool(None, base)), live(echo_config())
    sampler.initialize(EchoAgent(sampler.spec))
    for itr in range(3):
        assert bits(sampler.obtain_samples(itr)[0]) == bits(same.obtain_samples(itr)[0])
    assert sampler.evaluate_agent(0, 4).return_.tolist() == same.evaluate_agent(0, 4).return_.tolist()
    assert sampler.metrics() == {}
    sampler.shutdown()


@pytest.mark.parametrize("base", [EnvPool, object], ids=["inherits", "stands alone"])
@pytest.mark.parametrize("member", WITHOUT_DEFAULT)
def test_a_pool_that_lacks_a_member_is_refused_with_its_signature_and_the_page(member: str, base: type):
    with pytest.raises(ConfigError) as error:
        over(own_pool(member, base))
    text = f"mine.Mine has no {WITHOUT_DEFAULT[member]}, which EnvPool asks for; see docs/writing-a-sampler.md"
    assert str(error.value) == text


@pytest.mark.parametrize("member", sorted(WITH_DEFAULT))
def test_a_pool_that_does_not_inherit_needs_what_has_a_default_as_well(member: str):
    with pytest.raises(
        ConfigError, match=rf"^mine\.Mine has no {member}\b.*, which EnvPool asks for; see docs/writing-"
    ):
        over(own_pool(member, object))
