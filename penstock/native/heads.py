"""Actions by the native kernel, from the outputs of a policy's network: draws and log-probabilities in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.native import library
from penstock.native.elementwise import takes


def takes_rows(*tensors: Tensor | None) -> bool:
    """True if the kernel takes these float32 tensors, None aside, as they lie, and none wants a gradient."""
    recorded = torch.is_grad_enabled()
    return all(x is None or (takes(x) and x.is_contiguous() and not (recorded and x.requires_grad)) for x in tensors)


def categorical(logits: Tensor, mask: Tensor | None, noise: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
    """Choices [N], counted from `start`, and their log-probabilities [N] (nats).

    Args:
        logits: [N, n]. mask: [N, n], nonzero for legal choices. noise: [N, 1] uniforms; None: the likeliest choice.
    """
    rows, n = logits.shape
    action, logp = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    legal = None if mask is None else mask.bool().contiguous()
    library.found.categorical(_at(logits), rows, n, _at(legal), _at(noise), start, _at(action), _at(logp))
    return action, logp


def gaussian(
    mean: Tensor, log_std: Tensor, center: Tensor, half: Tensor, noise: Tensor | None, squash: bool
) -> tuple[Tensor, Tensor]:
    """Actions [N, n] in the environment's units and their log densities [N] (nats).

    Args:
        mean: [N, n] where [-1, 1] is the box, and log_std: [n]. center, half: [n] of the box. noise: [N, n] uniforms;
            None: the mean. squash: press the normals into the box by tanh.
    """
    rows, n = mean.shape
    action, logp = torch.empty(rows, n), torch.empty(rows)
    given = (_at(x) for x in (log_std, center, half, noise))
    library.found.gaussian(_at(mean), rows, n, *given, squash, _at(action), _at(logp))
    return action, logp


def control(out: Tensor, noise: Tensor | None, spread: float | None, center: Tensor, half: Tensor) -> Tensor:
    """Actions [N, n] in the environment's units of an off-policy actor.

    Args:
        out: [N, n] of a point, or [N, 2 n] means and log deviations of a squashed Gaussian, before tanh. noise: [N, n]
            uniforms; None: no noise. spread: deviation of a point's noise; None for a Gaussian.
    """
    rows, n = len(out), len(center)
    action = torch.empty(rows, n)
    given = (_at(x) for x in (noise, center, half, action))
    library.found.control(_at(out), rows, n, spread is None, spread or 0.0, *given)
    return action


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
