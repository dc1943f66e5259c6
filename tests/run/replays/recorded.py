"""A run beside the record of every row that it collected."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.tree import tree_map
from penstock.run.trainer import Trainer

T, B = 8, 2
UNIFORM = ps.ReplaySettings(capacity=100)  # 50 rows a slot, in a ring of 51
SMALL = ps.Net(hidden=(8,))
DQN = ps.DQN(learning_starts=16, batch_size=8, replay_ratio=1.0, replay=UNIFORM, net=SMALL)
PRIORITIZED = replace(DQN, replay=replace(UNIFORM, index="prioritized", fresh_priority="agent"))
SEQUENCES = ps.R2D1(
    learning_starts=16, batch_size=2, train_length=8, burn_in=8, state_interval=8, n_step=1,
    replay=replace(UNIFORM, capacity=160, index="prioritized"), net=ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=4),
)  # fmt: skip
CASES = {
    "uniform": ("CartPole-v1", DQN),
    "prioritized": ("CartPole-v1", PRIORITIZED),
    "frames": ("stacked_frames:Dot", replace(DQN, replay=replace(UNIFORM, deduplicate_frames=True))),
    "frames after zeros": ("stacked_frames:Blank", replace(DQN, replay=replace(UNIFORM, deduplicate_frames=True))),
    "sequences": ("CartPole-v1", SEQUENCES),
    "box": ("Pendulum-v1", ps.SAC(learning_starts=16, batch_size=8, replay_ratio=1.0, replay=UNIFORM, net=SMALL)),
}


class Recorded:
    """A run, and every row that it collected, with nothing in between."""

    def __init__(self, run: Path, case: str, batches: int) -> None:
        env, algo = CASES[case]
        exp = ps.Experiment(env, algo, ps.SerialSampler(T, B), ps.RunConfig(steps=10**6, dir=str(run), seed=2))
        self.run, rows = run, []
        with Trainer(exp, run) as trainer:
            for _ in range(batches):
                trainer.train()
                rows.append(trainer.sampler.last_batch.copy())
            self.own: Any = trainer.policy.replay_schedule
            self.checkpoint = trainer.save()
            from penstock.run.files.rundir import write_config

            write_config(trainer)
        last = rows[-1]

        def joined(get: Callable[[Any], Any], one_more: bool = False) -> Any:
            parts = [get(batch)[:T] for batch in rows] + ([get(last)[T:]] if one_more else [])
            return np.concatenate(parts)

        self.record = {
            "obs": joined(lambda x: x.obs, True), "first": joined(lambda x: x.first, True), "action": joined(lambda x: x.action),
            "reward": joined(lambda x: x.reward), "terminated": joined(lambda x: x.terminated),
            "truncated": joined(lambda x: x.truncated), "valid": joined(lambda x: x.valid),
        }  # fmt: skip
        self.states = [tree_map(np.copy, batch.state) for batch in rows]
        self.length = batches * T


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Recorded]]:
    made: dict[tuple[str, int], Recorded] = {}
    folder = str(Path(__file__).parent.parent)
    sys.path.insert(0, folder)

    def make(case: str, batches: int = 20) -> Recorded:
        if (case, batches) not in made:
            made[case, batches] = Recorded(tmp_path_factory.mktemp(case), case, batches)
        return made[case, batches]

    yield make
    sys.path.remove(folder)


def opened(path: Path) -> dict[str, Any]:
    """The arrays of an exported file, as any reader would get them."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
