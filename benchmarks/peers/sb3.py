"""Steps per second of Stable-Baselines3's own `collect_rollouts`, for `samplers.py`; it runs where SB3 is installed.

`--processes B` is its SubprocVecEnv as it comes, one environment for each process. It cannot put several into one, so
for fewer processes each holds a DummyVecEnv's worth of environments behind the same worker loop and pipe. `--processes 0`
is its DummyVecEnv, which many of its users take for environments as quick as CartPole.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

ENV, T = "CartPole-v1", 128


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


def _make(B: int, processes: int, seed: int, cpus: list[int]) -> VecEnv:
    if processes == 0:
        return make_vec_env(ENV, n_envs=B, seed=seed, vec_env_cls=DummyVecEnv)
    if processes == B:
        return make_vec_env(ENV, n_envs=B, seed=seed, vec_env_cls=SubprocVecEnv)
    return ChunkedVecEnv(B, processes, seed, cpus)


def measure(B: int, processes: int, seconds: float, seed: int, cpus: list[int]) -> float:
    """Steps per second after two batches to warm up."""
    envs = _make(B, processes, seed, cpus[1:])
    if cpus:
        os.sched_setaffinity(0, {cpus[0]})
    model: Any = PPO("MlpPolicy", envs, n_steps=T, seed=seed, device="cpu")
    _, callback = model._setup_learn(1 << 40)
    collect: Callable[..., Any] = model.collect_rollouts
    batches, started = 0, time.perf_counter()
    while batches < 3 or time.perf_counter() - started < seconds:
        if batches == 2:
            started = time.perf_counter()
        collect(model.env, callback, model.rollout_buffer, n_rollout_steps=T)
        batches += 1
    rate = (batches - 2) * T * B / (time.perf_counter() - started)
    envs.close()
    return rate


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("B", int), ("processes", int), ("seconds", float), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument(
        "--cpus", default="", help="of this process and the others, by comma; empty leaves it to the kernel"
    )
    args = parser.parse_args()
    cpus = [int(cpu) for cpu in args.cpus.split(",") if cpu]
    torch.set_num_threads(1)
    print(json.dumps({"value": measure(args.B, args.processes, args.seconds, args.seed, cpus)}))
