"""Environments of many agents that are found by id, or that are not quite by PettingZoo's API."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock.core.errors import ConfigError, EnvContractError, MissingExtraError
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig
from penstock.envs.pettingzoo import agents_of, factory_of
from penstock.envs.toy import EchoAgents
from penstock.envs.toy.agents import ParallelToy


class Sets(EchoAgents):
    """Names its agents in an order that differs from process to process."""

    def __init__(self) -> None:
        super().__init__(3, 9)
        self.possible_agents: Any = {*self.possible_agents}


def test_agents_without_an_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"possible_agents is a set, \['agent_0', 'agent_1', 'agent_2'\].*a list"):
        agents_of(Sets(), "sets")


class Unlike:
    """An environment by another API than PettingZoo's."""

    def reset(self, seed: int | None = None) -> None: ...

    def step(self, actions: Any) -> None: ...


class Nameless(Unlike):
    agents = ("a", "b")

    def observation_space(self, agent: str) -> None: ...

    def action_space(self, agent: str) -> None: ...


class OldSpaces(Unlike):
    possible_agents = ("a", "b")
    observation_space: dict[str, Any] = {"a": 0}  # noqa: RUF012
    action_space = None


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Unlike, "derive from gymnasium.Env, a batched one from gymnasium.vector.VectorEnv, or from PettingZoo's"),
        (Nameless, "it lacks possible_agents, the list of all names$"),
        (OldSpaces, r"a method observation_space\(agent\), which is a dict here and a method action_space\(agent\)$"),
    ],
)
def test_what_an_environment_lacks(cls: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EnvConfig(cls).make()


class Compound(ParallelToy):
    """Takes a choice and a number at once, by key."""

    def __init__(self) -> None:
        super().__init__(2, spaces.Box(-1, 1, (2,)), 3)
        self._moves: Any = spaces.Dict({"choice": spaces.Discrete(3), "number": spaces.Box(-1, 1, (1,))})
        self.taken: list[Any] = []

    def observe(self, agent: str) -> Any:
        return np.zeros(2, np.float32)

    def act(self, actions: dict[str, Any]) -> Any:
        assert all(self._moves.contains(action) for action in actions.values()), actions
        end = self.t == 4
        return (
            dict.fromkeys(self.agents, 1.0),
            dict.fromkeys(self.agents, end),
            dict.fromkeys(self.agents, False),
            [] if end else self.agents,
        )


def test_actions_may_be_dicts() -> None:
    report = check_env(Compound, steps=6)
    assert report.reproducible and report.agents is not None
    assert set(report.agents.specs["agent_0"].action) == {"choice", "number"}


class NoInfo(Compound):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed, options)
        return obs, dict.fromkeys(infos)


class Nobody(Compound):
    """Every second episode is over at its reset."""

    begun = 0

    def begin(self) -> None:
        Nobody.begun += 1
        self.agents = self.agents if Nobody.begun % 2 else []


class AllOver(Compound):
    """Says by RLlib's key when everybody is done."""

    def act(self, actions: dict[str, Any]) -> Any:
        rewards, _, _, now = super().act(actions)
        return rewards, {"__all__": not now}, {"__all__": False}, now


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (NoInfo, r"in reset\(\) at episode 0.*agent 'agent_0': info: got NoneType None, expected a dict"),
        (Nobody, r"in reset\(\) at episode \d.* env.agents is empty: the episode is over before any agent acted"),
        (AllOver, r"agent 'agent_0': terminations lack it: got \['__all__'\].*RLlib's MultiAgentEnv"),
    ],
)
def test_other_conventions_are_named(cls: Any, words: str) -> None:
    with pytest.raises(EnvContractError, match=words):
        check_env(cls, steps=9)


def _seen(seed: int | None = None, options: Any = None) -> int | None:
    return seed


class Remembers:
    """Returns the seed of its reset."""

    reset = staticmethod(_seen)


def test_hanabi_is_given_seeds_of_31_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hanabi_v9", "chess_v9"):
        module = ModuleType(f"mpe2.{name}")
        monkeypatch.setattr(module, "env", Remembers, raising=False)
        monkeypatch.setitem(sys.modules, "mpe2", ModuleType("mpe2"))
        monkeypatch.setitem(sys.modules, f"mpe2.{name}", module)
    small, plain = (factory_of(f"pettingzoo:mpe2/{name}")() for name in ("hanabi_v9", "chess_v9"))
    assert small.reset(seed=2**32 - 1) == 2**31 - 1
    assert small.reset() is None
    assert plain.reset(seed=2**32 - 1) == 2**32 - 1


def test_hanabi_plays() -> None:
    pytest.importorskip("pyspiel")
    pytest.importorskip("shimmy")
    report = check_env("pettingzoo:classic/hanabi_v5", steps=8)
    assert report.reproducible


@pytest.mark.parametrize(
    ("family", "error", "words"),
    [
        ("classic", MissingExtraError, r"penstock\[pettingzoo\]"),
        ("mpe2", MissingExtraError, r"penstock\[pettingzoo\]"),
        ("atari", ConfigError, r"absent_part is not installed; pettingzoo:atari .*'pettingzoo\[atari\]'"),
        ("magent2", ConfigError, "pip install 'magent2'"),
    ],
)
def test_what_brings_a_package_that_is_missing(
    family: str, error: type[ConfigError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'absent_part'", name="absent_part")

    monkeypatch.setattr("penstock.envs.pettingzoo.importlib.import_module", absent)
    with pytest.raises(error, match=words) as caught:
        factory_of(f"pettingzoo:{family}/some_v1")
    assert type(caught.value) is error
