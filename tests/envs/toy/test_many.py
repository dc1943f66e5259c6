"""Toys of many agents: the best return is what their pages say, and PettingZoo takes them for its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.envs.toy import Nim, PaidLater, TeamBit, TwoStepMatrix


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
        plan = {"first": iter((first, second[0])), "second": iter((0, second[1]))}
        found[first, *second] = team_return(TwoStepMatrix(), lambda agent, _, plan=plan: next(plan[agent]))
    assert [found[0, a, b] for a, b in itertools.product((0, 1), repeat=2)] == [7.0] * 4
    assert [found[1, a, b] for a, b in itertools.product((0, 1), repeat=2)] == [0.0, 1.0, 1.0, 8.0]


def test_a_team_earns_where_all_name_their_bits() -> None:
    assert team_return(TeamBit(3, 5), lambda _, obs: int(obs[0] > 0)) == 5.0
    assert team_return(TeamBit(3, 5), lambda agent, obs: int((obs[0] > 0) != (agent == "agent_1"))) == 0.0
    at_random = [team_return(TeamBit(2, 8), lambda *_: 1, seed) for seed in range(300)]
    assert np.mean(at_random) == pytest.approx(2.0, abs=0.25)
    env = TeamBit(2)
    shown, _ = env.reset(seed=3)
    np.testing.assert_array_equal(env.state(), np.concatenate([shown["agent_0"], shown["agent_1"]]))


def played(env: Any, choose: Callable[[str, Any], int], seed: int = 0) -> dict[str, float]:
    env.reset(seed=seed)
    total = dict.fromkeys(env.possible_agents, 0.0)
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, _ = env.last()
        total[agent] += reward
        env.step(None if terminated or truncated else choose(agent, obs))
    return total


def test_the_reward_comes_with_the_move_of_the_other() -> None:
    assert played(PaidLater(4), lambda _, obs: int(obs[0] > 0)) == {"first": 4.0, "second": 4.0}
    assert played(PaidLater(4), lambda agent, obs: int((obs[0] > 0) == (agent == "first"))) == {"first": 4.0, "second": 0.0}  # fmt: skip
    env = PaidLater(4)
    env.reset(seed=0)
    env.step(int(env.last()[0][0] > 0))
    assert env.rewards == {"first": 0.0, "second": 0.0}
    env.step(0)
    assert env.rewards["first"] == 1.0


@pytest.mark.parametrize("stones", range(1, 13))
def test_nim_is_won_by_leaving_a_multiple_of_four(stones: int) -> None:
    def best(obs: Any) -> int:
        left = int(np.argmax(obs["stones"])) + 1
        return left % 4 - 1 if left % 4 else 0

    rng = np.random.default_rng(stones)
    for _ in range(20):
        winner = "first" if stones % 4 else "second"

        def choose(agent: str, obs: Any, winner: str = winner) -> int:
            return best(obs) if agent == winner else int(rng.choice(np.flatnonzero(obs["action_mask"])))

        assert played(Nim(stones), choose)[winner] == 1.0


def test_pettingzoo_takes_them() -> None:
    testing = pytest.importorskip("pettingzoo.test")
    for make in (TeamBit, TwoStepMatrix):
        testing.parallel_api_test(make(), num_cycles=50)
