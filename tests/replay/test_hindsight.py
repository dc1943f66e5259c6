"""Are goals replaced as often, as evenly and by what hindsight promises, and does that solve what chance cannot?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import penstock as ps
from penstock.core.batch import Inputs, SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.envs.toy import BitFlip
from penstock.envs.toy.base import Toy, box
from penstock.replay.replay import Replay, ReplaySettings, make_view
from penstock.replay.view import Sequences
from penstock.run.trainer import Trainer
from tests.params import slow_but

GOAL = LeafSpec("box", (1,), "float32")
SPEC = EnvSpec({"achieved_goal": GOAL, "desired_goal": GOAL}, LeafSpec("discrete", (), "int64", sizes=(2,)))
FED = frozenset(("prev_action", "first"))
FLIP = "penstock.envs.toy:BitFlip"
reward_and_end = BitFlip.reward_and_end


def distance(achieved: Any, desired: Any, info: Any) -> Any:
    """A reward that says nothing about ends."""
    return -5.0 * np.abs(achieved - desired)[..., 0]


def first_rewarded(achieved: Any, desired: Any, info: Any) -> Any:
    """No function of batches."""
    return float(achieved[0, 0] == desired[0, 0])


class NoReward:
    """Has no compute_reward."""


def line() -> SampleBatch:
    """One slot: rows 0..4 are an episode, row 5 resets, rows 6 and 7 are another; `achieved_goal` counts the rows."""
    batch = allocate_batch(SPEC, BatchSpec(8, 1))
    obs: Any = batch.obs
    obs["achieved_goal"][:, 0, 0] = np.arange(9)
    obs["desired_goal"][:] = -1.0
    batch.valid[:] = True
    batch.valid[5] = False
    batch.terminated[4] = True
    batch.first[[0, 6]] = True
    batch.reward[:] = 0.25
    return batch


def replay_of(k: int = 4, reward_fn: str = f"{__name__}:distance", **view: Any) -> Replay:
    settings = ReplaySettings(capacity=60, hindsight=k, reward_fn=reward_fn)
    return Replay(SPEC, settings, make_view(settings, SPEC, discount=0.5, fed=FED, **view))


@pytest.mark.parametrize("k", [1, 4])
def test_goals_are_those_reached_later_in_the_episode_each_as_often(k: int) -> None:
    replay = replay_of(k)
    replay.append(line())
    drawing, shown = replay.sample(20_000, np.random.default_rng(0))
    obs: Any = shown.inputs.obs
    assert set(drawing.unit.tolist()) == {0, 1, 2, 3, 4, 6, 7}
    goal = obs["desired_goal"][:, 0]
    assert abs((goal != -1.0).mean() - k / (k + 1)) < 0.012  # 4 standard deviations at least
    for t, reached in ((0, [1, 2, 3, 4, 5]), (3, [4, 5]), (4, [5]), (6, [7, 8]), (7, [8])):
        values, counts = np.unique(goal[(drawing.unit == t) & (goal != -1.0)], return_counts=True)
        assert values.tolist() == reached
        expected = counts.sum() / len(reached)
        assert ((counts - expected) ** 2 / expected).sum() < 18.5  # once in a thousand, 4 degrees of freedom
    following: Any = shown.rows["next"]
    np.testing.assert_array_equal(following.obs["desired_goal"][:, 0], goal)
    np.testing.assert_array_equal(following.obs["achieved_goal"], obs["achieved_goal"] + 1)


@pytest.mark.parametrize("clip", [False, True])
def test_rewards_are_computed_anew_and_ends_stay_where_nothing_is_said_about_them(clip: bool) -> None:
    replay = replay_of(clip_reward=clip)
    replay.append(line())
    drawing, shown = replay.sample(500, np.random.default_rng(0))
    obs: Any = shown.inputs.obs
    goal = obs["desired_goal"][:, 0]
    changed = goal != -1.0
    expected = np.where(changed, -5.0 * np.abs(drawing.unit + 1 - goal), 0.25)
    np.testing.assert_allclose(shown.rows["return"], np.sign(expected) if clip else expected)
    np.testing.assert_array_equal(shown.rows["discount"], np.where(drawing.unit == 4, 0.0, 0.5))


@pytest.mark.parametrize("desired", [-1.0, 5.0])
def test_reaching_the_goal_ends_an_episode_if_the_function_says_so(desired: float) -> None:
    """Row 4 ends its episode since it reached 5, or fell; its only other goal is 5 as well."""
    replay = replay_of(reward_fn=f"{__name__}:reward_and_end")
    batch = line()
    obs: Any = batch.obs
    obs["desired_goal"][:] = desired
    replay.append(batch)
    drawing, shown = replay.sample(2_000, np.random.default_rng(0))
    obs = shown.inputs.obs
    changed, reached = obs["desired_goal"][:, 0] != desired, obs["desired_goal"][:, 0] == drawing.unit + 1
    np.testing.assert_array_equal(shown.rows["return"][changed], reached[changed] - 1.0)
    at_end = drawing.unit == 4
    ends = np.where(changed, reached, at_end)
    assert not changed[at_end].any() or reached[at_end & changed].all()
    np.testing.assert_array_equal(shown.rows["discount"], np.where(ends, 0.0, 0.5))


def some(achieved: Any, desired: Any, info: Any) -> Any:
    """Takes what is worth asking for."""
    assert len(achieved)
    return distance(achieved, desired, info)


def test_no_reward_is_asked_for_where_no_goal_is_replaced() -> None:
    replay = replay_of(1, reward_fn=f"{__name__}:some")
    replay.append(line())
    rng, seen = np.random.default_rng(0), set[bool]()
    for _ in range(20):
        _, shown = replay.sample(1, rng)
        obs: Any = shown.inputs.obs
        seen.add(bool(obs["desired_goal"][0, 0] == -1.0))
    assert seen == {True, False}


def test_a_goal_beyond_what_is_stored_is_not_drawn() -> None:
    """The episode goes on in the next batch, which is not there yet: its rows end at the newest one."""
    replay = replay_of()
    batch = line()
    replay.append(batch)
    obs: Any = replay.sample(400, np.random.default_rng(0))[1].inputs.obs
    assert obs["desired_goal"].max() == 8.0
    after = line()
    for name in ("achieved_goal", "desired_goal"):
        after_obs: Any = after.obs
        after_obs[name] += 8.0 if name == "achieved_goal" else 0.0
    after.first[0], after.prev_reward[0] = False, batch.prev_reward[8]
    replay.append(after)
    assert replay.storage is not None and replay.storage.head == 16
    drawing, shown = replay.sample(4_000, np.random.default_rng(0))
    obs = shown.inputs.obs
    assert set(obs["desired_goal"][drawing.unit == 7, 0].tolist()) == {-1.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0}


def test_what_hindsight_cannot_serve_is_refused_at_construction() -> None:
    settings = ReplaySettings(hindsight=4, reward_fn=f"{__name__}:distance")
    with pytest.raises(ConfigError, match=r"n_step=3.* use n_step=1"):
        make_view(settings, SPEC, 3, fed=FED)
    with pytest.raises(ConfigError, match=r"net.prev_reward=False"):
        make_view(settings, SPEC)
    with pytest.raises(
        ConfigError, match=r"observations box\[\d\] float32; expected a Dict with achieved_goal and desired_goal"
    ):
        make_view(settings, EnvSpec(GOAL, SPEC.action), fed=FED)
    wide = {"achieved_goal": LeafSpec("box", (2,), "float32"), "desired_goal": GOAL}
    for obs in ({"achieved_goal": GOAL}, wide):
        with pytest.raises(ConfigError, match=r"two arrays of one shape"):
            make_view(settings, EnvSpec(obs, SPEC.action), fed=FED)
    with pytest.raises(ConfigError, match=r"reward_fn gave reward of shape \[\] for 2 goals; expected \[2\]"):
        make_view(replace(settings, reward_fn=f"{__name__}:first_rewarded"), SPEC, fed=FED)
    for path in ("GOAL", "NoReward"):
        with pytest.raises(ConfigError, match=r"is no function, and no class that has compute_reward"):
            make_view(replace(settings, reward_fn=f"{__name__}:{path}"), SPEC, fed=FED)
    replay = Replay(SPEC, alone := ReplaySettings(hindsight=4), make_view(alone, SPEC, fed=FED))
    replay.append(line())
    with pytest.raises(ConfigError, match=r"without replay\.reward_fn, and there is no environment yet.*'module:Env'"):
        replay.sample(4, np.random.default_rng(0))
    with pytest.raises(ConfigError, match=r"hindsight=-1"):
        ReplaySettings(hindsight=-1)
    with pytest.raises(ConfigError, match=r"reads Sequences, whose goals stay as they were; use hindsight=0"):
        Replay(SPEC, settings, Sequences(4, 0, 4))


class Reach(Toy):
    """A point on a line and a goal; the action moves it; reward 0 near the goal, else -1."""

    def __init__(self) -> None:
        goal = box(-1.0, 1.0)
        super().__init__(spaces.Dict({"achieved_goal": goal, "desired_goal": goal}), box(-1.0, 1.0))

    def begin(self) -> None:
        self._at = np.zeros(1, np.float32)
        self._goal = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)

    def observe(self) -> Any:
        return {"achieved_goal": self._at.copy(), "desired_goal": self._goal.copy()}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -(np.abs(achieved_goal - desired_goal)[..., 0] > 0.1).astype(np.float32)

    def act(self, action: Any) -> tuple[float, bool, bool]:
        self._at = np.clip(self._at + 0.3 * action, -1.0, 1.0).astype(np.float32)
        return float(self.compute_reward(self._at, self._goal, {})), False, self.t >= 9


NET, MEMORY = ps.Net(hidden=(16,)), ReplaySettings(capacity=2_000, hindsight=4, reward_fn=f"{__name__}:Reach")
CONTROL = {"batch_size": 16, "replay_ratio": 16.0, "learning_starts": 64, "net": NET, "replay": MEMORY}
ALGOS = {
    "SAC": (Reach, ps.SAC(**CONTROL)),
    "TD3": (Reach, ps.TD3(**CONTROL)),
    "DDPG": (Reach, ps.DDPG(**CONTROL)),
    "DiscreteSAC": (BitFlip, ps.DiscreteSAC(**CONTROL | {"replay": replace(MEMORY, reward_fn=FLIP)})),
}


@pytest.mark.parametrize("name", slow_but("TD3", [*ALGOS]))
def test_each_algorithm_of_transitions_learns_in_hindsight(name: str) -> None:
    env, algo = ALGOS[name]
    trainer = Trainer(ps.Experiment(env, algo, ps.SerialSampler(T=8, B=2), ps.RunConfig(steps=200)))
    while trainer.env_steps < 200:
        trainer.train()
    assert trainer.policy.updates > 100 and trainer.policy.skipped == 0
    schedule: Any = trainer.policy.replay_schedule
    _, shown = schedule.replay.sample(400, np.random.default_rng(0))
    reached = (shown.rows["next"].obs["achieved_goal"] == shown.inputs.obs["desired_goal"]).all(-1)
    assert reached.mean() > 0.1  # its own goal is next to never reached


class Tolerant(Reach):
    """Near is `tolerance`, which every instance must be told."""

    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self.tolerance = tolerance

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -(np.abs(achieved_goal - desired_goal)[..., 0] > self.tolerance).astype(np.float32)


class Energetic(Reach):
    """Its reward reads the info."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return super().compute_reward(achieved_goal, desired_goal, info) - info["energy"]


