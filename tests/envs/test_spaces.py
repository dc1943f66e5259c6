import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs.contract import describe_violation
from penstock.envs.spaces import env_spec, leaf_spec, space_to_spec


def test_uniform_box_bounds_become_one_number():
    image = leaf_spec(spaces.Box(0, 255, (3, 8, 8), np.uint8))
    assert image == LeafSpec("box", (3, 8, 8), "uint8", 0.0, 255.0)
    assert image is not None
    assert image.is_image
    assert leaf_spec(spaces.Box(-np.inf, np.inf, (2,), np.float32)) == LeafSpec("box", (2,), "float32")


def test_mixed_box_bounds_become_tuples_in_c_order():
    low = np.array([[0, 1], [2, -np.inf]], np.float32)
    leaf = leaf_spec(spaces.Box(low, np.full((2, 2), 9, np.float32)))
    assert leaf == LeafSpec("box", (2, 2), "float32", (0.0, 1.0, 2.0, -math.inf), 9.0)
    assert leaf is not None
    assert leaf.bound("low").tolist() == low.tolist()


def test_discrete_kinds():
    assert leaf_spec(spaces.Discrete(3, start=-1)) == LeafSpec("discrete", (), "int64", sizes=(3,), start=-1)
    assert leaf_spec(spaces.MultiDiscrete([[2, 3], [4, 5]])) == LeafSpec(
        "multi_discrete", (2, 2), "int64", sizes=(2, 3, 4, 5), start=(0, 0, 0, 0)
    )
    assert leaf_spec(spaces.MultiDiscrete([2, 3], start=[1, -1])) == LeafSpec(
        "multi_discrete", (2,), "int64", sizes=(2, 3), start=(1, -1)
    )
    assert leaf_spec(spaces.MultiBinary([2, 3])) == LeafSpec("multi_binary", (2, 3), "int8")


def test_dtypes_of_the_other_byte_order_are_recorded_in_this_machines():
    box, choices = spaces.Box(0, 1, (2,), np.dtype(">f4")), spaces.MultiDiscrete([2, 3], dtype=np.dtype(">i4"))
    spec = EnvSpec(space_to_spec(box, "observation"), space_to_spec(choices, "action"))
    assert [leaf.dtype for leaf in (spec.obs, spec.action)] == ["float32", "int32"]
    assert EnvSpec.from_plain(spec.to_plain()) == spec
    said = describe_violation(np.zeros(2, ">f4"), spec.obs, "observation")
    assert said is not None
    assert "got dtype >f4, expected float32" in said
    assert "Conform" in said


def test_nested_spaces_keep_their_structure_and_survive_storage():
    space = spaces.Dict({"a": spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(3))), "b": spaces.Box(0, 1, (1,))})
    spec = space_to_spec(space, "observation")
    assert list(spec) == ["a", "b"]
    assert isinstance(spec["a"], tuple)
    assert [leaf.kind for leaf in (*spec["a"], spec["b"])] == ["discrete", "multi_binary", "box"]
    whole = EnvSpec(spec, spec["a"])
    assert EnvSpec.from_plain(whole.to_plain()) == whole


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.OneOf((spaces.Discrete(2), spaces.Box(0, 1))),
    ],
)
def test_spaces_without_a_fixed_array_are_refused_by_path(space: spaces.Space):
    nested = spaces.Dict({"words": spaces.Tuple((spaces.Discrete(2), space))})
    with pytest.raises(ConfigError, match=r"observation\['words'\]\[1\]") as caught:
        space_to_spec(nested, "observation")
    assert type(space).__name__ in str(caught.value)
    assert "MultiBinary" in str(caught.value)


def test_a_space_that_is_refused_says_what_works():
    def said(space: Any, where: str = "observation") -> str:
        with pytest.raises(ConfigError) as caught:
            space_to_spec(space, where)
        return str(caught.value)

    mission = type("MissionSpace", (spaces.Space,), {"__module__": "minigrid.core.mission"})(dtype=str)
    text = said(spaces.Dict({"mission": mission}))
    for part in ("env_drop=('mission',) (--env-drop mission)", "--env-text 64", "minigrid.wrappers:ImgObsWrapper",
                 "minigrid.wrappers:FlatObsWrapper"):  # fmt: skip
        assert part in text
    text = said(spaces.Text(3))
    assert "--env-text" in text
    assert "--env-drop" not in text
    text = said(spaces.Dict({"graph": spaces.Sequence(spaces.Discrete(2))}))
    assert "--env-drop graph" in text
    assert "--env-text" not in text
    assert "env_" not in said(spaces.Dict({"words": spaces.Text(3)}), "action")


def test_empty_containers_and_odd_keys_are_refused():
    with pytest.raises(ConfigError, match=r"action\['x'\] space is an empty Dict"):
        space_to_spec(spaces.Dict({"x": spaces.Dict({})}), "action")
    with pytest.raises(ConfigError, match="key 3 "):
        space_to_spec(spaces.Dict({3: spaces.Discrete(2)}), "observation")  # pyright: ignore


def test_env_spec_of_single_and_vector_env_agree():
    single = gym.make("CartPole-v1")
    vector = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    assert env_spec(single) == env_spec(vector)
    assert env_spec(single).action == LeafSpec("discrete", (), "int64", sizes=(2,), start=0)
    vector.close()


def test_a_missing_space_is_named():
    with pytest.raises(ConfigError, match=r"Env\.observation_space is None"):
        env_spec(gym.Env())
