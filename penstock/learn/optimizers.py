"""Optimizers that algorithms share, and the gradients set for them: one backward pass, scaled norm group by group."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.errors import CheckpointError, ConfigError
from penstock.learn.algorithm import Loss, Optimizer, OptimizerFn, Optimizers
from penstock.native import updates

OptimizerName = Literal["adam", "adamw", "radam", "rmsprop"]
_SMALLEST = sys.float_info.min
_ADAM: Any = torch._fused_adam_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
_ADAMW: Any = torch._fused_adamw_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


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


def adam(agent: Agent, settings: Any) -> Optimizers:
    """Adam over all parameters, or the optimizer that `settings.optimizer` names; see `make_optimizer`."""
    return {"all": make_optimizer(trainable(agent), settings)}


def rmsprop(agent: Agent, settings: Any) -> Optimizers:
    """RMSprop over all parameters, or the optimizer that `settings.optimizer` names; see `make_optimizer`."""
    return {"all": make_optimizer(trainable(agent), settings, usual="rmsprop")}


def make_optimizer(
    parameters: Iterable[Tensor],
    settings: Any,
    lr: float | None = None,
    *,
    usual: OptimizerName = "adam",
    decays: bool = True,
) -> Optimizer:
    """An optimizer as `settings.lr`, `optimizer`, `weight_decay` and `adam_eps` describe it.

    RMSprop has the alpha of OpenAI baselines' A2C, 0.99, and torch's form: eps is added to the root of the mean
    square, which starts at 0. In A3C's appendix (Mnih et al. 2016) and in TensorFlow's, theirs, it is added under it.
    RAdam (Liu et al. 2020) is torch's.

    Args:
        lr: of these parameters; None for `settings.lr`, whose schedule it follows in proportion.
        usual: the optimizer of settings that name none. decays: False leaves `weight_decay` out, as for temperatures.
    """
    kind: OptimizerName = getattr(settings, "optimizer", usual)
    given: float | None = getattr(settings, "weight_decay", None)
    usual_decay = 0.01 if kind == "adamw" else 0.0  # torch's, and the paper's for AdamW
    decay = 0.0 if not decays else usual_decay if given is None else given
    eps: float = getattr(settings, "adam_eps", 1e-5)
    of_all = float(settings.lr)
    own = lr or of_all
    if kind == "rmsprop":
        group = {"params": list(parameters), "lr_scale": own / of_all}
        return RMSprop([group], lr=own, alpha=0.99, eps=eps, weight_decay=decay, foreach=True)
    if kind == "radam":
        group = {"params": list(parameters), "lr_scale": own / of_all}
        return torch.optim.RAdam([group], lr=own, eps=eps, weight_decay=decay, foreach=True)
    betas = getattr(settings, "beta1", 0.9), 0.999
    how: Any = {"betas": betas, "eps": eps, "lr_scale": own / of_all, "weight_decay": decay}
    return Adam(parameters, lr=own, **how, decoupled=kind == "adamw")


def trainable(agent: Agent) -> list[torch.nn.Parameter]:
    """The parameters that want gradients. Raises ConfigError if there are none."""
    parameters = [p for p in agent.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            f"{type(agent).__name__} has no trainable parameters; an agent must hold its networks as modules"
        )
    return parameters


def scaled_groups(optimizer_fn: OptimizerFn) -> OptimizerFn:
    """An `optimizer_fn` whose optimizers have a group for each pattern in `settings.lr_scales`.

    A pattern is one of `fnmatch`, of a parameter's whole name in the agent or of its end after a dot, so that
    `encoder.*` is `actor.encoder.*` too. The first that matches counts.
    """

    def scaled(agent: Agent, settings: Any) -> Optimizers:
        optimizers = optimizer_fn(agent, settings)
        scales: Mapping[str, float] = settings.lr_scales
        if not scales:
            return optimizers
        check_optimizers(optimizers)
        names = {id(p): name for name, p in agent.named_parameters()}
        held = [p for x in optimizers.values() for group in x.param_groups for p in group["params"]]
        by_pattern = {pattern: [id(p) for p in held if _matches(names.get(id(p), ""), pattern)] for pattern in scales}
        for pattern, matched in by_pattern.items():
            if not matched:
                ends = {names[id(p)].rpartition(".")[0] for p in held if id(p) in names}
                raise ConfigError(
                    f"lr_scales[{pattern!r}] matches no parameter that an optimizer holds; expected a pattern of their "
                    f"names or of the ends of these, such as {', '.join(f'{x}.*' for x in sorted(ends)[:4])}"
                )
        pattern_of = {x: pattern for pattern in reversed(list(scales)) for x in by_pattern[pattern]}

        def own(pattern: str | None, group: Mapping[str, Any]) -> dict[str, Any]:
            x = 1.0 if pattern is None else scales[pattern]
            return {"lr": x * group["lr"], "lr_scale": x * group.get("lr_scale", 1.0)}

        _part(optimizers, lambda p: pattern_of.get(id(p)), own)
        return optimizers

    return scaled


def decayed_weights(optimizer_fn: OptimizerFn) -> OptimizerFn:
    """An `optimizer_fn` whose optimizers decay weight matrices alone (Loshchilov and Hutter 2019 decay all parameters).

    These are parameters of two axes or more with `weight` in the last part of their name, numbers in a list aside, and
    not a LayerNorm's. So biases, norms, deviations of noise and temperatures are left as they are.
    """

    def decayed(agent: Agent, settings: Any) -> Optimizers:
        optimizers = optimizer_fn(agent, settings)
        if no_decay(settings):
            return optimizers
        check_optimizers(optimizers)
        last = {id(p): name.rstrip(".0123456789").rpartition(".")[2] for name, p in agent.named_parameters()}
        norms = {id(p) for m in agent.modules() if isinstance(m, torch.nn.LayerNorm) for p in m.parameters()}

        def is_weight(p: Tensor) -> bool:
            name = last.get(id(p), "")
            return p.dim() > 1 and "weight" in name and not name.endswith("sigma") and id(p) not in norms

        _part(optimizers, is_weight, lambda yes, group: {"weight_decay": group["weight_decay"] if yes else 0.0})
        return optimizers

    return decayed


def no_decay(settings: Any) -> bool:
    """True where no parameter decays, so that weights need no group of their own."""
    given: float | None = getattr(settings, "weight_decay", None)
    return not given and not (given is None and getattr(settings, "optimizer", "") == "adamw")


def group_sizes(optimizer: Any) -> list[int]:
    """How many parameters each group has."""
    return [len(group["params"]) for group in optimizer.param_groups]


def take_over(optimizer: Any, source: Any) -> None:
    """Takes the state of an optimizer of its kind and of the same parameters, in whatever groups it has them."""
    if isinstance(optimizer, Adam):
        optimizer.load_state_dict(source.state_dict())
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: source.state[p] for i, p in enumerate(held) if p in source.state}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _part(
    optimizers: Optimizers, key: Callable[[Tensor], Any], own: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
) -> None:
    """Parts every group of parameters by `key`, each part with settings `own(key, group)`."""
    for optimizer in optimizers.values():
        groups = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        for group in groups:
            parts: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                parts.setdefault(key(p), []).append(p)
            for of, parameters in parts.items():
                optimizer.param_groups.append({**group, "params": parameters, **own(of, group)})


def _matches(name: str, pattern: str) -> bool:
    """True if a pattern matches a dotted name, or its end after some dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


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


