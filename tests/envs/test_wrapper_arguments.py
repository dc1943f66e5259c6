"""Wrappers with arguments: every form, in which they are stored, made and refused."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, RescaleAction, TransformReward

import penstock as ps
from penstock.core.config import from_plain, override, to_plain, unstorable
from penstock.core.errors import ConfigError
from penstock.envs.builtin import is_builtin_wrapper
from penstock.envs.make import EnvConfig
from penstock.envs.toy import TeamBits
from penstock.envs.wrappers import WeightedReward

STACK = "gymnasium.wrappers:FrameStackObservation(stack_size=4)"
HERE = "tests.envs.test_wrapper_arguments"


class Scaled(gym.RewardWrapper[Any, Any]):
    """Rewards times a factor, to which it adds what else it is given."""

    def __init__(self, env: Any, factor: float, *more: Any, name: str = "", each: Any = None) -> None:
        super().__init__(env)
        self.given = (factor, more, name, each)

    def reward(self, reward: Any) -> Any:
        return reward * self.given[0]


class Padded:
    """As SuperSuit's: of an environment of many agents, made by a function."""

    def __init__(self, env: Any, size: int) -> None:
        self.env, self.size = env, size

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)


def padded_v0(env: Any, size: int = 1) -> Padded:
    return Padded(env, size)


def twice(reward: Any) -> Any:
    return 2 * reward


def stored(settings: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(settings))))


def given_to(wrapper: Any) -> Any:
    env: Any = stored(EnvConfig("CartPole-v1", wrappers=(wrapper,))).make()
    return env.given


