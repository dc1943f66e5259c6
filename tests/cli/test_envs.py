from __future__ import annotations

from tests.cli.short import Cli


def test_envs(cli: Cli) -> None:
    assert "CartPole-v1\n" in cli("envs").out
    assert cli("envs", "cartpole-v1").out.splitlines()[0] == "CartPole-v1"
    assert cli("envs", "--import", "penstock.envs.toy", "pend").code == 0
    assert cli("envs", "tmaze").out == "penstock/TMaze-v0\n"
    said = cli("envs", "CartPol-v1x")
    assert said.code == 2
    assert "did you mean 'CartPole-v1'" in said.out


def test_environments_of_many_agents_are_listed(cli: Cli) -> None:
    said = cli("envs", "simple_spread")
    assert said.code == 0 and said.out.split() == ["pettingzoo:mpe2/simple_spread_v3"]
