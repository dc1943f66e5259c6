"""Networks from specs: settings, published image encoders, and an encoder for any observation tree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.agents.critics import SideBySide, StackedMLP
from penstock.agents.images import Image, ImageRule, image_of, require_images, trains_on_cpu
from penstock.agents.mlp import MLP, InitName, SimBa, init_layers, is_plain, orthogonal, run_layers
from penstock.agents.own.encoders import (
    EncoderFn,
    check_encoder,
    module_name,
    name_at,
    own_encoders,
    start_encoders,
)
from penstock.core.batch import Inputs
from penstock.core.config import import_object, known_names
from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Number, Positive, check_settings
from penstock.core.spec import LeafSpec, describe
from penstock.core.tree import Tree, tree_leaves, tree_paths, tree_structure, tree_unflatten
from penstock.native.direct import runs_directly
from penstock.ops.activations import ActivationName

LARGE = 10_000_000
"""Parameters above which a network gets a warning; an image of 84 x 84 x 4 needs 1.7e6."""
ABSURD = 500_000_000
"""Parameters above which a network is refused: 2 GB, four times that with gradients and Adam."""
_RESIZE = "gymnasium.wrappers.ResizeObservation(env, (84, 84))"


@dataclass(frozen=True)
class Net:
    """The default networks of an agent."""

    __new__ = known_names

    hidden: tuple[Count, ...] = (64, 64)
    """Widths of the fully connected layers, usually (64, 64) to (256, 256)."""
    actor_hidden: tuple[Count, ...] | None = None
    """Widths of the actor's fully connected layers; None: `hidden`. If actor and critic share a body (`hidden`), these
    layers follow it (and the memory)."""
    critic_hidden: tuple[Count, ...] | None = None
    """Like `actor_hidden`, for the critic or critics."""
    actor_keys: tuple[str, ...] | None = None
    """Keys of a Dict observation that the actor reads, of algorithms with an actor and a critic; None: all. An action
    mask is read in any case. Acting, exports and `predict` need these alone."""
    critic_keys: tuple[str, ...] | None = None
    """Like `actor_keys`, for the critic, which may see more than the actor (Pinto et al. 2018, "Asymmetric actor
    critic")."""
    activation: ActivationName | Callable[..., Any] = "tanh"
    """Activation between fully connected layers, by name or as a class of modules (`module:NAME`). tanh suits policy
    gradients on vectors (Andrychowicz et al. 2021, section 3.2), relu images."""
    block: Literal["none", "simba"] = "none"
    """`simba`: fully connected layers are residual blocks with norms (Lee et al. 2024), one for each width of `hidden`,
    which must be equal: (128,) for the actor and (512, 512) for critics in the paper, with `normalize_obs`. Activation
    (relu) and start are the paper's."""
    norm: Literal["none", "layer", "critic"] = "none"
    """`layer`: a LayerNorm (Ba et al. 2016) between each fully connected layer and its activation; `critic`: in critics
    alone, as those that learn from data of others need it (Ball et al. 2023)."""
    init: InitName = "auto"
    """Initialisation of hidden layers and image networks; `torch`: torch's own. `auto`, and output layers always: as
    each algorithm's page says."""
    encoder: EncoderFn | str | Mapping[str, EncoderFn | str] | None = None
    """Encoder of your own: `module:NAME` or a callable, from the observation's spec to a module with an int `features`,
    which maps observations [N, *O] to [N, features]. A mapping gives one for some keys of a Dict observation."""
    encoder_weights: str | Mapping[str, str] | None = None
    """File that the encoder starts from, safetensors or a state dict; a mapping: by key of `encoder`."""
    encoder_freeze: bool = False
    """Freeze encoders, which stay in `eval()`. For a smaller step size see `lr_scales`."""
    cnn: Literal["auto", "nature", "impala", "minatar"] | tuple[tuple[int, ...], ...] = "auto"
    """Encoder of images: Mnih et al. 2015, the ResNet of Espeholt et al. 2018, one small layer (Young and Tian 2019),
    or layers, each (channels, kernel, stride) or (channels, kernel, stride, padding) and followed by relu. These and
    `minatar` treat any box [H, W, C] or [C, H, W] as an image, bits and floats included. `auto` is `nature` from 36 x
    36, and below two layers of 3 x 3."""
    image: ImageRule = "auto"
    """Which boxes are images: `auto`: see docs/environments.md; `yes`: all of two to four axes; `no`: none."""
    channels: Literal["auto", "first", "last"] = "auto"
    """Axis of an image that holds its channels. `auto`: the one beside two equal axes, else the smaller of first and
    last."""
    image_scale: Positive | Literal["auto"] = "auto"
    """Divisor of an image's values, usually 255 or 1. `auto`: the upper bound of its space, at least 1."""
    shared: bool | None = None
    """Actor and critic share their body. None: only with byte images or memory, where a second body is costly."""
    recurrent: Literal["none", "lstm", "gru"] = "none"
    """Memory between body and heads."""
    recurrent_size: Count = 128
    """Width of the memory."""
    critic_recurrent: Literal["shared", "own", "none"] = "shared"
    """The critic's memory in PPO, A2C and the like: the actor's, its own, or none."""
    prev_action: bool = False
    """Feed the previous action to the body (one-hot for choices, zeros at an episode's start)."""
    prev_reward: bool = False
    """Feed the previous reward to the body."""
    squash: bool = False
    """Squash box actions into their bounds by tanh, with the exact log-probability, instead of clipping them."""
    log_std_init: Number | None = None
    """Initial log standard deviation of box actions in units of half the box, usually -2 to 0; with gSDE, of each
    weight's noise. None: 0, with gSDE -2, in SAC -3."""
    use_sde: bool = False
    """gSDE (Raffin et al. 2021) for one box of actions, in PPO, A2C and SAC: noise is linear in the last features, for
    smooth motion."""
    sde_sample_freq: Count | None = None
    """Steps after which gSDE draws new noise, usually 4 to 64; None: once a batch (-1 in Stable-Baselines3)."""
    normalize_obs: bool = False
    """Shift and scale box observations (not images of uint8) by their running mean and variance."""
    reward_scale: Positive = 1.0
    """Multiplies rewards, for targets only; after `normalize_reward` or `clip_reward`."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return, clipped at 10, for targets only. With n_step
    > 1 all algorithms but R2D1 clip the discounted sum of n rewards, where Stable-Baselines3's VecNormalize clips
    each."""
    clip_reward: bool = False
    """Learn from the sign of rewards, as on Atari (Mnih et al. 2015, "Methods"); the record keeps the rewards."""
    terminal_info: str = ""
    """Key of a recorded env info, such as `life_lost`; targets treat nonzero as a terminal state."""

    def __post_init__(self) -> None:
        if isinstance(self.activation, str) and ":" in self.activation:
            import_object(self.activation)
        check_settings(self, "net.")
        if self.block != "none" and self.norm != "none":
            raise ConfigError(f"net.block={self.block!r} with net.norm={self.norm!r}; blocks have norms of their own")
        for name in ("hidden", "actor_hidden", "critic_hidden"):
            widths = getattr(self, name)
            if self.block != "none" and len(set(widths or ())) > 1:
                raise ConfigError(
                    f"net.{name}={widths} with net.block={self.block!r}; expected equal widths, one for each block, "
                    f"such as {(widths[0],) * len(widths)}"
                )
        for i, layer in enumerate(self.cnn if isinstance(self.cnn, tuple) else ()):
            if len(layer) not in (3, 4) or min(layer[:3]) < 1 or min(layer) < 0:
                raise ConfigError(
                    f"net.cnn[{i}]={layer}; expected (channels, kernel, stride[, padding]): "
                    "whole numbers of at least 1, padding of at least 0"
                )
        if self.cnn == ():
            raise ConfigError("net.cnn=() has no layers; expected at least one, or 'auto'")
        if self.clip_reward and self.normalize_reward:
            raise ConfigError("net.clip_reward and net.normalize_reward both change the size of rewards; choose one")
        if self.critic_recurrent != "shared" and not self.is_recurrent:
            raise ConfigError(
                f"net.critic_recurrent={self.critic_recurrent!r} with net.recurrent='none'; expected 'lstm' or 'gru'"
            )

    @property
    def is_recurrent(self) -> bool:
        """True if the agent carries state from step to step."""
        return self.recurrent != "none"

    def body(self, inputs: int, hidden: tuple[int, ...], gain: float | None = math.sqrt(2.0)) -> MLP | SimBa:
        """Fully connected layers of these widths; `gain`: of the orthogonal start of plain ones."""
        if self.block == "simba" and hidden:
            return SimBa(inputs, hidden[0], len(hidden))
        return MLP(inputs, hidden, self.activation, gain=gain, init=self.init, norm=self._is_normed())

    def bodies(self, k: int, inputs: int, outputs: int) -> StackedMLP | SideBySide:
        """[N, inputs] -> [k, N, outputs]: k networks of widths `hidden` side by side, each with a linear layer."""
        if self.block == "simba" and self.hidden:
            return SideBySide((self.body(inputs, self.hidden) for _ in range(k)), outputs)
        return StackedMLP(k, inputs, self.hidden, outputs, self.activation, self.init, self._is_normed())

    def _is_normed(self) -> bool:
        """True for layers with norms. Raises ConfigError in a network that is actor and critic in one."""
        if self.norm == "critic":
            raise ConfigError(
                "net.norm='critic' needs a critic apart from the actor; use net.norm='layer' or 'none' here"
            )
        return self.norm == "layer"

    def of(self, part: Literal["actor", "critic"]) -> Net:
        """The settings of a separate actor or critic network, with its widths as `hidden`."""
        hidden = self.actor_hidden if part == "actor" else self.critic_hidden
        own = self if self.norm != "critic" else replace(self, norm="layer" if part == "critic" else "none")
        return own if hidden is None else replace(own, hidden=hidden)

    def without_keys(self, keys: Collection[str]) -> Net:
        """The settings for observations without some keys of a Dict."""
        if not isinstance(self.encoder, Mapping) or not set(keys) & set(self.encoder):
            return self
        return replace(self, encoder={name: x for name, x in self.encoder.items() if name not in keys} or None)

    def refuse_parts(self, algo: str) -> None:
        """Raises ConfigError for settings of actor or critic, given to an agent with one network."""
        given: dict[str, Any] = {"actor_hidden": self.actor_hidden, "critic_hidden": self.critic_hidden}
        given["critic_recurrent"] = None if self.critic_recurrent == "shared" else self.critic_recurrent
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"net.{name}={value!r} with {algo}, which has one network; use net.hidden")

    def log_std(self, with_sde: float = -2.0) -> float:
        """`log_std_init`; if None 0, or `with_sde` with gSDE, which sums noise over all features."""
        usual = with_sde if self.use_sde else 0.0
        return usual if self.log_std_init is None else float(self.log_std_init)

    @property
    def fed(self) -> frozenset[str]:
        """Names of the `Inputs` that the networks read besides the observation."""
        first = self.is_recurrent or self.prev_action or self.prev_reward
        used = {"prev_action": self.prev_action, "prev_reward": self.prev_reward, "first": first}
        return frozenset(name for name, yes in used.items() if yes)


