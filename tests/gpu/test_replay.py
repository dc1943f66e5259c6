"""A replay on the device: training takes the bits of one in the host's memory, whose samples travel there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.run.trainer import Trainer
from tests.gpu.toys import bits

NET = ps.Net(hidden=(32,), activation="relu")
SMALL: dict[str, Any] = {"batch_size": 64, "replay_ratio": 4, "learning_starts": 100, "net": NET}


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("algo", [ps.SAC, ps.TD3])
def test_training_takes_the_bits_of_the_host(algo: Any, same_step: bool, device: str) -> None:
    found: list[Any] = []
    for where in ("cpu", "learner"):
        replay = ps.ReplaySettings(capacity=1_500, index="prioritized", device=where)
        how = ps.RunConfig(steps=10**6, device=device, eval_episodes=0, progress="off")
        env = {"device": device, "same_step": same_step, "max_episode_steps": 7}
        settings = algo(**SMALL, n_step=3, distributional="c51", v_min=-100.0, replay=replay)
        exp = ps.Experiment("penstock.tensor_envs:Pendulum", settings, ps.SerialSampler(T=4, B=37), how, env_kwargs=env)
        with Trainer(exp) as trainer:
            for _ in range(14):  # the ring comes round
                trainer.train()
            kept = {name: np.asarray(x).tobytes() for name, x in trainer.policy.arrays().items()}
            found.append((bits(trainer), kept))
            assert trainer.policy.updates > 20
    assert found[0] == found[1]


def test_rows_beyond_the_memory_of_the_device_are_refused(device: str) -> None:
    replay = ps.ReplaySettings(capacity=10**12, device="learner")
    policy = ps.SAC(replay=replay).build(ps.SerialSampler().build("Pendulum-v1", 0).spec, 0, device)
    with pytest.raises(ConfigError, match=r"needs .* GB; free is .*replay.capacity <= \d+, replay.device='cpu'"):
        policy.prepare(ps.SerialSampler(T=1, B=1).spec)
