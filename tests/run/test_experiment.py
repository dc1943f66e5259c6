from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.core.config import from_plain, to_plain
from penstock.core.errors import ConfigError
from penstock.envs.toy import Constant
from penstock.samplers.sampler import SamplerSettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": -1}, "steps=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"keep": 0}, "keep=0"),
        ({"eval_interval": -1}, "eval_interval=-1"),
        ({"eval_episodes": -1}, "eval_episodes=-1"),
        ({"checkpoint_interval": -5}, "checkpoint_interval=-5"),
        ({"log_interval": -5}, "log_interval=-5"),
        ({"eval_interval": 10, "eval_episodes": 0}, "eval_episodes=0"),
        ({"learner_threads": 0}, "learner_threads=0"),
    ],
)
def test_run_settings_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ps.RunConfig(**changes)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ps.RunConfig().steps = 1  # pyright: ignore
    with pytest.raises(dataclasses.FrozenInstanceError):
        ps.Experiment("CartPole-v1", ps.PPO()).env = "x"  # pyright: ignore


def test_algorithm_class_instead_of_settings() -> None:
    with pytest.raises(ConfigError, match=r"PPO\(\)"):
        ps.Experiment("CartPole-v1", ps.PPO)


@pytest.mark.parametrize("algo", ["ppo", None, 3])
def test_algorithm_that_is_none(algo: Any) -> None:
    with pytest.raises(ConfigError, match=r"ps\.PPO\("):
        ps.Experiment("CartPole-v1", algo)


def test_sampler_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"ps\.SerialSampler\("):
        ps.Experiment("CartPole-v1", ps.PPO(), sampler="serial")


def test_env_config_and_its_fields_at_once() -> None:
    with pytest.raises(ConfigError, match="put them into it"):
        ps.Experiment(ps.EnvConfig("CartPole-v1"), ps.PPO(), env_kwargs={"a": 1})
    whole = ps.EnvConfig("CartPole-v1", info_keys=("a",))
    assert ps.Experiment(whole, ps.PPO()).env_config is whole


def test_env_config_has_every_field() -> None:
    exp = ps.Experiment(
        "a:b", ps.PPO(), env_kwargs={"k": 1}, wrappers=("c:d",), info_keys=("e",), imports=("f",), env_checks="off"
    )
    assert exp.env_config == ps.EnvConfig("a:b", {"k": 1}, ("c:d",), ("e",), ("f",), "off")


def test_algorithm_name() -> None:
    assert ps.Experiment("x", ps.PPO()).algo_name == "ppo"


@pytest.mark.parametrize("env", ["CartPole-v1", Constant, "penstock.envs.toy:Constant", ps.EnvConfig("x", {"a": 1})])
def test_goes_through_json_and_back(env: Any) -> None:
    run = ps.RunConfig(stop={"eval/mean_reward": 1.5}, learner_threads="auto")
    exp = ps.Experiment(env, ps.PPO(lr="linear(1, 0)", net=ps.Net(hidden=(3,))), ps.SerialSampler(T=2), run)
    assert from_plain(json.loads(json.dumps(to_plain(exp)))) == exp


@pytest.mark.parametrize(
    ("path", "value", "nearest"),
    [("algo.lrr", 1, "'lr'"), ("run.step", 1, "'steps'"), ("sampler.BB", 1, "'B'"), ("aglo.lr", 1, "'algo'"),
     ("algo.net.hiden", (3,), "'hidden'"), ("run.progress", "of", "'off'")],
)  # fmt: skip
def test_unknown_settings_name_the_nearest(path: str, value: Any, nearest: str) -> None:
    exp = ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler())
    with pytest.raises(ConfigError, match=nearest):
        ps.override(exp, {path: value})


def test_override_runs_the_checks_again() -> None:
    with pytest.raises(ConfigError, match="steps=0"):
        ps.override(ps.Experiment("CartPole-v1", ps.PPO()), {"run.steps": 0})


def test_a_run_directory_has_a_name() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir=''; expected a directory"):
        ps.RunConfig(dir="")


@pytest.mark.parametrize("value", ["475", None, [1]])
def test_stop_values_are_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match="stop"):
        ps.RunConfig(stop={"rollout/ep_rew_mean": value})


def test_without_a_sampler_the_settings_are_those_of_the_algorithms_batch() -> None:
    own = ps.CpuSampler(T=9, B=4, workers=2)
    T, B = ps.PPO().batch
    for given, expected in ((None, ps.SerialSampler(T, B)), ("auto", ps.SerialSampler(T, B)), (own, own)):
        exp = ps.Experiment("CartPole-v1", ps.PPO(), given)
        assert exp.sampler_settings == expected
        assert exp.sampler == given


@dataclasses.dataclass(frozen=True)
class Unbuilt(SamplerSettings):
    """Settings of a sampler without `build`."""

    spec: ps.BatchSpec = ps.BatchSpec(4, 2)


@dataclasses.dataclass(frozen=True)
class Uninherited:
    """Settings without a base."""

    spec: ps.BatchSpec = ps.BatchSpec(4, 2)

    def build(self, env: Any, seed: int = 0, **place: Any) -> Any: ...


class Half:
    """A live sampler without `evaluate_agent`."""

    def __init__(self, whole: Any) -> None:
        self._whole, self.spec, self.batch_spec, self.cut_slots = whole, whole.spec, whole.batch_spec, []
        for name in (
            "initialize",
            "obtain_samples",
            "metrics",
            "blank_batch",
            "state_dict",
            "load_state_dict",
            "shutdown",
        ):
            setattr(self, name, getattr(whole, name))


