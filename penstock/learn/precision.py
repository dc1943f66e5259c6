"""How a policy's functions compute: in which precision, and whether torch compiles them. The functions are wrapped."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.core.batch import TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves, tree_map
from penstock.learn.algorithm import Loss
from penstock.learn.policy import Policy
from penstock.learn.policy_set import AnyPolicy, trained_policies

Precision = Literal["float32", "bf16"]

_UPDATE = r"L\['\w+'\]\.rows\['update'\]"
"""The one number in a minibatch that is another in each update, as torch's compiler writes it."""
_AGAIN = 4
"""Times that a function is compiled for shapes that it was compiled for already, after which it is not compiled."""


def compute(policy: AnyPolicy, precision: Precision = "float32", compiled: bool = False) -> None:
    """Has a policy, or each that learns of several, postprocess and take losses in a precision, compiled or not.

    Acting, parameters, optimizers, gradients, running statistics, memories and output layers stay float32.

    Args:
        precision: bf16 runs the products of convolutions and hidden layers in bfloat16, by torch's autocast.
        compiled: `loss_fn`, and with replay `postprocess_fn`, go through `torch.compile`. Where that fails, they run
            uncompiled, after one warning.

    Raises:
        ConfigError: the processor has no bfloat16 products, or a recurrent policy is to be compiled.
    """
    compiler = Compiler()
    for name, own in trained_policies(policy).items():
        if compiled:
            if own.recurrent:
                of = f" of policy {name!r}" if name else ""
                raise ConfigError(
                    f"run.compile=True with a memory{of}: a compiled unroll has a piece for each row, which takes "
                    "minutes to compile and is slower than the library's own loop; use run.compile=False"
                )
            own.loss_fn = compiler.compiled(own.loss_fn)
            if own.replay_schedule is not None:  # else it runs once a batch
                own.postprocess_fn = compiler.compiled(own.postprocess_fn)
        if precision == "bf16":
            require_bf16(own.device)
            own.loss_fn, own.postprocess_fn = (in_bf16(f, own) for f in (own.loss_fn, own.postprocess_fn))


def require_bf16(device: torch.device) -> None:
    """Raises ConfigError unless the device multiplies bfloat16 numbers by instructions of its own."""
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        cpu: Any = torch.cpu
        supported = cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()
    if not supported:
        raise ConfigError(
            f"run.precision='bf16' on {device}, which has no bfloat16 products of its own (AVX512_BF16 or AMX on a "
            "CPU, Ampere or newer on CUDA) and would be slower by them; use 'float32'"
        )


def in_bf16(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """The function with products in bfloat16 where they are large parts of networks; its answer is float32."""
    kind = policy.device.type

    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        # No cache: in older versions of torch it hands weights rounded without gradient to a pass that needs one.
        with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
            result = function(*args)
        return _widened(result)

    return inside


def _widened(result: Any) -> Any:
    """A Loss or TrainBatch without bfloat16, which numpy does not have; other values unchanged."""

    def wide(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.dtype is torch.bfloat16 else x

    if isinstance(result, Loss):
        total = {name: wide(x) for name, x in result.total.items()} if isinstance(result.total, dict) else result.total
        metrics = {name: wide(x) for name, x in result.metrics.items()}
        return result._replace(total=wide(total), metrics=metrics, priorities=wide(result.priorities))
    if isinstance(result, TrainBatch):
        return replace(result, rows={name: tree_map(wide, x) for name, x in result.rows.items()})
    return result


class Compiler:
    """Compiles functions of an algorithm for each shape of their rows, until the first failure; then none.

    Args:
        transform: `torch.compile`, or a stand-in for it.
    """

    def __init__(self, transform: Callable[..., Any] | None = None) -> None:
        self._transform = self._made if transform is None else transform
        self._failed = False
        self._compilations = 0

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled at its first call."""
        fast: Callable[..., Any] | None = None
        known: set[Any] = set()
        again = 0

        @functools.wraps(function)
        def call(agent: Any, rows: Any, settings: Any) -> Any:
            nonlocal fast, again
            if self._failed:
                return function(agent, rows, settings)
            before = self._compilations
            try:
                made = fast = fast or self._transform(function)
                result = made(agent, rows, settings)
                if (key := _shapes(rows, result)) not in known and isinstance(result, Loss):
                    _rehearse(agent, result)
            except Exception as error:
                result = function(agent, rows, settings)  # an error of the function itself is raised here
                self._give_up(error)
                return result
            again += key in known and self._compilations > before
            known.add(key)
            if again >= _AGAIN:
                self._give_up("the same shapes again and again: a setting that the loss reads is a schedule")
            return result

        return call

    def _made(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch._dynamo.config as dynamo  # takes a second, as the compiler does
        import torch._functorch.config as functorch
        from torch._inductor.compile_fx import compile_fx

        def counted(module: Any, inputs: Any) -> Any:
            self._compilations += 1
            return compile_fx(module, inputs)

        # Several totals are differentiated one after the other, so a backward pass must leave what it reads.
        functorch.donated_buffer = False  # pyright: ignore[reportAttributeAccessIssue]
        # Counts all policies, which may have many shapes; endless recompiling is noticed here.
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 4_096  # pyright: ignore
        dynamo.fail_on_recompile_limit_hit = True  # pyright: ignore[reportAttributeAccessIssue]
        sources: Any = torch.compiler.config
        if _UPDATE not in sources.dynamic_sources:
            sources.dynamic_sources = ",".join(filter(None, (sources.dynamic_sources, _UPDATE)))
        # Each shape by itself, so that bits do not depend on which came first: a resumed run may begin with another.
        return torch.compile(function, backend=counted, dynamic=False)

    def _give_up(self, why: Exception | str) -> None:
        if self._failed:
            return
        self._failed = True
        if isinstance(why, str):
            seen, cure = f"torch compiles {why}", "give it a number"
        else:
            first = next((line for line in str(why).splitlines() if line.strip()), "")
            seen = f"torch could not compile ({type(why).__name__}: {first:.300})"
            cure = "on a CPU it needs a C++ compiler (g++, or CXX=...), on CUDA triton"
        warnings.warn(
            f"run.compile: {seen}; the run goes on without. To have it, {cure}; else leave run.compile out",
            stacklevel=3,
        )


def _shapes(rows: Any, result: Any) -> Any:
    """Key of a compiled function: the shapes of its rows, and the names of the totals of its loss."""
    totals = tuple(result.totals()) if isinstance(result, Loss) else ()
    return totals, *(tuple(x.shape) for x in tree_leaves(rows) if isinstance(x, Tensor))


def _rehearse(agent: torch.nn.Module, loss: Loss) -> None:
    """Runs the backward pass of a new shape once, which compiles it here, where a failure does no harm."""
    parameters = [p for p in agent.parameters() if p.requires_grad]
    for total in loss.totals().values():
        if total.requires_grad and total.numel() == 1:
            torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
