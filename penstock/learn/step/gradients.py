"""The gradients of a loss set for its optimizers: one backward pass, scaled norm group by group; and their sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError, NonFiniteError
from penstock.learn.algorithm import Loss, Optimizer, Optimizers
from penstock.native import updates

_SKIPS_IN_A_ROW = 10
_UNREAD = 256
"""Updates on a device whose flags may wait to be read: batches have fewer; a loop of your own may call nothing else."""


class Gradients(NamedTuple):
    """The gradients of one total of a loss."""

    parameters: Sequence[Tensor]
    values: Sequence[Tensor | None]
    """Gradient of each parameter; None where the loss does not depend on it."""
    total: Tensor
    """The loss, a scalar without gradient."""


Number: TypeAlias = "float | Tensor"
"""A number of Python, or a scalar on a device that nobody has waited for."""


class Norms(NamedTuple):
    """The norms of an update's gradients; on the CPU they are known, on another device nothing has waited for them."""

    of: dict[str, Number]
    """The norm of each group before clipping."""
    numbers: list[Number]
    """For each total the loss and the norms of its groups. One of inf or nan: no step must be taken."""

    @property
    def refused(self) -> bool | Tensor:
        """True where no step must be taken; a bool scalar on a device."""
        if isinstance(self.numbers[0], Tensor):
            return torch.stack([x for x in self.numbers if isinstance(x, Tensor)]).isfinite().all().logical_not()
        return first_wrong(self.numbers) is not None


def first_wrong(numbers: Iterable[Any]) -> float | None:
    """The first that is not finite."""
    return next((x for x in numbers if not math.isfinite(x)), None)


def read(numbers: Iterable[Any]) -> list[float]:
    """Numbers as Python's, with one wait for a device."""
    numbers = list(numbers)
    away = [wide(x.detach()).reshape(()) for x in numbers if isinstance(x, Tensor) and not x.is_cpu]
    found = iter(torch.stack(away).tolist() if away else ())
    return [next(found) if isinstance(x, Tensor) and not x.is_cpu else float(x) for x in numbers]


def wide(x: Tensor) -> Tensor:
    """x in float64, where the device has it."""
    return x.float() if x.device.type == "mps" else x.double()  # Apple's devices have no float64


Reduce: TypeAlias = Callable[[dict[str, Gradients]], dict[str, Gradients]]
_BACKWARD: Any = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore
"""(outputs, gradients, retain_graph, create_graph, inputs, allow_unused, accumulate_grad) -> gradients: the function
that `torch.autograd.grad` calls after checks that take as long as five nodes of the graph."""


class NormGroups:
    """The norm group of each parameter that an agent says has one (`Agent.norm_groups`)."""

    def __init__(self) -> None:
        self._held: tuple[int, ...] = ()
        self._of: dict[int, str] = {}

    def of(self, agent: Agent, optimizers: Optimizers) -> dict[int, str]:
        """The name of its group by a parameter's id; the agent is asked anew where optimizers hold other parameters."""
        held = tuple(id(p) for x in optimizers.values() for group in x.param_groups for p in group["params"])
        if self._held != held:
            groups = agent.norm_groups().items()
            self._held = held
            self._of = {id(p): name for name, modules in groups for m in modules for p in m.parameters()}
        return self._of


