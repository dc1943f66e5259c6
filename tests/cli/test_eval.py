from __future__ import annotations

import re
from pathlib import Path

from tests.cli.short import Cli


def test_eval(cli: Cli, trained: Path) -> None:
    said = cli("eval", str(trained), "--episodes", "3")
    assert said.code == 0
    assert "3, actions deterministic" in said.out
    assert cli("eval", str(trained), "--episodes", "3").out == said.out
    assert "sampled" in cli("eval", str(trained), "--episodes", "3", "--stochastic", "--seed", "4").out
    short = cli("eval", str(trained), "--env-kwargs", "max_episode_steps=5", "--which", "best")
    assert re.search(r"length +5\.0", short.out)
    assert cli("eval", str(trained), "--which", "beste").code == 2
    assert cli("eval", str(trained), "--which", "7").code == 5
    assert cli("eval", str(trained), "--episodes", "0").code == 2
