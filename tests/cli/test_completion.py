from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.cli.completion import SHELLS, script
from penstock.cli.main import COMMANDS

LINES = {
    "plo": {"plot"},
    "train pp": {"ppo"},
    "plot --s": {"--smooth"},
    "train ppo --algo.qqq": set[str](),
    "train ppo --algo.gae": {"--algo.gae_lambda"},
    "launch dqn --algo.replay.cap": {"--algo.replay.capacity"},
    "train sac --sampler.work": {"--sampler.workers"},
    "tune ppo --sched": {"--scheduler"},
    "completion f": {"fish"},
    "export RUN --to p": {"pt2"},
    "plot --kind p": {"profiles"},
    "train ppo --algo.net.recurrent l": {"lstm"},
    "resume RUN --run.progress p": {"plain"},
    "train sac --run.trackers t": {"tensorboard", "trackio"},
    "track RUN --trackers w": {"wandb"},
    "launch ppo --sampler as": {"async", "async-serial", "async-cpu", "async-gpu", "async-alternating"},
    "tune ppo --scheduler p": {"pbt"},
    "eval RUN --which b": {"best"},
    "bench samplers pp": {"ppo"},
    "replay in": {"info"},
}
ASKED = {
    "bash": "source ./script\n"
    'while read -r -a COMP_WORDS; do COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); _penstock; echo "${COMPREPLY[@]}"; done',
    "zsh": "compdef() { :; }; compadd() { shift; echo ${(M)@:#$words[CURRENT]*}; }; _files() { echo; }\nsource ./script\n"
    "while read -r -A words; do CURRENT=$#words; _penstock; done",
    "fish": 'source ./script\nwhile read line; echo (complete -C "$line" | string replace -r "\\t.*" ""); end',
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(script(shell))
    (tmp_path / "ask").write_text(ASKED[shell])
    given = "".join(f"penstock {line}\n" for line in LINES)
    ended = subprocess.run(
        [shell, "ask"], input=given, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stderr == ""
    assert [set(line.split()) for line in ended.stdout.split("\n")[: len(LINES)]] == list(LINES.values())


def test_every_command_has_its_options() -> None:
    text = script("bash")
    for command in COMMANDS:
        assert re.search(rf'^ .*"{command}".*\) echo "--', text, re.MULTILINE), command
