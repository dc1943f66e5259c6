"""Memory over sequences in which episodes begin anywhere: state is zeroed inside the unroll, nothing is cut."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.agents.precision import in_full
from penstock.core.tree import Tree, tree_map
from penstock.native.direct import is_transformed, values_are_there


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
        like = next(self.cell.parameters(), torch.zeros(0))  # a quantised cell has none
        zeros = torch.zeros(B, self.size, dtype=like.dtype, device=like.device)
        return {"h": zeros, "c": zeros.clone()} if self.kind == "lstm" else {"h": zeros}

    def forward(self, x: Tensor, first: Tensor, state: Tree, idle: Tensor | None = None) -> tuple[Tensor, Tree]:
        """Outputs [T, B, hidden] and the state after row T-1.

        Args:
            x: [T, B, inputs]. first: [T, B] bool, state is zeroed before these rows.
            state: before row 0. idle: [T, B] bool, state after these rows is the one before them.

        The sequence runs in as few pieces as there are rows with a reset, so that the library's fused loop serves
        the stretches between them (as IMPALA's reference agent does); rows that are idle somewhere are pieces of their
        own. Where a trace must hold for any resets, each row is a piece.
        """
        T = len(x)
        if T == 1 or not values_are_there():
            starts = list(range(T + 1))
        else:
            idle = idle if idle is not None and bool(idle.any()) else None
            breaks = first[1:].any(1)
            if idle is not None:
                breaks |= (idle[1:] | idle[:-1]).any(1)
            starts = [0, *(1 + breaks.nonzero().flatten()).tolist(), T]
        run = _one_row if is_transformed() and isinstance(self.cell, (nn.LSTM, nn.GRU)) else _library
        outputs: list[Tensor] = []
        for t0, t1 in zip(starts, starts[1:]):
            keep = ~first[t0].unsqueeze(-1)
            state = tree_map(lambda s, keep=keep: s * keep, state)
            out, after = in_full(functools.partial(run, self.cell), x[t0:t1], state)
            if idle is not None:
                stays = idle[t0].unsqueeze(-1)
                after = tree_map(lambda new, old, stays=stays: torch.where(stays, old, new), after, state)
            state = after
            outputs.append(out)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)), state


def _library(cell: nn.Module, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs of rows [T, B, inputs] by the library's fused loop, and the state after them."""
    held = {name: s.unsqueeze(0) for name, s in state.items()}
    out, new = cell(x, (held["h"], held["c"]) if "c" in held else held["h"])
    return out, {"h": new[0][0], "c": new[1][0]} if "c" in held else {"h": new[0]}


def _one_row(cell: Any, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Like `_library` for one row [1, B, inputs], written out: torch cannot map over its own loop.

    The equations and the order of gates are those of `torch.nn.LSTM` and `torch.nn.GRU`.
    """
    h = state["h"]
    seen, kept = F.linear(x[0], cell.weight_ih_l0, cell.bias_ih_l0), F.linear(h, cell.weight_hh_l0, cell.bias_hh_l0)
    if "c" in state:
        i, f, g, o = (seen + kept).chunk(4, -1)
        c = f.sigmoid() * state["c"] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h.unsqueeze(0), {"h": h, "c": c}
    (r, z, n), (kept_r, kept_z, kept_n) = seen.chunk(3, -1), kept.chunk(3, -1)
    z = (z + kept_z).sigmoid()
    h = (1.0 - z) * (n + (r + kept_r).sigmoid() * kept_n).tanh() + z * h
    return h.unsqueeze(0), {"h": h}