def set_gradients(
    loss: Loss,
    optimizers: Optimizers,
    max_grad_norm: float | None,
    reduce: Reduce | None = None,
    group_of: Mapping[int, str] = MappingProxyType({}),
) -> Norms:
    """Sets `.grad` of every optimizer's parameters, scaled so that the norm of each group is at most the limit.

    Frozen parameters (`requires_grad_(False)`) get no gradient, so no optimizer changes them.

    Args:
        reduce: turns this learner's gradients into those of all learners, before the norm; None for one learner.
        group_of: the norm group of a parameter, by its id; the other parameters of an optimizer are one group, which
            has the optimizer's name.
    """
    found = gradients_of(loss, optimizers)
    if reduce is not None:
        found = reduce(found)
    norms = Norms({}, [])
    for name, (parameters, gradients, total) in found.items():
        present = [g for g in gradients if g is not None]
        members: dict[str, list[int]] = {}
        for i, p in enumerate(p for p, g in zip(parameters, gradients) if g is not None):
            members.setdefault(group_of.get(id(p), name), []).append(i)
        *found_norms, value = _norms_of(present, members.values(), total)
        norms.of.update(zip(members, found_norms))
        norms.numbers.extend((value, *found_norms))
        if not total.is_cpu:
            if max_grad_norm is not None:
                present = _clipped(present, members.values(), found_norms, max_grad_norm)
        elif first_wrong((value, *found_norms)) is not None:
            return norms
        elif max_grad_norm is not None and max(found_norms) > max_grad_norm:
            scales = [1.0] * len(present)
            for group, norm in zip(members.values(), found_norms):
                for i in group if norm > max_grad_norm else ():
                    scales[i] = max_grad_norm / norm
            # Not in place: autograd may hand the same tensor to two parameters.
            present = torch._foreach_mul(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                present, scales
            )
        scaled = iter(present)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = None if gradient is None else next(scaled)
    return norms


def _clipped(
    gradients: list[Tensor], groups: Iterable[Sequence[int]], norms: Sequence[Any], limit: float
) -> list[Tensor]:
    """The gradients scaled as on the CPU, whose float64 quotient it is too, without a wait for the norms."""
    out = list(gradients)
    for group, norm in zip(groups, norms):
        held = [gradients[i] for i in group]
        scale = torch.where(norm > limit, limit / norm, 1.0).to(held[0].dtype)
        scaled = torch._foreach_mul(held, scale)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        for i, x in zip(group, scaled):
            out[i] = x
    return out


def _norms_of(gradients: list[Tensor], groups: Iterable[Sequence[int]], total: Tensor) -> list[Any]:
    """The norm of each group of gradients, given by their numbers, and the loss last."""
    if updates.takes(gradients):
        squares = updates.squares(gradients)
        return [*(math.sqrt(sum(squares[i] for i in group)) for group in groups), total.item()]
    parts = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    whole = [torch.linalg.vector_norm(torch.stack([parts[i] for i in group])) for group in groups]
    found = torch.stack([*whole, total.reshape(())])
    return found.tolist() if total.is_cpu else list(wide(found))


def gradients_of(loss: Loss, optimizers: Optimizers) -> dict[str, Gradients]:
    """The gradients of each total of a loss, by the name of its optimizer. Raises ConfigError if none has any."""
    totals = loss.total if isinstance(loss.total, dict) else {"all": loss.total}
    if not totals or not totals.keys() <= optimizers.keys():
        raise ConfigError(
            f"loss_fn gave totals for {sorted(totals)}; optimizer_fn gave optimizers {sorted(optimizers)}: one "
            "tensor goes with the one optimizer 'all', else each total needs an optimizer of its name"
        )
    found: dict[str, Gradients] = {}
    for i, (name, total) in enumerate(totals.items()):
        if not isinstance(total, Tensor) or total.numel() != 1:
            shape = getattr(total, "shape", None)
            seen = f"type {type(total).__name__}" if shape is None else f"shape {list(shape)}"
            raise ConfigError(
                f"loss_fn returned a total for {name!r} of {seen}; expected a scalar tensor: take the mean over rows "
                "with penstock.ops.masked_mean"
            )
        held = [p for group in optimizers[name].param_groups for p in group["params"]]
        parameters = [p for p in held if p.requires_grad]
        if len(parameters) < len(held):
            for p in held:
                p.grad = None
            if not (parameters or total.requires_grad):
                continue
        if not total.requires_grad:
            raise ConfigError(
                f"loss_fn returned a total for {name!r} without a gradient; is it detached, or made under no_grad?"
            )
        gradients = parameters and _BACKWARD(
            (total,), (torch.ones_like(total),), i + 1 < len(totals), False, tuple(parameters), True, False
        )
        if all(g is None for g in gradients):
            raise ConfigError(
                f"no parameter of optimizer {name!r} takes part in its loss; does loss_fn call the agent? Parameters "
                "that came after the policy was built, by load_state_dict(assign=True) or a new layer, are in no "
                "optimizer: copy values in place, or make the layers in agent_fn"
            )
        found[name] = Gradients(parameters, gradients, total.detach())
    if not found:
        raise ConfigError(
            f"every parameter of the optimizers {sorted(totals)} is frozen; expected one to train: requires_grad_(True)"
        )
    return found


