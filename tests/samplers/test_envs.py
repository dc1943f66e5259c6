"""Calls of environments between batches: the same batches wherever they are, kept by resume and by replacements."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.envs.make import EnvConfig
from penstock.run.checkpoints.state_codec import decode, encode
from tests.samplers.levels import B, Levels, Saved, Scaled, levels, live, many_levels, played, single
from tests.slow import slow

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

T = 5
ONE: dict[str, Any] = {
    "replayed": EnvConfig(Levels, wrappers=(Scaled,)),
    "saved": EnvConfig(Saved, wrappers=(Scaled,)),
}
PLACES: dict[str, Any] = {
    "cpu": lambda **k: ps.CpuSampler(T, B, workers=2, **k),
    "gpu": lambda **k: ps.GpuSampler(T, B, workers=3, **k),
    "alternating": lambda **k: ps.AlternatingSampler(T, B, workers=2, **k),
    "async-serial": lambda **k: ps.AsyncSerialSampler(ps.SerialSampler(T, B, **k), depth=0),
    "async-cpu": lambda **k: ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2, **k), depth=0),
    "runners": lambda **k: ps.RunnerSampler(
        inner=ps.SerialSampler(T, B // 2, **k), runners=2, backend="in-process", depth=0
    ),
    "runners-cpu": lambda **k: ps.RunnerSampler(
        inner=ps.CpuSampler(T, B // 2, workers=2, **k), runners=2, backend="processes", depth=0
    ),
}
AHEAD: dict[str, Any] = {
    "async-serial": lambda: ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=1),
    "async-alternating": lambda: ps.AsyncAlternatingSampler(ps.AlternatingSampler(T, B, workers=2), depth=1),
    "runners": lambda: ps.RunnerSampler(inner=ps.SerialSampler(T, B // 2), runners=2, backend="in-process", depth=1),
    "processes": lambda: ps.RunnerSampler(inner=ps.SerialSampler(T, 1), runners=4, backend="processes", depth=1),
}


def stored(state: Any) -> Any:
    return decode(encode(state))


def outcome(settings: Any, config: Any, between: Any, batches: int = 7, many: bool = False) -> list[Any]:
    sampler = live(settings, config, many)
    try:
        return played(sampler, between, range(batches), evaluate=(3, 5))
    finally:
        sampler.shutdown()


_KNOWN: dict[Any, Any] = {}


def expected(key: Any, settings: Any, config: Any, between: Any, many: bool = False) -> list[Any]:
    if key not in _KNOWN:
        _KNOWN[key] = outcome(settings, config, between, many=many)
    return _KNOWN[key]


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
@pytest.mark.parametrize("place", ["cpu", "alternating", "async-serial", "runners", *slow("gpu", "async-cpu", "runners-cpu")])
def test_calls_between_batches_change_the_same_bits_everywhere(place: str, reset: Any) -> None:
    config = ONE["replayed"]
    serial = expected(reset, ps.SerialSampler(T, B, reset=reset), config, single)
    assert serial != outcome(ps.SerialSampler(T, B, reset=reset), config, lambda envs, k: None)
    for k, (one, other) in enumerate(zip(serial, outcome(PLACES[place](reset=reset), config, single), strict=True)):
        assert one == other, k


@pytest.mark.parametrize("place", ["runners", *slow("async-alternating", "processes")])
def test_a_call_takes_effect_at_the_first_batch_that_was_not_ordered(place: str) -> None:
    ahead = expected("ahead", AHEAD["async-serial"](), ONE["replayed"], single)
    for k, (one, other) in enumerate(zip(ahead, outcome(AHEAD[place](), ONE["replayed"], single), strict=True)):
        assert one == other, k


@pytest.mark.parametrize("place", ["cpu", *slow("gpu", "alternating", "async-cpu", "runners", "runners-cpu")])
@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_calls_in_environments_of_many_agents(place: str, kind: str) -> None:
    config = many_levels(kind)
    serial = expected(kind, ps.SerialSampler(T, B), config, levels, many=True)
    for k, (one, other) in enumerate(zip(serial, outcome(PLACES[place](), config, levels, many=True), strict=True)):
        assert one == other, k


RESUMED: dict[str, Any] = {
    "serial": lambda **k: ps.SerialSampler(T, B, **k),
    **PLACES,
}


@pytest.mark.parametrize("kind", ["replayed", "saved", "parallel", "turns"])
@pytest.mark.parametrize("place", ["serial", "cpu", *slow("alternating", "async-serial", "runners", "runners-cpu")])
@pytest.mark.parametrize("reset", ["next_step", *slow("batch_end")])
def test_a_resumed_run_has_all_calls_and_goes_on_bit_by_bit(kind: str, place: str, reset: Any) -> None:
    many = kind in ("parallel", "turns")
    if kind == "turns" and reset != "next_step":
        pytest.skip("agents that take turns have no batch_end")
    config, between = (many_levels(kind), levels) if many else (ONE[kind], single)
    settings = RESUMED[place](reset=reset) if place.startswith("async") else ps.SerialSampler(T, B, reset=reset)
    whole = live(settings, config, many)
    states: dict[int, Any] = {}

    def kept(envs: Any, k: int) -> Any:
        found = between(envs, k)
        states[k] = stored(whole.state_dict())
        return found

    rows = played(whole, kept, range(7), evaluate=(5,))
    whole.shutdown()
    for k in (-1, 0, 1, 2, 4):
        resumed = live(RESUMED[place](reset=reset), config, many)
        try:
            resumed.load_state_dict(states[k])
            assert resumed.cut_slots == []
            after = played(resumed, between, range(k + 1, 7), evaluate=(5,))
            if k == -1:
                after = after[1:]
            assert after == rows[len(rows) - len(after) :], k
        finally:
            resumed.shutdown()
