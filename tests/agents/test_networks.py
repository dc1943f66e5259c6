import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from penstock.agents.actor_critic import ActionHead
from penstock.agents.images import as_floats
from penstock.agents.networks import (
    Convolutions,
    Encoder,
    ImpalaResNet,
    MinAtarCNN,
    NatureCNN,
    Net,
    convolved,
)
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import LeafSpec

VECTOR = LeafSpec("box", (3,), "float32")
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=2)
CHOICES = LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3), start=(0, 5))
BITS = LeafSpec("multi_binary", (2, 2), "int8")
SCALAR = LeafSpec("box", (), "float64")


def inputs(obs: Any, n: int, action: Any = None) -> Inputs:
    return Inputs(obs, action, torch.arange(n).float(), torch.zeros(n, dtype=torch.bool))


def orthogonal_error(weight: Tensor, gain: float) -> float:
    w = weight.detach().flatten(1)
    square = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    return float((square - gain**2 * torch.eye(len(square))).abs().max())


@pytest.mark.parametrize(("cnn", "smallest"), [(NatureCNN, 36), (ImpalaResNet, 8)])
def test_image_encoders(cnn: Any, smallest: int):
    for c, h, w in ((3, smallest, smallest), (1, smallest + 5, smallest + 9)):
        net = cnn(c, h, w)
        out = net(torch.rand(2, c, h, w))
        assert out.shape == (2, net.size)
        assert (out >= 0).all()
        out.sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
        for layer in net.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                assert orthogonal_error(layer.weight, math.sqrt(2)) < 1e-4


def test_the_published_sizes():
    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    # 84 x 84 x 4: filters of 8, 4 and 3 with strides 4, 2 and 1 leave 64 x 7 x 7 features (Mnih et al. 2015).
    convolutions = (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64
    assert count(NatureCNN(4, 84, 84)) == convolutions + (64 * 7 * 7 + 1) * 512
    # Espeholt et al. 2018, figure 3: 15 convolutions of 3 x 3 and 256 units.
    deep = sum((i * 9 + 1) * o + 4 * (o * 9 + 1) * o for i, o in ((4, 16), (16, 32), (32, 32)))
    assert count(ImpalaResNet(4, 84, 84)) == deep + (32 * 11 * 11 + 1) * 256


def test_the_small_encoder_takes_grids_of_bits_by_either_end():
    first, last = (LeafSpec("box", shape, "bool", 0.0, 1.0) for shape in ((4, 10, 10), (10, 10, 4)))
    encoders = [Encoder(leaf, CHOICE, Net(cnn="minatar")) for leaf in (first, last)]
    encoders[1].load_state_dict(encoders[0].state_dict())
    bits = torch.rand(3, 4, 10, 10) < 0.3
    out = encoders[0](inputs(bits, 3), bits)
    assert out.shape == (3, 16 * 8 * 8) and encoders[0].size == 16 * 8 * 8
    conv = encoders[0].images["0"].conv  # pyright: ignore[reportAttributeAccessIssue]
    by_hand = (bits[1, :, 2:5, 3:6] * conv.weight[7]).sum() + conv.bias[7]
    assert out.view(3, 16, 8, 8)[1, 7, 2, 3].item() == pytest.approx(max(by_hand.item(), 0.0), abs=1e-6)
    swapped = bits.permute(0, 2, 3, 1).contiguous()
    torch.testing.assert_close(encoders[1](inputs(swapped, 3), swapped), out)
    pixels = Encoder(LeafSpec("box", (10, 10, 4), "uint8", 0.0, 255.0), CHOICE, Net(cnn="minatar"))
    pixels.load_state_dict(encoders[0].state_dict())
    grey = swapped.to(torch.uint8) * 255
    torch.testing.assert_close(pixels(inputs(grey, 3), grey), out)
    with pytest.raises(ConfigError, match=r"net.cnn='minatar' needs images of at least 3 x 3; got 2 x 9"):
        MinAtarCNN(3, 2, 9)


def test_a_small_image_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"net.cnn='nature' needs images of at least 36 x 36; got 20 x 30"):
        NatureCNN(3, 20, 30)
    NatureCNN(3, 36, 36)


@pytest.mark.parametrize("cnn", ["nature", "impala"])
def test_images_are_scaled_and_may_have_channels_at_either_end(cnn: Any):
    first, last = LeafSpec("box", (3, 36, 40), "uint8"), LeafSpec("box", (36, 40, 3), "uint8")
    a = Encoder(first, CHOICE, Net(cnn=cnn))
    b = Encoder(last, CHOICE, Net(cnn=cnn))
    b.load_state_dict(a.state_dict())
    image = torch.randint(0, 256, (2, 3, 36, 40), dtype=torch.uint8)
    expected = a.images["0"](image.float() / 255)
    with torch.no_grad():
        torch.testing.assert_close(a(inputs(image, 2), image), expected)
        moved = image.permute(0, 2, 3, 1).contiguous()
        torch.testing.assert_close(b(inputs(moved, 2), moved), expected, rtol=1e-4, atol=1e-5)
    assert a.size == expected.shape[1]


