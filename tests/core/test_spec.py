import json
import math

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec, allocate, describe

IMAGE = LeafSpec("box", (3, 8, 8), "uint8", 0.0, 255.0)


def test_sizes():
    assert BatchSpec(T=3, B=5).size == 15
    assert LeafSpec("discrete", (), "int64", sizes=(4,)).size == 1
    assert LeafSpec("multi_binary", (2, 3), "int8").size == 6


def test_only_three_dimensional_bytes_are_images():
    assert IMAGE.is_image
    assert not LeafSpec("box", (8, 8), "uint8").is_image
    assert not LeafSpec("box", (3, 8, 8), "float32").is_image
    assert not LeafSpec("multi_binary", (3, 8, 8), "uint8").is_image


def test_bounds_take_the_shape():
    leaf = LeafSpec("box", (2, 2), "float32", low=-1.0, high=(1.0, 2.0, 3.0, math.inf))
    assert leaf.bound("low").tolist() == [[-1, -1], [-1, -1]]
    assert leaf.bound("high").tolist() == [[1, 2], [3, math.inf]]
    assert leaf.bound("low").dtype == np.float64
    assert not leaf.bounded
    assert LeafSpec("box", (2,), "float32", low=-1.0, high=(1.0, 2.0)).bounded
    assert not LeafSpec("box", (2,), "float32", high=2.0).bounded
    assert not LeafSpec("box", (2,), "float32", low=(-1.0, -math.inf), high=2.0).bounded
    assert not LeafSpec("box", (2,), "float32", low=-1.0, high=(math.inf, 1.0)).bounded
    assert LeafSpec("box", (), "float32", -1.0, 1.0).bound("low").shape == ()


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (LeafSpec("discrete", (), "int64", sizes=(4,)), 0),
        (LeafSpec("discrete", (), "int64", sizes=(4,), start=3), 3),
        (LeafSpec("multi_discrete", (2, 2), "int64", sizes=(2, 2, 2, 2), start=(1, 2, 3, 4)), [[1, 2], [3, 4]]),
        (LeafSpec("multi_discrete", (2,), "int32", sizes=(2, 2), start=1), [1, 1]),
        (LeafSpec("multi_binary", (2,), "int8"), [0, 0]),
        (LeafSpec("box", (2,), "float32", 1.0, 2.0), [0, 0]),
    ],
)
def test_the_null_action(leaf: LeafSpec, value):
    null = leaf.null()
    assert null.tolist() == value
    assert null.shape == leaf.shape
    assert null.dtype == leaf.dtype


def test_a_spec_survives_json():
    obs = {
        "camera": IMAGE,
        "joints": (
            LeafSpec("box", (2,), "float32", (-1.5, -math.inf), math.inf),
            LeafSpec("box", (), "float64", -math.inf, 0.1),
        ),
    }
    action = LeafSpec("multi_discrete", (2,), "int64", sizes=(3, 4), start=(1, -2))
    for spec in (
        EnvSpec(obs, action, agents=3),
        EnvSpec(IMAGE, LeafSpec("discrete", (), "int64", sizes=(2,), start=5)),
    ):
        text = json.dumps(spec.to_plain(), allow_nan=False)
        again = EnvSpec.from_plain(json.loads(text))
        assert again == spec
        assert hash(repr(again)) == hash(repr(spec))  # no int became a float, no tuple a list


def test_what_is_no_spec_is_refused():
    plain = EnvSpec(IMAGE, IMAGE).to_plain()
    for broken in ({"leaf": ["box"]}, {"list": []}, 3, None, {"dict": {"x": 1}}):
        with pytest.raises(ConfigError, match="not a stored spec"):
            EnvSpec.from_plain({**plain, "obs": broken})


def test_describe_is_short():
    choice = LeafSpec("discrete", (), "int64", sizes=(4,))
    assert describe(LeafSpec("box", (4,), "float32")) == "box[4] float32"
    assert describe(choice) == "discrete(4) int64"
    assert describe({"b": choice, "a": IMAGE}) == "{box[3, 8, 8] uint8, discrete(4) int64}"


def test_allocate_makes_zeroed_memory_of_its_own():
    a = allocate({"x": IMAGE, "y": LeafSpec("discrete", (), "int64", sizes=(2,), start=7)}, 5, 2)
    assert a["x"].shape == (5, 2, 3, 8, 8)
    assert a["x"].dtype == np.uint8
    assert a["y"].shape == (5, 2)
    assert a["y"].dtype == np.int64
    assert not a["x"].any()
    assert not a["y"].any()
    assert a["x"].flags.owndata
    assert allocate(IMAGE).shape == (3, 8, 8)
