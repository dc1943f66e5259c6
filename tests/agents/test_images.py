"""Which boxes are images, which axis holds channels, how they are scaled: the table in docs/environments.md."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.agents.actor_critic import ActorCritic
from penstock.agents.images import Image, dark_range, image_of
from penstock.agents.networks import Encoder, Net
from penstock.agents.preparation import Preparation
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs.spaces import leaf_spec

CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,))
NET = Net()


def box(low: float, high: float, shape: tuple[int, ...], dtype: str) -> LeafSpec:
    found = leaf_spec(spaces.Box(low, high, shape, np.dtype(dtype)))  # pyright: ignore[reportArgumentType]
    assert found is not None
    return found


def taken(low: float, high: float, shape: tuple[int, ...], dtype: str, net: Net = NET) -> str:
    image = image_of(box(low, high, shape, dtype), net)
    if image is None:
        return "vector"
    return f"{image.frames} x {image.planes} {image.axis} {image.height} x {image.width} / {image.scale:g}"


INF = float("inf")
TABLE = [
    # three axes: uint8 of any size, planes of a board from 5 x 5, floats without bounds from 36 x 36
    ((0, 255, (4, 84, 84), "uint8"), "1 x 4 first 84 x 84 / 255"),
    ((0, 255, (210, 160, 3), "uint8"), "1 x 3 last 210 x 160 / 255"),
    ((0, 255, (3, 2, 2), "uint8"), "1 x 3 first 2 x 2 / 255"),
    ((0, 1, (8, 8, 4), "uint8"), "1 x 4 last 8 x 8 / 1"),
    ((0, 10, (7, 7, 3), "uint8"), "1 x 3 last 7 x 7 / 10"),
    ((0, 1, (8, 8, 4), "bool"), "1 x 4 last 8 x 8 / 1"),
    ((-1, 1, (8, 8, 4), "int8"), "1 x 4 last 8 x 8 / 1"),
    ((-128, 127, (8, 8, 4), "int8"), "1 x 4 last 8 x 8 / 1"),
    ((0, 12, (2, 6, 7), "int64"), "1 x 2 first 6 x 7 / 12"),
    ((0, 1, (8, 8, 12), "float32"), "1 x 12 last 8 x 8 / 1"),
    ((0, 255, (84, 84, 3), "float64"), "1 x 3 last 84 x 84 / 255"),
    ((-2, 2, (13, 13, 5), "float32"), "1 x 5 last 13 x 13 / 2"),
    ((0, 65_535, (40, 40, 1), "uint16"), "1 x 1 last 40 x 40 / 65535"),
    ((-INF, INF, (84, 84, 3), "float32"), "1 x 3 last 84 x 84 / 1"),
    ((0, 1, (3, 3, 2), "int8"), "vector"),
    ((0, 1, (4, 4, 9), "float32"), "vector"),
    ((-INF, INF, (8, 8, 3), "float32"), "vector"),
    # the channel axis is the end that differs where the others are equal, else the smaller
    ((0, 255, (7, 7, 20), "uint8"), "1 x 20 last 7 x 7 / 255"),
    ((0, 255, (20, 8, 8), "uint8"), "1 x 20 first 8 x 8 / 255"),
    ((0, 255, (6, 7, 9), "uint8"), "1 x 6 first 7 x 9 / 255"),
    ((0, 255, (8, 8, 8), "uint8"), "1 x 8 last 8 x 8 / 255"),
    # two axes: grey pictures
    ((0, 255, (84, 84), "uint8"), "1 x 1 none 84 x 84 / 255"),
    ((0, 255, (16, 16), "uint8"), "1 x 1 none 16 x 16 / 255"),
    ((0, 1, (84, 84), "float32"), "1 x 1 none 84 x 84 / 1"),
    ((0, 255, (4, 128), "uint8"), "vector"),  # RAM of four frames
    ((0, 3, (20, 20), "uint8"), "vector"),
    ((0, 1, (20, 20), "float32"), "vector"),
    ((-1, 1, (64, 64), "float32"), "vector"),
    # four axes: stacks of frames, whose rule is that of a frame
    ((0, 255, (4, 84, 84, 3), "uint8"), "4 x 3 last 84 x 84 / 255"),
    ((0, 255, (4, 3, 84, 84), "uint8"), "4 x 3 first 84 x 84 / 255"),
    ((0, 255, (4, 84, 84, 1), "uint8"), "4 x 1 last 84 x 84 / 255"),
    ((0, 1, (2, 8, 8, 4), "float32"), "2 x 4 last 8 x 8 / 1"),
    ((0, 1, (3, 2, 2, 2), "float32"), "vector"),
    ((-1, 1, (300,), "float32"), "vector"),
    ((0, 255, (2, 2, 8, 8, 3), "uint8"), "vector"),
]


@pytest.mark.parametrize(("given", "expected"), TABLE)
def test_the_table(given: tuple[float, float, tuple[int, ...], str], expected: str):
    assert taken(*given) == expected


def test_planes_of_multi_binary_are_images():
    assert image_of(LeafSpec("multi_binary", (2, 8, 8), "int8"), NET) == Image(1, 2, 8, 8, "first", 1.0, False)
    assert image_of(LeafSpec("multi_binary", (64, 64), "int8"), NET) is None


def test_settings_override_the_table():
    board, odd = (0, 1, (3, 3, 2), "int8"), (0, 255, (7, 9, 5), "uint8")
    assert taken(*board, Net(image="yes")) == "1 x 2 last 3 x 3 / 1"
    assert taken(-1, 1, (4, 6), "float32", Net(image="yes")) == "1 x 1 none 4 x 6 / 1"
    assert taken(*odd, Net(image="no")) == "vector"
    assert (taken(*odd), taken(*odd, Net(channels="first"))) == (
        "1 x 5 last 7 x 9 / 255",
        "1 x 7 first 9 x 5 / 255",
    )
    assert taken(*odd, Net(image_scale=1)) == "1 x 5 last 7 x 9 / 1"
    assert taken(0, 1, (4, 84, 84, 3), "float32", Net(image_scale=0.5)) == "4 x 3 last 84 x 84 / 0.5"


@pytest.mark.parametrize("net", [Net(image="yes"), Net(channels="last"), Net(image_scale=255)])
def test_settings_of_images_without_an_image_are_refused(net: Net):
    with pytest.raises(ConfigError, match=r"^net\.(image|channels|image_scale)=.* box of two to four axes"):
        Encoder(box(-1, 1, (3,), "float32"), CHOICE, net)


def test_0_and_1_are_seen_as_0_and_1_by_bounds_and_by_the_setting():
    planes = (torch.rand(5, 8, 8, 4) < 0.3).to(torch.uint8)
    by_bounds, by_setting, faint = (
        Encoder(box(0, high, (8, 8, 4), "uint8"), CHOICE, net)
        for high, net in ((1, NET), (255, Net(image_scale=1)), (255, NET))
    )
    for encoder in (by_setting, faint):
        encoder.load_state_dict(by_bounds.state_dict())
    x = Inputs(planes, None, torch.zeros(5), torch.zeros(5, dtype=torch.bool))
    seen = by_bounds.images["0"](planes.permute(0, 3, 1, 2).float())
    assert torch.equal(by_bounds(x, planes), seen) and torch.equal(by_setting(x, planes), seen)
    assert not torch.allclose(faint(x, planes), seen)


@pytest.mark.parametrize("shape", [(4, 36, 36, 3), (4, 3, 36, 36)])
def test_a_stack_of_colour_frames_is_the_image_of_all_its_channels(shape: tuple[int, ...]):
    encoder = Encoder(box(0, 255, shape, "uint8"), CHOICE, NET)
    x = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    folded = x.movedim(-1, 2) if shape[-1] == 3 else x
    by_hand = torch.stack([folded[:, i, c] for i in range(4) for c in range(3)], 1).float() / 255
    found = encoder(Inputs(x, None, torch.zeros(2), torch.zeros(2, dtype=torch.bool)), x)
    torch.testing.assert_close(found, encoder.images["0"](by_hand))


def test_what_frame_stacks_show_is_an_image():
    class Camera(gym.Env[np.ndarray, int]):
        observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)
        action_space = spaces.Discrete(2)

    leaf = leaf_spec(gym.wrappers.FrameStackObservation(Camera(), 4).observation_space)
    assert leaf is not None
    assert str(image_of(leaf, NET)) == "image, channels last, scaled by 1/255 (84 x 84, 4 frames of 3 channels)"


def test_images_that_are_no_bytes_are_normalised_where_that_is_asked_for():
    spec = EnvSpec({"a": box(0, 9, (6, 6, 2), "float32"), "b": box(0, 1, (6, 6, 2), "uint8")}, CHOICE)
    net = Net(hidden=(8,), normalize_obs=True)
    own = Preparation(spec, net)
    assert own.normalizer is not None
    assert [len(m.mean) for m in own.normalizer.moments] == [72, 0]
    encoder = ActorCritic(spec, net).actor.encoder
    assert encoder.in_words() == {
        "['a']": "image, channels last, normalised (6 x 6, 2 channels)",
        "['b']": "image, channels last, not scaled (6 x 6, 2 channels)",
    }
    scaled = image_of(spec.obs["a"], Net(normalize_obs=True, image_scale=9))
    assert scaled is not None and scaled.scale == 9.0 and not scaled.normalized


def test_an_encoder_says_what_it_takes_for_an_image():
    obs = {"x": box(-1, 1, (3,), "float32"), "m": box(-1, 1, (2, 3), "float32"), "g": box(0, 255, (20, 30), "uint8")}
    assert Encoder(obs, CHOICE, NET).in_words() == {
        "['g']": "image, grey, scaled by 1/255 (20 x 30, 1 channel)",
        "['m']": "vector of 6 numbers",
    }


def test_values_that_never_leave_0_to_1_are_noticed():
    image = image_of(box(0, 255, (8, 8, 4), "uint8"), NET)
    assert image is not None
    bits = (torch.arange(256).view(1, 8, 8, 4) % 2).to(torch.uint8)
    assert dark_range(image, bits) == "0..1" and dark_range(image, bits * 2) == ""
    assert dark_range(image, bits * 0) is None  # a black screen says nothing
    board = image_of(box(0, 12, (8, 8, 4), "int8"), NET)
    assert board is not None and dark_range(board, bits) == ""
