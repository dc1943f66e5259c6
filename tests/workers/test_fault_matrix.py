"""Environments that die, hang, raise and exit in each of their methods and in each phase of a run, in every sampler."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import EnvWorkerError
from penstock.envs.make import EnvConfig
from penstock.envs.toy.faults import WAYS
from penstock.envs.toy.plumbing import SeedEcho
from penstock.testing.samplers import EchoAgent
from tests.workers.crashing import LIMIT_S, SEED, B, T, leaves_nothing

__all__ = ["leaves_nothing"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:.*replaced"),
]

_LIMITS = {"step_timeout_s": 1.0, "start_timeout_s": 1.5, "fault_policy": "raise"}
_OUTER = {"step_timeout_s": LIMIT_S, "start_timeout_s": LIMIT_S, "fault_policy": "raise"}
KINDS: dict[str, Any] = {
    "serial": ps.SerialSampler(T, B),
    "cpu": ps.CpuSampler(T, B, workers=2, **_LIMITS),
    "gpu": ps.GpuSampler(T, B, workers=2, **_LIMITS),
    "alternating": ps.AlternatingSampler(T, B, workers=2, **_LIMITS),
    "no-overlap": ps.NoOverlapAlternatingSampler(T, B, workers=2, **_LIMITS),
    "async-serial": ps.AsyncSerialSampler(ps.SerialSampler(T, B), **_LIMITS),
    "async-cpu": ps.AsyncCpuSampler(ps.CpuSampler(T, B, workers=2, **_LIMITS), **_OUTER),
    "async-alternating": ps.AsyncAlternatingSampler(ps.AlternatingSampler(T, B, workers=2, **_LIMITS), **_OUTER),
}
RAISES = {"raise": "ValueError: the arm fell off", "exit": "SystemExit: 7"}
DIES = {"os_exit": "exit code 0", "sigkill": r"signal 9 \(SIGKILL\)", "sigsegv": r"signal 11 \(SIGSEGV\)"}
HANGS = {
    "sleep": "no progress for 1 s|not started within 1.5 s",
    "stop": "no progress for 1 s|not started within 1.5 s",
}
SEEN = {**RAISES, **DIES, **HANGS}
PHASES = ("training", "evaluation", "resume")
METHODS = {
    "init": "(its construction|the construction of environments)",
    "reset": r"reset\(\) at episode",
    "step": r"step\(\) at episode",
    "close": r"close\(\)",
}


class Armed(SeedEcho):
    """Misbehaves as `way` says in the method `where` as soon as a file is there."""

    def __init__(self, way: str, where: str, armed: str) -> None:
        super().__init__()
        self._way, self._where, self._armed = way, where, armed
        self._act("init")

    def _act(self, method: str) -> None:
        if method == self._where and os.path.exists(self._armed):
            WAYS[self._way]()

    def reset(self, **kwargs: Any) -> Any:
        self._act("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._act("step")
        return super().step(action)

    def close(self) -> None:
        self._act("close")


@contextlib.contextmanager
def built(settings: Any, config: EnvConfig) -> Iterator[Any]:
    sampler = settings.build(config, SEED)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        yield sampler
    finally:
        sampler.shutdown()


CASES = [
    (kind, way, where, phase)
    for i, kind in enumerate(KINDS)
    for j, way in enumerate(SEEN)
    for k, where in enumerate(METHODS)
    for m, phase in enumerate(PHASES)
    # A third of the product: every sampler, way and method meet, in one of the phases.
    if (where == "close" or (i + j + k + m) % 3 == 0)
    # A SerialSampler steps in the learner itself, after the check; a death or hang there is its own.
    and (kind != "serial" or way in RAISES)
    and (where != "close" or phase == "training")
]


@pytest.mark.parametrize(("kind", "way", "where", "phase"), CASES)
def test_a_fault_is_an_error_or_a_warning_that_names_it(
    kind: str, way: str, where: str, phase: str, tmp_path: Path
) -> None:
    armed = tmp_path / "armed"
    config = EnvConfig(Armed, {"way": way, "where": where, "armed": str(armed)})
    began = time.monotonic()
    place = rf"slot \d of .*Armed in {METHODS[where]}"
    if where == "init":  # one is made by itself, to see whether it is a batch of environments
        place = rf"({place}|env factory .*Armed raised|SerialSampler on .*Armed, in {METHODS[where]})"
    match = rf"(?s){place}.*({SEEN[way]})"
    if where == "close":
        with built(KINDS[kind], config) as sampler:
            sampler.obtain_samples(0)
            armed.touch()
            seen = r"not closed its environments in time" if way in HANGS else SEEN[way]
            with pytest.warns(UserWarning, match=rf"(?s)slot \d (and \d more )?of .*Armed in close\(\): .*({seen})"):
                sampler.shutdown()
    elif phase == "training" and where == "init":
        armed.touch()
        with pytest.raises(EnvWorkerError, match=match), built(KINDS[kind], config):
            pass
    elif phase == "resume":
        with built(KINDS[kind], config) as sampler:
            for itr in range(3):
                sampler.obtain_samples(itr)
            state = sampler.state_dict()
        cut: list[int] = []
        error = ""
        try:
            if where == "init":
                armed.touch()
            with built(KINDS[kind], config) as resumed:
                armed.touch()
                resumed.load_state_dict(state)
                cut = resumed.cut_slots
        except EnvWorkerError as caught:
            error = str(caught)
        if way in RAISES and where != "init":
            assert not error
            assert cut, "an episode that raises in its replay cannot be restored"
        else:
            assert re.search(match, error), error
    else:
        with built(KINDS[kind], config) as sampler:
            sampler.obtain_samples(0)
            armed.touch()
            with pytest.raises(EnvWorkerError, match=match):
                if phase == "evaluation":
                    sampler.evaluate_agent(0, 4)
                for itr in range(1, 5):
                    sampler.obtain_samples(itr)
    assert time.monotonic() - began < 60
    print(kind, way, where, phase, file=sys.stderr)