def take_step(optimizer: Optimizer, refused: bool | Tensor) -> None:
    """Steps an optimizer, unless `refused`, which leaves parameters and the optimizer's state as they are.

    A flag on a device goes to the optimizer by the attribute `found_inf`, as `torch.amp.GradScaler` tells it to those
    that have `_step_supports_amp_scaling`: ours, and torch's with `fused=True`. For any other the flag is read, which
    waits for the device in each update.
    """
    if isinstance(refused, Tensor) and getattr(optimizer, "_step_supports_amp_scaling", False):
        told: Any = optimizer
        told.grad_scale, told.found_inf = None, refused.float()
        try:
            optimizer.step()
        finally:
            told.found_inf = None
    elif not refused:
        optimizer.step()


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


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) by the native kernel, or torch's fused one as `torch.optim.Adam` has it.

    For twelve small arrays most of that class's step is Python around the kernel, and the first optimizer of a
    process imports torch's compiler, which takes 0.85 s. Groups may be parted after it was made, before the first step.

    For a unit that no row activates, the running means of gradients shrink by beta1 a step until they are subnormal
    numbers, on which a processor is up to a hundred times slower. So they are flushed to 0.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    """A scalar on the parameters' device: 1 where the next step must not be taken; see `take_step`."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        lr_scale: float = 1.0,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        """Makes the moments.

        Args:
            lr_scale: whenever a schedule moves `settings.lr`, the step size becomes `lr_scale` times it.
            weight_decay: of the parameters, added to their gradients, or with `decoupled` taken off beside them, lr
                times it each step (AdamW: Loshchilov and Hutter 2019, algorithm 2).
        """
        params = list(parameters)
        self.param_groups: list[dict[str, Any]] = [
            {
                "params": params,
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "lr_scale": lr_scale,
                "weight_decay": weight_decay,
            }
        ]
        self._kernel = _ADAMW if decoupled else _ADAM
        self._params = params  # in whose order the moments are
        self._averages = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in params]
        self._squares = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in params]
        self._count = torch.zeros(len(params), device=params[0].device if params else None)
        self._steps = list(self._count)  # of each parameter; views

    @torch.no_grad()
    def step(self) -> None:
        """One update from the parameters' `.grad`; a parameter without one stays as it is."""
        if len(self.param_groups) == 1:
            self._step(self.param_groups[0], self._averages, self._squares, self._steps)
            return
        places = {id(p): i for i, p in enumerate(self._params)}
        for group in self.param_groups:
            at = [places[id(p)] for p in group["params"]]
            self._step(group, *([x[i] for i in at] for x in (self._averages, self._squares, self._steps)))

    def _step(self, group: dict[str, Any], averages: list[Tensor], squares: list[Tensor], steps: list[Tensor]) -> None:
        params = group["params"]
        held = [i for i, p in enumerate(params) if p.grad is not None]
        if not held:
            return
        taken = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        if len(held) == len(self._count):
            self._count.add_(taken)
        else:
            params, averages, squares, steps = ([x[i] for i in held] for x in (params, averages, squares, steps))
            torch._foreach_add_(steps, taken)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        gradients = _gradients(params)
        if updates.takes(params):  # and with them gradients and moments
            counts = self._count if len(held) == len(self._count) else torch.stack(steps)
            own = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            updates.adam(params, gradients, averages, squares, counts, **own, decoupled=self._kernel is _ADAMW)
            return
        with _subnormals_flushed():
            self._kernel(
                params,
                gradients,
                averages,
                squares,
                [],
                steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=None,
                found_inf=self.found_inf,
            )

    def state_dict(self) -> dict[str, Any]:
        """Steps, moments and settings: tensors and plain Python."""
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        settings: dict[str, Any] = {"group": own[0]} if len(own) == 1 else {"groups": own}
        return {"steps": self._steps, "averages": self._averages, "squares": self._squares, **settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises CheckpointError if the parameters are not of the same shapes."""
        shapes = [tuple(x.shape) for x in self._averages]
        if [tuple(x.shape) for x in state["averages"]] != shapes:
            raise CheckpointError(
                f"the stored Adam holds shapes {[tuple(x.shape) for x in state['averages']]}; the agent "
                f"has {shapes}: was net changed?"
            )
        held = [*self._averages, *self._squares, *self._steps]
        for own, stored in zip(held, [*state["averages"], *state["squares"], *state["steps"]]):
            own.copy_(stored)
        groups = state["groups"] if "groups" in state else [state["group"]]
        if len(groups) == len(self.param_groups):  # else they are parted otherwise, by settings that count now
            for own, settings in zip(self.param_groups, groups):
                own.update(settings, betas=tuple(settings["betas"]))


class RMSprop(torch.optim.RMSprop):
    """torch's, without momentum and not centred, whose steps the native kernel takes where it can."""

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for p in (p for _, held in groups for p in held):
            if not self.state[p]:
                zeros = torch.zeros_like(p, memory_format=torch.preserve_format)
                self.state[p] = {"step": torch.zeros((), device=p.device), "square_avg": zeros}
        if self.found_inf is not None:
            self._step_unless(self.found_inf > 0.0, [p for _, held in groups for p in held])
            return
        if not all(updates.takes(held) for _, held in groups):
            return super().step()
        for group, held in groups:
            for p in held:
                self.state[p]["step"] += 1.0
            own = {key: group[key] for key in ("lr", "alpha", "eps", "weight_decay")}
            updates.rmsprop(held, _gradients(held), [self.state[p]["square_avg"] for p in held], **own)

    def _step_unless(self, refused: Tensor, held: list[Tensor]) -> None:
        """torch's step, taken back where `refused`: its kernels know no flag."""
        for p in held:  # a loaded count lies on the host
            self.state[p]["step"] = self.state[p]["step"].to(p.device)
        changed = [x for p in held for x in (p, self.state[p]["square_avg"], self.state[p]["step"])]
        before = [x.clone() for x in changed]
        super().step()
        for x, old in zip(changed, before):
            x.copy_(torch.where(refused, old, x))


@contextlib.contextmanager
def _subnormals_flushed() -> Generator[None, None, None]:
    """Arithmetic of this thread takes numbers below the smallest normal one for 0, as it may have done before."""
    before = _SMALLEST * 0.5 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [_laid_out_as(p, p.grad) for p in parameters if p.grad is not None]


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout: the kernel walks through memory and never looks at strides."""
    if gradient.is_contiguous() and parameter.is_contiguous():  # asked in a fifth of the time
        return gradient
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
