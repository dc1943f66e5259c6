"""Images among observations: which boxes are one, which axis holds channels, how values are scaled.

The rule is the table in docs/environments.md, "Images"; `net.image`, `net.channels` and `net.image_scale` override it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.spec import LeafSpec, describe
from penstock.native.direct import values_are_there

_BOARD, _GREY, _PICTURE = 5, 16, 36
"""Sides from which an array is an image: planes of a board, grey pictures of bytes, and floats without bounds."""
_PICTURE_BOUNDS = ((0.0, 255.0), (0.0, 1.0))
_NO_RANGE = 2.0**31 - 1
"""A bound from which it says nothing about the values."""
_DARK = 16.0
"""A scale from which values that never leave 0..1 are told: a network would see next to nothing."""

ImageRule = Literal["auto", "yes", "no"]


class ImageSettings(Protocol):
    """Settings of `Net` that `image_of` reads."""

    @property
    def image(self) -> ImageRule: ...
    @property
    def channels(self) -> Literal["auto", "first", "last"]: ...
    @property
    def image_scale(self) -> float | Literal["auto"]: ...
    @property
    def cnn(self) -> Any: ...
    @property
    def normalize_obs(self) -> bool: ...


@dataclass(frozen=True)
class Image:
    """A box as image networks take it: [C, H, W] floats, the frames of a stack side by side in C."""

    frames: int
    """Frames of a stack [S, H, W, C] or [S, C, H, W]; 1 for one image."""
    planes: int
    """Channels of a frame."""
    height: int
    width: int
    axis: Literal["first", "last", "none"]
    """The axis of a frame that holds its channels; none for a grey one [H, W]."""
    scale: float
    """Values are divided by it."""
    normalized: bool
    """`net.normalize_obs` shifts and scales its elements, in place of `scale`."""

    @property
    def channels(self) -> int:
        """C: frames times channels of a frame."""
        return self.frames * self.planes

    def floats(self, x: Tensor) -> Tensor:
        """[N, C, H, W] floats of observations [N, *O]."""
        if self.axis == "last":
            x = x.movedim(-1, -3)
        return as_floats(x.flatten(1, 2) if x.ndim == 5 else x.unsqueeze(1) if x.ndim == 3 else x, self.scale)

    def __str__(self) -> str:
        """`image, channels last, scaled by 1/255 (84 x 84, 4 frames of 3 channels)`."""
        layout = "grey" if self.axis == "none" else f"channels {self.axis}"
        scaled = "normalised" if self.normalized else "not scaled" if self.scale == 1 else f"scaled by 1/{self.scale:g}"
        planes = f"{self.planes} channel{'s' * (self.planes != 1)}"
        frames = f"{self.frames} frames of " if self.frames > 1 else ""
        return f"image, {layout}, {scaled} ({self.height} x {self.width}, {frames}{planes})"


def image_of(leaf: LeafSpec, net: ImageSettings) -> Image | None:
    """The box as an image, None where it is none."""
    rank = len(leaf.shape)
    if net.image == "no" or leaf.kind not in ("box", "multi_binary") or not 2 <= rank <= 4 or not leaf.size:
        return None
    custom = (net.cnn == "minatar" or isinstance(net.cnn, tuple)) and rank == 3 and leaf.kind == "box"
    axis = channel_axis(leaf.shape[-3:], net.channels) if rank > 2 else "none"
    frame = leaf.shape[-3:] if rank > 2 else (*leaf.shape, 1)
    planes, height, width = frame if axis == "first" else (frame[2], *frame[:2])
    if not (net.image == "yes" or custom or leaf.is_image or min(height, width) >= _least_side(leaf)):
        return None
    given = net.image_scale != "auto"
    normalized = net.normalize_obs and leaf.kind == "box" and leaf.dtype != "uint8" and not given
    scale = 1.0 if normalized else float(net.image_scale) if given else _scale(leaf)
    return Image(leaf.shape[0] if rank == 4 else 1, planes, height, width, axis, scale, normalized)


def require_images(leaves: Sequence[LeafSpec], images: Sequence[Image | None], net: ImageSettings) -> None:
    """Raises ConfigError where settings of images are given and no observation is one."""
    asked = {"net.image": net.image == "yes", "net.channels": net.channels != "auto"}
    asked["net.image_scale"] = net.image_scale != "auto"
    names = [name for name, yes in asked.items() if yes]
    if names and not any(images):
        hint = "net.image='yes'" if net.image == "auto" else "the setting left out"
        raise ConfigError(
            f"{names[0]}={getattr(net, names[0][4:])!r}, and no part of the observation {describe(tuple(leaves))} is "
            f"an image; expected a box of two to four axes, with {hint} (docs/environments.md, Images)"
        )


def as_floats(images: Tensor, scale: float = 255.0) -> Tensor:
    """[N, C, H, W] divided by `scale`, on their way to training on a CPU channels last where they are uint8.

    Few channels are laid out as bytes, one after the other by numpy: half the time of torch's copy.
    """
    if images.dtype is not torch.uint8 or type(images) is not Tensor or not trains_on_cpu(images):
        return images.float() if scale == 1.0 else images.float() / scale
    if images.shape[1] > 4 or images.is_contiguous(memory_format=torch.channels_last):
        return images.to(torch.float32, memory_format=torch.channels_last).div_(scale)
    laid_out = torch.empty_like(images, memory_format=torch.channels_last)
    last, first = laid_out.permute(0, 2, 3, 1).numpy(), images.numpy()
    for channel in range(images.shape[1]):
        last[..., channel] = first[:, channel]
    return laid_out.float().div_(scale)


def trains_on_cpu(images: Tensor) -> bool:
    """True for images that are convolved channels last, which takes training two thirds of the time on a CPU.

    Acting keeps to the layout in which a row's bits do not depend on the rows beside it.
    """
    return images.is_cpu and values_are_there() and not torch.is_inference_mode_enabled()  # the last cannot be compiled


def dark_range(image: Image, seen: Tensor) -> str | None:
    """`0..1`, or `-1..1`, where no value seen leaves that and the scale is for far larger ones; else "".

    None where all are 0, as on a black screen: later ones will tell.
    """
    if image.scale < _DARK or not seen.numel():
        return ""
    least, most = (float(x) for x in torch.aminmax(seen.double()))
    if least == most == 0.0:
        return None
    return "" if max(-least, most) > 1.0 else "-1..1" if least < 0.0 else "0..1"


def _least_side(leaf: LeafSpec) -> float:
    """The smaller side from which an array is an image by itself; inf for never."""
    if len(leaf.shape) > 2:
        planes = leaf.kind == "multi_binary" or np.dtype(leaf.dtype).kind in "biu" or leaf.bounded
        return _BOARD if planes else _PICTURE
    if leaf.kind == "multi_binary" or _ends(leaf) not in _PICTURE_BOUNDS:
        return math.inf
    return _GREY if leaf.dtype == "uint8" and _ends(leaf)[1] == 255.0 else _PICTURE


def channel_axis(frame: tuple[int, ...], asked: Literal["auto", "first", "last"]) -> Literal["first", "last"]:
    """The end of a frame that differs where the two other axes are equal, else the smaller end."""
    if asked != "auto":
        return asked
    a, b, c = frame
    if a == b != c:
        return "last"
    if b == c != a:
        return "first"
    return "first" if a < c else "last"


def _scale(leaf: LeafSpec) -> float:
    """The largest bound; 1 where that is smaller, or bounds are none or all that a signed integer can hold."""
    if leaf.kind != "box":
        return 1.0
    low, high = _ends(leaf)
    dtype, largest = np.dtype(leaf.dtype), max(abs(low), abs(high))
    if dtype.kind == "i" and (low, high) == (np.iinfo(dtype).min, np.iinfo(dtype).max):
        return 1.0
    return largest if 1.0 < largest < _NO_RANGE else 1.0


def _ends(leaf: LeafSpec) -> tuple[float, float]:
    """The smallest and the largest value of a box; of integers within what their dtype holds."""
    low, high = (float(x) for x in (leaf.bound("low").min(), leaf.bound("high").max()))
    dtype = np.dtype(leaf.dtype)
    if dtype.kind in "iu":
        low, high = max(low, float(np.iinfo(dtype).min)), min(high, float(np.iinfo(dtype).max))
    return low, high
