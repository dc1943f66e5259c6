"""Leduc hold'em by two sets of rules: an environment, and the exact exploitability of policies by a walk of its tree.

Exploitability is (best response to one's first seat + best response to one's second) / 2, both of them the mean gain of
a player who knows the policy: 0 in equilibrium (OpenSpiel's `exploitability`, Lanctot et al. 2019, section 3.4). The
average of several policies draws one of them before the cards are dealt: at each information set they are weighted by
the chance that their own moves lead there (Heinrich et al. 2015, theorem 7).

Uniform play has 2.3736 chips in OpenSpiel's `leduc_poker` and 1.4716 big blinds in RLCard's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from penstock.envs.toy.agents import TurnToy

FOLD, MATCH, RAISE = range(3)
RANKS = range(3)
RAISES, MOST_MOVES = 2, 4


@dataclass(frozen=True)
class Rules:
    """Differences of the two games; both raise by 2 and then 4 chips, twice a round."""

    name: str
    start: tuple[int, int]
    """Chips in the pot before the first move: of who makes it, and of the other."""
    free_fold: bool
    """Whether a player may fold where there is nothing to pay."""
    first_leads: bool
    """Whether who made the first move begins the second round too, or the one whose turn it would be."""
    unit: float
    """Chips of a reward of 1."""


LEDUC_POKER = Rules("leduc_poker", (1, 1), False, True, 1.0)
RLCARD = Rules("leduc_holdem_v4", (1, 2), True, False, 2.0)


class State(NamedTuple):
    """The public part of a deal; players are 0, who makes the first move, and 1."""

    chips: tuple[int, int]
    player: int = 0
    rounds: tuple[tuple[int, ...], ...] = ((),)
    """Moves of each round so far."""
    public: int | None = None
    """Rank of the public card, None before the second round."""
    folded: int | None = None
    dealing: bool = False
    """The public card is next."""

    @property
    def over(self) -> bool:
        """No move follows."""
        return self.folded is not None or (len(self.rounds) == 2 and _is_settled(self.rounds[1]))

    def legal(self, rules: Rules) -> list[int]:
        """The moves of the player whose turn it is."""
        behind = self.chips[self.player] < max(self.chips)
        raises = self.rounds[-1].count(RAISE) < RAISES
        return [FOLD] * (behind or rules.free_fold) + [MATCH] + [RAISE] * raises

    def after(self, move: int, rules: Rules) -> State:
        """The state that a legal move leads to."""
        rounds, other = (*self.rounds[:-1], (*self.rounds[-1], move)), 1 - self.player
        if move == FOLD:
            return self._replace(rounds=rounds, folded=self.player, player=other)
        chips = [*self.chips]
        chips[self.player] = max(chips) + (2 * len(rounds) if move == RAISE else 0)
        found = self._replace(chips=(chips[0], chips[1]), rounds=rounds, player=other)
        if len(rounds) == 1 and _is_settled(rounds[0]):
            return found._replace(dealing=True, player=0 if rules.first_leads else other)
        return found

    def dealt(self, public: int) -> State:
        """The state with the public card, which opens the second round."""
        return self._replace(public=public, rounds=(*self.rounds, ()), dealing=False)

    def gain(self, player: int, own: int, other: int) -> float:
        """Chips that a player wins in a state that is over, by the ranks of both cards."""
        won = self.chips[1 - player], -self.chips[player]
        if self.folded is not None:
            return won[self.folded == player]
        ours, theirs = ((card == self.public, card) for card in (own, other))
        return 0.0 if ours == theirs else won[ours < theirs]


def _is_settled(moves: tuple[int, ...]) -> bool:
    """Both players have answered the last raise, or there was none and both have moved."""
    return len(moves) >= 2 and moves[-1] == MATCH


class LeducPoker(TurnToy):
    """OpenSpiel's `leduc_poker` for two agents in turn, player_0 first; chips won are the reward.

    Shown are the own and the public card, the seat, and which moves each round had: a player forgets nothing.
    """

    def __init__(self) -> None:
        observation, mask = spaces.Box(0, 1, (24,), np.float32), spaces.MultiBinary(3)
        super().__init__(2, spaces.Dict({"observation": observation, "action_mask": mask}), 3)
        self.state, self._cards = State(LEDUC_POKER.start), [0, 0, 0]

    def begin(self) -> None:
        self.state = State(LEDUC_POKER.start)
        self._cards = (self.rng.permutation(6)[:3] // 2).tolist()
        for agent in self.possible_agents:
            self.enter(agent)
        self.select(self.agents[0])

    def observe(self, agent: str) -> Any:
        seat = self.possible_agents.index(agent)
        return shown(LEDUC_POKER, self.state._replace(player=seat), self._cards[seat])

    def play(self, agent: str, action: Any) -> None:
        self.state = self.state.after(int(action), LEDUC_POKER)
        if self.state.dealing:
            self.state = self.state.dealt(self._cards[2])
        self.select(self.possible_agents[self.state.player])
        if self.state.over:
            for seat, each in enumerate(self.possible_agents):
                self.rewards[each] = self.state.gain(seat, self._cards[seat], self._cards[1 - seat])
                self.end(each)


def shown(rules: Rules, state: State, own: int) -> dict[str, Any]:
    """The observation of the player whose turn it is, who holds a card of rank `own`."""
    moves = state.legal(rules)
    if rules is LEDUC_POKER:
        obs, mask = np.zeros(24, np.float32), np.zeros(3, np.int8)
        obs[own] = 1.0
        if state.public is not None:
            obs[3 + state.public] = 1.0
        obs[6 + state.player] = 1.0
        for i, moved in enumerate(state.rounds):
            for j, move in enumerate(moved):
                if move != FOLD:
                    obs[8 + 2 * (MOST_MOVES * i + j) + move - 1] = 1.0
    else:
        obs, mask = np.zeros(36, np.int8), np.zeros(4, np.int8)
        obs[[own, 6 + state.chips[state.player], 21 + state.chips[1 - state.player]]] = 1
        if state.public is not None:
            obs[3 + state.public] = 1
    mask[[action_of(rules, state, move) for move in moves]] = 1
    return {"observation": obs, "action_mask": mask}


def action_of(rules: Rules, state: State, move: int) -> int:
    """The number of a move in the environment: RLCard's are call, raise, fold and check."""
    if rules is LEDUC_POKER:
        return move
    even = state.chips[state.player] == max(state.chips)
    return {FOLD: 2, MATCH: 3 if even else 0, RAISE: 1}[move]


