import sys
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.envs import ids
from penstock.envs.ids import import_path_of, known_ids, note_on
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import makes_vector_env
from penstock.envs.toy import Counter, Overshoot, TMaze, __all__ as toys
from penstock.samplers.serial import SerialSampler


class Game(Counter):
    """What stands for the preprocessed game, or for Gymnasium's."""

    def __init__(self, game: str = "raw", sticky: float = 0.0, noop_max: int = 30) -> None:
        super().__init__()
        self.made = (game, sticky, noop_max)


@pytest.fixture
def ale(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ALE/Fake-v5` in place of ale-py's ids."""

    def make(**kwargs: Any) -> Any:
        kwargs.pop("repeat_action_probability")
        return Game(**kwargs)

    gym.register("ALE/Fake-v5", entry_point=make, kwargs={"game": "fake", "repeat_action_probability": 0.25})
    monkeypatch.setattr(ids, "atari", Game)
    monkeypatch.setattr(ids, "_ale_ids", lambda: ["ALE/Fake-v5"])
    yield
    del gym.registry["ALE/Fake-v5"]


def test_an_atari_id_is_the_preprocessed_game_unless_it_is_raw(ale: Any) -> None:
    def made(**kwargs: Any) -> Any:
        return EnvConfig("ALE/Fake-v5", kwargs).make().unwrapped.made  # pyright: ignore

    assert made() == ("fake", 0.25, 30)
    assert made(sticky=0.0, noop_max=3) == ("fake", 0.0, 3)
    assert made(raw=True) == ("fake", 0.0, 30)
    assert made(raw=False) == ("fake", 0.25, 30)
    with pytest.raises(ConfigError, match=r"frameskip=1; .*noop_max.*raw=True"):
        made(frameskip=1)
    with pytest.raises(ConfigError, match="did you mean 'ALE/Fake-v5'"):
        EnvConfig("ALE/Fakee-v5").make()
    with pytest.raises(ConfigError, match="did you mean 'ALE/Fake-v5'"):
        EnvConfig("Fake-v5").make()
    assert "ALE/Fake-v5" in known_ids()


def test_an_atari_id_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_ale_ids", list)
    with pytest.raises(MissingExtraError, match=r"penstock\[atari\]"):
        EnvConfig("ALE/Pong-v5").make()


def test_real_atari_and_minatar_ids() -> None:
    pytest.importorskip("ale_py")
    assert EnvConfig("ALE/MsPacman-v5").make().observation_space.shape == (4, 84, 84)
    assert EnvConfig("ale_py:ALE/Pong-v5", {"raw": True}).make().observation_space.shape == (210, 160, 3)
    assert EnvConfig("MinAtar/SpaceInvaders-v1").make().observation_space.shape == (10, 10, 6)


def test_toys_have_ids() -> None:
    assert isinstance(EnvConfig("penstock/TMaze-v0", {"length": 3}).make(), TMaze)
    left_out = {"FAULTS", "FaultEnv", "HideVelocity", "Toy", "ParallelToy", "TurnToy"}
    assert {f"penstock/{name}-v0" for name in toys if name not in left_out and not name.endswith("_positions")} <= set(
        known_ids()
    )
    with pytest.raises(ConfigError, match="did you mean 'penstock/Overshoot-v0'"):
        EnvConfig("penstock/Overshot-v0").make()
    assert np.isfinite(Overshoot().reset(seed=0)[0]).all()


def test_what_is_done_unasked_is_said() -> None:
    assert "raw=true" in EnvConfig("ALE/Pong-v5", {"sticky": 0}).note
    assert "sticky=0" in note_on("ale_py:ALE/Pong-v5", {"sticky": 0})
    assert (
        EnvConfig("ALE/Pong-v5", {"raw": True}).note == EnvConfig("CartPole-v1").note == EnvConfig(Counter).note == ""
    )
    assert import_path_of("MinAtar/Breakout-v1") == "penstock.envs.minatar:breakout"
    assert import_path_of("ale_py:ALE/Pong-v5") == "ALE/Pong-v5"
    assert import_path_of("CartPole-v1") == "CartPole-v1"


@pytest.mark.parametrize(
    "id_", ["mpe2/simple_sprad_v3", "mpe2/simple_spread_v9", "mpe/simple_spread_v3", "mpe2/simple-spread_v3"]
)
def test_a_mistyped_environment_of_many_agents_names_the_nearest(id_: str) -> None:
    pytest.importorskip("mpe2")
    with pytest.raises(ConfigError, match="did you mean 'pettingzoo:mpe2/simple_spread_v3'"):
        EnvConfig(f"pettingzoo:{id_}").make()
    with pytest.raises(ConfigError, match="did you mean 'pettingzoo:mpe2/simple_spread_v3'"):
        EnvConfig(f"pettingzoo/{id_}").make()


@pytest.mark.parametrize(
    ("env", "kwargs", "kind"),
    [
        ("CartPole-v1", {"vectorized": True}, "CartPoleVectorEnv"),
        ("CartPole-v1", {"vectorized": "sync", "sutton_barto_reward": True}, "SyncVectorEnv"),
        ("Pendulum-v1", {"vectorized": True, "g": 9.81}, "SyncVectorEnv"),
        ("penstock/PixelCatch-v0", {"vectorized": True, "layout": "hwc"}, "SyncVectorEnv"),
        ("gymnasium:CartPole-v1", {"vectorized": True}, "CartPoleVectorEnv"),
    ],
)
def test_an_id_is_made_as_one_batched_environment_of_as_many_as_the_sampler_has_slots(env, kwargs, kind):
    config = EnvConfig(env, kwargs)
    assert makes_vector_env(config)
    sampler = SerialSampler(T=2, B=3).build(config)
    made = sampler.pool._envs[0]._env  # pyright: ignore
    assert (type(made).__name__, made.num_envs) == (kind, 3)
    sampler.shutdown()


def test_an_id_without_vectorized_or_with_false_is_of_one_slot():
    config = EnvConfig("CartPole-v1", {"vectorized": False})
    assert not makes_vector_env(config)
    assert config.make_one().spec.max_episode_steps == 500


@pytest.mark.parametrize(
    ("env", "mode", "text"),
    [
        ("CartPole-v1", "treu", "vectorized='treu'; expected one of [True, False, 'vector_entry_point'"),
        ("penstock/Bandit-v0", "vector_entry_point", "no batched environment of its own; use vectorized=True"),
        ("CartPoel-v1", True, "unknown environment id 'CartPoel-v1': did you mean 'CartPole-v1'"),
    ],
)
def test_a_batched_environment_that_cannot_be_made_is_refused(env, mode, text):
    with pytest.raises(ConfigError) as caught:
        EnvConfig(env, {"vectorized": mode}).make()
    assert text in str(caught.value)


def test_a_batched_atari_id_is_ale_pys_own_with_the_published_preprocessing(ale: Any, monkeypatch) -> None:
    def batched(game: str, num_envs: int = 1, *, sticky: float = 0.0, noop_max: int = 30) -> Any:
        return gym.vector.SyncVectorEnv([lambda: Game(game, sticky, noop_max)] * num_envs)

    monkeypatch.setattr(ids, "atari_vector", batched)
    made: Any = EnvConfig("ALE/Fake-v5", {"vectorized": True, "num_envs": 2, "noop_max": 3}).make()
    assert [env.made for env in made.envs] == [("fake", 0.25, 3)] * 2


@pytest.mark.parametrize(
    ("id_", "imports", "said"),
    [
        ("PongNoFrameskip-v4", (), "'PongNoFrameskip-v4': Atari games are ALE/Pong-v5 here, .*sticky=0"),
        ("CrafterReward-v1", (), "'CrafterReward-v1'. Packages register their ids when they are imported"),
        ("CrafterReward-v1", ("json",), "'CrafterReward-v1'. Importing json has not registered it with Gymnasium"),
        ("MortarMayhem-Grid-v0", (), "'MortarMayhem-Grid-v0'. Packages register .* or the module of yours"),
        ("CartPol-v1", (), "did you mean 'CartPole-v1'"),
    ],
)
def test_an_unknown_id_is_answered_with_what_is_known_of_it(id_: str, imports: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EnvConfig(id_, imports=imports).make()


@pytest.mark.parametrize("of_0_21", [True, False])
def test_an_id_of_the_old_gym_is_answered_with_a_converter(of_0_21: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {"CrafterReward-v1": None}
    registry = SimpleNamespace(env_specs=ids) if of_0_21 else ids
    monkeypatch.setitem(sys.modules, "gym.envs.registration", SimpleNamespace(registry=registry))
    with pytest.raises(
        ConfigError, match=r"'CrafterReward-v1': a package has registered it with .* the old `gym`.*shimmy"
    ):
        EnvConfig("CrafterReward-v1", imports=("json",)).make()
