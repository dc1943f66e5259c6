"""A pool of many agents that is restored goes on to the same bits: open turns, seats, sums and all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.tree import tree_assign, tree_leaves
from penstock.envs.pools.pool import PoolState
from penstock.envs.toy import EchoAgents, EchoTurns
from penstock.run.checkpoints.state_codec import decode, encode
from tests.envs.pools.plain_loop import Driver, seated


class SavedAgents(EchoAgents):
    """Saves its state."""

    def get_state(self) -> dict[str, Any]:
        return {
            "rng": self.rng.bit_generator.state, "t": self.t, "agents": list(self.agents), "episode": self._episode,
            "noise": self._noise, "age": dict(self._age), "played": dict(self._played), "waiting": list(self._waiting),
        }  # fmt: skip

    def set_state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.t, self.agents, self._episode = state["t"], list(state["agents"]), state["episode"]
        self._noise, self._age, self._played = state["noise"], dict(state["age"]), dict(state["played"])
        self._waiting = list(state["waiting"])


class Unseeded(EchoAgents):
    """No episode comes again."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(int(np.random.default_rng().integers(1 << 30)))


class UnseededTurns(EchoTurns):
    """The same."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(int(np.random.default_rng().integers(1 << 30)))


def by_turns(agent: str, episode: int, seed: int) -> str:
    return "a" if (int(agent[-1]) + episode) % 2 else "b"


def resumed(one: Driver, config: Any, **pool: Any) -> tuple[Driver, list[int]]:
    """A new pool where the first one is, by plain data alone."""
    state = decode(encode(one.pool.get_state().to_plain()))
    two = Driver(config, one.E, one.T, **pool)
    for x, y in zip(one.buffers[0], two.buffers[0]):
        for name in ("obs", "first", "prev_action", "prev_reward"):
            tree_assign(getattr(y, name), -1, getattr(x, name), -1)
    lost = two.pool.set_state(PoolState.from_plain(state), two.buffers[0], [None] * one.E)
    two.k = one.k
    return two, lost


CASES = [
    (cls, mapping, T, {})
    for cls in (EchoAgents, SavedAgents, EchoTurns)
    for mapping in (None, by_turns)
    for T in (1, 4)
] + [
    *(pytest.param(cls, mapping, 23, {}, marks=pytest.mark.slow) for cls in (EchoAgents, SavedAgents, EchoTurns)
      for mapping in (None, by_turns)),
    (EchoAgents, None, 4, {"max_decorrelation_steps": 20}),
    (SavedAgents, None, 4, {"max_decorrelation_steps": 20}),
    (EchoAgents, None, 7, {"reset": "batch_end"}),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "mapping", "T", "pool"), CASES)
def test_goes_on_to_the_same_bits(cls: Any, mapping: Any, T: int, pool: Any) -> None:
    seats = None if mapping is None else {"a": 2, "b": 2}
    config = seated(cls, ("a", "b") if mapping else ("s",), mapping, seats, info_keys=("echo",))
    one = Driver(config, 3, T, **pool)
    for stop in range(3, 3 + 4):
        for _ in range(stop):
            _unchecked(one)
        if pool.get("reset") == "batch_end":
            one.pool.host.prepare()
        two, lost = resumed(one, config, **pool)
        assert lost == []
        two, lost = resumed(two, config, **pool)  # before it has gone on
        assert lost == []
        for _ in range(3):
            _unchecked(one)
            _unchecked(two)
            for x, y in zip(one.buffers[0], two.buffers[0]):
                names = ("obs", "first", "prev_action", "prev_reward", "terminated", "truncated", "valid")
                for a, b in zip(*(tree_leaves([getattr(o, n) for n in names] + [o.info]) for o in (x, y))):
                    assert np.nan_to_num(a).tobytes() == np.nan_to_num(b).tobytes()
            assert _logged(one) == _logged(two)
            if pool.get("reset") == "batch_end":
                one.pool.host.prepare()


def _unchecked(driver: Driver) -> None:
    """A batch whose rows are not taken down: they begin within episodes."""
    outs = driver.buffers[0]
    driver.pool.bind(outs)
    (driver._turns if driver.pool.takes_turns else driver._lockstep)(outs)  # pyright: ignore[reportPrivateUsage]
    driver.k += 1


@pytest.mark.parametrize("cls", [Unseeded, UnseededTurns])
def test_what_does_not_come_again_is_lost_and_begins_anew(cls: Any) -> None:
    config = seated(cls)
    one = Driver(config, 3, 5)
    for _ in range(4):
        _unchecked(one)
    two, lost = resumed(one, config)
    assert lost == [e for e in range(3) if not one.pool.host.over[e]]
    assert lost
    _unchecked(two)
    for out in two.buffers[0]:
        n = out.valid.shape[1] // 3
        for e in lost:
            own = slice(e * n, e * n + n)
            assert out.first[:, own].any()
            assert not out.valid[0, own].any()
        assert two.pool.host.episode[lost[0]] >= one.pool.host.episode[lost[0]] + 1


@pytest.mark.parametrize("cls", [EchoAgents, EchoTurns])
def test_an_episode_longer_than_its_journal_is_cut(cls: Any) -> None:
    config = seated(cls, kwargs={"length": 300, "steady": True})
    one = Driver(config, 2, 5, journal_steps=20)
    _unchecked(one)  # 5 steps, or 15 moves
    assert resumed(one, config, journal_steps=20)[1] == []
    for _ in range(4):
        _unchecked(one)
    assert resumed(one, config, journal_steps=20)[1] == [0, 1]


def _logged(driver: Driver) -> list[Any]:
    log = driver.pool.log
    fields = ("steps", "policy", "return_", "discounted", "length", "terminated")
    rows = [[getattr(log, f)[e, :n].tolist() for f in fields] for e, n in enumerate(log.count.tolist())]
    return [rows, [np.nan_to_num(log.columns["echo"][e, :n]).tolist() for e, n in enumerate(log.count.tolist())]]
