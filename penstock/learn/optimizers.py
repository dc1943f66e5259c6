"""Optimizers that algorithms share, made from their settings, and steps that a flag on a device refuses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.errors import CheckpointError, ConfigError
from penstock.learn.algorithm import Optimizer, Optimizers
from penstock.learn.step.gradients import wide
from penstock.native import updates

OptimizerName = Literal["adam", "adamw", "radam", "rmsprop"]
_SMALLEST = sys.float_info.min
_ADAM: Any = torch._fused_adam_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
_ADAMW: Any = torch._fused_adamw_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


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
    RAdam (Liu et al. 2020) is torch's. Adam, AdamW and RAdam decay running gradients by `settings.beta1`, else 0.9.

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
    betas = getattr(settings, "beta1", 0.9), 0.999
    if kind == "radam":
        group = {"params": list(parameters), "lr_scale": own / of_all}
        return RAdam([group], lr=own, betas=betas, eps=eps, weight_decay=decay, foreach=True)
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


def set_rates(optimizers: Optimizers, lr: Any = None) -> list[Any]:
    """Sets the step size of each group of parameters to `lr` times its scale, unless `lr` is None; returns them."""
    groups = [group for x in optimizers.values() for group in x.param_groups]
    for group in groups if lr is not None else ():
        group["lr"] = lr * group.get("lr_scale", 1.0)
    return [group.get("lr", 0.0) for group in groups]


def changed_rates(optimizers: Optimizers, rates: list[Any]) -> dict[str, tuple[float, float]]:
    """The step sizes that are others than those that `set_rates` returned, by optimizer: (then, now)."""
    held = [name for name, x in optimizers.items() for _ in x.param_groups]
    pairs = zip(held, rates, set_rates(optimizers))
    return {name: (asked, seen) for name, asked, seen in pairs if asked is not seen and asked != seen}


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
        with _taken_back(refused, [x for p in held for x in (p, self.state[p]["square_avg"], self.state[p]["step"])]):
            super().step()


class RAdam(torch.optim.RAdam):
    """torch's; where a flag on a device says whether to step, the same equations with counts on the device.

    torch reads counts on the host, where nobody knows how many steps were taken, or with `capturable` computes float32
    corrections on CUDA alone.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.found_inf is None:
            for state in self.state.values():  # a count of steps with a flag lies on the device
                state["step"] = state["step"].cpu()
            super().step()
            return
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                if not self.state[p]:
                    averages = [torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(2)]
                    self.state[p] = {"step": torch.zeros(()), "exp_avg": averages[0], "exp_avg_sq": averages[1]}
                self.state[p]["step"] = self.state[p]["step"].to(p.device)
            states = [self.state[p] for p in held]
            each = zip(*([p, s["exp_avg"], s["exp_avg_sq"], s["step"]] for p, s in zip(held, states)))
            changed = [list(x) for x in each]
            if changed:
                with _taken_back(self.found_inf > 0.0, [x for kind in changed for x in kind]):
                    _radam(group, _gradients(held), *changed)


def _radam(
    group: Mapping[str, Any],
    gradients: list[Tensor],
    params: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
) -> None:
    """One step of RAdam (Liu et al. 2020, algorithm 2) in torch's order, so with its bits, without a number read."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    f: Any = torch
    f._foreach_add_(steps, 1.0)
    if group["weight_decay"]:
        gradients = f._foreach_add(gradients, params, alpha=group["weight_decay"])
    f._foreach_lerp_(averages, gradients, 1.0 - beta1)
    f._foreach_mul_(squares, beta2)
    f._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
    t, limit = wide(torch.stack(steps)), 2.0 / (1.0 - beta2) - 1.0
    rho = limit - 2.0 * t * beta2**t / (1.0 - beta2**t)
    rect = ((rho - 4.0) * (rho - 2.0) * limit / ((limit - 4.0) * (limit - 2.0) * rho)).sqrt()
    adapts, unbiased = rho > 5.0, 1.0 - beta1**t
    plain = torch.where(adapts, 0.0, -lr / unbiased).to(params[0].dtype)
    adaptive = torch.where(adapts, -(1.0 - beta2**t).sqrt() * (lr * rect / unbiased), 0.0).to(params[0].dtype)
    rates = f._foreach_add(f._foreach_sqrt(squares), group["eps"])
    rates = f._foreach_reciprocal(f._foreach_div(rates, list(adaptive)))
    f._foreach_addcmul_(params, averages, f._foreach_add(rates, list(plain)))


@contextlib.contextmanager
def _taken_back(refused: Tensor, changed: list[Tensor]) -> Generator[None, None, None]:
    """Tensors changed within are as before where `refused`, a bool scalar on their device."""
    before = [x.clone() for x in changed]
    yield
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