@dataclasses.dataclass(frozen=True)
class HalfBuilt(SamplerSettings):
    """Settings that build one."""

    spec: ps.BatchSpec = ps.BatchSpec(4, 2)

    def build(self, env: Any, seed: int = 0, **place: Any) -> Any:
        return Half(ps.SerialSampler(4, 2).build(env, seed))


def test_a_sampler_that_lacks_a_member_is_refused_with_its_signature_and_a_page() -> None:
    with pytest.raises(
        ConfigError, match=r"Unbuilt has no build\(env: Any, .*SamplerSettings asks for; see docs/writing-a-sampler.md"
    ):
        ps.Experiment("CartPole-v1", ps.PPO(), sampler=Unbuilt())  # pyright: ignore
    with pytest.raises(
        ConfigError, match=r"Uninherited has no .*; see docs/.*, or inherit SamplerSettings, which has a default$"
    ):
        ps.Experiment("CartPole-v1", ps.PPO(), sampler=Uninherited())  # pyright: ignore
    exp = ps.Experiment("CartPole-v1", ps.PPO(), sampler=HalfBuilt())
    with pytest.raises(
        ConfigError, match=r"Half has no evaluate_agent\(itr: int, .*Sampler asks for; see docs/writing-a-sampler.md"
    ):
        ps.Trainer(exp)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: ps.PPO(gamma=0.9), "PPO has no setting 'gamma'; it is 'discount' here"),  # pyright: ignore
        (lambda: ps.A2C(batch_size=9), "no minibatches in A2C: a gradient step is on a batch"),  # pyright: ignore
        (lambda: ps.SAC(buffer_size=9), r"it is 'replay.capacity' here \(--algo.replay.capacity\)"),  # pyright: ignore
        (lambda: ps.PPO(n_steps=9), r"it is 'T' of ps.SerialSampler, .* here \(--sampler.T\)"),  # pyright: ignore
        (lambda: ps.CpuSampler(batch_B=9), "it is 'B' here"),  # pyright: ignore
        (lambda: ps.AsyncSampler(num_workers=9), r"it is 'workers' of ps.CpuSampler, .*--sampler.workers"),  # pyright: ignore
        (lambda: ps.RunnerSampler(num_env_runners=9), r"it is 'runners' here \(--sampler.runners\)"),  # pyright: ignore
        (lambda: ps.RunnerSampler(rollout_fragment_length=9), r"it is 'inner.T' here \(--sampler.inner.T"),  # pyright: ignore
        (
            lambda: ps.RunnerSampler(B=9),
            "`B` is a setting of ps.SerialSampler, .*: sampler.inner.B, `--sampler.inner.B`",
        ),  # pyright: ignore
        (lambda: ps.RunnerSampler(sample_timeout_s=9), "it is 'deadline_s' here"),  # pyright: ignore
        (lambda: ps.IMPALA(lambda_=0.9), "it is 'vtrace_lambda' here"),  # pyright: ignore
        (lambda: ps.IMPALA(vtrace_clip_rho_threshold=2), "it is 'rho_bar' here"),  # pyright: ignore
        (lambda: ps.OfflineSampler(datset="a"), "did you mean 'dataset'"),  # pyright: ignore
        (lambda: ps.RunConfig(total_timesteps=9), "it is 'steps' here"),  # pyright: ignore
        (lambda: ps.Experiment("a", ps.PPO(), env_config={}), "it is 'env_kwargs' here"),  # pyright: ignore
        (lambda: ps.EnvConfig("a", kwarg={}), "did you mean 'kwargs'"),  # pyright: ignore
        (lambda: ps.Net(net_arch=(9,)), r"it is 'hidden' here .*net\.actor_hidden and net\.critic_hidden"),  # pyright: ignore
        (lambda: ps.ReplaySettings(buffer_size=9), "it is 'capacity' here"),  # pyright: ignore
    ],
)
def test_settings_know_the_names_of_other_libraries(make: Callable[[], Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ps.Experiment("CartPole-v1", ps.PPO(), ps.RunConfig()), r"pass it as run=RunConfig\(\.\.\.\)"),
        (lambda: ps.Experiment("CartPole-v1", ps.PPO(), steps=3), r"run\.steps"),
        (lambda: ps.Experiment("CartPole-v1", ps.PPO(), "cpu"), r"sampler='cpu'; expected ps\.CpuSampler\(\.\.\.\) or"),
        (lambda: ps.Experiment("CartPole-v1", ps.PPO(), "GpuSampler"), r"expected ps\.GpuSampler\(\.\.\.\)"),  # pyright: ignore
        (lambda: ps.Experiment("CartPole-v1", ps.PPO(), ps.CpuSampler), r"expected ps\.CpuSampler\(\.\.\.\)"),  # pyright: ignore
        (
            lambda: ps.Experiment("CartPole-v1", ps.PPO(), "cuda"),
            r"expected a sampler's settings, e\.g\. ps\.SerialSampler",
        ),  # pyright: ignore
        (lambda: ps.train("CartPole-v1"), r"'CartPole-v1' \(str\); expected an Experiment"),
    ],
    ids=["run-as-sampler", "steps", "cpu", "GpuSampler", "class", "other", "no-experiment"],
)
def test_a_first_mistake_is_answered_by_its_cure(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
