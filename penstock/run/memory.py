"""A device that runs out of memory: the error names the settings that decide how much is needed, with their values."""

from __future__ import annotations

from typing import Any

from penstock.core.errors import LearnerError
from penstock.run.experiment import Experiment


def out_of_memory(exp: Experiment, doing: str, error: BaseException) -> LearnerError:
    """The error that says what to lower where torch raised OutOfMemoryError.

    Args:
        doing: the action that needs the memory, as "trains on a batch".
    """
    algo: Any = exp.algo
    own = {name: getattr(algo, name, None) for name in ("minibatch", "batch_size")}
    lower = [f"algo.{name}={x}" for name, x in own.items() if x]
    lower += [f"sampler.{name}={x}" for name, x in zip("TB", exp.sampler_settings.spec)]
    if (net := getattr(algo, "net", None)) is not None:
        lower.append(f"algo.net.hidden={net.hidden}")
    return LearnerError(
        f"run.device={exp.run.device!r} has too little memory where the run {doing}: "
        f"{(str(error).splitlines() or [''])[0]:.300}; lower {', '.join(lower)}, or use run.device='cpu'"
    )
