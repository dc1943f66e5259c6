"""Optimizers that algorithms share."""

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

OptimizerName = Literal["adam", "adamw", "rmsprop"]
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
        return torch.optim.RMSprop([group], lr=own, alpha=0.99, eps=eps, weight_decay=decay, foreach=True)
    return Adam(parameters, lr=own, eps=eps, lr_scale=own / of_all, weight_decay=decay, decoupled=kind == "adamw")


def trainable(agent: Agent) -> list[torch.nn.Parameter]:
    """The parameters that want gradients. Raises ConfigError if there are none."""
    parameters = [p for p in agent.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            f"{type(agent).__name__} has no trainable parameters; an agent must hold its networks as modules"
        )
    return parameters


def step(optimizers: Optimizers, measured: bool = False) -> dict[str, Tensor]:
    """Steps the optimizers; if `measured`, returns the root mean square of what each changed its parameters by.

    Adam's is at most about its step size, and far below it while gradients are small beside eps or past ones.
    """
    if not measured:
        for optimizer in optimizers.values():
            optimizer.step()
        return {}
    sizes: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        held = [p.detach() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in held]
        optimizer.step()
        squares = [(new.float() - old.float()).square().sum() for new, old in zip(held, before)]
        if squares:
            sizes[name] = (torch.stack(squares).sum() / sum(p.numel() for p in held)).sqrt()
    return sizes


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) through torch's fused kernel, bit for bit as `torch.optim.Adam`.

    For twelve small arrays most of that class's step is Python around the kernel, and the first optimizer of a
    process imports torch's compiler, which takes 0.85 s. One group.

    Of a unit that no row switches on, the averages of gradients shrink by beta1 a step until they are subnormal
    numbers, and stay there; a processor takes up to a hundred times as long for these. So they are flushed to 0.
    """

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
            {"params": params, "lr": lr, "betas": betas, "eps": eps, "lr_scale": lr_scale}
        ]
        self._weight_decay, self._kernel = weight_decay, _ADAMW if decoupled else _ADAM
        self._averages = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in params]
        self._squares = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in params]
        self._count = torch.zeros(len(params), device=params[0].device if params else None)
        self._steps = list(self._count)  # of each parameter; views

    @torch.no_grad()
    def step(self) -> None:
        """One update from the parameters' `.grad`; a parameter without one stays as it is."""
        group = self.param_groups[0]
        params, averages, squares, steps = group["params"], self._averages, self._squares, self._steps
        held = [i for i, p in enumerate(params) if p.grad is not None]
        if not held:
            return
        if len(held) == len(params):
            self._count.add_(1.0)
        else:
            params, averages, squares, steps = ([x[i] for i in held] for x in (params, averages, squares, steps))
            torch._foreach_add_(steps, 1.0)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        gradients = [_laid_out_as(p, p.grad) for p in params if p.grad is not None]
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
                weight_decay=self._weight_decay,
                eps=group["eps"],
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )

    def state_dict(self) -> dict[str, Any]:
        """Steps, moments and settings: tensors and plain Python."""
        settings = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        return {"steps": self._steps, "averages": self._averages, "squares": self._squares, "group": settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. Raises CheckpointError if the parameters are not of the same shapes."""
        shapes = [tuple(x.shape) for x in self._averages]
        if [tuple(x.shape) for x in state["averages"]] != shapes:
            raise CheckpointError(
                f"the stored Adam holds shapes {[tuple(x.shape) for x in state['averages']]}; the agent "
                f"has {shapes}: was net changed?"
            )
        held = [*self._averages, *self._squares, *self._steps]
        for own, stored in zip(held, [*state["averages"], *state["squares"], *state["steps"]]):
            own.copy_(stored)
        settings = dict(state["group"])
        self.param_groups[0].update(settings, betas=tuple(settings["betas"]))


@contextlib.contextmanager
def _subnormals_flushed() -> Generator[None, None, None]:
    """Arithmetic of this thread takes numbers below the smallest normal one for 0, as it may have done before."""
    before = _SMALLEST * 0.5 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout: the kernel walks through memory and never looks at strides."""
    if gradient.is_contiguous() and parameter.is_contiguous():  # asked in a fifth of the time
        return gradient
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
