"""Memory over sequences in which episodes begin anywhere: state is zeroed inside the unroll, nothing is cut."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from penstock.core.tree import Tree, tree_map


class Memory(nn.Module):
    """An LSTM or GRU layer over [T, B, size] features; its state is a tree of [B, hidden] tensors."""

    def __init__(self, kind: Literal["lstm", "gru"], inputs: int, hidden: int) -> None:
        super().__init__()
        self.kind, self.size = kind, hidden
        self.cell = (nn.LSTM if kind == "lstm" else nn.GRU)(inputs, hidden)
        for name, parameter in self.cell.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter, 1.0)

    def initial_state(self, B: int) -> Tree:
        """Zeros [B, hidden], twice for an LSTM (hidden and cell)."""
        like = next(self.cell.parameters())
        zeros = torch.zeros(B, self.size, dtype=like.dtype, device=like.device)
        return {"h": zeros, "c": zeros.clone()} if self.kind == "lstm" else {"h": zeros}

    def forward(self, x: Tensor, first: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """Outputs [T, B, hidden] and the state after row T-1.

        Args:
            x: [T, B, inputs]. first: [T, B] bool, state is zeroed before these rows.
            state: before row 0.

        The sequence runs in as few pieces as there are rows with a reset, so that the library's fused loop serves
        the stretches between them (as IMPALA's reference agent does).
        """
        T = len(x)
        starts = [0, *(1 + first[1:].any(1).nonzero().flatten()).tolist(), T]
        outputs: list[Tensor] = []
        for t0, t1 in zip(starts, starts[1:]):
            keep = ~first[t0].unsqueeze(-1)
            held: dict[str, Tensor] = tree_map(lambda s, keep=keep: (s * keep).unsqueeze(0), state)
            out, new = self.cell(x[t0:t1], (held["h"], held["c"]) if self.kind == "lstm" else held["h"])
            state = {"h": new[0][0], "c": new[1][0]} if self.kind == "lstm" else {"h": new[0]}
            outputs.append(out)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)), state
