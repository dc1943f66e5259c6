"""The schedule by which samples of a replay are trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.noise import Purpose, generator
from penstock.core.tree import tree_leaves
from penstock.replay.replay import Replay
from penstock.replay.settings import check_rate

AfterUpdate: TypeAlias = Callable[[Any, Any, int], None]
"""(agent, settings, number of gradient steps) -> None."""
_LARGE_BYTES = 1 << 20


class ReplaySchedule:
    """The replay of a policy, and how much of it is trained on.

    Args:
        batch_size: samples of a gradient step.
        sample_rows: rows that each of them trains on, more than 1 for sequences.
        replay_ratio: rows trained on for each row collected, after the first `learning_starts` rows.
        noise_size: uniforms for each sample, which `postprocess_fn` and `loss_fn` find as `x["noise"]`.
        after_update: called with (agent, settings, number of gradient steps) after each step; moves target networks.

    Raises:
        ConfigError: a number out of range, or more than the replay can hold or give.
    """

    def __init__(
        self,
        replay: Replay,
        batch_size: int,
        replay_ratio: float,
        learning_starts: int,
        *,
        sample_rows: int = 1,
        noise_size: int = 0,
        after_update: AfterUpdate | None = None,
    ) -> None:
        check_rate(replay.settings, batch_size, replay_ratio, learning_starts, sample_rows)
        if replay.settings.index == "fifo" and replay_ratio > (most := sample_rows / replay.view.stride):
            raise ConfigError(
                f"replay_ratio={replay_ratio} with replay.index='fifo', which gives each sample once; use a ratio of "
                f"at most {most:g}, or another index"
            )
        self.replay, self.batch_size, self.sample_rows = replay, batch_size, sample_rows
        self.replay_ratio, self.learning_starts, self.noise_size = replay_ratio, learning_starts, noise_size
        self.after_update = after_update
        self.rng = generator(0, Purpose.REPLAY)
        """Draws samples; moved to an address of its own by each training step."""
        self.collected = 0
        """Rows collected since the run began."""
        self.trained = 0
        """Gradient steps asked of the policy, skipped ones included."""

    def due(self) -> int:
        """Gradient steps that the ratio asks for by now: exact, counted from the start of the run.

        Steps whose samples cannot be drawn yet stay due.
        """
        steps = self._asked() - self.trained
        if self.replay.settings.index == "fifo":  # the newest rows may not be samples yet
            return min(steps, len(self.replay) // self.batch_size)
        return steps if len(self.replay) else 0

    def reads_ahead(self, to_gpu: bool) -> bool:
        """True if samples are read in a thread: `replay.prefetch`; "auto": large ones, those of shards or a GPU."""
        wish = self.replay.settings.prefetch
        if wish != "auto":
            return wish
        # Observations are most of a sample where it is large; of a transition it holds two.
        rows = self.replay.view.span + 1 if self.sample_rows > 1 else 2
        row = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in tree_leaves(self.replay.spec.obs))
        return to_gpu or bool(self.replay.settings.shards) or self.batch_size * rows * row >= _LARGE_BYTES

    def describe(self) -> str:
        """Replay and rate of training for people, in gradient steps: `one update of 32 every 4 steps`."""
        exact = Fraction(repr(self.replay_ratio)) / (self.batch_size * self.sample_rows)
        of = f"{self.batch_size:,}" + (f" sequences of {self.sample_rows:,} rows" if self.sample_rows > 1 else "")
        if exact.denominator > 100_000:  # a ratio such as 1 / 3
            rate = f"one update of {of} every {1 / float(exact):,.6g} steps"
        else:
            rate = f"{exact.numerator:,} updates" if exact.numerator > 1 else "one update"
            rate += f" of {of} every " + ("step" if exact.denominator == 1 else f"{exact.denominator:,} steps")
        after = f" after the first {self.learning_starts:,}" if self.learning_starts else ""
        return f"{self.replay.describe()}; {rate}{after} (replay ratio {self.replay_ratio:g})"

    def metrics(self) -> dict[str, float]:
        """`replay/ratio`, the rows trained on for each row collected so far, and `replay/size` in samples."""
        counted = max(0, self.collected - self.learning_starts)
        ratio = self.trained * self.batch_size * self.sample_rows / counted if counted else 0.0
        return {"replay/ratio": ratio, "replay/size": float(len(self.replay))}

    def state_dict(self) -> dict[str, Any]:
        """Counters and the replay's state, without its arrays."""
        return {
            "collected": self.collected,
            "trained": self.trained,
            "rate": self._rate,
            "replay": self.replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """The inverse of `state_dict` and the replay's `arrays`; a ratio that has changed holds from now on."""
        self.replay.load_state_dict(state["replay"], arrays)
        self.collected, self.trained = int(state["collected"]), int(state["trained"])
        if list(state.get("rate", self._rate)) != self._rate:
            self.trained = self._asked()

    @property
    def _rate(self) -> list[float]:
        return [self.replay_ratio, self.batch_size, self.sample_rows, self.learning_starts]

    def _asked(self) -> int:
        rows = max(0, self.collected - self.learning_starts) * self.replay_ratio
        return math.floor(rows / (self.batch_size * self.sample_rows) + 1e-9)
