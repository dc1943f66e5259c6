import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig
from penstock.envs.wrappers import ActionMask, WeightedReward


class Talking(gym.Env):
    """Shows a number and a text."""

    observation_space = spaces.Dict({"at": spaces.Box(0, 9, (1,), np.float32), "mission": spaces.Text(20)})
    action_space = spaces.Discrete(2)

    def __init__(self, mission: str = "go to the door") -> None:
        self.mission = mission

    def _obs(self) -> Any:
        return {"at": np.ones(1, np.float32), "mission": self.mission}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        return self._obs(), np.array([1.0, -3.0]), False, False, {}


def test_text_is_refused_left_out_or_shown_as_bytes():
    one = ("penstock.envs.wrappers:WeightedReward",)
    with pytest.raises(ConfigError, match="--env-drop mission"):
        check_env(EnvConfig(Talking, wrappers=one))
    assert check_env(EnvConfig(Talking, wrappers=one, drop=("mission",))).spec.obs.keys() == {"at"}
    config = EnvConfig(Talking, {"mission": "höher"}, one, text=8)
    assert check_env(config).spec.obs["mission"].shape == (8,)
    assert config.make().reset()[0]["mission"].tolist() == [*"höher".encode(), 0, 0]
    with pytest.raises(EnvWorkerError, match="is 14 bytes long; set text=14 or more"):
        check_env(EnvConfig(Talking, wrappers=one, text=8))
    with pytest.raises(ConfigError, match="did you mean 'mission'"):
        EnvConfig(Talking, drop=("mision",)).make()
    with pytest.raises(ConfigError, match="leaves nothing"):
        EnvConfig(Talking, drop=("mission", "at")).make()
    with pytest.raises(ConfigError, match="expected a Dict"):
        EnvConfig("CartPole-v1", drop=("mission",)).make()
    with pytest.raises(ConfigError, match="which has no text"):
        EnvConfig("CartPole-v1", text=8).make()


def test_rewards_of_several_objectives_are_refused_with_a_wrapper_that_adds_them_up():
    with pytest.raises(EnvContractError, match=r"penstock\.envs\.wrappers:WeightedReward.*mo_gymnasium\.wrappers:Lin"):
        check_env(EnvConfig(Talking, drop=("mission",)))
    assert WeightedReward(Talking()).step(0)[1] == -2.0
    assert WeightedReward(Talking(), weights=(2, 0.5)).step(0)[1] == 0.5
    with pytest.raises(EnvWorkerError, match="with weights"):
        WeightedReward(Talking(), weights=(1, 1, 1)).step(0)


class MaskInInfo(gym.Env):
    """Shows its mask in the info under `legal`; `masks` are handed out in turn, None leaves the key away."""

    def __init__(
        self, masks: list[Any], actions: spaces.Space | None = None, shown: spaces.Space | None = None
    ) -> None:
        self.observation_space = shown or spaces.Box(0, 1, (2,), np.float32)
        self.action_space = actions or spaces.Discrete(3)
        self.masks = masks
        self.taken: list[Any] = []

    def _info(self) -> dict[str, Any]:
        mask = self.masks[len(self.taken) % len(self.masks)]
        return {"other": 1} if mask is None else {"legal": mask}

    def _obs(self) -> Any:
        zeros = np.zeros(2, np.float32)
        return {"view": zeros} if isinstance(self.observation_space, spaces.Dict) else zeros

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.taken = []
        return self._obs(), self._info()

    def step(self, action):
        self.taken.append(action)
        return self._obs(), 0.0, False, False, self._info()


def test_the_mask_moves_into_the_observation():
    env = ActionMask(MaskInInfo([np.array([True, False, True]), [0, 1, 0]]), "legal")
    assert env.observation_space["action_mask"] == spaces.MultiBinary(3)  # pyright: ignore
    obs, _ = env.reset(seed=0)
    assert sorted(obs) == ["action_mask", "obs"]
    assert obs["action_mask"].dtype == np.int8
    assert obs["action_mask"].tolist() == [1, 0, 1]
    assert env.step(0)[0]["action_mask"].tolist() == [0, 1, 0]


def test_a_dict_observation_keeps_its_keys():
    inner = MaskInInfo([[1, 1, 0]], shown=spaces.Dict({"view": spaces.Box(0, 1, (2,), np.float32)}))
    env = ActionMask(inner, "legal")
    assert sorted(env.reset()[0]) == ["action_mask", "view"]
    assert env.reset()[0] in env.observation_space


def test_multi_discrete_masks_are_concatenated():
    mask = (np.array([1, 0, 1]), np.array([0, 1]))
    env = ActionMask(MaskInInfo([mask], spaces.MultiDiscrete([3, 2])), "legal")
    assert env.reset()[0]["action_mask"].tolist() == [1, 0, 1, 0, 1]


def test_what_is_missing_is_named():
    env = ActionMask(MaskInInfo([[1, 1, 1], None]), "legal")
    env.reset()
    with pytest.raises(EnvWorkerError, match=r"step gave no info\['legal'\]; its keys are \['other'\]"):
        env.step(0)
    with pytest.raises(EnvWorkerError, match="2 elements; expected 3"):
        ActionMask(MaskInInfo([[1, 1]]), "legal").reset()
    with pytest.raises(ConfigError, match="no choices to mask; expected Discrete"):
        ActionMask(MaskInInfo([], spaces.Box(0, 1, (2,))), "legal")
    with pytest.raises(ConfigError, match="already"):
        ActionMask(ActionMask(MaskInInfo([[1, 1, 1]]), "legal"), "legal")


def test_check_env_plays_legal_actions_only():
    made = []

    def factory() -> gym.Env:
        made.append(MaskInInfo([[0, 0, 1], [0, 1, 0]]))
        return made[-1]

    report = check_env(EnvConfig(factory, mask_key="legal"))
    assert report.reproducible
    assert [int(a) for a in made[0].taken[:4]] == [2, 1, 2, 1]


def test_check_env_names_the_place_of_a_missing_mask():
    config = EnvConfig(lambda: MaskInInfo([[1, 1, 1], None]), mask_key="legal")
    with pytest.raises(EnvWorkerError, match=r"slot 0, step 0 of episode 0 \(seed \d+\): step gave no info"):
        check_env(config)


class Nested(Talking):
    """A text in a Dict in a Dict."""

    BOX = spaces.Box(0, 9, (1,), np.float32)
    observation_space = spaces.Dict({"a": spaces.Dict({"b": spaces.Text(9), "c": BOX}), "a/c": BOX})

    def _obs(self):
        one = np.ones(1, np.float32)
        return {"a": {"b": "go", "c": one}, "a/c": one}

    def step(self, action):
        return self._obs(), 1.0, False, False, {}


def test_keys_of_dicts_in_dicts_are_dropped_by_their_path():
    with pytest.raises(ConfigError, match=re.escape("env_drop=('a/b',) (--env-drop a/b)")):
        check_env(EnvConfig(Nested))
    env = EnvConfig(Nested, drop=("a/b",)).make()
    assert env.observation_space.spaces.keys() == {"a", "a/c"}
    assert env.observation_space["a"].spaces.keys() == env.reset()[0]["a"].keys() == {"c"}
    assert EnvConfig(Nested, drop=("a/b", "a/c")).make().reset()[0].keys() == {"a"}  # the key itself comes first
    with pytest.raises(ConfigError, match=r"has no 'a/d'; did you mean .*'a/b'"):
        EnvConfig(Nested, drop=("a/d",)).make()
    with pytest.raises(ConfigError, match="leaves nothing of the observation"):
        EnvConfig(Nested, drop=("a", "a/c")).make()
