"""Connect-3 by its rules, move by move beside an independent solver, which counts its positions and knows its value."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig
from penstock.envs.toy import Connect3
from tests import connect3


def test_it_has_19944_positions_and_nobody_can_force_a_win() -> None:
    assert len(connect3.positions()) == 19_944
    assert connect3.value(connect3.EMPTY) == 0
    right = connect3.right()
    legal = np.array([len(connect3.legal(at)) for at in connect3.positions()])
    assert (right.sum(1) >= 1).all() and (right.sum(1) / legal).mean() == pytest.approx(0.638, abs=1e-3)


def test_every_move_is_that_of_the_solver() -> None:
    env, rng, ends = Connect3(), np.random.default_rng(0), set[float]()
    for game in range(100):
        env.reset(seed=game)
        at, won = connect3.EMPTY, 0.0
        while not won and connect3.legal(at):
            obs, reward, terminated, truncated, _ = env.last()
            expected = connect3.shown(at)
            assert env.agent_selection == f"agent_{connect3.mover(at) - 1}"
            assert (reward, terminated, truncated) == (0.0, False, False)
            assert all(np.array_equal(obs[key], expected[key]) for key in expected)
            move = int(rng.choice(connect3.legal(at)))
            env.step(move)
            at = connect3.dropped(at, move)
            won = float(connect3.has_won(at, 3 - connect3.mover(at)))
        loser = connect3.mover(at) - 1
        assert env.rewards == {f"agent_{loser}": -won, f"agent_{1 - loser}": won}
        assert all(env.terminations.values())
        ends.add(won)
    assert ends == {0.0, 1.0}


def test_openings_of_every_length_lead_to_positions_of_the_game() -> None:
    env, known, lengths = Connect3(opening_moves=11), set(connect3.positions()), list[int]()
    for seed in range(200):
        env.reset(seed=seed)
        columns = (column[column > 0].tolist() for column in env.board.T)
        at: connect3.Position = tuple(map(tuple, columns))
        assert at in known
        lengths.append(sum(map(len, at)))
        assert env.agent_selection == f"agent_{lengths[-1] % 2}"
    assert set(lengths) == set(range(12))
    assert min(map(lengths.count, range(12))) >= 5
    with pytest.raises(ValueError, match="opening_moves=12; expected 0 to 11"):
        Connect3(opening_moves=12)


def test_our_check_passes() -> None:
    assert check_env(Connect3).reproducible
    assert check_env(EnvConfig(Connect3, kwargs={"opening_moves": 11})).reproducible
