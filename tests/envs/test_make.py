import functools
import importlib
import json
import sys
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from penstock.core.config import from_plain, to_plain
from penstock.core.errors import ConfigError, EnvWorkerError, MissingExtraError
from penstock.envs.make import EnvConfig, as_env_config, with_added
from penstock.envs.toy import Counter, Echo, FaultEnv


def broken_wrapper(env: gym.Env) -> gym.Env:
    raise KeyError("no such lens")


def test_an_id_is_made_without_gymnasiums_checker_and_with_its_time_limit():
    env = EnvConfig("CartPole-v1").make()
    assert "PassiveEnvChecker" not in str(env)
    assert isinstance(env, gym.wrappers.TimeLimit)
    limited = EnvConfig("CartPole-v1", {"max_episode_steps": 7}).make()
    assert isinstance(limited, gym.wrappers.TimeLimit)
    assert limited._max_episode_steps == 7


def test_colon_means_a_registered_id_or_an_object():
    assert EnvConfig("gymnasium.envs.classic_control:CartPole-v1").make().unwrapped.__class__.__name__ == "CartPoleEnv"
    echo = EnvConfig("penstock.envs.toy:Echo", {"slot": 5}).make()
    assert isinstance(echo, Echo)
    assert echo.slot == 5
    vector = EnvConfig("gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv", {"num_envs": 3}).make()
    assert isinstance(vector, CartPoleVectorEnv)


def test_callables_are_called_with_kwargs_and_wrapped_in_order():
    config = EnvConfig(
        lambda stop: Counter(terminate_at=stop),
        {"stop": 3},
        wrappers=("gymnasium.wrappers:OrderEnforcing", lambda env: gym.wrappers.TimeLimit(env, 2)),
    )
    env = config.make()
    assert isinstance(env, gym.wrappers.TimeLimit)
    assert isinstance(env.env, gym.wrappers.OrderEnforcing)
    assert isinstance(env.unwrapped, Counter)
    assert env.unwrapped.terminate_at == 3
    assert config.make() is not env


class Consumes(Counter):
    """Takes its settings out of what it is given, as `config.pop("size", 1)` does."""

    def __init__(self, settings, sizes, table) -> None:
        super().__init__()
        self.seen = settings.pop("size", None), len(sizes), float(table[0])
        sizes.append(0)
        table += 1


def consume(env: gym.Env, settings) -> gym.Env:
    env.wrapped_with = settings.pop("scale", None)  # pyright: ignore
    return env


@pytest.mark.parametrize("bound", [False, True], ids=["kwargs", "partial"])
def test_an_instance_that_changes_its_arguments_changes_no_others(bound):
    given = {"settings": {"size": 3}, "sizes": [1, 2], "table": np.zeros(1)}
    wrap = functools.partial(consume, settings={"scale": 2})
    config = EnvConfig(functools.partial(Consumes, **given) if bound else Consumes, {} if bound else given, (wrap,))
    for _ in range(2):
        env = config.make()
        assert env.seen == (3, 2, 0.0)
        assert env.wrapped_with == 2
    assert given["settings"] == {"size": 3}


def test_instances_share_what_cannot_be_copied_and_callables():
    lock, made = threading.Lock(), []
    config = EnvConfig(lambda lock, hook: made.append((lock, hook)) or Counter(), {"lock": lock, "hook": len})
    config.make()
    assert made == [(lock, len)]


def test_unknown_ids_name_the_nearest_and_the_import():
    with pytest.raises(ConfigError, match="'CartPole-v1'") as caught:
        EnvConfig("CartPol-v1").make()
    assert "--import" in str(caught.value)
    with pytest.raises(ConfigError, match="LunarLander-v3"):
        EnvConfig("LunarLander-v2").make()


def test_wrong_import_paths_say_which_half_is_wrong():
    with pytest.raises(ConfigError, match="did you mean 'Echo'"):
        EnvConfig("penstock.envs.toy:Ecko").make()
    with pytest.raises(ConfigError, match="no_such_module"):
        EnvConfig("no_such_module:Env").make()
    with pytest.raises(ConfigError, match="imports: cannot import 'no_such_module'"):
        EnvConfig("CartPole-v1", imports=("no_such_module",)).make()
    with pytest.raises(ConfigError, match="is tuple"):
        EnvConfig("penstock.envs.toy:FAULTS").make()


def test_imports_come_first(tmp_path, monkeypatch):
    (tmp_path / "late_ids.py").write_text(
        "import gymnasium as gym\ngym.register('Late-v0', entry_point='penstock.envs.toy:Counter')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert isinstance(EnvConfig("Late-v0", imports=("late_ids",)).make().unwrapped, Counter)
    finally:
        gym.registry.pop("Late-v0", None)


def test_a_module_that_fails_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_ids.py").write_text("raise RuntimeError('no display')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvWorkerError, match="importing 'broken_ids' raised RuntimeError: no display"):
        EnvConfig("CartPole-v1", imports=("broken_ids",)).make()


@pytest.mark.parametrize("kwargs", [{"size": 8}, {}], ids=str)
def test_one_dict_of_settings_is_named_where_the_environment_takes_it(kwargs: dict[str, int]) -> None:
    def of_rllib(config: dict[str, int]) -> gym.Env:
        raise TypeError(f"an argument of its own, with {config['size']}")

    with pytest.raises(EnvWorkerError) as caught:
        EnvConfig(of_rllib, kwargs).make()
    assert f"RLlib's env_config is one argument here, env_kwargs={ {'config': kwargs} }" in str(caught.value)
    with pytest.raises(EnvWorkerError, match="with 8") as caught:
        EnvConfig(of_rllib, {"config": {"size": 8}}).make()
    assert "RLlib" not in str(caught.value)


