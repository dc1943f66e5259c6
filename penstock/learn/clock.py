"""Clock, by which schedules move in a loop of one's own, and the step size that moves by the KL divergence."""

from __future__ import annotations

import warnings
from typing import Any, Self

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.schedule import curve, over_the_run
from penstock.learn.algorithm import Optimizers
from penstock.learn.optimizers import Adam

_FACTOR = 1.5
ROUNDING = 1e-7
"""KL divergences up to it count as 0, at which nothing moves: several learners round them otherwise than one."""


class Clock:
    """Counts environment steps until somebody else keeps the time, by `Policy.set_progress`."""

    def __init__(self) -> None:
        self.total_steps: int | None = None
        """Environment steps of the whole run, None where nobody has said."""
        self.env_steps = 0
        """Environment steps trained on; 0 where somebody else keeps the time."""
        self.kept_outside = False
        """`Policy.set_progress` has been called, as a run does before each batch."""
        self._said = False

    def begin(self, total_steps: int | None) -> None:
        """Sets the length of the run. Raises ConfigError unless it is a positive number of steps, or None."""
        if total_steps is not None and (isinstance(total_steps, bool) or int(total_steps) != total_steps):
            raise ConfigError(f"total_steps={total_steps!r}; expected a whole number of environment steps")
        if total_steps is not None and total_steps < 1:
            raise ConfigError(f"total_steps={total_steps}; expected 1 or more environment steps")
        self.total_steps = None if total_steps is None else int(total_steps)

    @property
    def progress(self) -> float:
        """Fraction of the run that is over, at most 1; 0 where its length is not known."""
        return min(self.env_steps / self.total_steps, 1.0) if self.total_steps else 0.0

    def remark(self, settings: Any) -> None:
        """Warns, once, of schedules that stand still since the length of the run is not known."""
        if self._said or self.total_steps:
            return
        self._said = True
        still = over_the_run(settings)
        if still:
            name, text = next(iter(still.items()))
            warnings.warn(
                f"{', '.join(f'{key}={value!r}' for key, value in still.items())}: a schedule over the whole run, "
                f"which stands still where nobody says how long that is. Say it, {type(settings).__name__}(...).build("
                f"spec, total_steps=100_000), or give steps in the schedule ({name}={_in_steps(text)!r}), or call "
                "policy.set_progress(fraction) before each batch",
                stacklevel=4,
            )


class KlRate:
    """The step size of `lr="kl(start, desired=...)"`: a tensor on the policy's device, which nobody waits for.

    The rule of rsl_rl (Schwarke et al. 2025, arXiv:2509.10771): before each gradient step it is divided by 1.5 where
    the KL divergence of the present policy from the one before the batch is over twice the desired one, and multiplied
    by 1.5 below half of it.
    """

    def __init__(self, start: float, desired: float, least: float, most: float, device: torch.device) -> None:
        self.value = torch.tensor(start, dtype=torch.float64, device=device)
        self._desired, self._least, self._most = desired, least, most

    @classmethod
    def of(cls, settings: Any, device: torch.device) -> Self | None:
        """The one that the settings' `lr` asks for, None if it asks for none. Raises ConfigError where none can be."""
        lr: Any = getattr(settings, "lr", 0.0)
        if not isinstance(lr, str) or (found := curve(lr)).desired_kl is None:
            return None
        if not getattr(settings, "reports_kl", False):
            raise ConfigError(
                f"lr={lr!r} with {type(settings).__name__}, whose loss tells no KL divergence; expected a number or "
                "another schedule, or PPO, MAPPO or APPO"
            )
        return cls(found.start, found.desired_kl, found.lowest, found.highest, device)

    def follow(self, kl: Tensor, refused: bool | Tensor = False) -> None:
        """Moves it by the KL divergence of a minibatch, a scalar tensor; not by one of an update that is refused."""
        less, more = (self.value / _FACTOR).clamp(min=self._least), (self.value * _FACTOR).clamp(max=self._most)
        taken = kl.isfinite() & ~torch.as_tensor(refused, device=kl.device)
        near = taken & (kl > ROUNDING) & (kl < 0.5 * self._desired)
        far = taken & (kl > 2.0 * self._desired)
        self.value.copy_(torch.where(far, less, torch.where(near, more, self.value)))

    def value_for(self, optimizers: Optimizers) -> Any:
        """The step size as optimizers take it: a number on the CPU, else the tensor where they are all ours."""
        takes = not self.value.is_cpu and all(isinstance(x, Adam) for x in optimizers.values())
        return self.value.float() if takes else self.value.item()


def _in_steps(schedule: Any) -> str:
    """A schedule as it could be written in steps: of two values the same ones."""
    kind, _, numbers = str(schedule).partition("(")
    values = numbers.rstrip(") ").split(",")[:2]
    if kind.strip() not in ("linear", "cosine", "exponential") or len(values) != 2:
        return "linear(1e-3, 0, steps=100_000)"
    return f"{kind}({values[0].strip()}, {values[1].strip()}, steps=100_000)"
