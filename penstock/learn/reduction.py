"""Reduction: the gradient step of several learners made one, by one all-reduce between gradients and norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError
from penstock.learn.algorithm import Loss
from penstock.learn.comm import Comm
from penstock.learn.optimizers import Gradients


class Reduction:
    """Makes the gradients, loss and metrics of this rank's share of a minibatch those of the whole, on every rank.

    One flat tensor holds them all, weighted by the rows of the share, with those rows behind them: so a mean over the
    minibatch comes out whatever the shares are, and no two ranks differ in a bit afterwards.

    Args:
        agent: names parameters in messages.
        loss: of the own share; afterwards `loss` has the metrics of the whole minibatch, and says `stop` if any did.
        rows: of the share that count; 0: it only takes part.
    """

    def __init__(self, comm: Comm, agent: Agent, loss: Loss, rows: float) -> None:
        self._comm, self._agent, self.loss, self._rows = comm, agent, loss, rows

    def __call__(self, found: dict[str, Gradients]) -> dict[str, Gradients]:
        """The gradients over all ranks; a parameter that takes part nowhere has none.

        Raises:
            ConfigError: a parameter takes part in the loss of some ranks only.
        """
        every = [(p, g) for x in found.values() for p, g in zip(x.parameters, x.values)]
        dtype, device = every[0][0].dtype, every[0][0].device
        metrics = list(self.loss.metrics)
        scalars = [x.total for x in found.values()] + [torch.as_tensor(self.loss.metrics[k]) for k in metrics]
        told = [float(g is not None) for _, g in every] + [float(self.loss.stop), float(self._rows)]
        flat = torch.cat(
            [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in every]
            + [x.detach().to(device, dtype).reshape(1) for x in scalars]
            + [torch.tensor(told, dtype=dtype, device=device)]
        )
        weighted = flat[: len(flat) - len(told)]
        # Not by the weight alone: nothing times inf is nan, and a share of no rows says nothing.
        if self._rows:
            weighted.mul_(self._rows)
        else:
            weighted.zero_()
        self._comm.all_reduce(flat)
        *counts, stops, rows = flat[len(weighted) :].tolist()
        self._check(every, counts)
        weighted.div_(max(rows, 1.0))
        pieces = iter(weighted.split([p.numel() for p, _ in every] + [1] * len(scalars)))
        values = {
            name: [y.view_as(p) if g is not None else None for p, g, y in zip(x.parameters, x.values, pieces)]
            for name, x in found.items()
        }
        out = {name: Gradients(x.parameters, values[name], next(pieces)) for name, x in found.items()}
        common = {name: next(pieces).squeeze(0) for name in metrics}
        self.loss = self.loss._replace(metrics=common, stop=stops > 0.0)
        return out

    def _check(self, every: list[tuple[Tensor, Tensor | None]], counts: list[float]) -> None:
        """Raises ConfigError if a parameter takes part in the loss of some ranks only."""
        if all(count in (0.0, self._comm.size) for count in counts):
            return
        names: Mapping[int, str] = {id(p): name for name, p in self._agent.named_parameters()}
        for (p, _), count in zip(every, counts):
            name = names.get(id(p), f"a parameter of shape {list(p.shape)}")
            if 0.0 < count < self._comm.size:
                raise ConfigError(
                    f"{name} takes part in the loss of {count:.0f} of {self._comm.size} learners; expected the same "
                    "parameters on all: a loss must not choose its terms by what a minibatch happens to hold (multiply "
                    "by a mask instead)"
                )
