from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from penstock.core.config import from_plain, to_plain
from penstock.core.errors import ConfigError
from penstock.core.placement import Placement, pin


def pinned(*cpus: int, allowed: str = "None") -> tuple[int, list[int], str]:
    """Exit code, CPUs afterwards and error of a process that pins itself."""
    code = (
        "import os, sys\nfrom penstock.core.errors import ConfigError\nfrom penstock.core.placement import pin\n"
        f"try: pin({list(cpus)}, allowed={allowed})\nexcept ConfigError as e: print(e, file=sys.stderr)\n"
        "print(sorted(os.sched_getaffinity(0)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_is_stored_and_read_back() -> None:
    placement = Placement(((0, 4), (1, 5), ()), (2,), (3,), "because")
    plain = json.loads(json.dumps(to_plain(placement)))
    assert from_plain(plain) == placement
    assert Placement() == Placement((), (), (), "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": ((0,), (-1,))}, r"workers\[1\]=\(-1,\) names CPU -1; expected numbers from 0"),
        ({"server": (2, 3, 2)}, r"server=\(2, 3, 2\) names CPU 2 twice"),
        ({"learner": (-3, 1)}, "learner=.* names CPU -3"),
        ({"learner": 1}, "learner=1"),
        ({"workers": (0, 1)}, r"workers=0 \(int\)"),
        ({"workers": (("a",),)}, "workers='a'"),
        ({"server": (0.5,)}, "server=0.5"),
        ({"why": 3}, "why=3"),
    ],
)
def test_refuses_what_is_no_placement(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement(**fields)


def test_workers_may_share_a_cpu() -> None:
    assert Placement(((0,), (0,)), (0,), (0,)).workers == ((0,), (0,))


def test_no_cpus_pin_nothing() -> None:
    before = os.sched_getaffinity(0)
    pin(())
    assert os.sched_getaffinity(0) == before


def test_pins() -> None:
    cpu = max(os.sched_getaffinity(0))
    assert pinned(cpu) == (0, [cpu], "")


def test_a_cpu_that_is_not_ours_is_named_and_nothing_changes() -> None:
    mine = sorted(os.sched_getaffinity(0))
    _, after, error = pinned(mine[0], 9999)
    assert after == mine
    assert "CPU 9999 is not for this process to use" in error
    assert f"expected some of {', '.join(map(str, mine))}" in error


def test_a_cpu_that_does_not_exist_is_refused_by_the_kernel_too() -> None:
    mine = sorted(os.sched_getaffinity(0))
    for cpus in ((1023,), (mine[0], 1023), (99999999,)):
        _, after, error = pinned(*cpus, allowed=str([*mine, cpus[-1]]))
        assert after == mine
        assert f"CPU {cpus[-1]} is not for this process to use" in error


def test_the_parents_cpus_may_be_given() -> None:
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("needs two CPUs")
    code = (
        "import os\nfrom penstock.core.placement import pin\n"
        f"pin([{mine[0]}])\npin([{mine[1]}], allowed={mine})\nprint(sorted(os.sched_getaffinity(0)))\n"
        f"try: pin([{mine[0]}])\nexcept ValueError as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    assert first == f"[{mine[1]}]"
    assert f"CPU {mine[0]} is not" in second


def test_a_system_without_affinity_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    pin(())
    with pytest.raises(ConfigError, match="need Linux"):
        pin([0])
