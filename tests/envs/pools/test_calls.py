"""Histories of calls: the ones that a new environment need not repeat, and where an attribute is looked up."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

from penstock.core.wire import decode, encode
from penstock.envs.agents_wrappers import NamedAgents
from penstock.envs.pools.calls import (
    Answer,
    CallRecord,
    EnvCall,
    execute,
    from_plain,
    layers,
    plain,
    recorded,
    remembered,
)
from tests.samplers.levels import Levels, ParallelLevels, Scaled


def record(kind: Any, name: str, value: int = 0, at: tuple[int, int] = (0, -1), **more: Any) -> CallRecord:
    return EnvCall(kind, name, encode(((value,), {})), more.get("overwrites", False)).record(
        Answer("raised" if more.get("raised") else "done", None, *at)
    )


def kept(*records: CallRecord) -> list[str]:
    history: list[CallRecord] = []
    for x in records:
        history = remembered(history, x)
    assert from_plain(plain([history])) == [history]
    return [f"{x.name}{decode(x.data)[0][0]}" for x in history]


def test_a_later_set_of_the_same_attribute_is_enough() -> None:
    assert kept(record("set", "a", 1), record("set", "b", 2), record("set", "a", 3)) == ["b2", "a3"]


def test_calls_stay_and_what_was_set_before_them_as_well_unless_they_overwrite() -> None:
    assert kept(record("set", "a", 1), record("call", "f", 2), record("set", "a", 3)) == ["a1", "f2", "a3"]
    assert kept(record("call", "f", 1), record("call", "f", 2)) == ["f1", "f2"]
    assert kept(record("call", "f", 1, overwrites=True), record("call", "f", 2, overwrites=True)) == ["f2"]
    assert kept(record("call", "f", 1), record("call", "f", 2, overwrites=True)) == ["f1", "f2"]
    assert kept(record("set", "a", 1), record("set", "a", 2, raised=True), record("set", "a", 3)) == ["a1", "a2", "a3"]


def test_the_open_episode_keeps_its_calls_and_what_held_before_it() -> None:
    before, inside, inside_too = record("set", "a", 1), record("set", "a", 2, (0, 3)), record("set", "a", 3, (0, 5))
    assert kept(before, inside, inside_too) == ["a1", "a2", "a3"]
    assert kept(before, inside, inside_too, record("set", "a", 4, (1, -1))) == ["a4"]
    assert kept(before, inside, inside_too, record("set", "b", 4, (1, 2))) == ["a3", "b4"]


@pytest.mark.parametrize(
    "changes",
    [{"kind": "get"}, {"name": "_obs"}, {"name": "close"}, {"name": 3}, {"data": "x"}, {"episode": "1"}, {"step": 0.5}],
    ids=str,
)
def test_damaged_histories_are_refused(changes: dict[str, Any]) -> None:
    sound = record("set", "level", 3)
    assert from_plain(plain([[sound], []])) == [[sound], []]
    with pytest.raises(TypeError, match="is no call of an environment"):
        from_plain(plain([[], [sound._replace(**changes)]]))
    with pytest.raises(TypeError):
        from_plain([[("set", "level")]])


def test_a_call_of_an_absent_slot_comes_last() -> None:
    calls = [[record("set", "a", 1, (4, 2))], [record("set", "a", 1, (4, -1))], []]
    recorded(calls, record("set", "a", 2).call, [0, 1, 2], [Answer("absent")] * 3)
    assert [[(decode(x.data)[0][0], x.episode, x.step) for x in mine] for mine in calls] == [
        [(2, 5, -1)],
        [(2, 4, -1)],
        [(2, 0, -1)],
    ]
    recorded(calls, EnvCall("set", "a", b""), [0], [Answer("missing")])
    assert len(calls[0]) == 1


def test_an_attribute_is_found_on_the_outermost_layer_that_has_it() -> None:
    env = Scaled(gym.wrappers.TimeLimit(Levels(), 9))
    assert [type(x).__name__ for x in layers(env)] == ["Scaled", "TimeLimit", "Levels"]
    assert execute(env, EnvCall("set", "scale", encode(((2.0,), {})))).status == "done"
    assert execute(env, EnvCall("set", "gravity", encode(((1.0,), {})))).status == "done"
    assert (vars(env)["scale"], vars(env.unwrapped)["gravity"]) == (2.0, 1.0)
    assert "gravity" not in vars(env)
    found = execute(env, EnvCall("set", "gravty", encode(((1.0,), {}))))
    assert found.status == "missing" and "'gravity'" in found.value
    assert not hasattr(env.unwrapped, "gravty")


def test_wrappers_of_many_agents_forward_and_are_seen_through() -> None:
    env = NamedAgents(ParallelLevels())
    assert decode(execute(env, EnvCall("call", "set_level", encode(((4,), {})))).value) == 4
    assert execute(env, EnvCall("set", "level", encode(((5,), {})))).status == "done"
    assert "level" not in vars(env) and env.env.level == 5


@pytest.mark.parametrize("name", ["unwrapped", "np_random"])
def test_to_look_for_names_runs_no_property(name: str) -> None:
    env = Levels()
    assert execute(env, EnvCall("call", name + "x", encode(((), {})))).status == "missing"
    assert vars(env).get("_np_random") is None