def _laid_out(images: Tensor) -> Tensor:
    """Images in the layout fastest for training."""
    return images.contiguous(memory_format=torch.channels_last) if trains_on_cpu(images) else images


def convolved(convs: nn.Sequential, images: Tensor) -> Tensor:
    """[N, size]: `convs`, flattened; a relu after a plain convolution is done in place."""
    if not is_plain(convs, nn.Sequential) or not runs_directly():
        return convs(images).flatten(1)
    x, before, layers = images, None, list(convs)
    for layer in layers:
        over = before is not None and is_plain(before, nn.Conv2d) and is_plain(layer, nn.ReLU)
        if over and layer is layers[-1]:
            return x.flatten(1).relu_()  # in the order in which its gradient arrives
        x, before = x.relu_() if over else layer(x), layer
    return x.flatten(1)


class NatureCNN(nn.Module):
    """[N, C, H, W] float in [0, 1] -> [N, 512]: the convolutions of Mnih et al. 2015, "Methods".

    `closing`: end in the layer of 512 units; else [N, size] of the last convolution.
    """

    def __init__(self, channels: int, height: int, width: int, closing: bool = True) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(channels, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
        )
        features = _conv_size(self.convs, channels, height, width, "nature", "36 x 36")
        refuse_absurd(features * 512 if closing else 0, f"net.cnn='nature' for an image of {height} x {width}", _RESIZE)
        self.out = nn.Linear(features, 512) if closing else None
        self.size = 512 if closing else features
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                orthogonal(layer, math.sqrt(2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = convolved(self.convs, _laid_out(x))
        return x if self.out is None else run_layers(x, (self.out,), "relu")


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(torch.relu(x))))


