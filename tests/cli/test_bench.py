from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.short import Cli

# bench and auto


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_bench_recommends_a_setting_that_train_takes(cli: Cli, tmp_path: Path) -> None:
    said = cli(
        "bench", "samplers", "a2c", "penstock.envs.toy:Counter", "--seconds", "0.1", "--T", "8", "--B", "2", "--env-kwargs",
        "terminate_at=4", "--trace", "t.json",
    )  # fmt: skip
    assert said.code == 0, said.both
    for words in ("measured: collecting batches of T=", "alternating", "steps/s", "recommended"):
        assert words in said.out
    command = next(line for line in said.out.splitlines() if line.startswith("penstock train"))
    assert "--sampler.T 8 --sampler.B 2" in command
    assert "terminate_at=4" in command
    done = cli(
        *command.split()[1:], "--run.steps", "32", "--run.eval-episodes", "0", "--run.progress", "off", "--run.dir", "x"
    )
    assert done.code == 0, done.both
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "t.png").stat().st_size > 10_000


@pytest.mark.parametrize("words", [("ppo", "Cart-v9"), ("Cart-v9", "ppo")])
def test_bench_takes_the_algorithm_first_and_knows_it_where_it_comes_second(words: tuple[str, str], cli: Cli) -> None:
    said = cli("bench", "samplers", *words)
    assert said.code == 2
    assert "unknown environment id 'Cart-v9'" in said.err