def test_features_of_every_kind_lie_side_by_side():
    obs = {"bits": BITS, "choice": CHOICE, "choices": CHOICES, "scalar": SCALAR, "vector": VECTOR}
    encoder = Encoder(obs, CHOICE, Net())
    x = {
        "bits": torch.tensor([[[1, 0], [1, 1]], [[0, 0], [0, 1]]], dtype=torch.int8),
        "choice": torch.tensor([2, 5]),
        "choices": torch.tensor([[1, 5], [0, 7]]),
        "scalar": torch.tensor([0.5, -2.0], dtype=torch.float64),
        "vector": torch.tensor([[1.0, 2, 3], [4, 5, 6]]),
    }
    out = encoder(inputs(x, 2), x)
    assert out.dtype == torch.float32
    assert out.tolist() == [
        [*[1, 0, 1, 1], *[1, 0, 0, 0], *[0, 1, 1, 0, 0], 0.5, *[1, 2, 3]],
        [*[0, 0, 0, 1], *[0, 0, 0, 1], *[1, 0, 0, 0, 1], -2, *[4, 5, 6]],
    ]
    assert encoder.size == 17


def test_rows_of_padding_are_no_choice_and_no_error():
    """They are zeros, which need not be a value of the space."""
    encoder = Encoder({"a": CHOICE, "b": CHOICES}, CHOICE, Net())
    padded = {"a": torch.tensor([5, 0]), "b": torch.tensor([[1, 5], [0, 0]])}
    assert encoder(inputs(padded, 2), padded).tolist() == [[0, 0, 0, 1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0, 0]]


def test_what_came_before_is_null_where_an_episode_opens():
    action = {"a": CHOICE, "b": LeafSpec("box", (2,), "float32")}
    encoder = Encoder(VECTOR, action, Net(prev_action=True, prev_reward=True))
    x = torch.ones(2, 3)
    prev = {"a": torch.tensor([3, 4]), "b": torch.tensor([[0.5, 0.25], [7, 8]])}
    given = Inputs(x, prev, torch.tensor([9.0, 5.0]), torch.tensor([False, True]))
    assert encoder(given, x).tolist() == [[1, 1, 1, 0, 1, 0, 0, 0.5, 0.25, 9], [1, 1, 1] + 7 * [0]]
    assert encoder.size == 10
    only_reward = Encoder(VECTOR, action, Net(prev_reward=True))
    assert only_reward(given, x).tolist() == [[1, 1, 1, 9], [1, 1, 1, 0]]
    assert only_reward.size == 4


def test_nothing_to_see_is_refused():
    with pytest.raises(ConfigError, match="no features"):
        Encoder({}, CHOICE, Net())
    with pytest.raises(ConfigError, match=r"^net\.hidden=\(64, 0\); expected 1 or more$"):
        Net(hidden=(64, 0))
    with pytest.raises(ConfigError, match="recurrent_size=0"):
        Net(recurrent_size=0)