FORMS: list[tuple[Any, Any]] = [
    ("FrameStackObservation(stack_size=4)", STACK),
    ("gymnasium.wrappers:FrameStackObservation( stack_size = 4 )", STACK),
    (("FrameStackObservation", {"stack_size": 4}), STACK),
    (["FrameStackObservation", {"stack_size": 4}], STACK),
    ((FrameStackObservation, {"stack_size": 4}), STACK),
    (functools.partial(FrameStackObservation, stack_size=4), STACK),
    ("FlattenObservation", "gymnasium.wrappers:FlattenObservation"),
    ("FlattenObservation()", "gymnasium.wrappers:FlattenObservation"),
    (("FlattenObservation", {}), "gymnasium.wrappers:FlattenObservation"),
    ("WeightedReward((1, 0.1))", "penstock.envs.wrappers:WeightedReward((1, 0.1))"),
    (functools.partial(WeightedReward, weights=(1, 0.1)), "penstock.envs.wrappers:WeightedReward(weights=(1, 0.1))"),
    (functools.partial(Scaled, factor=2, name="x"), f"{HERE}:Scaled(factor=2, name='x')"),
    ("no_such:Thing", "no_such:Thing"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kept"), FORMS, ids=lambda value: str(value)[:40])
def test_all_forms_of_a_wrapper_are_one_text(given: Any, kept: str) -> None:
    """So experiments are equal, and config.json, TOML and a grid hold the same."""
    config = EnvConfig("CartPole-v1", wrappers=(given,))
    assert config.wrappers == (kept,)
    exp = ps.Experiment("CartPole-v1", ps.PPO(), wrappers=[given])  # pyright: ignore[reportArgumentType]
    assert exp.wrappers == override(exp, {"wrappers": [given]}).wrappers == exp.env_config.wrappers == (kept,)
    assert stored(exp).wrappers == stored(config).wrappers == (kept,)


def test_a_stack_has_the_shape_that_its_argument_asks_for() -> None:
    env = EnvConfig("CartPole-v1", wrappers=("FrameStackObservation(3)", ("FrameStackObservation", {"stack_size": 2})))
    assert env.make().observation_space.shape == (2, 3, 4)


def test_arguments_come_back_as_they_were_given() -> None:
    each = {"k": [1, (2, "a")], 3: None}
    assert given_to(f"{HERE}:Scaled(3, 4, (5, 6), name='x', each={each!r})") == (3, (4, (5, 6)), "x", each)
    assert given_to((f"{HERE}:Scaled", {"factor": 3, "each": each})) == (3, (), "", each)
    assert given_to(functools.partial(Scaled, factor=3, each=each)) == (3, (), "", each)
    odd = functools.partial(Scaled, factor=float("inf"), each=[(np.abs, 1), {"f": twice, "tuple": 1}])
    assert "unstorable" in json.dumps(to_plain(odd))  # a dict that looks like a mark of ours
    odd = functools.partial(Scaled, factor=float("inf"), each=[(np.abs, (1,)), {"f": twice, "d": np.float32}])
    factor, _, _, found = given_to(odd)
    assert factor == float("inf")
    assert found == [(np.abs, (1,)), {"f": twice, "d": np.float32}]


def test_a_pair_may_hold_functions_that_can_be_imported() -> None:
    for given in (("TransformReward", {"func": twice}), functools.partial(TransformReward, func=twice)):
        config = stored(EnvConfig("CartPole-v1", wrappers=(given,)))
        env = config.make()
        env.reset(seed=0)
        assert env.step(0)[1] == 2.0


def test_an_environment_and_what_it_is_given_may_be_partials() -> None:
    exp = ps.Experiment(
        functools.partial(gym.make, "CartPole-v1", max_episode_steps=7),
        ps.PPO(),
        eval_env=functools.partial(gym.make, "CartPole-v1", max_episode_steps=9),
        env_kwargs={"sutton_barto_reward": True},
    )
    found = stored(exp)
    for config, limit in ((found.env_config, 7), (found.eval_env_config, 9)):
        assert config.make()._max_episode_steps == limit
        assert config.name == "gymnasium.envs.registration:make"
    assert found.env_config.make().unwrapped._sutton_barto_reward


def agent(spec: Any, settings: Any, width: int = 8) -> Any:
    return ps.actor_critic(spec, settings)


def seat(agent: str, episode: int, seed: int, names: Any = "ab") -> str:
    return names[int(agent[-1])]


def test_functions_of_an_algorithm_may_be_partials() -> None:
    found = stored(ps.override(ps.PPO(), {"agent": functools.partial(agent, width=16)}))
    assert found.agent.func is agent
    assert found.agent.keywords == {"width": 16}
    both = ps.Policies({"a": ps.PPO(), "b": ps.PPO()}, functools.partial(seat, names=("b", "a")), {"a": 1, "b": 1})
    mapping = stored(both).policy_mapping_fn
    assert mapping("agent_0", 0, 0) == "b"
    assert mapping.keywords == {"names": ("b", "a")}


def test_instances_do_not_share_their_arguments() -> None:
    config = EnvConfig("CartPole-v1", wrappers=(f"{HERE}:Scaled(1, each=[1])",))
    first: Any = config.make()
    first.given[3].append(2)
    second: Any = config.make()
    assert second.given[3] == [1]


def test_wrappers_of_many_agents_take_arguments_too() -> None:
    for given in (f"{HERE}:padded_v0(3)", (padded_v0, {"size": 3}), functools.partial(padded_v0, size=3)):
        env: Any = stored(EnvConfig(TeamBits, wrappers=(given,))).make()
        assert env.size == 3
    rewards: Any = EnvConfig(TeamBits, wrappers=("WeightedReward(weights=[2.0])",)).make()
    assert rewards.env.possible_agents == ["agent_0", "agent_1"]


def test_wrappers_of_batches_take_arguments_too() -> None:
    config = EnvConfig(
        "CartPole-v1", {"vectorized": True, "num_envs": 2}, ("gymnasium.wrappers.vector:RecordEpisodeStatistics(5)",)
    )
    env: Any = config.make()
    assert env.return_queue.maxlen == 5


class Foreign:
    """An environment of no API that penstock knows."""

    closed = False

    def close(self) -> None:
        self.closed = True


class FromForeign(gym.Env[Any, Any]):
    """As shimmy's: the environment is a later argument."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, env_id: Any = None, make_kwargs: Any = None, env: Any = None, render_mode: Any = None) -> None:
        assert isinstance(env, Foreign)
        self.inner, self.render_mode = env, render_mode


def test_shimmys_wrappers_convert_what_is_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    shimmy: Any = ModuleType("shimmy")
    shimmy.__spec__, shimmy.GymV26CompatibilityV0 = ModuleSpec("shimmy", None), FromForeign
    monkeypatch.setitem(sys.modules, "shimmy", shimmy)
    for given in ("GymV26CompatibilityV0", "GymV26CompatibilityV0(render_mode='human')"):
        env: Any = EnvConfig(Foreign, wrappers=(given, "OrderEnforcing")).make()
        assert isinstance(env.unwrapped.inner, Foreign)
    with pytest.raises(ConfigError, match=r"gave .*Foreign; expected a gymnasium\.Env"):
        EnvConfig(Foreign, wrappers=("OrderEnforcing",)).make()
    monkeypatch.setitem(sys.modules, "shimmy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(ConfigError, match=r"unknown wrapper 'GymV26CompatibilityV0'.*shimmy, if it is installed"):
        EnvConfig(Foreign, wrappers=("GymV26CompatibilityV0",))


REFUSED: list[tuple[Any, str]] = [
    ("FrameStak(4)", r"unknown wrapper 'FrameStak'; did you mean 'FrameStackObservation'.*module:NAME"),
    (("TimeLimt", {"max_episode_steps": 3}), "unknown wrapper 'TimeLimt'; did you mean 'TimeLimit'"),
    ("gymnasium.wrappers.TimeLimit(3)", "did you mean 'gymnasium.wrappers:TimeLimit'"),
    ("TimeLimit, 4", r"wrapper 'TimeLimit, 4': arguments stand in brackets, as 'TimeLimit\(4\)'"),
    ("my.module:Skip, frames=4", r"brackets, as 'my\.module:Skip\(frames=4\)'"),
    ("TimeLimit 100", r"as 'TimeLimit\(100\)'"),
    ("TimeLimit(len)", r"'TimeLimit\(len\)' has arguments that cannot be read.*functools\.partial"),
    ({"max_episode_steps": 3}, r"wrappers has \{'max_episode_steps': 3\}; expected .*a pair"),
    (("TimeLimit", 3), r"wrappers has \('TimeLimit', 3\); expected .*a pair"),
    ((3, {}), r"wrappers has \(3, \{\}\); expected"),
    (None, "wrappers has None; expected"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=lambda value: str(value)[:30])
def test_wrappers_that_are_none_are_refused_when_they_are_named(given: Any, said: str) -> None:
    for take in (
        lambda: EnvConfig("CartPole-v1", wrappers=(given,)),
        lambda: ps.Experiment("x", ps.PPO(), wrappers=(given,)),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            take()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["TimeLimit(3)", FrameStackObservation, None])
def test_wrappers_that_are_no_tuple(given: Any) -> None:
    for take in (
        lambda: EnvConfig("CartPole-v1", wrappers=given),
        lambda: ps.Experiment("x", ps.PPO(), wrappers=given),
    ):
        with pytest.raises(ConfigError, match=r"wrappers=.*; expected a tuple: wrappers=\("):
            take()


bind: Any = functools.partial
MISFITS: list[tuple[Any, str]] = [
    ("FrameStackObservation(stak_size=4)", "takes no 'stak_size'; did you mean 'stack_size'"),
    (bind(FrameStackObservation, stak_size=4), "takes no 'stak_size'; did you mean 'stack_size'"),
    (bind(TransformReward, fun=len), "takes no 'fun'; did you mean 'func'"),
    ("FrameStackObservation", r"missing a required argument: 'stack_size'; .*it takes \(stack_size, padding_type\)"),
    (FrameStackObservation, "missing a required argument: 'stack_size'"),
    ("TimeLimit(3, 4)", r"too many positional arguments; .*it takes \(max_episode_steps\)"),
    ("OrderEnforcing(env=3)", "takes no 'env'"),
    (bind(RescaleAction, *[3], min_action=0, max_action=1), "multiple values|too many"),
]


@pytest.mark.parametrize(("given", "said"), MISFITS, ids=lambda value: str(value)[:30])
def test_arguments_that_its_signature_does_not_take_are_refused_before_anything_is_wrapped(
    given: Any, said: str
) -> None:
    for settings in ("CartPole-v1", TeamBits):
        with pytest.raises(ConfigError, match=f"^env wrapper .*{said}") as caught:
            EnvConfig(settings, wrappers=(given,)).make()
        assert "\n" not in str(caught.value)


def test_what_cannot_be_stored_is_named_by_its_place() -> None:
    odd = functools.partial(Scaled, factor=1, each=(np.zeros(2), [lambda: 1]))
    exp = ps.Experiment(
        lambda: None, ps.PPO(), wrappers=("OrderEnforcing", odd), env_kwargs={"a": {"b": len, "c": {1}}}
    )
    lost = unstorable(to_plain(exp))
    here = "test_what_cannot_be_stored_is_named_by_its_place.<locals>.<lambda>"
    assert lost == {
        "env": here,
        "wrappers[1].kwargs.each.tuple[0]": "array([0., 0.])",
        "wrappers[1].kwargs.each.tuple[1][0]": here,
        "env_kwargs.a.c": "{1}",
    }
    with pytest.raises(ConfigError, match="could not be stored"):
        stored(exp)


def test_what_a_decorator_hides_is_no_signature() -> None:
    @functools.wraps(padded_v0)
    def around(env: Any) -> Any:
        return padded_v0(env, 3)

    @functools.wraps(padded_v0)
    def of_any(*given: Any, **more: Any) -> Any:
        return padded_v0(given[0], more["width"])

    for wrapper in (around, bind(of_any, width=3)):
        env: Any = EnvConfig(TeamBits, wrappers=(wrapper,)).make()
        assert env.size == 3


class Own(functools.partial):
    """A partial that does something else when it is called."""


@dataclass(frozen=True)
class Adding:
    """Settings that are called."""

    size: int = 3

    def __call__(self, env: Any, by: int = 0) -> Any:
        return padded_v0(env, self.size + by)


def test_only_partials_of_functions_and_classes_are_stored() -> None:
    for wrapper in (Own(padded_v0, size=3), functools.partial(Adding(2), by=1)):
        config = EnvConfig(TeamBits, wrappers=(wrapper,))
        assert config.wrappers == (wrapper,)
        env: Any = config.make()
        assert env.size == 3
        assert list(unstorable(to_plain(config))) == ["wrappers[0]"]
    env = stored(EnvConfig(TeamBits, wrappers=(Adding(4),))).make()
    assert env.size == 4


HARMLESS = [
    "FrameStackObservation(4)", "gymnasium.wrappers:TimeLimit(max_episode_steps=9)", "copy_obs", "WeightedReward((1, 0.1))",
    ["FrameStackObservation", {"stack_size": 4, "padding_type": "zero"}], "penstock.envs.toy:HideVelocity",
    {"import": "gymnasium.wrappers:ClipReward", "args": [], "kwargs": {"min_reward": -1.5, "max_reward": None}},
]  # fmt: skip
FOREIGN = [
    "RecordVideo('x')", "gymnasium.wrappers.vector:RecordVideo('x')", "my_module:Mine", "FilterObservation(['a/b'])", "TimeLimit(10000000)",
    ["TimeLimit", {"max_episode_steps": b"x"}], ["TimeLimit"], {"import": None}, {}, 3, None, "TimeLimit(",
    "penstock.envs.wrappers:give_options(3)", {"import": "TimeLimit", "args": [{"import": "os:abort"}], "kwargs": {}},
]  # fmt: skip


@pytest.mark.parametrize("wrapper", [*HARMLESS, *FOREIGN], ids=lambda wrapper: str(wrapper)[:40])
def test_wrappers_of_ours_with_numbers_and_words_need_no_trust(wrapper: Any) -> None:
    assert is_builtin_wrapper(wrapper) == (wrapper in HARMLESS)