class UpdateCount:
    """Counts updates taken, and those skipped as loss or gradient was not finite: on a device by the next wait.

    Args:
        taken, skipped: numbers of updates. in_a_row: of those skipped since the last that was taken.
    """

    def __init__(self, taken: int = 0, skipped: int = 0, in_a_row: int = 0) -> None:
        self.taken, self.skipped, self.in_a_row = taken, skipped, in_a_row
        self._unread: list[tuple[Norms, Any]] = []
        """Updates on a device since `settle`, each with its metrics."""
        self._refused: list[Any] = []
        """The metrics of those that were found not taken and not yet returned."""

    def take(self, norms: Norms, metrics: Any, on_device: bool) -> None:
        """Counts an update as taken; on a device `settle` says whether it was."""
        self.taken += 1
        if on_device:
            self._unread.append((norms, metrics))
            if len(self._unread) >= _UNREAD:
                self.settled()

    def skips(self, numbers: Sequence[Any]) -> bool:
        """True if an update with this loss and norms is to be skipped, and counts it. Raises at the tenth in a row."""
        wrong = first_wrong(numbers)
        if wrong is None:
            self.in_a_row = 0
            return False
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= _SKIPS_IN_A_ROW:
            raise NonFiniteError(
                f"gradients were not finite in {_SKIPS_IN_A_ROW} updates in a row (norm {wrong}); the last that "
                f"counted was number {self.taken}; lower lr, or use net.normalize_obs, net.normalize_reward"
            )
        return True

    def settle(self, others: Iterable[Any] = ()) -> tuple[list[Any], list[float]]:
        """The body of `Policy.settle`."""
        unread, self._unread = self._unread, []
        refused, self._refused = self._refused, []
        found = iter(read([*(x for norms, _ in unread for x in norms.numbers), *others]))
        self.taken -= len(unread)
        for norms, metrics in unread:
            if self.skips([next(found) for _ in norms.numbers]):
                refused.append(metrics)
            else:
                self.taken += 1
        return refused, list(found)

    def settled(self) -> int:
        """The updates skipped up to now, all of them; `settle` returns their metrics all the same."""
        self._refused = self.settle()[0]
        return self.skipped


def sizes_of(before: Mapping[str, Sequence[Tensor]], optimizers: Optimizers) -> dict[str, Tensor]:
    """The root mean square of what each optimizer has changed its parameters by since `copies` were taken.

    Adam's is at most about its step size, and far below it while gradients are small beside eps or past ones.
    """
    sizes: dict[str, Tensor] = {}
    for name, copied in before.items():
        squares = [(p.detach().float() - x.float()).square().sum() for p, x in zip(_held(optimizers[name]), copied)]
        if squares:
            sizes[name] = (torch.stack(squares).sum() / sum(x.numel() for x in copied)).sqrt()
    return sizes


def copies(optimizers: Optimizers) -> dict[str, list[Tensor]]:
    """Copies of the parameters that each optimizer is about to step."""
    return {name: [p.detach().clone() for p in _held(optimizer)] for name, optimizer in optimizers.items()}


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def measured(norms: Mapping[str, Number], sizes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics `grad_norm` and `step_rms`, each with the name of its norm group or optimizer but for "all"."""
    found = {
        f"grad_norm_{name}": norm.float() if isinstance(norm, Tensor) else torch.tensor(norm)
        for name, norm in norms.items()
    }
    found |= {f"step_rms_{name}": size for name, size in sizes.items()}
    return {key.removesuffix("_all"): x for key, x in found.items()}


def judged(loss: Loss) -> Loss:
    """The loss, with `stop` where a metric is above its limit."""
    if loss.limits and any(float(loss.metrics[name]) > limit for name, limit in loss.limits.items()):
        return loss._replace(stop=True)
    return loss