def test_flat_inputs_are_time_major():
    given = Inputs({"x": torch.arange(12).reshape(2, 3, 2)}, None, torch.arange(6).reshape(2, 3), torch.ones(2, 3))
    flat = given.flat()
    assert flat.obs["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert flat.prev_action is None
    assert flat.prev_reward.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.first.shape == (6,)


def test_only_a_memory_makes_a_net_recurrent():
    assert [Net(recurrent=r).is_recurrent for r in ("none", "lstm", "gru")] == [False, True, True]


def test_layers_as_data_are_the_published_ones() -> None:
    """Nature's convolutions without its 512 units, number for number."""
    torch.manual_seed(0)
    nature = NatureCNN(4, 84, 84)
    torch.manual_seed(0)
    own = Convolutions(((32, 8, 4), (64, 4, 2), (64, 3, 1)), 4, 84, 84)
    x = torch.rand(2, 4, 84, 84)
    assert own.size == 64 * 7 * 7
    own.convs.load_state_dict(nature.convs.state_dict())
    assert torch.equal(own(x), nature.convs(x.contiguous(memory_format=torch.channels_last)).flatten(1))
    assert sum(p.numel() for p in NatureCNN(4, 84, 84, closing=False).parameters()) == sum(
        p.numel() for p in own.parameters()
    )


def test_padding_keeps_the_size_and_any_box_is_an_image() -> None:
    grid = LeafSpec("box", (10, 10, 4), "bool", 0.0, 1.0)
    encoder = Encoder(grid, CHOICE, Net(cnn=((16, 3, 1, 1),)))
    bits = torch.rand(3, 10, 10, 4) < 0.3
    assert encoder.size == 16 * 10 * 10 and encoder(inputs(bits, 3), bits).shape == (3, 1600)
    conv = encoder.images["0"].convs[0]  # pyright: ignore
    corner = (bits[1, :2, :2].permute(2, 0, 1) * conv.weight[5, :, 1:, 1:]).sum() + conv.bias[5]
    got = encoder(inputs(bits, 3), bits).view(3, 16, 10, 10)[1, 5, 0, 0].item()
    assert got == pytest.approx(max(corner.item(), 0.0), abs=1e-6)


@pytest.mark.parametrize("shape", [(7, 7, 3), (5, 5, 3), (3, 3, 3), (1, 1, 3), (35, 35, 3), (20, 60, 1), (4, 10, 10)])
def test_a_small_image_has_a_network_that_fits(shape: tuple[int, ...]) -> None:
    leaf = LeafSpec("box", shape, "uint8", 0.0, 255.0)
    encoder = Encoder(leaf, CHOICE, Net())
    x = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    assert encoder(inputs(x, 2), x).shape == (2, encoder.size) and 64 <= encoder.size <= 6_000
    assert not isinstance(encoder.images["0"], NatureCNN)
    large = Encoder(LeafSpec("box", (36, 36, 3), "uint8", 0.0, 255.0), CHOICE, Net())
    assert isinstance(large.images["0"], NatureCNN)


def test_a_layer_that_does_not_fit_is_named() -> None:
    net, leaf = Net(cnn=((16, 3, 2), (32, 5, 1))), LeafSpec("box", (7, 9, 3), "uint8", 0.0, 255.0)
    with pytest.raises(ConfigError, match=r"net.cnn\[1\]=\(32, 5, 1\) .* 5 x 5 for 3 x 4, .*at most 3"):
        Encoder(leaf, CHOICE, net)
    for cnn, message in (
        (((16, 3),), r"net.cnn\[0\]=\(16, 3\); expected \(channels, kernel, stride\["),
        (((16, 3, 0),), "at least 1"),
        (((16, 3, 1, -1),), "padding of at least 0"),
        ((), "no layers"),
        ("natur", "did you mean 'nature'|nature"),
    ):
        with pytest.raises(ConfigError, match=message):
            Net(cnn=cnn)  # pyright: ignore


def test_a_large_image_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr("penstock.agents.networks.LARGE", 100_000)
    leaf = LeafSpec("box", (60, 80, 3), "uint8", 0.0, 255.0)
    Encoder(leaf, CHOICE, Net(cnn="impala", hidden=(64,)))
    (warning,) = [w for w in recwarn if "million parameters" in str(w.message)]
    assert "0.8 million" in str(warning.message) and "60 x 80 x 3" in str(warning.message)
    assert "gymnasium.wrappers.ResizeObservation" in str(warning.message)
    Encoder(LeafSpec("box", (7, 7, 3), "uint8", 0.0, 255.0), CHOICE, Net(cnn=((4, 3, 1),)))
    assert len([w for w in recwarn if "million parameters" in str(w.message)]) == 1


def test_many_features_are_said_to_be_many_and_absurdly_many_are_refused(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    many = LeafSpec("discrete", (), "int64", sizes=(200_000,))
    with pytest.warns(UserWarning, match="200,000 features .* has 12.8 million parameters"):
        Encoder(many, CHOICE, Net(hidden=(64,)))
    with pytest.warns(UserWarning, match=r"net.hidden=\(4000, 4000\) for 3 features .* has 16.0 million"):
        Encoder(LeafSpec("box", (3,), "float32"), CHOICE, Net(hidden=(4000, 4000)))
    absurd = LeafSpec("discrete", (), "int64", sizes=(10**7,))
    with pytest.raises(ConfigError, match=r"10,000,000 features .* 640 million .*expected at most 500.*nn.Embedding"):
        Encoder(absurd, CHOICE, Net(hidden=(64,)))
    with pytest.raises(ConfigError, match="a head of 10,000,000 outputs has 640 million"):
        ActionHead(64, absurd, False, 0.0)
    monkeypatch.setattr("penstock.agents.networks.ABSURD", 100_000)
    image = LeafSpec("box", (60, 80, 3), "uint8", 0.0, 255.0)
    for cnn in ("nature", "impala"):
        with pytest.raises(ConfigError, match=f"net.cnn='{cnn}' for an image of 60 x 80 .*ResizeObservation"):
            Encoder(image, CHOICE, Net(cnn=cnn))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_is_refused_where_the_agent_is_made(dtype: torch.dtype):
    torch.set_default_dtype(dtype)
    try:
        with pytest.raises(ConfigError, match=rf"{dtype}.*set_default_dtype\(torch.float32\)"):
            Encoder(VECTOR, CHOICE, Net())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("channels", [1, 3, 4, 5, 12])
@pytest.mark.parametrize("kind", ["first", "last", "strided", "none"])
def test_bytes_become_the_floats_that_they_stand_for(channels: int, kind: str) -> None:
    images = torch.randint(0, 256, (6, channels, 9, 13), dtype=torch.uint8)
    if kind == "last":
        images = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    elif kind == "strided":
        images = images[::2, :, 1:, ::3]
    elif kind == "none":
        images = images[:0]
    before = images.clone()
    found = as_floats(images)
    assert torch.equal(found, images.float() / 255.0)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)
    with torch.inference_mode():
        acting = as_floats(images.contiguous())
    assert torch.equal(acting, found)
    assert acting.is_contiguous()


LAYERS = (((32, 8, 4), (64, 4, 2), (64, 3, 1)), ((7, 3, 2, 1),), ((5, 2, 1), (3, 3, 2, 1), (16, 2, 2)))


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("size", [(36, 36), (41, 57)])
def test_convolutions_and_relus_are_those_of_the_modules(layers: Any, size: Any) -> None:
    net = Convolutions(layers, 4, *size)
    x = torch.rand(5, 4, *size).contiguous(memory_format=torch.channels_last)
    weights = torch.rand(5, net.size)
    expected, found = net.convs(x).flatten(1), net(x)
    assert torch.equal(found, expected)
    by_modules = torch.autograd.grad((expected * weights).sum(), list(net.parameters()))
    own = torch.autograd.grad((found * weights).sum(), list(net.parameters()))
    again = torch.autograd.grad((net(x) * weights).sum(), list(net.parameters()))
    for a, b, c in zip(own, by_modules, again):
        torch.testing.assert_close(a, b)
        assert torch.equal(a, c)
    with torch.inference_mode():
        torch.testing.assert_close(convolved(net.convs, x.contiguous()), expected)


def _doubled(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 2.0 * out


CHANGES: dict[str, Any] = {
    "hook on a relu": lambda convs: convs[1].register_forward_hook(_doubled),
    "hook before a relu": lambda convs: convs[3].register_forward_pre_hook(lambda layer, args: (args[0] + 1.0,)),
    "hook on all": lambda convs: convs.register_forward_hook(_doubled),
    "pruning": lambda convs: prune.l1_unstructured(convs[2], "weight", 0.5),
    "parametrisation": lambda convs: parametrizations.weight_norm(convs[2]),
    "another activation": lambda convs: convs.__setitem__(5, nn.Tanh()),
    "a forward of its own": lambda convs: setattr(convs[5], "forward", torch.tanh),
    "no relu at the end": lambda convs: convs.__delitem__(5),
    "two relus": lambda convs: convs.append(nn.ReLU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_layer_act(change: str) -> None:
    net = NatureCNN(4, 36, 36, closing=False)
    x = torch.rand(3, 4, 36, 36).contiguous(memory_format=torch.channels_last)
    plain = net(x)
    CHANGES[change](net.convs)
    expected = net.convs(x).flatten(1)
    found = net(x)
    assert torch.equal(found, expected)
    assert change in ("two relus", "parametrisation") or not torch.equal(plain, found)
    own = torch.autograd.grad(found.sum(), list(net.parameters()))
    for a, b in zip(own, torch.autograd.grad(expected.sum(), list(net.parameters()))):
        torch.testing.assert_close(a, b)


def test_a_hook_keeps_what_it_saw() -> None:
    net = NatureCNN(4, 36, 36)
    x = torch.rand(3, 4, 36, 36)
    seen: list[Tensor] = []
    net.convs[0].register_forward_hook(lambda layer, args, out: seen.append(out.detach()))
    net(x)
    assert seen[0].min() < 0
    handle = nn.modules.module.register_module_forward_hook(lambda layer, args, out: seen.append(out.detach()))
    try:
        net(x)
    finally:
        handle.remove()
    assert min(float(out.min()) for out in seen[1:3]) < 0


def test_bf16_takes_images_channels_last_as_well() -> None:
    image = torch.randint(0, 256, (2, 4, 36, 36), dtype=torch.uint8)
    encoder = Encoder(LeafSpec("box", (4, 36, 36), "uint8"), CHOICE, Net(cnn="nature"))
    with torch.autocast("cpu", torch.bfloat16):
        assert as_floats(image).is_contiguous(memory_format=torch.channels_last)
        found = encoder(inputs(image, 2), image)
    torch.testing.assert_close(found.float(), encoder(inputs(image, 2), image), rtol=0.05, atol=0.05)
