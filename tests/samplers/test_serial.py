from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.algos.ppo import PPO
from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.pools.settings import Reset
from penstock.envs.toy import PixelCatch, SeedEcho, TMaze, Toy
from penstock.samplers.serial import SerialSampler
from penstock.testing.samplers import EchoAgent, bits, check_sampler
from tests.slow import slow


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
@pytest.mark.parametrize(("B", "T"), [(5, 4), *slow((1, 5), (3, 1), (3, 7), (17, 6))])
def test_the_contract(reset: Reset, B: int, T: int):
    for decorrelation in (0, 20):
        settings = SerialSampler(T=T, B=B, reset=reset, max_decorrelation_steps=decorrelation, discount=0.9)
        check_sampler(
            settings.build,
            reset=reset,
            decorrelated=decorrelation > 0,
            discount=0.9,
            nested=decorrelation > 0,
            batches=5,
        )


def agent_of(spec: EnvSpec, **net: Any) -> Agent:
    return PPO(net=Net(hidden=(16, 16), **net)).build(spec, 1).agent


def batches(
    env: Any, agent: Agent | None, T: int, B: int, itrs: Any = range(4), seed: int = 3, **settings: Any
) -> list[SampleBatch]:
    sampler = SerialSampler(T=T, B=B, **settings).build(env, seed)
    sampler.initialize(agent or EchoAgent(sampler.spec))
    out = [sampler.obtain_samples(itr)[0].copy() for itr in itrs]
    sampler.shutdown()
    return out


MEMORY = {"recurrent": "lstm", "recurrent_size": 16, "prev_action": True, "prev_reward": True}
SETUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Pendulum mlp": ("Pendulum-v1", {}),
    "Pendulum gru": (EnvConfig("Pendulum-v1", {"max_episode_steps": 11}), {**MEMORY, "recurrent": "gru"}),
    "memory lstm": (EnvConfig(TMaze, {"length": 3}), MEMORY),
    "pixels": (EnvConfig(PixelCatch), {"cnn": "impala"}),
    "tree": (EnvConfig(SeedEcho, {"nested": True}), {**MEMORY, "normalize_obs": True}),
    "squashed": (EnvConfig("Pendulum-v1", {"max_episode_steps": 11}), {"squash": True, "activation": "relu"}),
}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("reset", ["next_step", *slow("batch_end")])
def test_a_slots_stream_does_not_depend_on_how_many_slots_lie_beside_it(setup: str, reset: Reset):
    env, net = SETUPS[setup]
    spec = SerialSampler(T=1, B=1).build(env).spec
    agent = agent_of(spec, **net)
    decorrelation = 7 if "mlp" in setup or "lstm" in setup else 0
    shapes = (1, 3, 8) if setup in ("pixels", "tree") else (1, 3, 5, 8, 17)
    wide = batches(env, agent, 12, shapes[-1], reset=reset, max_decorrelation_steps=decorrelation)
    for B in shapes[:-1]:
        narrow = batches(env, agent, 12, B, reset=reset, max_decorrelation_steps=decorrelation)
        for itr, (few, many) in enumerate(zip(narrow, wide)):
            few_bits, many_bits = bits(few), bits(many[:, :B])
            assert "['info']['logp']" in few_bits
            for path, x in few_bits.items():
                assert x == many_bits[path], f"itr {itr}, B={B}, {path}"
    assert any(batch.first[1:].any() for batch in wide) or "mlp" in setup
    assert len({x.tobytes() for x in wide[0].info["logp"].T}) == shapes[-1], "slots of equal noise"


def test_noise_and_version_are_addressed_by_itr_not_by_call():
    config = EnvConfig(SeedEcho)
    one = batches(config, None, 4, 3, itrs=(0, 1, 9, 9))
    assert [np.unique(batch.version).tolist() for batch in one] == [[0], [1], [9], [9]]
    noise = [batch.info["noise"] for batch in one]
    assert (noise[2] == noise[3]).all()
    assert (noise[0] != noise[1]).all()
    other = batches(config, None, 4, 3, itrs=(9, 0))
    assert (other[0].info["noise"] == noise[2]).all()
    assert (other[1].info["noise"] == noise[0]).all()