class TenTimes(gym.Wrapper[Any, Any, Any, Any]):
    """Pays ten times, and does not say what other goals would be worth."""

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, 10 * float(reward), *rest


class TenTimesAlike(TenTimes):
    """Says it."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        env: Any = self.env
        return 10 * env.compute_reward(achieved_goal, desired_goal, info)


def trained(env: Any, reward_fn: Any, **settings: Any) -> Any:
    """The rewards of 400 samples of a short run."""
    path = "" if reward_fn is None else f"{__name__}:{reward_fn.__name__}"
    algo = ps.SAC(**CONTROL | {"replay": replace(MEMORY, reward_fn=path)})
    run = ps.RunConfig(steps=112, eval_episodes=0, progress="off")
    trainer = Trainer(ps.Experiment(env, algo, ps.SerialSampler(T=8, B=2), run, **settings))
    while trainer.env_steps < trainer.exp.run.steps:
        trainer.train()
    trainer.stop()
    _, shown = trainer.policy.replay_schedule.replay.sample(400, np.random.default_rng(0))  # type: ignore
    far = np.abs(shown.rows["next"].obs["achieved_goal"] - shown.rows["next"].obs["desired_goal"])[:, 0]
    return shown.rows["return"], far


@pytest.mark.parametrize("reward_fn", ["Tolerant", None])
@pytest.mark.parametrize("tolerance", [0.02, 0.5])
def test_goals_are_rewarded_by_the_environment_of_the_run(tolerance: float, reward_fn: str | None) -> None:
    reward, far = trained(Tolerant, reward_fn and Tolerant, env_kwargs={"tolerance": tolerance})
    sure = np.abs(far - tolerance) > 1e-4
    np.testing.assert_array_equal(reward[sure], np.where(far <= tolerance, 0.0, -1.0)[sure])
    assert len({*reward.tolist()}) == 2


class Mute(Reach):
    compute_reward: Any = None

    def act(self, action: Any) -> tuple[float, bool, bool]:
        return 0.0, False, self.t >= 9


def test_an_environment_that_cannot_reward_goals_is_named() -> None:
    with pytest.raises(ConfigError, match=r"without replay\.reward_fn, and Mute has no compute_reward"):
        trained(Mute, None)


@pytest.mark.parametrize("reward_fn", [Reach, None])
def test_a_wrapper_is_asked_what_it_pays_and_one_that_does_not_say_is_refused(reward_fn: Any) -> None:
    reward, far = trained(Reach, reward_fn, wrappers=(TenTimesAlike,))
    sure = np.abs(far - 0.1) > 1e-4
    np.testing.assert_array_equal(reward[sure], np.where(far <= 0.1, 0.0, -10.0)[sure])
    with pytest.raises(
        ConfigError, match=r"pays -1 for achieved_goal .* where the environment paid -10; \d+ of 16 rows"
    ):
        trained(Reach, reward_fn, wrappers=(TenTimes,))


def test_rewards_that_cannot_be_asked_for_say_why() -> None:
    with pytest.raises(ConfigError, match=r"raised KeyError: 'energy' for .* no info is known of goals that were not"):
        trained(Reach, Energetic)
    with pytest.raises(ConfigError, match=r":Tolerant' needs arguments, .* that one is a Reach; name a function"):
        trained(Reach, Tolerant)
    settings = replace(MEMORY, reward_fn=f"{__name__}:Tolerant")
    replay = Replay(SPEC, settings, make_view(settings, SPEC, fed=FED))
    replay.append(line())
    with pytest.raises(ConfigError, match="there is none yet"):
        replay.sample(4, np.random.default_rng(0))


def solved(hindsight: int) -> float:
    """Share of 256 pairs of states and goals of 8 bits that the greedy policy joins, after 3,000 steps of DQN."""
    memory = ReplaySettings(capacity=20_000, hindsight=hindsight, reward_fn=f"{__name__}:reward_and_end")
    algo = ps.DQN(lr=2e-3, discount=0.9, batch_size=64, replay_ratio=16.0, learning_starts=500, target_interval=1, tau=0.05,
                  epsilon="linear(1.0, 0.1, 0.3)", replay=memory, net=ps.Net(hidden=(128, 128), activation="relu"))  # fmt: skip
    trainer = Trainer(ps.Experiment(BitFlip, algo, ps.SerialSampler(T=8, B=8), ps.RunConfig(steps=3_000)))
    while trainer.env_steps < 3_000:
        trainer.train()
    state, goal = np.random.default_rng(0).integers(0, 2, (2, 256, 8)).astype(np.float32)
    joined = (state == goal).all(1)
    for _ in range(8):
        bits = torch.from_numpy(state)
        obs = {"observation": bits, "achieved_goal": bits, "desired_goal": torch.from_numpy(goal)}
        with torch.no_grad():
            action = trainer.policy.agent(Inputs(obs, None, None, None)).argmax(-1).numpy()
        state[~joined, action[~joined]] = 1 - state[~joined, action[~joined]]
        joined |= (state == goal).all(1)
    return float(joined.mean())


@pytest.mark.slow
def test_hindsight_solves_what_chance_never_reaches() -> None:
    """8 bits (Andrychowicz et al. 2017, figure 1): DQN alone sees no reward, and stays about where chance is."""
    assert solved(hindsight=4) > 0.8
    assert solved(hindsight=0) < 0.1
