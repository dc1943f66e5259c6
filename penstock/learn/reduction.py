"""GradientAllReduce: the gradient step of several learners made one, by one all-reduce between gradients and norm."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.parameters import parameters_digest
from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves
from penstock.learn.algorithm import Loss, Optimizer, Optimizers
from penstock.learn.comm import Comm
from penstock.learn.step.gradients import Gradients
from penstock.native.library import VARIABLE, kernel


class GradientAllReduce:
    """Turns gradients, loss and metrics of each rank's share of a minibatch into those of the full minibatch.

    One flat tensor holds them all, weighted by the rows of the share and followed by their number. So the result is the
    mean over the minibatch for any shares, and bit-identical on all ranks. It is float32 (half precision is summed in
    it), or wider where a parameter is.

    Args:
        agent: names parameters in messages.
        optimizers: all of the policy. All their parameters have a place, with or without a total in a loss, as ranks
            must send equal sizes.
        loss: of this rank's share; afterwards `loss` has the metrics of the full minibatch, and `stop` if any rank had.
            A metric is the mean over the shares that report it.
        share: of the minibatch; without valid rows it only takes part.
        metrics: names that all ranks know; adds names that a rank reports for the first time.
    """

    def __init__(
        self, comm: Comm, agent: Agent, optimizers: Optimizers, loss: Loss, share: TrainBatch, metrics: list[str]
    ) -> None:
        self._comm, self._agent, self._optimizers, self._rows = comm, agent, optimizers, _rows_of(loss, share)
        self.loss, self._metrics = loss, metrics

    def __call__(self, found: dict[str, Gradients]) -> dict[str, Gradients]:
        """The gradients over all ranks; a parameter that takes part nowhere has none.

        Raises:
            ConfigError: a parameter takes part in the loss of some ranks only.
        """
        own, placed = self.loss.metrics, {n: found.get(n) or _nothing(x) for n, x in self._optimizers.items()}
        every = [(p, g) for x in placed.values() for p, g in zip(x.parameters, x.values)]
        dtype = functools.reduce(torch.promote_types, (p.dtype for p, _ in every), torch.float32)
        device = every[0][0].device
        scalars = [x.total for x in placed.values()] + [torch.as_tensor(own.get(k, 0.0)) for k in self._metrics]
        told = [float(g is not None) for _, g in every] + [self._rows * (k in own) for k in self._metrics]
        told += [float(not own.keys() <= set(self._metrics)), float(self.loss.stop), float(self._rows)]
        flat = torch.cat(
            [(torch.zeros_like(p) if g is None else g).to(dtype).reshape(-1) for p, g in every]
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
        numbers = flat[len(weighted) :].tolist()
        counts, reporting, (new, stops, rows) = numbers[: len(every)], numbers[len(every) : -3], numbers[-3:]
        self._check(every, counts)
        if new:
            told_by_all = _texts(self._comm, json.dumps(list(own)))
            self._metrics += dict.fromkeys(k for x in told_by_all for k in json.loads(x) if k not in self._metrics)
            return self(found)
        weighted.div_(max(rows, 1.0))
        pieces = iter(weighted.split([p.numel() for p, _ in every] + [1] * len(scalars)))
        values = {
            name: [None if g is None else y.view_as(p).to(g.dtype) for p, g, y in zip(x.parameters, x.values, pieces)]
            for name, x in placed.items()
        }
        out = {name: Gradients(x.parameters, values[name], next(pieces)) for name, x in placed.items()}
        means = zip(self._metrics, reporting, pieces)
        common = {
            k: (x if n == rows else x * (rows / n)).squeeze(0) for k, n, x in means if n or (not rows and k in own)
        }
        self.loss = self.loss._replace(metrics=common, stop=stops > 0.0)
        return {name: out[name] for name in found}

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


def _nothing(optimizer: Optimizer) -> Gradients:
    """The gradients of a total that a loss leaves out."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return Gradients(parameters, [None] * len(parameters), torch.zeros(()))


def _texts(comm: Comm, text: str) -> list[str]:
    """The text of every rank."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [int(x) for x in comm.all_gather(torch.tensor([len(data)]))]
    padded = torch.cat((data, data.new_zeros(max(sizes) - len(data))))
    return [x[:size].numpy().tobytes().decode() for x, size in zip(comm.all_gather(padded), sizes)]


def check_built_alike(comm: Comm, agent: Agent) -> None:
    """Raises ConfigError unless every rank computes by the same kernel and has the same parameters."""
    own = kernel().encode().ljust(16)
    kernels = [bytes(x.tolist()) for x in comm.all_gather(torch.tensor(list(own), dtype=torch.uint8))]
    if other := [i for i, x in enumerate(kernels) if x != own]:
        raise ConfigError(
            f"rank {comm.rank} computes dense layers by kernel {kernel()!r}, rank {other[0]} by "
            f"{kernels[other[0]].decode().strip()!r}, and their last bits differ; set {VARIABLE} alike on every "
            "machine, and install penstock there with a C compiler"
        )
    digest = torch.frombuffer(bytearray(parameters_digest(agent)), dtype=torch.uint8)
    other = [i for i, x in enumerate(comm.all_gather(digest)) if not torch.equal(x, digest)]
    if other:
        raise ConfigError(
            f"the parameters of rank {comm.rank} differ from those of rank {other[0]}; build the policy with the "
            "same settings and seed on every rank, on machines and with versions that are alike"
        )


def check_alike(comm: Comm, agent: Agent) -> None:
    """Raises ConfigError, on every rank, that names a tensor of the agent's state in which ranks differ."""
    held = {name: x for name, x in agent.state_dict().items() if isinstance(x, Tensor)}
    plain = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for x in held.values())
    digests = bytearray(b"".join(hashlib.sha256(x.tobytes()).digest() for x in plain))
    found = comm.all_gather(torch.frombuffer(digests, dtype=torch.uint8).reshape(len(held), -1))
    for i, name in enumerate(held):
        if other := [rank for rank, x in enumerate(found) if not torch.equal(x[i], found[0][i])]:
            raise ConfigError(
                f"{name} of rank {other[0]} differs from that of rank 0 after a gradient step; expected what an agent "
                "holds to follow from gradients and from observe(), which all ranks have in common. BatchNorm keeps "
                "statistics of its own rows: use LayerNorm, Net(normalize_obs=True), or a buffer with persistent=False "
                "for what may differ"
            )


def _rows_of(loss: Loss, minibatch: TrainBatch) -> float:
    """The rows that the means of a loss are over."""
    if loss.rows is not None:
        return float(loss.rows)
    if minibatch.valid is not None:
        return float(minibatch.valid.sum())
    return float(len(tree_leaves(minibatch.inputs.obs)[0]))
