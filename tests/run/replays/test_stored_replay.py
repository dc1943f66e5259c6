from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.run.replays.stored_replay import StoredReplay, open_replay, summary, whole_episodes
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


def test_an_episode_with_a_lost_row_or_an_end_within_is_not_whole() -> None:
    """Of a slot that lost a row, and of one in which a lost life counted as an end before the game was over."""
    rows = 6
    flags = {name: np.zeros((rows, 3), bool) for name in ("first", "terminated", "truncated")}
    valid = np.ones((rows, 3), bool)
    flags["first"][1] = True
    flags["terminated"][4] = True
    valid[2, 1] = False
    flags["terminated"][2, 2] = True
    arrays = {**flags, "valid": valid, "index.usable": valid}
    state = {"prepared": (rows + 1, 3), "storage": {"head": rows}}
    replay = StoredReplay(Path("x"), 0, state, 0, arrays, 0)
    assert whole_episodes(replay) == [(0, 1, 5), (2, 1, 3)]
