"""Gradients of a loss for its optimizers: one backward pass, each norm group scaled to a norm of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError
from penstock.learn.algorithm import Loss, Optimizers


class Gradients(NamedTuple):
    """The gradients of one total of a loss."""

    parameters: Sequence[Tensor]
    values: Sequence[Tensor | None]
    """Of each parameter; None where it takes no part in the loss."""
    total: Tensor
    """The loss, a scalar without gradient."""


Reduce: TypeAlias = Callable[[dict[str, Gradients]], dict[str, Gradients]]
_BACKWARD: Any = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore
"""(outputs, gradients, retain_graph, create_graph, inputs, allow_unused, accumulate_grad) -> gradients: all that
`torch.autograd.grad` does in the end, where what it checks before takes as long as five nodes of the graph."""


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


def check_optimizers(found: object) -> None:
    """Raises ConfigError unless this is what `optimizer_fn` must return: optimizers by name."""
    if not isinstance(found, dict):
        hint = ': put it into a dict, {"all": optimizer}' if hasattr(found, "param_groups") else ""
        raise ConfigError(f"optimizer_fn returned {type(found).__name__}; expected {{name: optimizer}}{hint}")
    wrong = {name: type(x).__name__ for name, x in found.items() if not hasattr(x, "param_groups")}
    if wrong or not found:
        raise ConfigError(f"optimizer_fn returned {wrong}; expected a torch.optim.Optimizer for each name")


def held_by_none(agent: Agent, optimizers: Optimizers) -> list[torch.nn.Parameter]:
    """The parameters of an agent that want gradients and that no optimizer steps."""
    held = {id(p) for x in optimizers.values() for group in x.param_groups for p in group["params"]}
    return [p for p in agent.parameters() if p.requires_grad and id(p) not in held]


def check_newcomers(agent: Agent, optimizers: Optimizers, known: list[torch.nn.Parameter], loss: Loss) -> None:
    """Raises ConfigError if a loss has gradients for parameters that no optimizer holds, those `known` aside."""
    aside = set(map(id, known))
    new = [p for p in held_by_none(agent, optimizers) if id(p) not in aside]
    totals = loss.total.values() if isinstance(loss.total, dict) else [loss.total]
    taking_part: set[int] = set()
    for total in totals if new else ():
        if isinstance(total, Tensor) and total.requires_grad and total.numel() == 1:
            gradients = torch.autograd.grad(total, new, retain_graph=True, allow_unused=True)
            taking_part |= {id(p) for p, gradient in zip(new, gradients) if gradient is not None}
    if names := [name for name, p in agent.named_parameters() if id(p) in taking_part]:
        raise ConfigError(
            f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}: parameters that came after the policy was "
            "built, by load_state_dict(assign=True) or a new layer, act but are in no optimizer: copy values in place, "
            "make the layers in agent_fn, or rebuild the optimizers before the first update, "
            "policy.optimizers = policy.optimizer_fn(policy.agent, policy.settings); requires_grad_(False) for those "
            "that shall not train"
        )


def set_gradients(
    loss: Loss,
    optimizers: Optimizers,
    max_grad_norm: float | None,
    reduce: Reduce | None = None,
    group_of: Mapping[int, str] = MappingProxyType({}),
) -> dict[str, float]:
    """Sets `.grad` of every optimizer's parameters, scaled so that the norm of each group is at most the limit.

    Frozen parameters (`requires_grad_(False)`) have none, and so stay as they are, whatever their optimizer.

    Args:
        reduce: makes the gradients of this learner those of all, before the norm; None for one learner.
        group_of: the norm group of a parameter, by its id; the other parameters of an optimizer are one group, which
            has the optimizer's name.

    Returns:
        The norm of each group before clipping. One of inf or nan (of a loss or a gradient): no step must be taken.
    """
    found = gradients_of(loss, optimizers)
    if reduce is not None:
        found = reduce(found)
    norms: dict[str, float] = {}
    for name, (parameters, gradients, total) in found.items():
        present = [g for g in gradients if g is not None]
        each = torch._foreach_norm(present)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        members: dict[str, list[int]] = {}
        for i, p in enumerate(p for p, g in zip(parameters, gradients) if g is not None):
            members.setdefault(group_of.get(id(p), name), []).append(i)
        whole = [torch.linalg.vector_norm(torch.stack([each[i] for i in x])) for x in members.values()]
        *found_norms, value = torch.stack([*whole, total.reshape(())]).tolist()  # one wait for a device
        norms.update(zip(members, found_norms))
        if not all(map(math.isfinite, (*found_norms, value))):
            return norms if math.isfinite(value) else {name: value}
        if max_grad_norm is not None and max(found_norms) > max_grad_norm:
            scales = [1.0] * len(present)
            for group, norm in zip(members.values(), found_norms):
                for i in group if norm > max_grad_norm else ():
                    scales[i] = max_grad_norm / norm
            # Not in place: autograd may hand the same tensor to two parameters.
            present = torch._foreach_mul(present, scales)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        scaled = iter(present)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = None if gradient is None else next(scaled)
    return norms


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
