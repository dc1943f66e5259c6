"""A lesser processor gives the bits of this one: libraries are told to see it, and runs act and learn as before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.native.library import VARIABLE

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("by_kernel")]
_AVX512 = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4"
LESSER = {
    "torch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL for any processor": {"MKL_CBWR": "COMPATIBLE"},
    "numpy and OpenBLAS of 2013": {"NPY_DISABLE_CPU_FEATURES": _AVX512, "OPENBLAS_CORETYPE": "Haswell"},
    "all of them": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "COMPATIBLE",
        "NPY_DISABLE_CPU_FEATURES": _AVX512,
        "OPENBLAS_CORETYPE": "Haswell",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA",
        VARIABLE: "scalar",
    },
}


def run(case: str, seen: dict[str, str]) -> tuple[str, str]:
    """The digests of penstock and of the libraries in a process for which they see another processor."""
    script = str(Path(__file__).with_name("one_run.py"))
    env = {**os.environ, VARIABLE: "1", **seen}
    done = subprocess.run([sys.executable, script, case], env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    own, libraries = done.stdout.split()
    return own, libraries


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "ppo-256", "a2c", "sac", "td3", "dqn"])
def test_a_run_has_the_same_bits_where_libraries_see_another_processor(case: str) -> None:
    here, libraries = run(case, {})
    for name, seen in LESSER.items() if case == "ppo" else [("all of them", LESSER["all of them"])]:
        own, theirs = run(case, seen)
        assert own == here, name
        if theirs == libraries:
            pytest.skip(f"{name}: the variables have no effect on torch and numpy here, so nothing was tried")
