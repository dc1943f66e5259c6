"""Toys that each algorithm learns in seconds, with the return of a policy that has learned; no test module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

import penstock as ps
from penstock.envs import toy
from penstock.envs.toy.base import Toy


class Side(Toy):
    """A bright half of a frame, new each step, and the last two frames as [2, 12, 12]: 1 for naming the half, 8 steps."""

    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (2, 12, 12), np.uint8), spaces.Discrete(2))

    def begin(self) -> None:
        self._stack = np.repeat(self._frame()[None], 2, 0)

    def observe(self) -> Any:
        return self._stack

    def act(self, action: Any) -> tuple[float, bool, bool]:
        right = float(action == self._half)
        self._stack = np.concatenate([self._stack[1:], self._frame()[None]])
        return right, False, self.t + 1 >= 8

    def _frame(self) -> Any:
        self._half = int(self.np_random.integers(2))
        frame = np.zeros((12, 12), np.uint8)
        frame[:, 6 * self._half : 6 * self._half + 6] = 255
        return frame


@dataclass(frozen=True)
class Case:
    """An algorithm that reaches `score` in its toy in so many batches [T, B]."""

    env: Any
    algo: Any
    batches: int
    score: float
    T: int = 32
    B: int = 16

    @property
    def spec(self) -> tuple[int, int]:
        return self.T, self.B

    def experiment(self, device: str, sampler: Any = None, batches: int | None = None, **run: Any) -> ps.Experiment:
        steps = (batches or self.batches) * self.T * self.B
        run = {"seed": 0, "progress": "off", "eval_episodes": 100, **run}
        settings = ps.RunConfig(**{"steps": steps, "device": device, **run})
        return ps.Experiment(self.env, self.algo, sampler or ps.SerialSampler(*self.spec), settings)


MEMORY = ps.Net(
    hidden=(32,), recurrent="lstm", recurrent_size=32, normalize_obs=True, normalize_reward=True, prev_reward=True
)
RELU = ps.Net(hidden=(32,), activation="relu")
CASES = {
    "ppo": Case(
        toy.Match,
        ps.PPO(lr="linear(1e-2, 0)", discount=0.9, epochs=8, minibatch=64, max_grad_norm=10.0, net=ps.Net(hidden=(32,))),
        batches=15, score=0.99,
    ),
    "ppo-lstm-norms": Case(
        partial(toy.RepeatPrevious, 1, 3),
        ps.PPO(lr="linear(1e-2, 0)", discount=0.5, epochs=8, minibatch=256, net=MEMORY),
        batches=20, score=0.95 * 15, B=32,
    ),
    "dqn-frames-per": Case(
        Side,
        ps.DQN(
            lr="linear(1e-2, 0)", discount=0.5, batch_size=32, replay_ratio=4.0, learning_starts=64, epsilon=0.5,
            target_interval=1, tau=0.2, net=ps.Net(hidden=(32,), activation="relu", cnn=((8, 3, 2),)),
            replay=ps.ReplaySettings(capacity=2_000, index="prioritized", deduplicate_frames=True, prefetch=True),
        ),
        batches=10, score=7.5, T=8, B=8,
    ),
    "r2d1": Case(
        partial(toy.RepeatPrevious, 1, 2, 8),
        ps.R2D1(
            lr=1e-2, discount=0.5, batch_size=16, replay_ratio=4.0, learning_starts=200, n_step=1, burn_in=4, train_length=8,
            state_interval=8, epsilon=0.4, target_interval=1, tau=0.1, value_rescale=False,
            replay=ps.ReplaySettings(capacity=4_000, index="prioritized", fresh_priority="agent"),
            net=ps.Net(hidden=(32,), activation="relu", recurrent="lstm", recurrent_size=16),
        ),
        batches=80, score=6.2, T=8, B=8,
    ),
    "sac": Case(
        toy.ContinuousBandit,
        ps.SAC(lr="linear(3e-2, 0)", discount=0.9, batch_size=32, replay_ratio=6.0, learning_starts=100, alpha=0.005,
               tau=0.2, replay=ps.ReplaySettings(capacity=4_000, device="learner"), net=RELU),
        batches=8, score=-0.01, B=8,
    ),
}  # fmt: skip


def bits(trainer: Any) -> dict[str, bytes]:
    """Of all that the agent holds."""
    state = trainer.policy.agent.state_dict()
    return {name: x.cpu().numpy().tobytes() for name, x in state.items() if isinstance(x, torch.Tensor)}
