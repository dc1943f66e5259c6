"""Calls of environments between batches: the same batches wherever they are, kept by resume and by replacements."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.envs.make import EnvConfig
from penstock.run.checkpoints.state_codec import decode, encode
from penstock.tensor_envs import CartPole
from penstock.workers import faults
from tests.samplers.levels import B, Levels, Saved, Scaled, levels, live, many_levels, played, single
from tests.slow import slow

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

T = 5
ONE: dict[str, Any] = {
    "replayed": EnvConfig(Levels, wrappers=(Scaled,)),
    "saved": EnvConfig(Saved),  # a wrapper would have no state
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
        return played(sampler, between, range(-1, batches), evaluate=(3, 5))
    finally:
        sampler.shutdown()


_KNOWN: dict[Any, Any] = {}


def expected(key: Any, settings: Any, config: Any, between: Any, many: bool = False) -> list[Any]:
    if key not in _KNOWN:
        _KNOWN[key] = outcome(settings, config, between, many=many)
    return _KNOWN[key]


@pytest.mark.parametrize("reset", ["next_step", "batch_end"])
@pytest.mark.parametrize(
    "place", ["cpu", "alternating", "async-serial", "runners", *slow("gpu", "async-cpu", "runners-cpu")]
)
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

    rows = played(whole, kept, range(-1, 7), evaluate=(5,))
    whole.shutdown()
    for k in (-1, 0, 1, 2, 4):
        resumed = live(RESUMED[place](reset=reset), config, many)
        try:
            resumed.load_state_dict(states[k])
            assert resumed.cut_slots == []
            after = played(resumed, between, range(k + 1, 7), evaluate=(5,))
            assert after == rows[len(rows) - len(after) :], k
        finally:
            resumed.shutdown()


@pytest.mark.parametrize("place", ["serial", *slow("cpu", "async-cpu", "runners")])
def test_evaluations_of_other_sizes_and_those_after_a_resume_have_had_the_calls_too(place: str) -> None:
    sampler = live(RESUMED[place](), ONE["replayed"])
    resumed = live(RESUMED[place](), ONE["replayed"])
    try:
        sampler.obtain_samples(0)
        assert sampler.envs.call("set_level", 7, evaluation=True) == [*range(-1, -17, -1)]
        sampler.envs.set("gravity", 2.0, evaluation=True)
        resumed.load_state_dict(stored(sampler.state_dict()))
        for each in (sampler, resumed):
            for count in (3, 5, 20):
                found = each.evaluate_agent(0, count)
                assert (found.return_ == 14 * found.length).all()
            assert each.envs.get("level") == [0] * B
    finally:
        sampler.shutdown()
        resumed.shutdown()


@pytest.mark.parametrize("place", ["serial", *slow("cpu")])
@pytest.mark.parametrize("kind", ["replayed", "turns"])
def test_a_state_may_be_loaded_into_a_sampler_whose_environments_have_had_other_calls(kind: str, place: str) -> None:
    many = kind == "turns"
    sampler = live(RESUMED[place](), many_levels(kind) if many else ONE[kind], many)
    try:
        sampler.obtain_samples(0)
        sampler.envs.call("set_level", 3)
        state = stored(sampler.state_dict())
        rows = played(sampler, lambda envs, k: envs.get("level"), (1, 2))
        for _ in range(2):
            sampler.envs.call("set_level", 8)
            sampler.obtain_samples(3)
            sampler.load_state_dict(state)
            assert sampler.cut_slots == []
            assert played(sampler, lambda envs, k: envs.get("level"), (1, 2)) == rows
    finally:
        sampler.shutdown()


KILLED: dict[str, Any] = {
    "cpu": lambda: ps.CpuSampler(T, B, workers=2),
    "gpu": lambda: ps.GpuSampler(T, B, workers=2),
    "alternating": lambda: ps.AlternatingSampler(T, B, workers=1),
    "async-serial": lambda: ps.AsyncSerialSampler(ps.SerialSampler(T, B), depth=1),
    "async-cpu": lambda: ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2), depth=0),
    "processes": lambda: ps.RunnerSampler(inner=ps.SerialSampler(T, B // 2), runners=2, backend="processes", depth=0),
    "in-process": lambda: ps.RunnerSampler(
        inner=ps.CpuSampler(T, B // 2, workers=2), runners=2, backend="in-process", depth=1
    ),
}


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def everything(sampler: Any) -> list[Any]:
    return [sampler.envs.get(name) for name in ("level", "gravity", "spawned", "scale")]


@pytest.mark.filterwarnings("ignore:.*replaced", "ignore:.*they go on")
@pytest.mark.parametrize("place", ["cpu", *slow(*[x for x in KILLED if x != "cpu"])])
@pytest.mark.parametrize("before", [0, 3, -3], ids=["first", "later", "resumed"])
def test_a_replacement_has_had_all_calls(place: str, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_FIRST_DELAY_S", 0.0)
    mine = descendants()
    sampler = live(KILLED[place](), ONE["replayed"])
    before, resumed = abs(before), before < 0
    try:
        for k in range(before):
            sampler.obtain_samples(k)
        sampler.envs.call("set_level", 3)
        sampler.envs.call("spawn", "a", slots=[1, 3])
        sampler.envs.set("gravity", 1.62, slots=[2])
        sampler.envs.set("scale", 2.0)
        if resumed:
            state = stored(sampler.state_dict())
            sampler.shutdown()
            sampler = live(KILLED[place](), ONE["replayed"])
            sampler.load_state_dict(state)
        for pid in descendants() - mine:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sampler.envs.call("set_level", 4)  # while they are dead, maybe unseen
        for k in range(before, before + 30):
            batch, _ = sampler.obtain_samples(k)
            if batch.valid[-1].all() and sampler.metrics().get("faults/restarts"):
                break
        assert sampler.metrics()["faults/restarts"], "nothing was killed"
        assert everything(sampler) == [[4] * 4, [9.81, 9.81, 1.62, 9.81], [[], ["a"], [], ["a"]], [2.0] * 4]
    finally:
        sampler.shutdown()


@pytest.mark.filterwarnings("ignore:.*replaced", "ignore:.*they go on")
@pytest.mark.parametrize("place", ["cpu", *slow("async-serial", "async-cpu")])
def test_a_call_that_dies_with_its_worker_is_made_once_more(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_FIRST_DELAY_S", 0.0)
    sampler = live(KILLED[place](), ONE["replayed"])
    try:
        sampler.obtain_samples(0)
        sampler.envs.call("spawn", "a")
        (tmp_path / "armed").touch()
        assert sampler.envs.call("die", str(tmp_path / "armed")) == ["alive"] * 4
        assert not (tmp_path / "armed").exists()
        assert sampler.envs.get("spawned") == [["a"]] * 4
        sampler.obtain_samples(1)
    finally:
        sampler.shutdown()


@pytest.mark.parametrize("place", ["serial", "cpu", "runners", *slow("async-cpu")])
def test_bad_input_is_refused_in_one_line_and_the_sampler_goes_on(place: str) -> None:
    sampler = live(RESUMED[place](), ONE["replayed"])
    envs = sampler.envs
    try:
        sampler.obtain_samples(0)
        for call, error, says in (
            (lambda: envs.call("set_lvel", 3), ConfigError, "slots 0 to 3: the environment has no method.*'set_level'"),
            (lambda: envs.set("gravty", 3), ConfigError, "no attribute of this name, did you mean 'gravity'"),
            (lambda: envs.get("secret"), ConfigError, "builtins.object .* can be neither stored nor sent"),
            (lambda: envs.get("spawn", slots=[2]), ConfigError, r"slot 2: .*it is a method: use envs.call\('spawn'\)"),
            (lambda: envs.call("gravity"), ConfigError, "has no method of this name"),
            (lambda: envs.call("_obs"), ConfigError, "private"),
            (lambda: envs.call("reset"), ConfigError, "for the sampler alone"),
            (lambda: envs.set("action_space", 2), ConfigError, "for the sampler alone"),
            (lambda: envs.call("spawn", object()), ConfigError, "neither stored nor sent"),
            (lambda: envs.call("spawn", slots=[4]), ConfigError, r"slots=\[4\]; expected .* 0 to 3"),
            (lambda: envs.call("spawn", slots=[]), ConfigError, "different numbers from 0 to 3"),
            (lambda: envs.call("spawn", slots=[1, 1]), ConfigError, "different numbers from 0 to 3"),
            (lambda: envs.call("spawn", slots=[1], evaluation=True), ConfigError, "all evaluation environments"),
            (lambda: envs.call("fail", -2, evaluation=True), EnvWorkerError, "evaluation slot 1: .*made anew"),
            (lambda: envs.call("fail", 2), EnvWorkerError, "slot 2: ValueError: no level for 2; the other 3 slots"),
        ):
            with pytest.raises(error, match=says) as raised:
                call()
            head = str(raised.value).splitlines()
            assert len(head) == 1 or error is EnvWorkerError
        assert envs.get("level") == [1, 1, 1, 1], "the others have executed it, and it had done so as well"
        assert envs.get("level", evaluation=True) == [0] * 16
        state = stored(sampler.state_dict())
        rows = played(sampler, single, (1, 2))
    finally:
        sampler.shutdown()
    resumed = live(RESUMED[place if place == "async-cpu" else "serial"](), ONE["replayed"])
    resumed.load_state_dict(state)
    assert played(resumed, single, (1, 2)) == rows, "what raised raises again, and changes the same"
    resumed.shutdown()


@pytest.mark.parametrize("depth", [0, *slow(1)])
def test_a_fragment_of_any_runner_comes_after_the_calls_that_were_made_before_it_was_asked_for(depth: int) -> None:
    settings = ps.RunnerSampler(
        inner=ps.SerialSampler(T, 2), runners=2, backend="in-process", mode="ready", depth=depth
    )
    sampler = live(settings, ONE["replayed"])
    shown: list[set[float]] = []
    try:
        for k in range(6):
            batch, _ = sampler.obtain_samples(k)
            shown.append({*batch.obs[1:, :, 0][batch.valid].tolist()})
            assert sampler.envs.call("set_level", k + 1) == [0, 1, 2, 3]
            assert sampler.envs.get("level", slots=[3, 0]) == {3: k + 1, 0: k + 1}
        state = stored(sampler.state_dict())
        later = played(sampler, lambda envs, k: envs.get("level"), range(6, 9))
    finally:
        sampler.shutdown()
    assert shown == [{0.0}, {0.0}, {0.0}, {1.0}, {2.0}, {3.0}]  # each of two was asked again as it was served
    resumed = live(settings, ONE["replayed"])
    resumed.load_state_dict(state)
    assert played(resumed, lambda envs, k: envs.get("level"), range(6, 9)) == later
    resumed.shutdown()


@pytest.mark.parametrize(
    "settings", [ps.SerialSampler(T, 3), ps.GpuSampler(T, 3), *slow(ps.AsyncSerialSampler(ps.SerialSampler(T, 3)))]
)
def test_a_native_batched_environment_is_refused_by_name(settings: Any) -> None:
    config = EnvConfig("CartPole-v1", {"vectorized": True})
    sampler = live(settings, config)
    try:
        sampler.obtain_samples(0)
        for evaluation in (False, True):
            with pytest.raises(ConfigError, match=r"NativeGroups steps all slots as one batched .*'length'"):
                sampler.envs.set("length", 0.3, evaluation=evaluation)
        sampler.obtain_samples(1)
    finally:
        sampler.shutdown()


def test_one_of_tensors_is_refused_by_name() -> None:
    sampler = live(ps.SerialSampler(T, 3), EnvConfig(CartPole))
    with pytest.raises(ConfigError, match="TensorPool steps all slots as one"):
        sampler.envs.get("length")
    sampler.obtain_samples(0)