def test_factories_that_raise_are_named_with_their_cause():
    with pytest.raises(EnvWorkerError, match=r"faults:FaultEnv raised RuntimeError: no simulator licence") as caught:
        EnvConfig(FaultEnv, {"fault": "raise_in_init"}).make()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EnvWorkerError, match="unexpected keyword argument 'sloot'"):
        EnvConfig("penstock.envs.toy:Echo", {"sloot": 1}).make()
    closed = []

    class Closing(Counter):
        def close(self) -> None:
            closed.append(self)

    with pytest.raises(EnvWorkerError, match=r"env wrapper .*broken_wrapper raised KeyError"):
        EnvConfig(Closing, wrappers=(broken_wrapper,)).make()
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("error", "extra"),
    [
        (gym.error.DependencyNotInstalled("Box2D is not installed, run `pip install swig`"), "box2d"),
        (gym.error.DependencyNotInstalled("MuJoCo is not installed"), "mujoco"),
        (gym.error.DependencyNotInstalled("pygame is not installed"), "classic"),
        (ModuleNotFoundError("No module named 'ale_py'", name="ale_py"), "atari"),
    ],
)
def test_missing_dependencies_name_the_extra(error: Exception, extra: str):
    def factory() -> None:
        raise error

    with pytest.raises(MissingExtraError, match=rf"penstock\[{extra}\]"):
        EnvConfig(factory).make()


def test_an_error_without_words_keeps_its_traceback(tmp_path, monkeypatch):
    def factory() -> None:
        assert not tmp_path

    for config in (EnvConfig(factory), EnvConfig("CartPole-v1", wrappers=(lambda env: factory(),))):
        with pytest.raises(EnvWorkerError, match=r"(?s)raised AssertionError: .*Traceback.*in factory\n +assert not"):
            config.make()
    (tmp_path / "silent_ids.py").write_text("raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvWorkerError, match=r"(?s)importing 'silent_ids' raised AssertionError.*silent_ids\.py"):
        EnvConfig("CartPole-v1", imports=("silent_ids",)).make()


def test_the_old_gym_is_named_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gym", None)

    def factory() -> None:
        importlib.import_module("gym")

    with pytest.raises(EnvWorkerError, match=r"old `gym`.*gymnasium\.Env.*shimmy"):
        EnvConfig(factory).make()
    (tmp_path / "old_ids.py").write_text("import gym\n")
    monkeypatch.syspath_prepend(tmp_path)
    for config in (EnvConfig("CartPole-v1", imports=("old_ids",)), EnvConfig("old_ids:Env")):
        with pytest.raises(ConfigError, match=r"cannot import 'old_ids'.*old `gym`.*shimmy"):
            config.make()
    like = type("Like", (), {"reset": lambda self: 0, "step": lambda self, action: (0, 0.0, False, {})})
    with pytest.raises(ConfigError, match=r"derive from gymnasium\.Env.*shimmy"):
        EnvConfig(like).make()


def test_factories_that_make_no_environment():
    with pytest.raises(ConfigError, match=r"NoneType.*is a `return` missing"):
        EnvConfig(lambda: None).make()
    with pytest.raises(ConfigError, match=r"gave builtins\.dict; expected a gymnasium\.Env"):
        EnvConfig(dict).make()
    old = type("Old", (), {"__module__": "gym.core"})
    with pytest.raises(ConfigError, match="old `gym`"):
        EnvConfig(old).make()


def test_settings_are_checked_at_construction():
    with pytest.raises(ConfigError, match="its own instance"):
        EnvConfig(Counter())  # pyright: ignore
    with pytest.raises(ConfigError, match="did you mean 'always'"):
        EnvConfig("CartPole-v1", checks="alway")  # pyright: ignore
    with pytest.raises(ConfigError, match="expected a tuple"):
        EnvConfig("CartPole-v1", imports="ale_py")  # pyright: ignore
    with pytest.raises(ConfigError, match="expected a tuple"):
        EnvConfig("CartPole-v1", drop="mission")  # pyright: ignore
    with pytest.raises(ConfigError, match="text=-1; expected the bytes"):
        EnvConfig("CartPole-v1", text=-1)


def test_as_env_config_and_storage():
    config = EnvConfig(Echo, {"length": 3}, ("gymnasium.wrappers:OrderEnforcing",), ("score",))
    assert as_env_config(config) is config
    assert as_env_config("CartPole-v1") == EnvConfig("CartPole-v1")
    assert config.name == "penstock.envs.toy.plumbing:Echo"
    assert from_plain(json.loads(json.dumps(to_plain(config)))) == config


@pytest.mark.parametrize("asked", [{"mask_key": "mask"}, {"drop": ("mission",)}, {"text": 8}])
def test_a_vector_environment_shows_what_it_shows(asked):
    with pytest.raises(ConfigError, match="CartPoleVectorEnv"):
        EnvConfig(CartPoleVectorEnv, **asked).make()


def test_a_factory_without_render_mode_is_told_how_to_be_filmed() -> None:
    class Plain(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
        action_space = gym.spaces.Discrete(2)

        def __init__(self) -> None: ...

    with pytest.raises(ConfigError, match=r"takes no render_mode, so it can be neither shown nor filmed; give it an"):
        with_added(EnvConfig(Plain), {"render_mode": "rgb_array"}).make()
