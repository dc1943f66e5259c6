"""EnvPool's environments by id: what they take, and that their pool keeps the contract."""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves
from penstock.envs.builtin import is_builtin_env
from penstock.envs.check import check_env
from penstock.envs.envpool import EnvPoolVectorEnv, envpool_ids
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import makes_vector_env
from penstock.envs.pools.native_groups import NativeGroups
from penstock.run.files.modules import modules_named

CARTPOLE = "envpool:CartPole-v1"


@pytest.fixture(scope="module")
def envpool() -> Any:
    return pytest.importorskip("envpool", reason="EnvPool is not installed: pip install 'penstock[envpool]'")


def filled(pool: NativeGroups, T: int) -> SampleBatch:
    """T rows of the pool's next batch. Choices are 0, 1, 0, 1, ... in even slots and 1 in odd ones; boxes are at rest."""
    B = pool.groups[-1].slots.stop
    out = allocate_batch(pool.spec, BatchSpec(T, B), env_info=pool.info_keys)
    if isinstance(out.action, np.ndarray) and out.action.dtype == np.int64:
        out.action[...] = (np.arange(T)[:, None] | np.arange(B)) % 2
    pool.bind([out])
    for t in range(T):
        for g in range(len(pool.groups)):
            pool.send(g, t)
        for _ in pool.groups:
            pool.recv()
    return out


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(MissingExtraError, match=r"envpool is not installed; .*pip install 'penstock\[envpool\]'"):
        EnvConfig(CARTPOLE).make()


def test_an_id_names_no_module_of_the_user_and_is_known_to_be_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)  # nothing is made for these answers
    assert makes_vector_env(EnvConfig(CARTPOLE))
    assert is_builtin_env(CARTPOLE)
    assert not modules_named(["--env", CARTPOLE])


@pytest.mark.usefixtures("envpool")
@pytest.mark.parametrize("groups", [1, 2])
def test_an_episode_ends_with_its_last_observation_and_resets_in_the_next_row(groups: int) -> None:
    pool = NativeGroups(EnvConfig(CARTPOLE, {"max_episode_steps": 20}, info_keys=("elapsed_step",)), 3, 6, groups)
    batch = filled(pool, 70)
    pool.close()
    ended = batch.terminated | batch.truncated
    elapsed: Any = batch.info["env"]["elapsed_step"]
    assert batch.terminated.any() and batch.truncated.any() and not (batch.terminated & batch.truncated).any()
    assert (elapsed[batch.truncated] == 20).all() and (elapsed[batch.terminated] < 20).all()
    angle = np.abs(batch.obs[1:, :, 2])
    assert (angle[batch.terminated] > 0.2094).all() and (angle[batch.truncated] < 0.2094).all()
    assert np.array_equal(~batch.valid[1:], ended[:-1]) and np.array_equal(batch.first[1:], ~batch.valid)
    assert (np.abs(batch.obs[batch.first]) <= 0.05).all()
    assert (batch.reward == batch.valid).all() and np.isnan(elapsed[~batch.valid]).all()


@pytest.mark.usefixtures("envpool")
def test_a_slot_plays_by_its_own_seed_with_any_number_of_threads_and_evaluations_by_others() -> None:
    one = NativeGroups(EnvConfig(CARTPOLE, {"num_threads": 1}), 3, 6, 2)
    other = NativeGroups(EnvConfig(CARTPOLE, {"num_threads": 2}), 3, 6, 2)
    first, again = filled(one, 60), filled(other, 60)
    assert first.obs.tobytes() == again.obs.tobytes() and (first.terminated == again.terminated).all()
    assert len({x.tobytes() for x in first.obs[0]}) == 6
    one.restart(3)
    assert filled(one, 60).obs.tobytes() == first.obs.tobytes()
    one.restart(4)
    assert not (filled(one, 1).obs[0] == first.obs[0]).any()
    evaluation = one.for_evaluation(6)
    assert not (filled(evaluation, 1).obs[0] == first.obs[0]).any()
    for pool in (one, other, evaluation):
        pool.close()


