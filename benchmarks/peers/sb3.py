"""Stable-Baselines3, and its JAX twin SBX, as a contestant of `speed.py`, `samplers.py` and `off_policy.py` (see turns.py).

SubprocVecEnv has one environment in each process. It cannot put several into one, so for fewer processes each holds a
DummyVecEnv's worth of environments behind the same worker loop and pipe. `processes=0` is its DummyVecEnv, which many of
its users take for environments as quick as CartPole.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import turns
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

ENV, T, WARM = "CartPole-v1", 128, 500


class ChunkedVecEnv(VecEnv):
    """A VecEnv whose processes step several environments each: SubprocVecEnv with a DummyVecEnv in every process."""

    def __init__(self, num_envs: int, processes: int, seed: int, cpus: list[int]) -> None:
        if num_envs % processes:
            raise ValueError(f"{num_envs} environments in {processes} processes; expected a multiple")
        context, share = mp.get_context("forkserver"), num_envs // processes
        self._pipes: list[Connection] = []
        for w in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, share, seed + w * share), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            if cpus and process.pid:
                os.sched_setaffinity(process.pid, {cpus[w % len(cpus)]})
        self._share = share
        one = gym.make(ENV)
        super().__init__(num_envs, one.observation_space, one.action_space)

    def reset(self) -> Any:
        for pipe in self._pipes:
            pipe.send(("reset", None))
        return np.concatenate([pipe.recv() for pipe in self._pipes])

    def step_async(self, actions: Any) -> None:
        for w, pipe in enumerate(self._pipes):
            pipe.send(("step", actions[w * self._share : (w + 1) * self._share]))

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = zip(*(pipe.recv() for pipe in self._pipes))
        return (
            np.concatenate(obs),
            np.concatenate(rewards),
            np.concatenate(dones),
            [info for part in infos for info in part],
        )

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(("close", None))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [True] * self.num_envs  # make_vec_env adds the Monitor, in the processes


def _serve(pipe: Connection, num_envs: int, seed: int) -> None:
    torch.set_num_threads(1)
    envs = make_vec_env(ENV, n_envs=num_envs, seed=seed)
    while True:
        command, actions = pipe.recv()
        if command == "close":
            return
        pipe.send(envs.reset() if command == "reset" else envs.step(actions))


def _envs(B: int, processes: int, seed: int, cpus: list[int]) -> VecEnv:
    if processes == 0:
        return make_vec_env(ENV, n_envs=B, seed=seed, vec_env_cls=DummyVecEnv)
    if processes == B:
        return make_vec_env(ENV, n_envs=B, seed=seed, vec_env_cls=SubprocVecEnv)
    return ChunkedVecEnv(B, processes, seed, cpus)


def _ppo(envs: VecEnv, seed: int) -> Any:
    """The settings of `speed.PPO_SETTINGS`."""
    return PPO("MlpPolicy", envs, n_steps=T, batch_size=512, n_epochs=4, learning_rate=1e-3, ent_coef=0.01, gamma=0.99,
               gae_lambda=0.95, clip_range=0.2, vf_coef=0.5, max_grad_norm=0.5, seed=seed, device="cpu")  # fmt: skip


@contextmanager
def sampling(B: int, seed: int, processes: int = 0, pinned: bool = False) -> Iterator[turns.Unit]:
    """`collect_rollouts` alone; all steps count. Processes on cores of their own if there are so many."""
    cores = sorted(os.sched_getaffinity(0))
    cpus = cores[: processes + 1] if pinned and 0 < processes < len(cores) else []
    envs = _envs(B, processes, seed, cpus[1:])
    if cpus:
        os.sched_setaffinity(0, {cpus[0]})
    model = _ppo(envs, seed)
    _, callback = model._setup_learn(1 << 40)

    def unit() -> float:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=T)
        return T * B

    for _ in range(2):
        unit()
    yield unit
    envs.close()


@contextmanager
def ppo(steps: int, seed: int) -> Iterator[turns.Unit]:
    """Making of the model and `learn`; and the rate of `learn` alone."""

    def unit() -> turns.Look:
        model = _ppo(_envs(16, 0, seed, []), seed)
        wall, cpu = time.perf_counter(), time.process_time()
        model.learn(steps)
        done, wall, cpu = model.num_timesteps, time.perf_counter() - wall, time.process_time() - cpu
        return {"work": done, "steps/s of training": done / wall, "steps/CPU s of training": done / cpu}

    yield unit


@contextmanager
def solved(goal: float, steps: int, seed: int) -> Iterator[turns.Unit]:
    """`learn`, model and environments included, to a mean return of the goal over 100 episodes."""

    class Stop(BaseCallback):
        solved = False

        def _on_step(self) -> bool:
            return not self.solved

        def _on_rollout_end(self) -> None:  # once a batch, as penstock looks
            seen = self.model.ep_info_buffer
            assert seen is not None
            self.solved = len(seen) == 100 and sum(e["r"] for e in seen) / 100 >= goal

    def unit() -> turns.Look:
        stop = Stop()
        model = _ppo(_envs(16, 0, seed, []), seed).learn(steps, callback=stop)
        return {"work": 1.0, "steps": model.num_timesteps, "solved": float(stop.solved)}

    yield unit


@contextmanager
def training(algo: str, steps: int, seed: int, library: str = "stable_baselines3") -> Iterator[turns.Unit]:
    """A gradient step for each environment step: 256 x 256 everywhere; batch 256, or 128 for DQN. PPO as above."""
    package: Any = importlib.import_module(library)
    if algo == "ppo":
        model = package.PPO("MlpPolicy", _envs(16, 0, seed, []), n_steps=T, batch_size=512, n_epochs=4, learning_rate=1e-3,
                            ent_coef=0.01, seed=seed, device="cpu")  # fmt: skip
    else:
        env, batch = ("CartPole-v1", 128) if algo == "dqn" else ("Pendulum-v1", 256)
        model = getattr(package, algo.upper())(
            "MlpPolicy", env, batch_size=batch, train_freq=1, gradient_steps=1, learning_starts=WARM, buffer_size=100_000,
            policy_kwargs={"net_arch": [256, 256]}, seed=seed, device="cpu",
        )  # fmt: skip
    model.learn(WARM + 200)

    def unit() -> float:
        before = model.num_timesteps
        model.learn(steps, reset_num_timesteps=False)
        if library == "sbx":  # jax returns before the last update is done: wait for it
            model.predict(model._last_obs)
        return model.num_timesteps - before

    yield unit


if __name__ == "__main__":
    torch.set_num_threads(1)
    turns.child({f.__name__: f for f in (sampling, ppo, solved, training)}, "stable-baselines3", "sbx-rl", "torch")
