"""Every observation and action space of docs/environments.md with every algorithm: it trains, or says what would."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as S

import penstock as ps
from penstock.agents.parameters import parameters_of
from penstock.core.batch import MultiAgentBatch
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.check import check_env
from penstock.learn.policies import for_agents
from penstock.learn.train_ops import train_one_step

MOST, INF = float(np.finfo(np.float32).max), np.inf
OBSERVATIONS: dict[str, gym.Space[Any]] = {
    "float32": S.Box(-1, 1, (3,), np.float32),
    "float64": S.Box(0, INF, (2,), np.float64),
    "float16": S.Box(-1, 1, (2,), np.float16),
    "number": S.Box(-1, 1, (), np.float32),
    "matrix": S.Box(-1, 1, (2, 3), np.float32),
    "int8": S.Box(-3, 3, (3,), np.int8),
    "int64": S.Box(-9, 9, (2,), np.int64),
    "uint8": S.Box(0, 255, (4,), np.uint8),
    "uint16": S.Box(0, 60_000, (3,), np.uint16),
    "uint32": S.Box(0, 2**32 - 1, (3,), np.uint32),
    "uint64": S.Box(0, 2**64 - 1, (2,), np.uint64),
    "bits": S.Box(0, 1, (3,), np.bool_),
    "first": S.Box(0, 255, (3, 8, 8), np.uint8),
    "last": S.Box(0, 255, (7, 7, 20), np.uint8),
    "grey": S.Box(0, 255, (16, 16), np.uint8),
    "stack": S.Box(0, 255, (2, 8, 8, 3), np.uint8),
    "depth": S.Box(0, 65_535, (8, 8, 1), np.uint16),
    "bool planes": S.Box(0, 1, (6, 6, 2), np.bool_),
    "int8 planes": S.Box(-1, 1, (2, 6, 7), np.int8),
    "float planes": S.Box(0, 1, (6, 6, 3), np.float32),
    "discrete": S.Discrete(4, start=-2),
    "multi_discrete": S.MultiDiscrete([[2, 3], [4, 2]]),
    "multi_discrete uint16": S.MultiDiscrete([3, 4], dtype=np.uint16),
    "multi_binary": S.MultiBinary(3),
    "multi_binary planes": S.MultiBinary([5, 5, 2]),
    "tuple": S.Tuple((S.Discrete(2), S.Dict(a=S.Box(-1, 1, (2,), np.float64)))),
    "empty part": S.Dict(a=S.Box(-1, 1, (0,), np.float32), b=S.Box(-1, 1, (2,), np.float32)),
    "images and vector": S.Dict(
        camera=S.Box(0, 255, (8, 8, 3), np.uint8), map=S.Box(0, 1, (6, 6, 1), np.float32), v=S.Box(-1, 1, (2,))
    ),
}
BOXES: dict[str, gym.Space[Any]] = {
    "box": S.Box(-2, 3, (2,), np.float32),
    "box of one": S.Box(-2, 2, (1,), np.float32),
    "box scalar": S.Box(-2, 2, (), np.float32),
    "box matrix": S.Box(-1, 1, (2, 2), np.float64),
}
UNBOUNDED: dict[str, gym.Space[Any]] = {
    "box free": S.Box(-INF, INF, (2,), np.float32),
    "box one-sided": S.Box(np.array([50, -INF], np.float32), np.array([INF, -9], np.float32)),
    "box mixed": S.Box(np.array([0, -INF], np.float32), np.array([100, INF], np.float32)),
    "box finfo.max": S.Box(-MOST, MOST, (2,), np.float32),
    "box 1e300": S.Box(-1e300, 1e300, (1,), np.float64),
    "box finfo64.max": S.Box(-float(np.finfo(np.float64).max), 4.0, (1,), np.float64),
}
CHOICES: dict[str, gym.Space[Any]] = {
    "discrete": S.Discrete(3),
    "discrete start": S.Discrete(2, start=-1),
    "discrete uint8": S.Discrete(3, dtype=np.uint8),  # pyright: ignore
}
OTHERS: dict[str, gym.Space[Any]] = {
    "multi_discrete": S.MultiDiscrete([2, 3]),
    "multi_discrete uint16": S.MultiDiscrete([[2, 3]], dtype=np.uint16),
    "multi_binary": S.MultiBinary([2, 2]),
    "tree": S.Dict(a=S.Discrete(2), b=S.Tuple((S.Box(-1, 1, (2,), np.float32), S.MultiBinary(2)))),
}
REFUSED: dict[str, gym.Space[Any]] = {
    "box of ints": S.Box(0, 3, (2,), np.int64),
    "box fixed": S.Box(np.float32([1, 0]), np.float32([1, 1])),
    "box empty": S.Box(-1, 1, (0,), np.float32),
}
ACTIONS = BOXES | UNBOUNDED | CHOICES | OTHERS | REFUSED
NET = ps.Net(hidden=(8,), activation="relu")
MINI: dict[str, Any] = {"epochs": 1, "minibatch": 8, "net": NET}
SAMPLES: dict[str, Any] = {"batch_size": 8, "replay_ratio": 4, "learning_starts": 4, "net": NET}
NORMAL = ps.Net(hidden=(8,), normalize_obs=True, normalize_reward=True)
LSTM = ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8, prev_action=True, prev_reward=True)
ANY = BOXES | UNBOUNDED | CHOICES | OTHERS
ALGORITHMS: dict[str, tuple[Any, dict[str, gym.Space[Any]]]] = {
    "ppo": (ps.PPO(**MINI), ANY),
    "ppo normalized": (ps.PPO(**MINI | {"net": NORMAL}), ANY),
    "ppo lstm": (ps.PPO(**MINI | {"net": LSTM}), ANY),
    "ppo squash": (ps.PPO(**MINI | {"net": ps.Net(hidden=(8,), squash=True)}), BOXES | CHOICES | OTHERS),
    "ppo gsde": (ps.PPO(**MINI | {"net": ps.Net(hidden=(8,), use_sde=True)}), BOXES | UNBOUNDED),
    "a2c": (ps.A2C(net=NET), ANY),
    "impala": (ps.IMPALA(net=NET), ANY),
    "appo": (ps.APPO(**MINI), ANY),
    "bc": (ps.BC(**MINI), ANY),
    "marwil": (ps.MARWIL(**MINI), ANY),
    "mappo": (ps.MAPPO(**MINI), ANY),
    "ppo rnd": (ps.PPO(**MINI, rnd=ps.RND(net=NET)), ANY),
    "dqn": (ps.DQN(**SAMPLES), CHOICES),
    "boot dqn": (ps.BootDQN(**SAMPLES, heads=3), CHOICES),
    "rainbow": (
        ps.DQN(
            **SAMPLES | {"net": ps.Net(hidden=(8,), normalize_obs=True)},
            distributional="c51",
            dueling=True,
            noisy=True,
            n_step=2,
            replay=ps.ReplaySettings(capacity=100, index="prioritized"),
        ),
        CHOICES,
    ),
    "r2d1": (
        ps.R2D1(
            net=LSTM,
            batch_size=2,
            replay_ratio=2,
            learning_starts=4,
            burn_in=0,
            train_length=4,
            state_interval=4,
            n_step=1,
        ),
        CHOICES,
    ),
    "discrete sac": (ps.DiscreteSAC(**SAMPLES), CHOICES),
    "qmix": (ps.QMIX(**SAMPLES | {"net": ps.Net(hidden=(8,), normalize_obs=True)}), CHOICES),
    "sac": (ps.SAC(**SAMPLES), BOXES),
    "td3": (ps.TD3(**SAMPLES), BOXES),
    "ddpg": (ps.DDPG(**SAMPLES), BOXES),
    "cql": (ps.CQL(**SAMPLES), BOXES | CHOICES),
    "pqn": (ps.PQN(**MINI | {"net": ps.Net(hidden=(8,), activation="silu", norm="layer")}), CHOICES),
    "pqn lstm": (ps.PQN(**MINI | {"net": replace(LSTM, activation="elu", norm="layer")}), CHOICES),
    "tqc": (ps.TQC(**SAMPLES | {"net": ps.Net(hidden=(8,), norm="layer")}, quantiles=5, drop=1), BOXES),
    "crossq": (ps.CrossQ(**SAMPLES | {"net": ps.Net(hidden=(8,), normalize_obs=True)}), BOXES),
    "ppo simba": (ps.PPO(**MINI | {"net": replace(LSTM, block="simba")}, value_clip=0.2, lr="kl(1e-3)"), ANY),
}
MANY = ("mappo", "qmix")


class Any1(gym.Env[Any, Any]):
    """Observations of a space, and actions that must lie in another; episodes of 3 steps end both ways."""

    def __init__(self, obs: gym.Space[Any], action: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = obs, action
        self.t = self.episode = 0

    def _obs(self) -> Any:
        found = self.observation_space.sample()
        if isinstance(found, dict) and "action_mask" in found:
            found["action_mask"][:] = 1  # of several choices one must be legal in each
            found["action_mask"][1] = self.t % 2
        return found

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed % 1_000_003)
        self.t, self.episode = 0, self.episode + 1
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        over = self.t == 3
        return self._obs(), float(self.t), over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}


class Any2:
    """The same for two agents that act at once."""

    possible_agents = ("a", "b")

    def __init__(self, obs: gym.Space[Any], action: gym.Space[Any]) -> None:
        self._one = Any1(obs, action)

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return self._one.observation_space

    def action_space(self, agent: str) -> gym.Space[Any]:
        return self._one.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        obs, _ = self._one.reset(seed=seed)
        return dict.fromkeys(self.agents, obs), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        acted = self.agents
        obs, reward, terminated, truncated, _ = [self._one.step(action) for action in actions.values()][-1]
        self.agents = [] if terminated or truncated else acted
        each = [dict.fromkeys(acted, x) for x in (obs, reward, terminated, truncated)]
        return (*each, {agent: {} for agent in acted})

    def close(self) -> None:
        pass


def train(name: str, obs: gym.Space[Any], action: gym.Space[Any], updates: int = 1) -> None:
    """Gradient steps of an algorithm, at least these, and a prediction from an observation of the space."""
    algo: Any = ALGORITHMS[name][0]
    config = ps.EnvConfig(lambda: (Any2 if name in MANY else Any1)(obs, action))
    if name in MANY:
        report = check_env(config, steps=3)
        algo = for_agents(algo, report.agents)
        assert report.agents is not None
        config = algo.seat(config, report.agents)
        specs = dict(zip(config.seating.policies, config.seating.specs))
    sampler = ps.SerialSampler(T=2, B=2).build(config, seed=0)
    try:
        policy: Any = algo.build(specs if name in MANY else sampler.spec, seed=0)
        one = policy["shared"] if name in MANY else policy
        shown = sampler.initialize(policy.agents if name in MANY else policy.agent)
        policy.prepare(sampler.batch_spec, {k: v["info"] for k, v in shown.items()} if name in MANY else shown["info"])
        for itr in range(8):
            batch, _ = sampler.obtain_samples(itr)
            train_one_step(policy, batch)
            if one.updates >= updates:
                break
    finally:
        sampler.shutdown()
    assert one.updates >= updates, "never trained"
    assert all(bool(torch.isfinite(x.double()).all()) for x in parameters_of(one.agent).values())
    part = batch["shared"] if isinstance(batch, MultiAgentBatch) else batch
    row = tree_map(lambda x: np.asarray(x[1, 0]), part.obs)
    found = one.predict(row)
    chosen = found[0] if one.recurrent else found
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in tree_leaves(chosen))


def names() -> list[tuple[str, str, str]]:
    """Observation, algorithm and action, so that every two of them meet where the algorithm takes the action."""
    found: list[tuple[str, str, str]] = []
    for (i, obs), (name, (_, taken)) in itertools.product(enumerate(OBSERVATIONS), ALGORITHMS.items()):
        found.append((obs, name, list(taken)[i % len(taken)]))
    return found


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("obs", OBSERVATIONS)
def test_every_two_of_observation_algorithm_and_action(obs: str, half: int):
    for shown, name, action in names()[half::2]:
        if shown == obs:
            try:
                train(name, OBSERVATIONS[obs], ACTIONS[action])
            except Exception as error:
                raise AssertionError(f"{name}, {obs}, action {action}") from error


@pytest.mark.slow
@pytest.mark.parametrize("obs", OBSERVATIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_third_of_the_product(name: str, obs: str):
    at = list(OBSERVATIONS).index(obs) + list(ALGORITHMS).index(name)
    for action in list(ALGORITHMS[name][1])[at % 3 :: 3]:
        try:
            train(name, OBSERVATIONS[obs], ACTIONS[action], updates=2)
        except Exception as error:
            raise AssertionError(f"{name}, {obs}, action {action}") from error


CURE = r"expected|use |leave|give|bound|instead|wrap"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_action_that_an_algorithm_cannot_take_is_one_config_error_with_the_cure(name: str):
    taken = ALGORITHMS[name][1]
    for action in ACTIONS.keys() - taken.keys():
        with pytest.raises(ps.ConfigError, match=CURE):
            train(name, OBSERVATIONS["float32"], ACTIONS[action])
            pytest.fail(f"{name} trained on {action}")


def masked(choices: int) -> gym.Space[Any]:
    return S.Dict(o=S.Box(-1, 1, (2,), np.float32), action_mask=S.Box(0, 1, (choices,), np.int8))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masks_of_choices_train_and_masks_of_boxes_are_refused(name: str):
    taken = ALGORITHMS[name][1]
    if "discrete" in taken:
        train(name, masked(3), CHOICES["discrete"])
    if "multi_discrete" in taken:
        train(name, masked(5), OTHERS["multi_discrete"])
    if "box" in taken:
        with pytest.raises(ps.ConfigError, match=r"for 0 discrete choices|action mask"):
            train(name, masked(2), BOXES["box"])


@pytest.mark.parametrize("name", [name for name, (algo, _) in ALGORITHMS.items() if not algo.net.prev_action])
def test_an_observation_without_elements_is_refused(name: str):
    with pytest.raises(ps.ConfigError, match="no features in observation"):
        train(name, S.Box(-1, 1, (0,), np.float32), next(iter(ALGORITHMS[name][1].values())))
