from __future__ import annotations

import sys

import pytest

from tests.cli.short import Cli


def test_envs(cli: Cli) -> None:
    assert "CartPole-v1\n" in cli("envs").out
    assert cli("envs", "cartpole-v1").out.splitlines()[0] == "CartPole-v1"
    assert cli("envs", "--import", "penstock.envs.toy", "pend").code == 0
    assert cli("envs", "tmaze").out.splitlines()[0] == "penstock/TMaze-v0"
    said = cli("envs", "CartPol-v1x")
    assert said.code == 2
    assert "did you mean 'CartPole-v1'" in said.out


def test_environments_of_many_agents_are_listed(cli: Cli) -> None:
    said = cli("envs", "simple_spread")
    assert said.code == 0 and said.out.split() == ["pettingzoo:mpe2/simple_spread_v3"]


def test_tasks_of_envpool_are_listed(cli: Cli) -> None:
    pytest.importorskip("envpool")
    assert "envpool:Pong-v5" in cli("envs", "pong").out.split()


def test_a_task_of_envpool_without_the_package_names_the_extra(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    said = cli("train", "ppo", "--env", "envpool:CartPole-v1")
    assert said.code == 2 and "pip install 'penstock[envpool]'" in said.err
