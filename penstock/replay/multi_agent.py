"""One replay for each policy, over batches that hold every policy's own columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core.batch import MultiAgentBatch, TrainBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.replay.columns import Array
from penstock.replay.replay import Replay, SampledUnits


class MultiAgentReplay:
    """One replay for each policy id, over batches that hold every policy's own columns."""

    def __init__(self, replays: Mapping[str, Replay]) -> None:
        self.replays = dict(replays)

    def append(self, batch: MultiAgentBatch) -> None:
        """Adds every policy's rows to its replay."""
        unknown = batch.keys() - self.replays.keys()
        if unknown:
            raise ConfigError(
                f"batches of policies {sorted(unknown)} and replays of {sorted(self.replays)}; name a replay for each"
            )
        for name, part in batch.items():
            self.replays[name].append(part)

    def sample(
        self, n: int, rng: np.random.Generator, progress: float = 0.0
    ) -> dict[str, tuple[SampledUnits, TrainBatch]]:
        """N samples of every policy that has any."""
        return {name: each.sample(n, rng, progress) for name, each in self.replays.items() if len(each)}

    def update_priorities(self, drawings: Mapping[str, SampledUnits], priorities: Mapping[str, Array]) -> None:
        """Like `Replay.update_priorities`, for each policy."""
        for name, drawing in drawings.items():
            self.replays[name].update_priorities(drawing, priorities[name])

    def describe(self) -> str:
        """Like `Replay.describe`, a line for each policy."""
        return "\n".join(f"{name}: {each.describe()}" for name, each in self.replays.items())

    def state_dict(self) -> dict[str, Any]:
        """Like `Replay.state_dict`, by policy id."""
        return {name: each.state_dict() for name, each in self.replays.items()}

    def arrays(self) -> dict[str, Array]:
        """Like `Replay.arrays`, for all policies: `id/name`."""
        return {f"{name}/{key}": x for name, each in self.replays.items() for key, x in each.arrays().items()}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Inverse of `state_dict` and `arrays`, after each replay's `prepare`."""
        if state.keys() != self.replays.keys():
            raise CheckpointError(
                f"the checkpoint has replays of policies {sorted(state)}; this run has {sorted(self.replays)}"
            )
        for name, each in self.replays.items():
            own = {key.removeprefix(f"{name}/"): x for key, x in arrays.items() if key.startswith(f"{name}/")}
            each.load_state_dict(state[name], own)
