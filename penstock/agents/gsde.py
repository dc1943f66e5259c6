"""Generalised state-dependent exploration (Raffin et al. 2021, arXiv:2005.05719): noise that is linear in the features.

A matrix Z [L, A] of normals stays for some steps; the action is mean(h) + (exp(log_std) Z)^T h of the features h [L].
So near states get near noise, and motions are smooth. Over Z an action is normal, with variances sum_l h_l^2 std_la^2
(section 3.2), which is all that learning needs to know. As in the authors' code no gradient runs through h into them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.agents.distributions import Distribution, Gaussian, SquashedGaussian, standard_normal
from penstock.agents.mlp import orthogonal
from penstock.core.tree import Tree
from penstock.native.elementwise import exp, log

_EPS = 1e-6
"""Added to variances, as in the authors' code: features may all be zero."""


class StateDependentOutput(nn.Module):
    """Features [N, L] -> [N, 2 A], mean and log standard deviation of the actions that they lead to.

    Args:
        log_std: of the noise of each weight, usually -3 to -2, since an action's noise is the sum over L of them.
        clip_mean: means lie within this of 0; None for anywhere. 2 in Stable-Baselines3's SAC, where tanh follows.
    """

    def __init__(self, features: int, actions: int, log_std: float, clip_mean: float | None = None) -> None:
        super().__init__()
        self.mean = nn.Linear(features, actions)
        self.log_std = nn.Parameter(torch.full((features, actions), log_std))
        self.clip_mean = clip_mean

    @property
    def noise_size(self) -> int:
        """Numbers of a matrix Z."""
        return self.log_std.numel()

    def forward(self, h: Tensor) -> Tensor:
        mean = self.mean(h) if self.clip_mean is None else self.mean(h).clamp(-self.clip_mean, self.clip_mean)
        variance = h.detach().square() @ exp(2.0 * self.log_std)
        return torch.cat([mean, 0.5 * log(variance + _EPS)], -1)

    def offset(self, h: Tensor, noise: Tensor) -> Tensor:
        """[N, A] to be added to the means, from the uniforms [N, L A] of each row's matrix."""
        z = standard_normal(noise).unflatten(-1, self.log_std.shape)
        return (h.unsqueeze(-1) * (exp(self.log_std) * z)).sum(-2)


class StateDependentHead(nn.Module):
    """The action head of one box in place of an `ActionHead`: `linear` makes parameters, `forward` distributions.

    Args:
        center, half: [A] of the box. shape: of the action.
    """

    center_0: Tensor
    half_0: Tensor

    def __init__(
        self, features: int, center: Tensor, half: Tensor, shape: tuple[int, ...], squash: bool, log_std: float
    ) -> None:
        super().__init__()
        self.linear = _WithFeatures(StateDependentOutput(features, len(center), log_std))
        orthogonal(self.linear.output.mean, 0.01)
        self.shape, self.squash = shape, squash
        self.noise_sizes = [self.linear.output.noise_size]
        self.register_buffer("center_0", center, persistent=False)
        self.register_buffer("half_0", half, persistent=False)

    def forward(self, params: Tensor, mask: Tensor | None = None) -> Distribution:
        """The distribution with these parameters [N, ...], the outputs of `linear`."""
        size = len(self.center_0)
        mean, log_std, h = params.split([size, size, params.shape[-1] - 2 * size], -1)
        box = (SquashedGaussian if self.squash else Gaussian)(mean, log_std, self.center_0, self.half_0, self.shape)
        return _StateDependent(box, self.linear.output, h)


class _WithFeatures(nn.Module):
    """[N, L] -> [N, 2 A + L], the output and the features that it was made of."""

    def __init__(self, output: StateDependentOutput) -> None:
        super().__init__()
        self.output = output

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.output(h), h.detach()], -1)


class _StateDependent:
    """A Gaussian or squashed Gaussian that samples each row by its own noise matrix."""

    def __init__(self, box: Gaussian, output: StateDependentOutput, h: Tensor) -> None:
        self.box, self._output, self._h = box, output, h

    def sample(self, noise: Tensor) -> Tensor:
        return self.box.to_env(self.box.mean + self._output.offset(self._h, noise))

    def mode(self) -> Tensor:
        return self.box.mode()

    def log_prob(self, action: Tree) -> Tensor:
        return self.box.log_prob(action)

    def entropy(self) -> Tensor:
        return self.box.entropy()
