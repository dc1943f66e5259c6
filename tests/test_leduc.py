"""Leduc hold'em: published exploitability, averages of policies, and RLCard's rules move by move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import leduc


def test_uniform_play_is_as_exploitable_as_published() -> None:
    """OpenSpiel 2.0.2 says 2.373611111111111 of `leduc_poker`; by ranks alone the game has 288 information sets."""
    assert len(leduc.decisions(leduc.LEDUC_POKER)) == 288
    assert leduc.exploitability(leduc.uniform(leduc.LEDUC_POKER), leduc.LEDUC_POKER) == pytest.approx(2.373611111111111)


def test_who_always_folds_loses_what_stands_in_the_pot() -> None:
    """By RLCard's rules a half and a whole big blind; the mean of both seats is 0.75."""
    rules = leduc.RLCARD
    folds = {at: np.array([1.0, 0.0, 0.0]) for at in leduc.uniform(rules)}
    assert leduc.best_response(folds, rules, 1) == pytest.approx(0.5)
    assert leduc.exploitability(folds, rules) == pytest.approx(0.75)


def test_an_average_is_weighted_by_the_chance_to_come_there() -> None:
    """One policy raises a third of the time and the other always: after a raise the second one counts three times."""
    rules = leduc.LEDUC_POKER
    start, own = leduc.State(rules.start), 1
    often, always = (dict(leduc.uniform(rules)) for _ in range(2))
    often[start, own], always[start, own] = np.array([0, 2 / 3, 1 / 3]), np.array([0, 0, 1.0])
    later = start.after(leduc.RAISE, rules).after(leduc.RAISE, rules)
    often[later, own], always[later, own] = np.array([1.0, 0, 0]), np.array([0, 1.0, 0])
    mixed = leduc.average([often, always], rules)
    np.testing.assert_allclose(mixed[start, own], [0, 1 / 3, 2 / 3])
    np.testing.assert_allclose(mixed[later, own], [0.25, 0.75, 0])


@pytest.mark.parametrize("rules", ["LEDUC_POKER", "RLCARD"])
def test_its_rules_are_those_of_the_environment(rules: str) -> None:
    if rules == "RLCARD":
        env: Any = pytest.importorskip("pettingzoo.classic.leduc_holdem_v4").env()
    else:
        env = leduc.LeducPoker()
    own_rules, rng = getattr(leduc, rules), np.random.default_rng(0)
    for game in range(12):
        env.reset(seed=game)
        first = env.agent_selection
        names = [first, *(agent for agent in env.possible_agents if agent != first)]
        state, cards, won = leduc.State(own_rules.start), [-1, -1], dict.fromkeys(names, 0.0)
        for agent in names:
            cards[names.index(agent)] = int(env.observe(agent)["observation"][:3].argmax())
        while env.agents:
            agent = env.agent_selection
            obs, reward, terminated, _, _ = env.last()
            won[agent] += reward
            if terminated:
                env.step(None)
                continue
            if state.dealing:
                state = state.dealt(int(obs["observation"][3:6].argmax()))
            expected = leduc.shown(own_rules, state, cards[state.player])
            assert agent == names[state.player]
            assert all(np.array_equal(obs[key], expected[key]) for key in expected)
            move = int(rng.choice(state.legal(own_rules)))
            env.step(leduc.action_of(own_rules, state, move))
            state = state.after(move, own_rules)
        assert state.over
        for i, agent in enumerate(names):
            assert won[agent] == state.gain(i, cards[i], cards[1 - i]) / own_rules.unit