@functools.cache
def decisions(rules: Rules) -> list[tuple[State, int]]:
    """Every information set: what is public where a move is due, and the rank of the card of who makes it."""
    found: list[tuple[State, int]] = []

    def visit(state: State) -> None:
        if state.dealing:
            for public in RANKS:
                visit(state.dealt(public))
        elif not state.over:
            found.extend((state, own) for own in RANKS)
            for move in state.legal(rules):
                visit(state.after(move, rules))

    visit(State(rules.start))
    return found


Chances = Mapping[tuple[State, int], np.ndarray]
"""[3] chance of each move at each information set."""


def uniform(rules: Rules) -> Chances:
    """Any legal move."""
    return {(state, own): _spread(state.legal(rules)) for state, own in decisions(rules)}


def _spread(moves: list[int]) -> np.ndarray:
    out = np.zeros(3)
    out[moves] = 1.0 / len(moves)
    return out


def average(policies: Sequence[Chances], rules: Rules) -> Chances:
    """The policy that draws one of `policies` before each deal, as chances at each information set."""
    total: dict[tuple[State, int], np.ndarray] = {}
    for policy in policies:
        for own in RANKS:

            def visit(state: State, reach: tuple[float, float], own: int = own, policy: Chances = policy) -> None:
                if state.dealing:
                    for public in RANKS:
                        visit(state.dealt(public), reach)
                elif not state.over:
                    chances, player = policy[state, own], state.player
                    total[state, own] = total.get((state, own), 0.0) + reach[player] * chances
                    for move in state.legal(rules):
                        own_reach = reach[player] * float(chances[move])
                        visit(state.after(move, rules), (own_reach, reach[1]) if player == 0 else (reach[0], own_reach))

            visit(State(rules.start), (1.0, 1.0))
    sums = {at: float(x.sum()) for at, x in total.items()}
    return {at: x / sums[at] if sums[at] > 0 else _spread(at[0].legal(rules)) for at, x in total.items()}


def best_response(chances: Chances, rules: Rules, player: int) -> float:
    """The mean gain, in units of the rewards, of a player that knows how the other moves and answers best."""

    def value(state: State, own: int, reach: np.ndarray) -> float:
        """Over the deals: reach [3] is the chance of the other's card and of the moves that it made."""
        if state.dealing:
            return sum(
                value(state.dealt(public), own, reach * [(2 - (public == own) - (public == x)) / 4 for x in RANKS])
                for public in RANKS
            )
        if state.over:
            return float(reach @ [state.gain(player, own, other) for other in RANKS])
        moves = state.legal(rules)
        if state.player == player:
            return max(value(state.after(move, rules), own, reach) for move in moves)
        theirs = np.stack([chances[state, other] for other in RANKS])
        return sum(value(state.after(move, rules), own, reach * theirs[:, move]) for move in moves)

    deals = ((own, np.array([2 * (2 - (own == other)) / 30 for other in RANKS])) for own in RANKS)
    return sum(value(State(rules.start), own, reach) for own, reach in deals) / rules.unit


def exploitability(chances: Chances, rules: Rules) -> float:
    """The mean over both seats of what a player gains who knows how the other moves."""
    return sum(best_response(chances, rules, player) for player in (0, 1)) / 2
