"""Is a replay that cannot be, or cannot serve its algorithm, refused before the first step, and does the advice help?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.envs.toy import RepeatPrevious, TMaze
from penstock.replay import room
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.trainer import Trainer

SAMPLER = ps.SerialSampler(T=4, B=2)
NET = ps.Net(hidden=(8,), activation="relu")
MEMORY = ps.ReplaySettings(capacity=200)
DQN = ps.DQN(batch_size=8, learning_starts=16, replay_ratio=1.0, replay=MEMORY, net=NET)
R2D1 = ps.R2D1(batch_size=2, learning_starts=16, burn_in=4, train_length=8, state_interval=8, n_step=2, replay=MEMORY,
               net=replace(NET, recurrent="gru", recurrent_size=8))  # fmt: skip


def steps(algo: Any, env: Any = RepeatPrevious, **run: Any) -> Trainer:
    return Trainer(ps.Experiment(env, algo, SAMPLER, ps.RunConfig(steps=80, **run)))


def of(algo: Any, **replay: Any) -> Any:
    return replace(algo, replay=replace(algo.replay, **replay))


CASES = {
    "larger than memory": (of(DQN, capacity=10**13), r"replay of 10,0.* rows x 32 B needs 320,000 GB; free is .* use replay.capacity <="),
    "a batch larger than the replay": (replace(of(DQN, capacity=40), batch_size=64), r"holds less than batch_size=64 samples.*>= 64"),
    "sequences larger than the replay": (replace(R2D1, batch_size=64), r"batch_size=64 samples of 8 rows.*capacity >= 512"),
    "a start that never comes": (replace(DQN, learning_starts=300), r"learning_starts=300; use replay.capacity >= 300"),
    "a queue that is drawn twice": (replace(of(DQN, index="fifo"), replay_ratio=1.5), r"ratio of at most 1, or another index"),
    "overlapping sequences of a queue": (replace(of(R2D1, index="fifo"), train_length=12, replay_ratio=2.0), r"at most 1.5,"),
    "sequences longer than what is kept": (replace(R2D1, burn_in=90), r"samples of 101 rows need 114; use replay.capacity >= 226"),
    "states where no batch begins": (replace(R2D1, state_interval=6), r"every sampler.T=4 rows, and sequences begin every 6"),
    "frames of what is no image": (of(DQN, deduplicate_frames=True), r"no observation is a stack of uint8 images.*use False"),
    "goals of what has none": (of(DQN, hindsight=4, reward_fn="penstock.envs.toy:BitFlip"), r"expected a Dict with achieved_goal"),
    "no folder": (of(DQN, dir="/proc/nowhere"), r"replay.dir='/proc/nowhere'.*name a directory that can be written"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_said_before_anything_is_collected(case: str):
    algo, message = CASES[case]
    with pytest.raises(ConfigError, match=message) as seen:
        steps(algo, TMaze if algo.net.is_recurrent else RepeatPrevious)
    assert len(str(seen.value)) < 400
    enough = re.search(r"replay.capacity >= (\d+)", str(seen.value))
    if enough:
        trainer = steps(of(algo, capacity=int(enough[1])), TMaze if algo.net.is_recurrent else RepeatPrevious)
        while trainer.env_steps < 80:
            trainer.train()


def test_what_does_not_fit_on_the_disk_is_said_with_what_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Usage:
        free = 20_000

    monkeypatch.setattr(room.psutil, "disk_usage", lambda path: Usage)
    algo = of(DQN, dir=str(tmp_path), capacity=100_000)
    with pytest.raises(ConfigError, match=r"free is 2e-05 GB of space in .*; use replay.capacity <= \d+$") as seen:
        steps(algo)
    assert not list(tmp_path.iterdir())
    fits = int(str(seen.value).rsplit(" ", 1)[1])
    assert 200 < fits < 20_000
    steps(of(algo, capacity=fits)).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 300}, r"100 rows of 2 slots; this one has 150 of 2"),
        ({"index": "fifo"}, r"'uniform'; this one has 'fifo'"),
    ],
)
def test_a_replay_of_another_shape_is_not_resumed_and_the_checkpoint_stays(
    changes: dict[str, Any], message: str, tmp_path: Path
):
    quiet = {"dir": str(tmp_path / "run"), "progress": "off", "eval_interval": 0}
    ps.train(ps.Experiment(RepeatPrevious, DQN, SAMPLER, ps.RunConfig(steps=80, **quiet)))
    kept = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run/checkpoints").rglob("*"))
    checkpoint = load_checkpoint(find_checkpoint(tmp_path / "run", replay=True), replay=True)
    other = Trainer(ps.Experiment(RepeatPrevious, of(DQN, **changes), SAMPLER, ps.RunConfig(steps=160)))
    with pytest.raises(CheckpointError, match=message):
        other.restore(checkpoint)
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run/checkpoints").rglob("*")) == kept
