"""Faults of workers: the error that is raised, or a replacement within a budget; and their counts."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from typing import Any, Literal, NamedTuple

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, NativeEnvError, PenstockError
from penstock.processes.death import Death

FaultKind = Literal["exception", "contract", "signal", "exit", "oom", "timeout"]
FaultPolicy = Literal["auto", "raise", "restart", "drop"]

_BUDGET = 5
_BUDGET_S = 600.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 30.0
_WARN_EVERY_S = 60.0


class Fault(NamedTuple):
    """A worker's fault: its kind, and a message that names the place."""

    kind: FaultKind | Literal["config", "native"]
    message: str

    def error(self) -> PenstockError:
        """The exception to raise."""
        if self.kind in ("config", "native"):
            return (ConfigError if self.kind == "config" else NativeEnvError)(self.message)
        return (EnvContractError if self.kind == "contract" else EnvWorkerError)(self.message)


class Faults:
    """Counts faults, and decides by `fault_policy` whether to raise, to replace or to go on without the worker.

    Args:
        budget: replacements of one worker within ten minutes, 5 if None. what: word for a worker in messages.
    """

    def __init__(self, policy: FaultPolicy, budget: int | None = None, what: str = "worker") -> None:
        self.policy, self._what = policy, what
        self._budget = _BUDGET if budget is None else budget
        self.counts: Counter[str] = Counter()
        self._restarts: dict[int, list[float]] = {}
        self._warned: dict[int, float] = {}

    def decide(self, worker: int, fault: Fault) -> float | None:
        """Seconds after which to start a replacement, or None to go on without this worker.

        Raises:
            EnvWorkerError, EnvContractError, ConfigError: the policy says so, or the budget of restarts is used up.
        """
        if fault.kind in ("config", "native"):
            raise fault.error()
        self.counts[fault.kind] += 1
        ours = fault.kind in ("exception", "contract")
        if self.policy == "raise" or (self.policy == "auto" and ours):
            raise fault.error()
        if self.policy == "drop":
            self._warn(worker, f"{fault.message.splitlines()[0]}; its slots are dropped (fault_policy='drop')")
            return None
        now = time.monotonic()
        recent = [t for t in self._restarts.get(worker, []) if now - t < _BUDGET_S]
        if len(recent) >= self._budget:
            raise Fault(
                fault.kind,
                f"{fault.message}\n{self._what} {worker} was replaced {self._budget} times within "
                f"{_BUDGET_S / 60:.0f} minutes; mend the environment, or use fault_policy='drop'",
            ).error()
        self._restarts[worker] = [*recent, now]
        self.counts["restarts"] += 1
        self._warn(worker, f"{fault.message.splitlines()[0]}; the {self._what} is replaced")
        return 0.0 if not recent else min(_FIRST_DELAY_S * 2.0 ** len(recent), _LONGEST_DELAY_S)

    def metrics(self) -> dict[str, float]:
        """`faults/...` counts since the run began; empty while there is none."""
        return {f"faults/{name}": float(n) for name, n in self.counts.items()}

    def _warn(self, worker: int, text: str) -> None:
        now = time.monotonic()
        if now - self._warned.get(worker, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned[worker] = now
            warnings.warn(text, stacklevel=2)


def fault_of(death: Death, report: Any) -> Fault:
    """The fault that a worker died of: its own report, or else the exit status from the system."""
    if isinstance(report, dict) and "error" in report:
        return Fault(report["error"]["kind"], report["error"]["text"])
    return Fault(death.kind, "\n".join(filter(None, [death.text, death.said])))
