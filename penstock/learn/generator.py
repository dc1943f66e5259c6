"""Random numbers of a generator of one's own, for code that asks torch's process-wide one: how networks start."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # torch's own way for a thread to see its operations


class OwnGenerator(TorchDispatchMode):
    """A context in which every random operation of this thread draws from generators that start at `seed`.

    The numbers are those that the process-wide generators would draw after `torch.manual_seed(seed)`, on any device.
    Those are neither read nor moved, so other threads may draw, or start networks of their own, all the while.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operation would import torch's compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        drawing = _drawing(func)
        if drawing is not None and kwargs.get("generator") is None:
            device = args[0].device if args and isinstance(args[0], torch.Tensor) else kwargs.get("device")
            func, kwargs["generator"] = drawing, self._generator(torch.device(device or "cpu"))
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _drawing(func: Any) -> Any:
    """The overload of an operation that takes a generator, or None if it draws nothing."""
    if any(a.name == "generator" for a in func._schema.arguments):
        return func
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    plain = func._overloadname == "default"
    return getattr(func.overloadpacket, "generator" if plain else f"{func._overloadname}_generator", None)
