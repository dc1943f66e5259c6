"""The noise of a batch of tensors, drawn on the device that acts by it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.noise import HeldNoise, Noise, Purpose, stream_seed


def rows_on(
    device: torch.device, noise: Noise, T: int, B: int, n: int, ranks: bool, policy: int, held: HeldNoise
) -> Tensor:
    """[T, B, n] uniforms as `Noise.rows` has them, from torch's generator of the device (CUDA's is Philox-4x32-10).

    It is seeded anew for each batch by its address, so nothing is stored; other devices, and other numbers of slots,
    have other numbers. The values are those of `core.noise.uniform`: multiples of 2^-24 in the open interval (0, 1).
    """

    def drawn(purpose: int, batch: int, T: int, n: int) -> Tensor:
        generator = torch.Generator(device)
        generator.manual_seed(stream_seed(noise.seed, purpose, batch, noise.first_slot))
        out = torch.empty(T, B, n, device=device).random_(0, 1 << 23, generator=generator)
        return out.add_(0.5).mul_(2.0**-23)

    purpose = noise.purpose + (policy << 32)
    out = drawn(purpose, noise.batch, T, n - held.size)
    if held.size:
        blocks = held.blocks(noise.batch, T)
        parts = {block: drawn(held.purpose(purpose), block, 1, held.size) for block in set(blocks)}
        out = torch.cat([torch.cat([parts[block] for block in blocks]), out], -1)
    if ranks:
        slots = torch.arange(noise.first_slot, noise.first_slot + B, dtype=torch.float32, device=device)
        out[..., -1] = -1.0 - slots if noise.purpose == Purpose.EVALUATE_GREEDILY else slots
    return out
