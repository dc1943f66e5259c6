"""float64 observations stay so in replay where a normaliser works in float64: acting and training see the same."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import penstock as ps
from penstock.core.errors import CheckpointError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves
from penstock.learn.train_ops import train_one_step
from penstock.replay.replay import Replay
from penstock.replay.settings import make_view
from penstock.replay.storage import require_arrays

NET = ps.Net(hidden=(8,), normalize_obs=True)
SAMPLES: dict[str, Any] = {"batch_size": 4, "replay_ratio": 1, "learning_starts": 4}
ALGOS: dict[str, Any] = {
    "dqn": ps.DQN(**SAMPLES),
    "r2d1": ps.R2D1(batch_size=2, replay_ratio=1, learning_starts=4, burn_in=0, train_length=4, state_interval=4),
    "discrete sac": ps.DiscreteSAC(**SAMPLES),
    "cql": ps.CQL(**SAMPLES),
    "sac": ps.SAC(**SAMPLES),
    "td3": ps.TD3(**SAMPLES),
    "ddpg": ps.DDPG(**SAMPLES),
}
BASE = 1.7e9


class Clock(gym.Env[Any, Any]):
    """Shows seconds since 1970 in float64, beside a float32 vector."""

    observation_space = spaces.Dict(
        clock=spaces.Box(0, np.inf, (1,), np.float64), v=spaces.Box(-1, 1, (2,), np.float32)
    )

    def __init__(self, choices: bool = True) -> None:
        self.action_space: Any = spaces.Discrete(2) if choices else spaces.Box(-1, 1, (1,), np.float32)

    def seen(self) -> Any:
        return {"clock": np.array([BASE + self.np_random.uniform()]), "v": np.zeros(2, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.seen(), 1.0, False, self.t >= 5, {}


@pytest.mark.parametrize("name", ALGOS)
@pytest.mark.parametrize("normalized", [True, False])
def test_a_sample_holds_the_bits_that_were_acted_on(name: str, normalized: bool):
    algo = ps.override(ALGOS[name], {"net.normalize_obs": normalized, "net.hidden": (8,)})
    sampler = ps.SerialSampler(T=4, B=2).build(lambda: Clock(name not in ("sac", "td3", "ddpg")), seed=0)
    policy = algo.build(sampler.spec, seed=0)
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    seen: set[float] = set()
    for itr in range(3):
        batch, _ = sampler.obtain_samples(itr)
        seen |= set(batch.obs["clock"].ravel().tolist())
        train_one_step(policy, batch)
    sampler.shutdown()
    replay = policy.replay_schedule.replay
    _, x = replay.sample(8, np.random.default_rng(0))
    clock = x.inputs.obs["clock"]
    assert clock.dtype == (np.float64 if normalized else np.float32)
    assert (set(clock.ravel().tolist()) <= seen) is normalized
    assert x.inputs.obs["v"].dtype == np.float32


def test_qmix_normalises_the_bits_that_were_acted_on():
    policy = ps.QMIX(mixer="vdn", net=NET).build(
        EnvSpec(LeafSpec("box", (2,), "float64"), LeafSpec("discrete", (), "int64", sizes=(2,)), agents=2)
    )
    assert policy.replay_schedule is not None and policy.replay_schedule.replay.exact


def test_goals_stay_exact_in_hindsight_as_their_rewards_are_made_of_them():
    leaf = LeafSpec("box", (2,), "float64")
    spec = EnvSpec(dict.fromkeys(("achieved_goal", "desired_goal", "observation"), leaf), leaf)
    settings = ps.ReplaySettings(capacity=50, hindsight=4, reward_fn=f"{__name__}:distance")
    view = make_view(settings, spec, fed=frozenset())
    replay = Replay(spec, settings, view)
    replay.prepare(4, 2)
    dtypes = {name: x.dtype.name for name, x in replay.arrays().items() if name.startswith("obs")}
    assert dtypes == {
        "obs['achieved_goal']": "float64",
        "obs['desired_goal']": "float64",
        "obs['observation']": "float32",
    }


def distance(achieved: Any, desired: Any, info: Any) -> Any:
    return -np.linalg.norm(achieved - desired, axis=-1)


def test_memory_is_stated_and_rows_kept_as_float32_before_still_load():
    spec = EnvSpec(LeafSpec("box", (4,), "float64"), LeafSpec("discrete", (), "int64", sizes=(2,)))
    sizes = {}
    for exact in (False, True):
        settings = ps.ReplaySettings(capacity=1_000)
        replay = Replay(spec, settings, make_view(settings, spec), exact=exact)
        replay.prepare(1, 1)
        sizes[exact] = replay.bytes
        (obs,) = [x for name, x in replay.arrays().items() if name.startswith("obs")]
        assert obs.dtype == (np.float64 if exact else np.float32)
    assert sizes[True] - sizes[False] == 16 * 1_001
    old = {"obs": np.zeros((3, 1, 4), np.float32)}
    require_arrays({"obs": ((10, 1, 4), np.dtype(np.float64))}, 2, old)
    with pytest.raises(CheckpointError, match="float32"):
        require_arrays({"obs": ((10, 1, 4), np.dtype(np.int64))}, 2, old)


@pytest.mark.slow
def test_a_run_with_a_clock_resumes_exactly(tmp_path: Path):
    def run(steps: int, at: Path) -> Any:
        return ps.Experiment(
            f"{__name__}:Clock",
            ps.override(ALGOS["dqn"], {"net.normalize_obs": True, "epsilon": 0.1}),
            ps.SerialSampler(T=4, B=2),
            ps.RunConfig(steps=steps, progress="off", dir=str(at), eval_episodes=0),
        )

    straight = ps.train(run(400, tmp_path / "a"))
    ps.train(run(200, tmp_path / "b"))
    resumed = ps.resume(tmp_path / "b", {"run.steps": 400}, trust=True)
    for x, y in zip(
        tree_leaves(straight.policy.state_dict()["agent"]), tree_leaves(resumed.policy.state_dict()["agent"])
    ):
        assert x.numpy().tobytes() == y.numpy().tobytes()
