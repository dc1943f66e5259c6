"""Toys of teams: returns are what their pages say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from penstock.envs.toy import TwoStepMatrix


def team_return(env: Any, choose: Callable[[str, Any], int], seed: int = 0) -> float:
    shown, _ = env.reset(seed=seed)
    total = 0.0
    while env.agents:
        shown, rewards, *_ = env.step({agent: choose(agent, shown[agent]) for agent in env.agents})
        assert len({*rewards.values()}) == 1
        total += next(iter(rewards.values()))
    return total


def test_the_matrix_game_pays_what_the_paper_says() -> None:
    found = {}
    for first, *second in itertools.product((0, 1), repeat=3):
        plan = {"agent_0": iter((first, second[0])), "agent_1": iter((0, second[1]))}
        found[first, *second] = team_return(TwoStepMatrix(), lambda agent, _, plan=plan: next(plan[agent]))
    assert [found[0, a, b] for a, b in itertools.product((0, 1), repeat=2)] == [7.0] * 4
    assert [found[1, a, b] for a, b in itertools.product((0, 1), repeat=2)] == [0.0, 1.0, 1.0, 8.0]