@pytest.mark.parametrize("seed", [np.int64(5), np.uint8(5), 5 + (1 << 64)])
def test_seeds_may_be_of_any_integer_type(seed: Any):
    small = batches("CartPole-v1", None, 4, 3, seed=5, max_decorrelation_steps=4)
    again = batches("CartPole-v1", None, 4, 3, seed=seed, max_decorrelation_steps=4)
    assert ([bits(x) for x in small] == [bits(x) for x in again]) == (seed < 1 << 64)


def test_the_batch_is_the_live_buffer():
    sampler = SerialSampler(T=4, B=2).build(EnvConfig(SeedEcho))
    sampler.initialize(EchoAgent(sampler.spec))
    one, _ = sampler.obtain_samples(0)
    kept = one.copy()
    two, _ = sampler.obtain_samples(1)
    assert one is two is sampler.last_batch
    assert bits(kept) != bits(two)
    assert np.array_equal(kept.obs[-1], two.obs[0])


def test_decorrelated_slots_do_not_run_in_step():
    env = EnvConfig("Pendulum-v1", {"max_episode_steps": 50})

    def ends(decorrelation: int) -> set[int]:
        batch = batches(env, None, 60, 16, range(1), max_decorrelation_steps=decorrelation)[0]
        return {*np.argmax(batch.truncated, 0).tolist()}

    assert ends(0) == {49}
    assert len(ends(40)) > 8
    assert min(ends(40)) >= 9
    assert len(ends(49)) > 8


class Recorder(Toy):
    """Shows the action that it was given, and keeps it; never ends."""

    def __init__(self, space: spaces.Space[Any], low: float = -1e9) -> None:
        super().__init__(spaces.Box(-1e9, 1e9, (1,), np.float32), space)
        self.given: list[Any] = []
        self.copies: list[Any] = []

    def observe(self) -> Any:
        return np.array([self.t], np.float32)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        assert self.action_space.contains(action), action
        self.given.append(action)
        self.copies.append(tree_map(np.copy, action))
        return 0.0, False, False


