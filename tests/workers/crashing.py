"""Samplers whose workers come to harm: environments that crash, what is said of it, and what may be left of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.core.noise import env_seed
from penstock.envs.make import EnvConfig
from penstock.envs.toy.crashes import CrashEnv
from penstock.testing.samplers import EchoAgent
from tests.workers.first_batches import PLACES as SAMPLERS

SEED, T, B, SLOT = 4, 8, 4, 3
EPISODE = 2
LIMIT_S = 100.0
"""For what takes no time where nothing is wrong, except on a busy machine."""


def held() -> tuple[set[int], int, set[str]]:
    """Children, open descriptors, and mapped memory of samplers."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return (
        {p.pid for p in psutil.Process().children(recursive=True)},
        len(os.listdir("/proc/self/fd")),
        {line for line in maps if "memfd:penstock" in line},
    )


@pytest.fixture(autouse=True)
def leaves_nothing(no_segment_left: None) -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what is there now is not looked at again, which would take 0.2 s
    before = held()
    yield
    gc.collect()
    children, descriptors, mappings = held()
    assert children == before[0], "a process is left"
    assert descriptors == before[1], "a descriptor is left"
    assert mappings <= before[2], "a mapping is left"


@pytest.fixture(autouse=True)
def saves_time(request: pytest.FixtureRequest) -> None:
    """Workers begin as users' do under a GpuSampler, and where errors are to be raised."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    if params.get("kind", "gpu") != "gpu" and not {"way", "policy"} <= params.keys():
        request.getfixturevalue("forked")


def live(kind: str, env: Any, **settings: Any) -> Any:
    # Long: on a busy machine a worker may well wait for its turn.
    given = {"step_timeout_s": LIMIT_S, "start_timeout_s": LIMIT_S, **settings}
    sampler = SAMPLERS[kind](T=T, B=B, workers=2, **given).build(env, SEED)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
    except BaseException:
        sampler.shutdown()
        raise
    return sampler


def crash(way: str, where: Any = "step", once: Path | None = None) -> EnvConfig:
    given = {"way": way, "where": where, "seed": SEED, "slot": SLOT, "episode": EPISODE,
             "once": None if once is None else str(once)}  # fmt: skip
    return EnvConfig(CrashEnv, given, info_keys=("echo",), checks="always")


RAISES = {"raise": "ValueError: the arm fell off", "odd_error": "odd 3: two arguments", "interrupt": "KeyboardInterrupt",
          "exit": "SystemExit: 7"}  # fmt: skip
DIES = {"os_exit": "exit code 0", "sigkill": r"signal 9 \(SIGKILL\)", "sigsegv": r"signal 11 \(SIGSEGV\)",
        "null": r"signal 11 \(SIGSEGV\)", "abort": r"signal 6 \(SIGABRT\)", "orphan": "signal 9"}  # fmt: skip
HANG_S = 1.0
HANGS = dict.fromkeys(("sleep", "busy", "stop"), "no progress for 1 s")
KIND = (
    dict.fromkeys(RAISES, "exception")
    | dict.fromkeys(DIES, "signal")
    | dict.fromkeys(HANGS, "timeout")
    | {"os_exit": "exit"}
)
SEEN = {**RAISES, **DIES, **HANGS}


def told_of(way: str, where: str, episode: int) -> str:
    """What a message about it must match."""
    parts = [SEEN[way]]
    if where == "step":
        parts.append("last action")
    if way in RAISES:
        parts.append("Traceback")
    if way in (
        *RAISES,
        "sigsegv",
        "null",
        "abort",
        "sleep",
    ):  # it died of itself, or sleeps in Python: here is its stack
        parts.append("in _?crash")
    place = rf"slot {SLOT} of .* in {where}\(\) at episode {episode}, step 0, seed {env_seed(SEED, SLOT, episode)}"
    return rf"(?s)worker \d, pid \d+: {place}" + "".join(f"(?=.*{part})" for part in parts)
