"""PettingZoo's own tests of its API pass on the toys, which need nothing of PettingZoo."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from penstock.envs.toy import Connect3, EchoAgents, EchoTurns, LatePay, Nim, TeamBits

pytest.importorskip("pettingzoo")


@pytest.mark.parametrize("toy", [TeamBits, EchoAgents])
def test_parallel_api(toy: Any) -> None:
    from pettingzoo import ParallelEnv
    from pettingzoo.test import parallel_api_test

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_api_test(type("Both", (toy, ParallelEnv), {})(), num_cycles=100)


@pytest.mark.parametrize("toy", [Nim, Connect3, LatePay, EchoTurns])
def test_turns_api(toy: Any) -> None:
    from pettingzoo import AECEnv
    from pettingzoo.test import api_test

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api_test(type("Both", (toy, AECEnv), {})(), num_cycles=100)