@pytest.mark.usefixtures("envpool")
@pytest.mark.parametrize(
    ("task", "shapes"),
    {
        "FrozenLake-v1": [((), "int64")],
        "HalfCheetah-v4": [((17,), "float64")],
        "Pong-v5": [((4, 84, 84), "uint8")],
        "CartpoleBalance-v1": [((3,), "float64"), ((2,), "float64")],
        "MiniGrid-Empty-5x5-v0": [((), "int64"), ((7, 7, 3), "uint8"), ((96,), "uint8")],
    }.items(),
)
def test_observations_are_those_of_the_space(task: str, shapes: list[Any]) -> None:
    pool = NativeGroups(EnvConfig(f"envpool:{task}", checks="always"), 0, 2, 1)
    batch = filled(pool, 3)
    pool.close()
    assert [(x.shape[2:], str(x.dtype)) for x in tree_leaves(batch.obs)] == shapes
    assert all(x[0].any() for x in tree_leaves(batch.obs) if x.shape[2:])


@pytest.mark.usefixtures("envpool")
def test_no_bound_is_no_bound() -> None:
    pool = NativeGroups(EnvConfig("envpool:LunarLander-v3", checks="always"), 0, 4, 1)
    assert filled(pool, 20).obs.min() < 0 and np.isneginf(tree_leaves(pool.spec.obs)[0].low).all()
    pool.close()


@pytest.mark.usefixtures("envpool")
@pytest.mark.parametrize(
    ("task", "kwargs", "text"),
    [
        ("CartPol-v1", {}, r"unknown environment id 'envpool:CartPol-v1'; did you mean 'envpool:CartPole-v1'"),
        ("CartPole-v1", {"num_thread": 1}, r"num_thread=1: it takes no 'num_thread'; did you mean 'num_threads'"),
        ("CartPole-v1", {"seed": 1}, r"seed=1: the seed follows from run\.seed"),
        ("CartPole-v1", {"batch_size": 1}, r"batch_size=1: every step returns all environments"),
        ("CartPole-v1", {"max_episode_steps": "a"}, r"incompatible .*; it takes .*max_episode_steps"),
        ("CartPole-v1", {"num_envs": 0}, r"num_envs=0; it takes"),
        ("CartPole-v1", {"num_threads": -1}, r"num_threads=-1; expected 1 or more, or 0"),
        ("Go9x9-v1", {}, r"of up to 2 players, .*expected one player"),
    ],
)
def test_what_cannot_be_made_says_why(task: str, kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EnvConfig(f"envpool:{task}", kwargs).make()


@pytest.mark.usefixtures("envpool")
def test_options_of_resets_are_refused() -> None:
    with pytest.raises(ConfigError, match="EnvPoolVectorEnv, which resets its environments without options; give them"):
        EnvConfig(CARTPOLE, options={"level": 1}).make()


def test_envpool_made_by_a_callable_is_refused(envpool: Any) -> None:
    with pytest.raises(ConfigError, match="EnvPool's own, which ignores the seed of a reset; expected env='envpool:TA"):
        check_env(functools.partial(envpool.make, "CartPole-v1", env_type="gymnasium", num_envs=2))


@pytest.mark.usefixtures("envpool")
def test_wrappers_of_gymnasium_see_batched_spaces() -> None:
    env: Any = EnvConfig(CARTPOLE, {"num_envs": 3}, wrappers=("gymnasium.wrappers.vector:FlattenObservation",)).make()
    assert isinstance(env.unwrapped, EnvPoolVectorEnv)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Gymnasium's, of rounded bounds
        assert env.reset()[0].shape == (3, 4)
    assert env.unwrapped.observation_space.shape == (3, 4) and env.action_space.shape == (3,)
    env.close()


@pytest.mark.usefixtures("envpool")
def test_its_ids_are_listed() -> None:
    assert {CARTPOLE, "envpool:Pong-v5", "envpool:HalfCheetah-v4"} <= set(envpool_ids())


@pytest.mark.usefixtures("envpool")
def test_a_run_by_id_repeats_is_evaluated_and_resumed(tmp_path: Path) -> None:
    def experiment(name: str, steps: int = 400) -> ps.Experiment:
        run = ps.RunConfig(steps=steps, seed=2, dir=str(tmp_path / name), progress="off", eval_episodes=3)
        return ps.Experiment(CARTPOLE, ps.PPO(minibatch=50), ps.SerialSampler(T=25, B=4), run)

    one, again = ps.train(experiment("one")), ps.train(experiment("again"))
    assert one.episodes.mean_return == again.episodes.mean_return > 5
    assert one.metrics["eval/mean_reward"] == again.metrics["eval/mean_reward"] > 5
    assert ps.evaluate(tmp_path / "one", episodes=3).mean_return > 5
    with pytest.warns(UserWarning, match="4 of 4 slots could not be brought back and start a new episode"):
        more = ps.resume(tmp_path / "one", {"run.steps": 600})
    assert more.env_steps >= 600
