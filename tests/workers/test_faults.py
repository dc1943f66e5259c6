"""Failed workers are replaced, dropped or raised by kind and policy, and their deaths named; only the test moves time."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, NativeEnvError
from penstock.processes.death import Death
from penstock.workers import faults
from penstock.workers.faults import Fault, Faults, fault_of

OURS = ("exception", "contract")
DEATHS = ("signal", "exit", "oom", "timeout")
ERRORS = {"config": ConfigError, "native": NativeEnvError, "contract": EnvContractError} | dict.fromkeys(
    ("exception", *DEATHS), EnvWorkerError
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize("kind", ERRORS)
def test_the_error_of_each_kind(kind: Any) -> None:
    error = Fault(kind, "it fell").error()
    assert type(error) is ERRORS[kind]
    assert str(error) == "it fell"


@pytest.mark.parametrize("policy", ["auto", "raise", "restart", "drop"])
@pytest.mark.parametrize("kind", ["config", "native"])
def test_what_a_replacement_cannot_mend_is_raised_whatever_the_policy(kind: Any, policy: Any) -> None:
    found = Faults(policy)
    with pytest.raises(ERRORS[kind], match="no such id"):
        found.decide(0, Fault(kind, "no such id"))
    assert found.metrics() == {}


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [("raise", (*OURS, *DEATHS)), ("auto", OURS)],
)
def test_what_is_raised(policy: Any, kinds: Any) -> None:
    for kind in kinds:
        found = Faults(policy)
        with pytest.raises(ERRORS[kind], match="it fell"):
            found.decide(0, Fault(kind, "it fell"))
        assert found.metrics() == {f"faults/{kind}": 1.0}


@pytest.mark.parametrize(("policy", "kinds"), [("restart", (*OURS, *DEATHS)), ("auto", DEATHS)])
def test_what_is_replaced_at_once(policy: Any, kinds: Any) -> None:
    for kind in kinds:
        found = Faults(policy)
        with pytest.warns(UserWarning, match=r"^worker 3 fell; the worker is replaced$"):
            assert found.decide(3, Fault(kind, "worker 3 fell\nTraceback")) == 0.0
        assert found.metrics() == {f"faults/{kind}": 1.0, "faults/restarts": 1.0}


@pytest.mark.parametrize("kind", [*OURS, *DEATHS])
def test_what_is_dropped(kind: Any) -> None:
    found = Faults("drop")
    with pytest.warns(UserWarning, match=r"^it fell; its slots are dropped \(fault_policy='drop'\)$"):
        assert found.decide(0, Fault(kind, "it fell\nTraceback")) is None
    assert found.metrics() == {f"faults/{kind}": 1.0}


@pytest.mark.filterwarnings("ignore:it fell")
def test_replacements_wait_longer_each_time_up_to_a_budget_in_ten_minutes(clock: Any) -> None:
    """0, then 0.1 s doubled for each replacement of this worker within the last 600 s."""
    found, fault = Faults("auto"), Fault("signal", "it fell")
    for delay in (0.0, 0.2, 0.4, 0.8, 1.6):
        clock.now += 10.0
        assert found.decide(1, fault) == pytest.approx(delay)
    assert found.decide(2, fault) == 0.0, "each worker has a budget of its own"
    with pytest.raises(EnvWorkerError, match=r"(?s)^it fell\nworker 1 was replaced 5 times within 10 minutes; mend"):
        found.decide(1, fault)
    assert found.counts["restarts"] == 6
    clock.now = 1010.0 + 599.0
    with pytest.raises(EnvWorkerError, match="was replaced 5 times"):
        found.decide(1, fault)
    clock.now = 1010.0 + 601.0  # the first of them is forgotten
    assert found.decide(1, fault) == pytest.approx(1.6)
    clock.now += 600.0
    assert found.decide(1, fault) == 0.0


@pytest.mark.filterwarnings("ignore:it fell")
def test_no_replacement_waits_longer_than_half_a_minute(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_BUDGET", 20)
    found = Faults("restart")
    delays = [found.decide(0, Fault("exit", "it fell")) for _ in range(12)]
    assert delays[8:] == [25.6, 30.0, 30.0, 30.0]


def test_each_worker_is_warned_of_at_most_once_a_minute(clock: Any) -> None:
    found, said = Faults("drop"), list[list[int]]()
    for now, workers in ((0.0, (0, 0, 1)), (59.0, (0, 1)), (60.0, (0,)), (100.0, (0, 1))):
        clock.now = now
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for worker in workers:
                found.decide(worker, Fault("exit", f"{worker}: it fell"))
        said.append([int(str(each.message)[0]) for each in caught])
    assert said == [[0, 1], [], [0], [1]]
    assert found.counts["exit"] == 8


def test_a_report_says_more_than_the_end_of_the_process() -> None:
    report = {"error": {"kind": "contract", "text": "slot 3: got nan"}}
    assert fault_of(Death("signal", "was killed", "stack"), report) == ("contract", "slot 3: got nan")


@pytest.mark.parametrize("report", [None, {"answer": [1]}])
def test_without_one_the_end_speaks(report: Any) -> None:
    assert fault_of(Death("exit", "ended with exit code 7"), report) == ("exit", "ended with exit code 7")
    assert fault_of(Death("oom", "was killed", "in f"), report) == ("oom", "was killed\nin f")