ARM = spaces.Box(np.array([-1, 0, -5], np.float32), np.array([1, 3, 5], np.float32))
ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": ARM,
    "one-sided box": spaces.Box(0, np.inf, (2,), np.float32),
    "scalar box": spaces.Box(-1, 1, (), np.float32),
    "double box": spaces.Box(-1, 1, (2, 2), np.float64),
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_discrete from": spaces.MultiDiscrete([2, 3], start=[4, -7]),
    "multi_discrete 2 x 2": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), dtype=np.int32),
    "multi_binary": spaces.MultiBinary(3),
    "multi_binary 2 x 2": spaces.MultiBinary([2, 2]),
    "dict": spaces.Dict({"b": ARM, "a": spaces.Tuple((spaces.Discrete(2, start=-1), spaces.MultiBinary(2)))}),
    "tuple": spaces.Tuple((spaces.Dict({"x": spaces.Discrete(3)}), ARM)),
}


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("by", ["policy", "echo"])
def test_actions_reach_the_environment_as_it_takes_them_and_the_record_as_they_were_chosen(
    kind: str, by: Literal["policy", "echo"]
):
    envs: list[Recorder] = []

    def make() -> Recorder:
        envs.append(Recorder(ACTIONS[kind]))
        return envs[-1]

    sampler = SerialSampler(T=6, B=3).build(make, 0)
    del envs[0]  # made to find out whether it is a batched one
    agent = agent_of(sampler.spec, log_std_init=1.0) if by == "policy" else EchoAgent(sampler.spec)
    sampler.initialize(agent)
    recorded = [sampler.obtain_samples(itr)[0].copy() for itr in range(3)]
    outside = inside = 0
    for b, env in enumerate(envs):
        assert len(env.given) == 18
        for given, then in zip(env.given, env.copies):
            assert all(np.array_equal(x, y) for x, y in zip(tree_leaves(given), tree_leaves(then))), "overwritten"
        for row, given in enumerate(env.given):
            action = tree_map(lambda x, row=row, b=b: x[row % 6, b], recorded[row // 6].action)
            for leaf, x, y in zip(tree_leaves(sampler.spec.action), tree_leaves(action), tree_leaves(given)):
                if leaf.kind == "box":
                    low, high = leaf.bound("low"), leaf.bound("high")
                    outside += ((x < low) | (x > high)).sum()
                    inside += ((x > low) & (x < high)).sum()
                    assert np.asarray(y).dtype == leaf.dtype
                    assert (np.clip(x, low, high).astype(leaf.dtype) == y).all()
                else:
                    assert np.array_equal(x, y)
    if any(leaf.kind == "box" for leaf in tree_leaves(sampler.spec.action)):
        assert inside
        assert outside or (by, kind) == ("echo", "one-sided box")
    sampler.shutdown()


class Nested(gym.Env[Any, Any]):
    """Observations of every kind in one tree."""

    observation_space = spaces.Dict({
        "b": spaces.Tuple((spaces.Discrete(4, start=2), spaces.Box(0, 255, (3, 8, 8), np.uint8))),
        "a": spaces.Dict({"x": spaces.MultiBinary((2, 2)), "y": spaces.MultiDiscrete([3, 4])}),
    })  # fmt: skip
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t, self.shown = 0, [self.observation_space.sample()]
        return self.shown[-1], {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.shown.append(self.observation_space.sample())
        return self.shown[-1], 0.0, False, False, {}


def test_nested_observations_keep_keys_dtypes_and_places():
    envs: list[Nested] = []

    def make() -> Nested:
        envs.append(Nested())
        return envs[-1]

    sampler = SerialSampler(T=5, B=3).build(make, 0)
    examples = sampler.initialize(EchoAgent(sampler.spec))
    batch, _ = sampler.obtain_samples(0)
    assert batch.obs["b"][0].dtype == np.int64
    assert batch.obs["b"][1].dtype == np.uint8
    assert batch.obs["a"]["x"].shape == (6, 3, 2, 2)
    assert examples["obs"]["b"][1].shape == (3, 8, 8)
    for b, env in enumerate(envs[1:]):
        for t, shown in enumerate(env.shown):
            for x, y in zip(tree_leaves(batch.obs), tree_leaves(shown)):
                assert np.array_equal(x[t, b], y)


def test_what_contradicts_is_refused_before_anything_runs():
    for settings in ({"T": 0}, {"B": 0}, {"max_decorrelation_steps": -1}, {"journal_steps": -1}):
        with pytest.raises(ConfigError, match=f"sampler.*{next(iter(settings)).split('_')[0]}"):
            SerialSampler(**settings)
    sampler = SerialSampler(T=4, B=2).build("CartPole-v1")
    with pytest.raises(ConfigError, match=r"call sampler.initialize"):
        sampler.obtain_samples(0)
    with pytest.raises(ConfigError, match=r"call sampler.initialize"):
        sampler.evaluate_agent(0)
    with pytest.raises(ConfigError, match="the agent was built for"):
        sampler.initialize(EchoAgent(SerialSampler(T=1, B=1).build("Acrobot-v1").spec))
    with pytest.raises(ConfigError, match="unknown environment id"):
        SerialSampler(T=4, B=2).build("CartPool-v1")

    class NoDict(EchoAgent):
        def act(self, *args: Any) -> Any:
            action, info, state = super().act(*args)
            return action, {"env": info["noise"]}, state

    with pytest.raises(ConfigError, match=r"expected a dict of tensors .* without the key 'env'"):
        sampler.initialize(NoDict(sampler.spec))