class ImpalaResNet(nn.Module):
    """[N, C, H, W] float in [0, 1] -> [N, 256]: the deep network of Espeholt et al. 2018, figure 3.

    `closing`: end in the layer of 256 units; else [N, size] of the last convolution.
    """

    def __init__(self, channels: int, height: int, width: int, closing: bool = True) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for i, o in zip((channels, 16, 32), (16, 32, 32)):
            stages += [nn.Conv2d(i, o, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), _Residual(o), _Residual(o)]
        self.convs = nn.Sequential(*stages, nn.ReLU())
        features = _conv_size(self.convs, channels, height, width, "impala", "8 x 8")
        refuse_absurd(features * 256 if closing else 0, f"net.cnn='impala' for an image of {height} x {width}", _RESIZE)
        self.out = nn.Linear(features, 256) if closing else None
        self.size = 256 if closing else features
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                orthogonal(layer, math.sqrt(2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = convolved(self.convs, _laid_out(x))
        return x if self.out is None else run_layers(x, (self.out,), "relu")


class MinAtarCNN(nn.Module):
    """[N, C, H, W] float in [0, 1] -> [N, 16 (H - 2) (W - 2)]: the convolution of Young and Tian 2019, section 4."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3)
        self.size = _conv_size(nn.Sequential(self.conv), channels, height, width, "minatar", "3 x 3")

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.conv(_laid_out(x))).flatten(1)


class Convolutions(nn.Module):
    """[N, C, H, W] float -> [N, size]: the layers of a tuple `net.cnn`, each followed by relu.

    Raises:
        ConfigError: a kernel is larger than its layer's padded input.
    """

    def __init__(self, layers: tuple[tuple[int, ...], ...], channels: int, height: int, width: int) -> None:
        super().__init__()
        self.convs = nn.Sequential()
        c, h, w = channels, height, width
        for i, (out, kernel, stride, *rest) in enumerate(layers):
            padding = sum(rest)
            largest = min(h, w) + 2 * padding
            if largest < kernel:
                raise ConfigError(
                    f"net.cnn[{i}]={layers[i]} has a kernel of {kernel} x {kernel} for {h} x {w}, padding {padding} "
                    f"(the image is {height} x {width}); use a kernel of at most {largest}, more padding, or smaller "
                    "strides before it"
                )
            conv = nn.Conv2d(c, out, kernel, stride, padding)
            orthogonal(conv, math.sqrt(2.0))
            self.convs.extend((conv, nn.ReLU()))
            c, h, w = out, (h + 2 * padding - kernel) // stride + 1, (w + 2 * padding - kernel) // stride + 1
        self.size = c * h * w

    def forward(self, x: Tensor) -> Tensor:
        return convolved(self.convs, _laid_out(x))


def image_network(cnn: Any, c: int, h: int, w: int, closing: bool = True) -> nn.Module:
    """The network of `net.cnn` for an image; `closing`: with the fully connected layer of its paper."""
    if cnn == "auto":
        cnn = "nature" if min(h, w) >= 36 else _small_layers(h, w)
    if isinstance(cnn, tuple):
        return Convolutions(cnn, c, h, w)
    if cnn == "minatar":
        return MinAtarCNN(c, h, w)
    return (NatureCNN if cnn == "nature" else ImpalaResNet)(c, h, w, closing)


def _small_layers(h: int, w: int) -> tuple[tuple[int, ...], ...]:
    """32 and 64 channels of 3 x 3, padded, which halve the image where a side is longer than 8."""
    layers: list[tuple[int, ...]] = []
    for channels in (32, 64):
        stride = 2 if max(h, w) > 8 else 1
        layers.append((channels, 3, stride, 1))
        h, w = (h - 1) // stride + 1, (w - 1) // stride + 1
    return tuple(layers)


class Encoder(nn.Module):
    """Features [N, size] of an observation tree, with previous action and reward if the net asks for them.

    Vectors pass unchanged, choices as one-hots, bits as floats, each image (`image_of`) through its own network, unless
    `net.encoder` takes it. A single vector is returned as it is.

    Args:
        closing: image networks end in the fully connected layer of their paper, if it has one.
    """

    def __init__(self, obs: Tree, action: Tree, net: Net, closing: bool = True) -> None:
        super().__init__()
        if torch.get_default_dtype() is not torch.float32:
            raise ConfigError(
                f"torch's default dtype is {torch.get_default_dtype()}; networks of float32 observations must be "
                "float32: call torch.set_default_dtype(torch.float32) before the agent is built"
            )
        self.leaves: list[LeafSpec] = tree_leaves(obs)
        self.action_leaves: list[LeafSpec] = tree_leaves(action) if net.prev_action else []
        self.prev_reward = net.prev_reward
        self.images = nn.ModuleDict()
        self.own = nn.ModuleDict()
        """The user's encoders, by key of a Dict observation; one for the whole observation is `obs`."""
        encoders = own_encoders(obs, net)
        self._taken = _taken_leaves(obs, encoders)
        self.shown: list[Image | None] = [
            None if i in self._taken else image_of(leaf, net) for i, leaf in enumerate(self.leaves)
        ]
        """Each leaf as an image; None for other leaves and those of a user's encoder."""
        self.paths = tree_paths(obs)
        if not encoders:
            require_images(self.leaves, self.shown, net)
        self.size = sum(_flat_size(leaf) for leaf in self.action_leaves) + int(net.prev_reward)
        self.size += sum(int(module.features) for module in encoders.values())  # pyright: ignore[reportArgumentType]
        plain = [leaf for i, leaf in enumerate(self.leaves) if self.shown[i] is None and i not in self._taken]
        _check_layers(self.size + sum(map(_flat_size, plain)), obs, net)
        for number, (key, module) in enumerate(encoders.items()):
            self.own[module_name(key, number)] = module
        for i, (leaf, shown) in enumerate(zip(self.leaves, self.shown)):
            if i in self._taken:
                continue
            if shown is not None:
                image = image_network(net.cnn, shown.channels, shown.height, shown.width, closing)
                init_layers(image, net.init)
                self.images[str(i)] = image
                self.size += int(image.size)  # pyright: ignore[reportArgumentType]
                _warn_if_large(image, f"{shown.height} x {shown.width} x {shown.channels}", net)
            else:
                self.size += _flat_size(leaf)
        if not self.size:
            raise ConfigError(f"no features in observation {describe(obs)}; expected at least one array with elements")
        self.sees_images = bool(self.images) or any(len(self.leaves[i].shape) > 1 for i in self._taken)
        """Rows are large: with an image, or a user's encoder of an array of two or more axes."""
        one = self.leaves[0]
        self.is_identity = (
            isinstance(obs, LeafSpec)
            and one.kind == "box"
            and len(one.shape) == 1
            and one.dtype == "float32"
            and not self.action_leaves
            and not self.prev_reward
            and not encoders
        )
        self._encoders = {key: name_at(key, net).partition("=")[2] for key in encoders}
        if net.encoder_weights is not None or net.encoder_freeze:
            start_encoders(encoders or {self.paths[int(i)]: image for i, image in self.images.items()}, net)
        for key, module in encoders.items():
            check_encoder(key, module, obs if key is None else obs[key], net)  # pyright: ignore[reportIndexIssue]

    def in_words(self) -> dict[str, str]:
        """By path: user's encoders, and whether each box of two or more axes is an image or a vector."""
        found: dict[str, str] = {}
        for i, (path, leaf, image) in enumerate(zip(self.paths, self.leaves, self.shown)):
            if i in self._taken:
                if (own := self._taken[i]) is not None:
                    where = "" if own[1] is None else f"[{own[1]!r}]"
                    found[where] = f"{self._encoders[own[1]]}, {self.own[own[0]].features} features"
            elif image is not None or (leaf.kind == "box" and len(leaf.shape) > 1):
                found[path] = f"vector of {leaf.size:,} numbers" if image is None else str(image)
        return found

    def forward(self, inputs: Inputs, obs: Tree) -> Tensor:
        """Features [N, size] of flat inputs; `obs` is `inputs.obs` after normalisation."""
        parts: list[Tensor] = []
        for i, (leaf, image, x) in enumerate(zip(self.leaves, self.shown, tree_leaves(obs))):
            if i in self._taken:
                if (own := self._taken[i]) is not None:
                    parts.append(self.own[own[0]](obs if own[1] is None else obs[own[1]]))
                continue
            parts.append(_flat_features(leaf, x) if image is None else self.images[str(i)](image.floats(x)))
        if self.action_leaves:
            opened = inputs.first.unsqueeze(-1)
            for leaf, x in zip(self.action_leaves, tree_leaves(inputs.prev_action)):
                parts.append(_flat_features(leaf, x).masked_fill(opened, 0.0))
        if self.prev_reward:
            parts.append(inputs.prev_reward.masked_fill(inputs.first, 0.0).unsqueeze(-1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def refuse_absurd(count: int, network: str, cure: str) -> None:
    """Raises ConfigError if the parameters would not fit into memory."""
    if count > ABSURD:
        raise ConfigError(
            f"{network} has {count / 1e6:,.0f} million parameters; expected at most {ABSURD / 1e6:,.0f}: {cure}"
        )


def _check_layers(features: int, obs: Tree, net: Net) -> None:
    """Warns of fully connected layers that are large, and refuses absurd ones, before they are made."""
    count = sum(i * o for i, o in zip((features, *net.hidden), net.hidden))
    network = f"net.hidden={net.hidden} for {features:,} features of the observation {describe(obs)}"
    cure = (
        "a wrapper that shows fewer numbers, a smaller net.hidden, or, since a choice of n is n features, an "
        "nn.Embedding in an agent of your own (docs/writing-an-algorithm.md)"
    )
    refuse_absurd(count, network, cure)
    if count > LARGE:
        warnings.warn(
            f"{network} has {count / 1e6:.1f} million parameters; a smaller network is far faster: {cure}",
            stacklevel=1,  # here, so that an agent's second network says nothing new
        )


def _warn_if_large(image: nn.Module, shape: str, net: Net) -> None:
    following = net.hidden[0] * int(image.size) if net.hidden else 0  # pyright: ignore[reportArgumentType]
    count = sum(p.numel() for p in image.parameters()) + following
    refuse_absurd(count, f"net.cnn={net.cnn!r} with the layer after it for an image of {shape}", _RESIZE)
    if count > LARGE:
        warnings.warn(
            f"net.cnn={net.cnn!r} and the layer after it have {count / 1e6:.1f} million parameters for an image of "
            f"{shape}; a smaller one is far faster: {_RESIZE}",
            stacklevel=1,  # here, so that an agent's second network says nothing new
        )


def _taken_leaves(obs: Tree, encoders: Mapping[str | None, Any]) -> dict[int, tuple[str, str | None] | None]:
    """The leaves of users' encoders, by number: each encoder's first with its name and key, others None."""
    numbered: Any = tree_unflatten(tree_structure(obs), list(range(len(tree_leaves(obs)))))
    taken: dict[int, tuple[str, str | None] | None] = {}
    for number, key in enumerate(encoders):
        first, *others = tree_leaves(numbered if key is None else numbered[key])
        taken |= {first: (module_name(key, number), key), **dict.fromkeys(others)}
    return taken


def _flat_size(leaf: LeafSpec) -> int:
    return sum(leaf.sizes) if leaf.sizes else leaf.size


def _flat_features(leaf: LeafSpec, x: Tensor) -> Tensor:
    if leaf.kind == "discrete":
        return _one_hot(x, int(leaf.start), leaf.sizes[0])  # pyright: ignore[reportArgumentType]
    flat = x.flatten(1) if x.ndim > 1 else x.unsqueeze(-1)
    if leaf.kind != "multi_discrete":
        return flat.float()
    starts = leaf.start if isinstance(leaf.start, tuple) else (leaf.start,) * leaf.size
    one_hots = [_one_hot(flat[:, i], s, n) for i, (s, n) in enumerate(zip(starts, leaf.sizes))]
    return torch.cat(one_hots, -1)


def _one_hot(x: Tensor, start: int, n: int) -> Tensor:
    """[N, n] floats; zeros where x is no valid choice, as in padding."""
    return (x.long().unsqueeze(-1) == torch.arange(start, start + n, device=x.device)).float()


def _conv_size(convs: nn.Sequential, c: int, h: int, w: int, name: str, smallest: str) -> int:
    try:
        with torch.no_grad():
            return convs(torch.zeros(1, c, h, w)).numel()
    except RuntimeError as error:
        raise ConfigError(
            f"net.cnn={name!r} needs images of at least {smallest}; got {h} x {w} with {c} channels; "
            f"use net.cnn='auto', layers that fit such as net.cnn=((32, 3, 1, 1),), or a resize wrapper"
        ) from error
