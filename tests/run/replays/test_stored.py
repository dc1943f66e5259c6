from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.run.replays.stored import open_replay, summary
from tests.run.replays.recorded import B, Recorded


def test_episodes_that_are_kept_whole(recorded: Callable[..., Recorded]) -> None:
    """Counted row by row: CartPole pays 1 a step, so a return is a length."""
    for case in ("uniform", "box"):
        run = recorded(case)
        replay = open_replay(run.run)
        x, returns = run.record, []
        for b in range(B):
            total: float | None = None
            for t in range(replay.oldest, run.length):
                total = 0.0 if x["first"][t, b] else total
                if not x["valid"][t, b]:
                    total = None
                if total is not None:
                    total += float(np.float32(x["reward"][t, b]))
                if total is not None and (x["terminated"] | x["truncated"])[t, b]:
                    returns.append(total)
                    total = None
        said = summary(replay)["episodes"]
        if case == "box":  # an episode of 200 steps does not fit
            assert not returns
            assert said == "none is kept from its first row to its last"
        else:
            mean = f"mean {np.mean(returns):.4g} (min {min(returns):.4g}, max {max(returns):.4g})"
            assert len(returns) > 1
            assert said == f"{len(returns)} kept whole; return {mean}; length {mean}"
