from __future__ import annotations

from tests.cli.short import Cli


def test_algos(cli: Cli) -> None:
    out = cli("algos").out
    assert "penstock.algos.ppo:PPO" in out
    assert "CartPole-v1" in out
    assert "a2c" in out
